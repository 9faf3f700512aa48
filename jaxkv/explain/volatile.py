"""Texts that change with every request: times, ids, counters. They are recognised by their shape on both sides."""

import re

from jaxkv.explain.cause import Cause

_WINDOW = 100  # characters looked at on each side
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_NTH = r"\d{1,2}(?:st|nd|rd|th)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b\.?)?"
_ID_WORDS = (
    r"(?:id|uuid|guid|session|request|trace|span|run|nonce|token|user|conversation|thread|tenant|key|hash|build|commit)"
)
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_COUNT_WORDS = r"(?:turn|step|message|count|counter|attempt|iteration|try|number|remaining|left|used|round|page|#)"

# In order: the first shape that holds the difference on both sides names the cause.
_SHAPES: tuple[tuple[Cause, str], ...] = (
    (Cause.TIME, rf"\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]?{_CLOCK}(?:\s?(?:Z|UTC|[+-]\d{{2}}:?\d{{2}}))?)?"),
    (Cause.TIME, rf"(?:{_DAY},?\s+)?{_NTH}\.?\s+(?:of\s+)?{_MONTH},?(?:\s+\d{{4}})?(?:\s+(?:at\s+)?{_CLOCK})?"),
    (Cause.TIME, rf"(?:{_DAY},?\s+)?{_MONTH}\s+{_NTH}(?:,?\s+\d{{4}})?(?:,?\s+(?:at\s+)?{_CLOCK})?(?:\s+\d{{4}})?"),
    (Cause.TIME, r"(?:\d{4}[/.]\d{1,2}[/.]\d{1,2}|\d{1,2}([/.-])\d{1,2}\1(?:\d{4}|\d{2}\b))(?:,?\s+" + _CLOCK + ")?"),
    (Cause.TIME, r"\b\d{8}T\d{4,6}Z?"),
    (Cause.TIME, rf"\b{_CLOCK}"),
    (Cause.TIME, r"\b\d{1,2}\s?[ap]\.?m\b"),
    (Cause.TIME, r"\byear\W{0,3}\d{4}\b"),
    (Cause.TIME, r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"),
    (Cause.TIME, rf"\b{_MONTH}\s+\d{{4}}\b"),
    (Cause.TIME, r"\b\d+(?:\.\d+)?\s?(?:ms|seconds?|minutes?|hours?|days?)\s+(?:ago|old)\b"),
    (Cause.IDENTIFIER, _UUID),
    (Cause.IDENTIFIER, rf"\b(?:[a-z]+[_-])*{_ID_WORDS}(?:[_ -]?id)?\b[\"']?\s*(?:[:=#]|\bis\b)?\s*[\"']?[\w.-]*\d[\w.-]*"),
    (Cause.TIME, r"\b(?:1[0-9]|2[01])\d{8}(?:\d{3}|\.\d+)?\b"),  # seconds or milliseconds since 1970
    (Cause.IDENTIFIER, r"\b[a-z]{2,8}[_-](?=[a-z]*\d|\d*[a-z])\w{6,}\b"),  # req_8fK2...
    (Cause.IDENTIFIER, r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{6,}\b"),
    (Cause.IDENTIFIER, r"\b(?=\w*\d)(?=\w*[a-z])\w{8,}\b"),
    (Cause.COUNTER, rf"\b{_COUNT_WORDS}\b\D{{0,12}}\d[\d,.]*|\d[\d,.]*\s*(?:/|of|out of)?\s*\d*\s*{_COUNT_WORDS}"),
    (Cause.COUNTER, r"-?\d+(?:[.,]\d+)*%?"),
)  # fmt: skip
_PATTERNS = tuple((cause, re.compile(shape, re.IGNORECASE)) for cause, shape in _SHAPES)


def name_volatile(a: str, b: str, at_a: int, at_b: int) -> tuple[Cause, str, str] | None:
    """The kind of changing text that holds a difference, and the text on both sides; None if it is none.

    Args:
        a: a text.
        b: another one.
        at_a: the first character that differs in `a`.
        at_b: the same in `b`.
    """
    for cause, pattern in _PATTERNS:
        spans = [_span(pattern, text, at) for text, at in ((a, at_a), (b, at_b))]
        if spans[0] is not None and spans[1] is not None and spans[0] != spans[1]:
            return cause, spans[0], spans[1]
    return None


def is_time(text: str) -> bool:
    """Whether a text holds a date or a time."""
    return any(cause is Cause.TIME and pattern.search(text) for cause, pattern in _PATTERNS)


def _span(pattern: re.Pattern[str], text: str, at: int) -> str | None:
    """The match that holds the character `at`, or ends there; None if there is none."""
    start = max(at - _WINDOW, 0)
    for match in pattern.finditer(text, start, at + _WINDOW):
        if match.start() <= at <= match.end():
            return match.group()
        if match.start() > at:
            return None
    return None
