r"""ECMA-262 regular expressions (`u` mode, as JSON Schema asks), parsed to a tree.

Two liberties of patterns in the wild are taken: a lone `{`, `}` or `]` is itself, and so is any escaped character
that is no letter or digit (`\-`, `\_`). What no finite automaton has is refused by
name: backreferences, lookbehind, word boundaries.
"""

import dataclasses

from jaxkv.grammar import chars
from jaxkv.grammar.chars import Ranges
from jaxkv.grammar.errors import RegexError


@dataclasses.dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclasses.dataclass(frozen=True)
class Concat:
    """All parts one after the other."""

    parts: tuple["Node", ...]


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """One of the parts."""

    parts: tuple["Node", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """`low` to `high` times; no limit if `high` is None."""

    part: "Node"
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True)
class Start:
    """`^`."""


@dataclasses.dataclass(frozen=True)
class End:
    """`$`."""


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """What follows begins with the part, or (`negative`) does not."""

    part: "Node"
    negative: bool


Node = Chars | Concat | Alternatives | Repeat | Start | End | Lookahead

_CONTROL = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_CLASSES = {"d": chars.DIGIT, "w": chars.WORD, "s": chars.SPACE}
_MAX_REPEAT = 65_535


def parse(pattern: str) -> Node:
    """The tree of a pattern.

    Raises:
        RegexError: the pattern is malformed or uses a construct that is not supported; names it and its place.
    """
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0

    def fail(self, what: str) -> RegexError:
        return RegexError(f"regex {self.text!r}: {what} at character {self.at}")

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.text):
            raise self.fail("unexpected end")
        self.at += 1
        return self.text[self.at - 1]

    def parse(self) -> Node:
        node = self.alternatives()
        if self.at < len(self.text):
            raise self.fail("unmatched ')'")
        return node

    def alternatives(self) -> Node:
        parts = [self.concat()]
        while self.take("|"):
            parts.append(self.concat())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def concat(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.peek() not in "|)":
            parts.append(self.term())
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def term(self) -> Node:
        if self.take("^"):
            return Start()
        if self.take("$"):
            return End()
        atom = self.atom()
        return self.quantified(atom)

    def quantified(self, atom: Node) -> Node:
        if self.take("*"):
            bounds = (0, None)
        elif self.take("+"):
            bounds = (1, None)
        elif self.take("?"):
            bounds = (0, 1)
        else:
            bounds = self.braces()
            if bounds is None:
                return atom
        self.take("?")  # lazy or not, the language is the same
        if isinstance(atom, Lookahead):
            raise self.fail("a quantified lookahead is not supported")
        self.refuse_quantifier()
        return Repeat(atom, *bounds)

    def refuse_quantifier(self) -> None:
        """A quantifier may stand only behind what it repeats, and only once."""
        if (self.peek() and self.peek() in "*+?") or self.braces() is not None:
            raise self.fail("nothing to repeat")

    def braces(self) -> tuple[int, int | None] | None:
        """`{m}`, `{m,}` or `{m,n}`; None if what stands here is no quantifier."""
        begin = self.at
        if not self.take("{"):
            return None
        low = self.number()
        high: int | None = low
        if self.take(","):
            high = self.number()
            high = None if high is None and self.peek() == "}" else high
        if low is None or not self.take("}"):
            self.at = begin
            return None
        if max(low, high or 0) > _MAX_REPEAT:
            raise self.fail(f"more than {_MAX_REPEAT} repeats")
        if high is not None and high < low:
            raise self.fail(f"repeat from {low} to {high}")
        return low, high

    def number(self) -> int | None:
        begin = self.at
        while self.peek().isascii() and self.peek().isdigit():
            self.at += 1
        return int(self.text[begin : self.at]) if self.at > begin else None

    def atom(self) -> Node:
        if self.take("("):
            return self.group()
        if self.take("["):
            return Chars(self.char_class())
        if self.take("."):
            return Chars(chars.invert(chars.LINE_END))
        if self.take("\\"):
            return Chars(chars.normal(self.escape(in_class=False)))
        self.refuse_quantifier()
        return Chars(chars.normal(self.single(ord(self.next()))))

    def single(self, code: int) -> Ranges:
        """One code point; a surrogate too, as it can be the end of a range."""
        return ((code, code),)

    def group(self) -> Node:
        look: bool | None = None
        if self.take("?"):
            if self.take("="):
                look = False
            elif self.take("!"):
                look = True
            elif self.peek(2) in ("<=", "<!"):
                raise self.fail("lookbehind is not supported")
            elif self.take("<"):
                while self.next() != ">":
                    pass
            elif not self.take(":"):
                raise self.fail(f"group '(?{self.peek()}' is not supported")
        node = self.alternatives()
        if not self.take(")"):
            raise self.fail("missing ')'")
        return node if look is None else Lookahead(node, look)

    def escape(self, *, in_class: bool) -> Ranges:
        char = self.next()
        if char in _CONTROL:
            return self.single(_CONTROL[char])
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return chars.invert(ranges) if char.isupper() else ranges
        if char in "pP":
            return self.unicode_property(negative=char == "P")
        if char == "c" and self.peek().isascii() and self.peek().isalpha():
            return self.single(ord(self.next()) % 32)
        if char == "0" and not self.peek().isdigit():
            return self.single(0)
        if char == "x":
            return self.single(self.hexadecimal(2))
        if char == "u":
            return self.single(self.unicode_escape())
        if in_class and char == "b":
            return self.single(0x08)
        if char in "bB":
            raise self.fail(f"word boundary '\\{char}' is not supported")
        if char.isdigit() or char == "k":
            raise self.fail(f"backreference '\\{char}' is not supported")
        if char.isascii() and char.isalpha():
            raise self.fail(f"escape '\\{char}' is unknown")
        return self.single(ord(char))

    def hexadecimal(self, digits: int) -> int:
        text = self.peek(digits)
        if len(text) < digits or any(char not in "0123456789abcdefABCDEF" for char in text):
            raise self.fail(f"{digits} hexadecimal digits expected")
        self.at += digits
        return int(text, 16)

    def unicode_escape(self) -> int:
        if self.take("{"):
            begin = self.at
            while self.next() != "}":
                pass
            text = self.text[begin : self.at - 1]
            if not text or any(char not in "0123456789abcdefABCDEF" for char in text) or int(text, 16) > chars.LAST:
                raise self.fail("a code point expected in '\\u{}'")
            return int(text, 16)
        code = self.hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self.peek(2) == "\\u":
            begin = self.at
            self.at += 2
            low = self.hexadecimal(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            self.at = begin
        return code

    def unicode_property(self, *, negative: bool) -> Ranges:
        if not self.take("{"):
            raise self.fail("'{' expected after '\\p'")
        begin = self.at
        while self.next() != "}":
            pass
        name = self.text[begin : self.at - 1]
        ranges = chars.unicode_property(name)
        if ranges is None:
            raise self.fail(f"Unicode property {name!r} is not supported (general categories are)")
        return chars.invert(ranges) if negative else ranges

    def char_class(self) -> Ranges:
        negative = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.class_member()
            if self.peek() == "-" and self.peek(2) != "-]":
                self.at += 1
                high = self.class_member()
                if len(low) == 1 and len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if low[0][0] > high[0][0]:
                        raise self.fail("character range out of order")
                    ranges.append((low[0][0], high[0][0]))
                else:  # [\w-.]: a hyphen beside a class is itself, as in browsers without the u flag
                    ranges += [*low, (0x2D, 0x2D), *high]
            else:
                ranges += low
        return chars.invert(ranges) if negative else chars.normal(ranges)

    def class_member(self) -> Ranges:
        if self.take("\\"):
            return self.escape(in_class=True)
        return self.single(ord(self.next()))
