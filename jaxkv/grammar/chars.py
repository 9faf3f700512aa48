"""Sets of Unicode characters as sorted ranges, and how a character is written as bytes.

A surrogate is no character: UTF-8 has none, and JSON text that is UTF-8 has none either.
"""

import functools
import sys
import unicodedata
from collections.abc import Iterable

from jaxkv.grammar.graph import Graph

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, not adjacent; both ends included


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and merged, without surrogates."""
    cut: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if first <= last:
                cut.append((first, last))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(cut):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def invert(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters."""
    out, low = [], 0
    for first, last in normal(ranges):
        if low < first:
            out.append((low, first - 1))
        low = last + 1
    return normal([*out, (low, LAST)] if low <= LAST else out)


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Characters of both sets."""
    return normal((max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) <= min(b, d))


ANY = normal([(0, LAST)])
DIGIT: Ranges = ((0x30, 0x39),)
WORD = normal([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
LINE_END = normal([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
# ECMA-262 WhiteSpace and LineTerminator: unlike Python's \s with U+FEFF and without U+001C..U+001F, U+0085.
SPACE = normal(
    [
        *[(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
        *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
    ]
)

_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Cased_Letter": "LC",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd",
    "Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf", "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Private_Use": "Co",
    "Unassigned": "Cn", "Surrogate": "Cs",
}  # fmt: skip


@functools.cache
def _by_category() -> dict[str, list[tuple[int, int]]]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    first, current = 0, unicodedata.category(chr(0))
    for code in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if category != current:
            ranges.setdefault(current, []).append((first, code - 1))
            first, current = code, category
    return ranges


@functools.cache
def unicode_property(name: str) -> Ranges | None:
    r"""Characters of `\p{name}`: a general category, `Any` or `ASCII`; None for others (the standard library has no scripts)."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    if name == "Any":
        return ANY
    if name == "ASCII":
        return ((0, 0x7F),)
    short = _CATEGORIES.get(name, name)
    wanted = ("Lu", "Ll", "Lt") if short == "LC" else (short,)
    known = set(_CATEGORIES.values()) | {"LC"}
    if short not in known:
        return None
    return normal(span for category, spans in _by_category().items() if category.startswith(wanted) for span in spans)


@functools.cache
def utf8_sequences(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Byte range sequences whose union is the UTF-8 of the characters: each a tuple of (first, last) for 1 to 4 bytes."""
    out: list[tuple[tuple[int, int], ...]] = []
    for low, high in ranges:
        for length, first, last in ((1, 0, 0x7F), (2, 0x80, 0x7FF), (3, 0x800, 0xFFFF), (4, 0x10000, LAST)):
            a, b = max(low, first), min(high, last)
            if a <= b:
                _split(a, b, length, out)
    return tuple(out)


def _split(low: int, high: int, length: int, out: list[tuple[tuple[int, int], ...]]) -> None:
    """Cuts a range of characters of one UTF-8 length where the bytes before the last would vary together with it."""
    for tail in range(1, length):
        mask = (1 << (6 * tail)) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                _split(low, low | mask, length, out)
                _split((low | mask) + 1, high, length, out)
                return
            if high & mask != mask:
                _split(low, (high & ~mask) - 1, length, out)
                _split(high & ~mask, high, length, out)
                return
    first, last = chr(low).encode(), chr(high).encode()
    out.append(tuple(zip(first, last, strict=True)))


_SHORT = {0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t"}
_PLAIN = invert([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])  # characters that stand for themselves in a JSON string


def json_escape(text: str) -> bytes:
    """The canonical JSON text of a string, without the quotes: raw UTF-8, escaped only what must be."""
    out = bytearray()
    for char in text:
        code = ord(char)
        out += _SHORT.get(code) or (b"\\u%04x" % code if code < 0x20 else char.encode())
    return bytes(out)


def _runs(by_lead: dict[int, list[int]]) -> list[tuple[tuple[int, int], list[int]]]:
    """Neighbouring bytes with the same targets, as ranges."""
    out: list[tuple[tuple[int, int], list[int]]] = []
    for lead in sorted(by_lead):
        if out and out[-1][0][1] == lead - 1 and out[-1][1] == by_lead[lead]:
            out[-1] = ((out[-1][0][0], lead), out[-1][1])
        else:
            out.append(((lead, lead), by_lead[lead]))
    return out


class CharWriter:
    """Writes characters into a graph, as UTF-8 or as they stand inside a JSON string.

    Args:
        graph: what is written to.
        json: the canonical JSON escapes (`json_escape`) for quotes, backslashes and control characters.
    """

    def __init__(self, graph: Graph, *, json: bool) -> None:
        self.graph = graph
        self.json = json
        self._known: dict[tuple[Ranges, int], int] = {}
        self._tails: dict[tuple[tuple[tuple[int, int], ...], int], int] = {}

    def char(self, ranges: Ranges, after: int) -> int:
        """One character of the set, then `after`."""
        if not ranges or not after:
            return 0
        key = (ranges, after)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.graph.new()
            self._write(ranges, found, after)
        return found

    def _write(self, ranges: Ranges, state: int, after: int) -> None:
        plain = intersect(ranges, _PLAIN) if self.json else ranges
        by_lead: dict[int, list[int]] = {}  # leads of two sequences can be the same byte
        for sequence in utf8_sequences(plain):
            target = self._tail(sequence[1:], after)
            for lead in range(sequence[0][0], sequence[0][1] + 1):
                by_lead.setdefault(lead, []).append(target)
        for (first, last), targets in _runs(by_lead):
            self.graph.edge(state, first, last, self.graph.union(targets))
        if self.json:
            escaped = [
                json_escape(chr(code))[1:]
                for low, high in ranges
                for code in [*range(low, min(high, 0x1F) + 1), 0x22, 0x5C]
                if low <= code <= high
            ]
            self.graph.edge(state, 0x5C, 0x5C, self._escapes(frozenset(escaped), after))

    def _tail(self, sequence: tuple[tuple[int, int], ...], after: int) -> int:
        if not sequence:
            return after
        key = (sequence, after)
        found = self._tails.get(key)
        if found is None:
            found = self._tails[key] = self.graph.new()
            self.graph.edge(found, *sequence[0], self._tail(sequence[1:], after))
        return found

    def _escapes(self, texts: frozenset[bytes], after: int) -> int:
        return self.graph.union([self.graph.literal(text, after) for text in sorted(texts)])
