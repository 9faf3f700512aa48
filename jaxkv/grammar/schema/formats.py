r"""String formats as automata.

Sources: RFC 3339 (date, time, duration; a leap second only at 23:59:60 UTC written with offset zero), RFC 5321 (email: dot-atom
or quoted local part), RFC 1123 (hostname), RFC 4291 (ipv6), RFC 4122 (uuid), RFC 3986 (uri), RFC 3987 (iri),
RFC 6570 (uri-template), RFC 6901 (json-pointer).
The standard's own formats that have no finite automaton, or need tables that are not here (`regex`, `idn-hostname`), and
names that the standard does not know are annotations, as the standard has it by default.
"""

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.regex import json_whole

_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
    r"|23:59:60(?:\.\d+)?(?:[Zz]|[+-]00:00))"
)
_DURATION_TIME = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DURATION_DATE = r"(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)"
_DURATION = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|\d+W)"

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_LAST32 = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_GROUP}:){{6}}{_LAST32}|::(?:{_GROUP}:){{5}}{_LAST32}|(?:{_GROUP})?::(?:{_GROUP}:){{4}}{_LAST32}"
    rf"|(?:(?:{_GROUP}:){{0,1}}{_GROUP})?::(?:{_GROUP}:){{3}}{_LAST32}|(?:(?:{_GROUP}:){{0,2}}{_GROUP})?::(?:{_GROUP}:){{2}}{_LAST32}"
    rf"|(?:(?:{_GROUP}:){{0,3}}{_GROUP})?::{_GROUP}:{_LAST32}|(?:(?:{_GROUP}:){{0,4}}{_GROUP})?::{_LAST32}"
    rf"|(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}|(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)"
)


def _label(longest: int) -> str:
    return rf"[A-Za-z0-9](?:[A-Za-z0-9-]{{0,{longest - 2}}}[A-Za-z0-9])?"


# At most 253 characters: four labels of the full length, or more shorter ones.
_HOSTNAME = rf"(?:{_label(63)}(?:\.{_label(63)}){{0,2}}(?:\.{_label(61)})?|{_label(24)}(?:\.{_label(24)}){{0,9}})"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"
_ADDRESS = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = rf"(?:{_ATEXT}+(?:\.{_ATEXT}+)*|{_QUOTED})@(?:{_DOMAIN}|{_ADDRESS})"
_UTEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\u0080-\u{10FFFF}-]"
_ULABEL = r"[A-Za-z0-9\u0080-\u{10FFFF}](?:[A-Za-z0-9\u0080-\u{10FFFF}-]*[A-Za-z0-9\u0080-\u{10FFFF}])?"
_IDN_EMAIL = rf"{_UTEXT}+(?:\.{_UTEXT}+)*@{_ULABEL}(?:\.{_ULABEL})*"


def _uri(unreserved: str, private: str) -> tuple[str, str]:
    """Patterns of a URI and of a URI reference."""
    subs = "!$&'()*+,;="
    escaped = "%[0-9A-Fa-f]{2}"

    def many(chars: str) -> str:
        return rf"(?:[{chars}]|{escaped})*"

    segment = many(f"{unreserved}{subs}:@")
    some = rf"(?:[{unreserved}{subs}:@]|{escaped})+"
    some_no_colon = rf"(?:[{unreserved}{subs}@]|{escaped})+"
    future = rf"v[0-9A-Fa-f]+\.[A-Za-z0-9._~{subs}:-]+"
    host = rf"(?:\[(?:{_IPV6}|{future})\]|{many(f'{unreserved}{subs}')})"
    authority = rf"(?:{many(f'{unreserved}{subs}:')}@)?{host}(?::\d*)?"
    rooted = rf"//{authority}(?:/{segment})*|/(?:{some}(?:/{segment})*)?"
    tail = rf"(?:\?{many(f'{unreserved}{subs}:@/?{private}')})?(?:#{many(f'{unreserved}{subs}:@/?')})?"
    uri = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{rooted}|{some}(?:/{segment})*|){tail}"
    relative = rf"(?:{rooted}|{some_no_colon}(?:/{segment})*|){tail}"
    return uri, rf"(?:{uri}|{relative})"


_URI, _URI_REFERENCE = _uri(r"A-Za-z0-9._~\-", "")
_UCS = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + "".join(rf"\u{{{p:X}0000}}-\u{{{p:X}FFFD}}" for p in range(1, 15))
_IRI, _IRI_REFERENCE = _uri(rf"A-Za-z0-9._~{_UCS}\-", r"\uE000-\uF8FF\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}")
_VARCHAR = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_VARSPEC = rf"{_VARCHAR}(?:\.?{_VARCHAR})*(?:\*|:[1-9]\d{{0,3}})?"
_TEMPLATE = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS}\uE000-\uF8FF]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"
)
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _IDN_EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}


def format_automaton(name: str) -> ByteAutomaton | None:
    """The JSON string contents of a format; None for one that is an annotation only."""
    pattern = PATTERNS.get(name)
    return None if pattern is None else json_whole(pattern)
