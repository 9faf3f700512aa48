r"""Sets of numbers as automata over their JSON text.

A number has many texts. These are accepted: plain decimals (`-12.50`), and with an exponent where one digit stands
before the point, and is not zero (`1.5e-07`, which is how Python, JavaScript and most others write them). `number()`
alone accepts all of JSON's grammar. Comparisons are by value, digit by digit, with no floating point: `1.0` is 1.

Most readers make doubles of numbers, and must not see others than those meant: of `1e400` infinity, which is no number, of
`9007199254740993.5` an integer. So exponents have at most two digits, and a fraction shows within the number's first 16
digits that it is one. (Plain texts of more than 308 digits, and bounds closer than a double tells apart, are not looked after.)
"""

import functools
from decimal import Decimal
from typing import NamedTuple

from jaxkv.grammar import algebra
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.explore import explore
from jaxkv.grammar.literals import choice
from jaxkv.grammar.regex import compile_regex

_ALPHABET = [*"0123456789", "-", "+", ".", "eE"]
_MAX_MODULUS = 4096  # a multiple of m needs m states
_MAX_DIGITS = 400
_EXPONENT = "[0-9]{1,2}"
_EXACT_DIGITS = 16  # of a decimal: no two that differ become one double


@functools.cache
def number() -> ByteAutomaton:
    """All JSON numbers."""
    return compile_regex(rf"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?{_EXPONENT})?")


@functools.cache
def integer() -> ByteAutomaton:
    """Numbers without a fractional part: `3`, `3.0`, `3e2`."""
    return compile_regex(rf"-?((0|[1-9][0-9]*)(\.0+)?|[1-9](\.0+)?[eE]\+?{_EXPONENT})")


@functools.cache
def written_integer() -> ByteAutomaton:
    """Numbers that are written without point and exponent, which is what draft 4 calls integers."""
    return compile_regex(r"-?(0|[1-9][0-9]*)")


@functools.cache
def written_otherwise() -> ByteAutomaton:
    """Numbers with a point or an exponent."""
    return algebra.difference(number(), written_integer())


@functools.cache
def fractional() -> ByteAutomaton:
    """Numbers that are not integers."""
    plain = [rf"0\.{_apart(_EXACT_DIGITS)}"]
    plain += [rf"[1-9][0-9]{{{num - 1}}}\.{_apart(_EXACT_DIGITS - num)}" for num in range(1, _EXACT_DIGITS)]
    scientific = rf"[1-9](\.[0-9]{{1,{_EXACT_DIGITS - 1}}})?[eE]-([1-9][0-9]?|0[1-9])"
    return compile_regex(f"-?({'|'.join([*plain, scientific])})")


def _apart(num: int) -> str:
    """Digits after the point, as a regex, of which the first `num` tell the number from the integers beside it."""
    zeros, nines = f"0{{1,{num - 1}}}[1-9][0-9]*", f"9{{1,{num - 1}}}[0-8][0-9]*"
    return f"([1-8][0-9]*|9{{1,{num}}}{f'|{zeros}|{nines}' if num > 1 else ''})"


class _Compared(NamedTuple):
    """What was read of a number, against a bound's magnitude.

    `phase`: start, sign, zero, int, point, frac, e, esign, exp. `count`: integer digits, or position in the fraction, or exponent
    digits, capped. `order`: how the digits that count compare so far. `scientific`: how the significant digits compare; None
    if not one digit stands before the point. `position`: significant digits read, capped.
    """

    phase: str
    negative: bool = False
    count: int = 0
    order: int = 0
    scientific: int | None = None
    position: int = 0
    minus: bool = False


class _Bound:
    """Compares the magnitude of a number, as it is read, with that of `bound`."""

    def __init__(self, bound: Decimal) -> None:
        magnitude = bound.copy_abs()  # `abs` rounds to 28 digits
        whole, _, fraction = f"{magnitude:f}".partition(".")
        self.whole = whole.lstrip("0")
        self.fraction = fraction.rstrip("0")
        if len(self.whole) + len(self.fraction) > _MAX_DIGITS:
            raise TooLarge(f"a bound of {bound} has more than {_MAX_DIGITS} digits")
        self.digits = (self.whole + self.fraction).lstrip("0").rstrip("0")
        self.exponent = magnitude.adjusted() if self.digits else 0
        self.exponent_digits = str(abs(self.exponent)).lstrip("0") if self.exponent else ""

    def step(self, state: _Compared, symbol: str) -> _Compared | None:
        if symbol.isdigit():
            return self._digit(state, symbol)
        if symbol == "-":
            if state.phase == "start":
                return state._replace(phase="sign", negative=True)
            return state._replace(phase="esign", minus=True) if state.phase == "e" else None
        if symbol == "+":
            return state._replace(phase="esign") if state.phase == "e" else None
        if symbol == ".":
            if state.phase not in ("zero", "int"):
                return None
            return state._replace(phase="point", order=self._whole_order(state), count=0)
        if state.phase not in ("int", "frac") or state.scientific is None:
            return None
        short = state.scientific == 0 and state.position < len(self.digits)
        return _Compared("e", state.negative, scientific=-1 if short else state.scientific)

    def _digit(self, state: _Compared, symbol: str) -> _Compared | None:
        if state.phase in ("start", "sign"):
            if symbol == "0":
                return state._replace(phase="zero")
            first = _order(symbol, self.digits[:1]) if self.digits else 1
            return state._replace(
                phase="int",
                count=1,
                order=_order(symbol, self.whole[:1]),
                scientific=first,
                position=1 if first == 0 else 0,
            )
        if state.phase == "int":
            count = min(state.count + 1, len(self.whole) + 1)
            order = state.order
            if order == 0 and count <= len(self.whole):
                order = _order(symbol, self.whole[count - 1])
            return state._replace(count=count, order=order, scientific=None, position=0)
        if state.phase in ("point", "frac"):
            return self._fraction_digit(state, symbol)
        if state.phase in ("e", "esign", "exp"):
            return self._exponent_digit(state, symbol)
        return None

    def _whole_order(self, state: _Compared) -> int:
        """How the integer part compares, once it is whole."""
        count = state.count if state.phase == "int" else 0
        if count != len(self.whole):
            return 1 if count > len(self.whole) else -1
        return state.order if count else 0

    def _fraction_digit(self, state: _Compared, symbol: str) -> _Compared:
        order, count = state.order, state.count
        if order == 0:
            order = _order(symbol, self.fraction[count] if count < len(self.fraction) else "0")
            count = min(count + 1, len(self.fraction))
        scientific, position = state.scientific, state.position
        if scientific == 0:
            scientific = _order(symbol, self.digits[position] if position < len(self.digits) else "0")
            position = min(position + 1, len(self.digits)) if scientific == 0 else 0
        return state._replace(
            phase="frac", order=order, count=count if order == 0 else 0, scientific=scientific, position=position
        )

    def _exponent_digit(self, state: _Compared, symbol: str) -> _Compared:
        if state.count == 0 and symbol == "0":
            return state._replace(phase="exp")
        count = min(state.count + 1, len(self.exponent_digits) + 1)
        order = state.order
        if order == 0 and count <= len(self.exponent_digits):
            order = _order(symbol, self.exponent_digits[count - 1])
        return state._replace(phase="exp", count=count, order=order)

    def result(self, state: _Compared) -> int | None:
        """-1, 0 or 1 as the magnitude compares with the bound's; None if the text is not whole."""
        if state.phase in ("zero", "int"):
            order = self._whole_order(state)
            return -1 if order == 0 and self.fraction else order
        if state.phase == "frac":
            return -1 if state.order == 0 and state.count < len(self.fraction) else state.order
        if state.phase != "exp":
            return None
        if not self.digits:
            return 1
        if state.count != len(self.exponent_digits):
            magnitude = 1 if state.count > len(self.exponent_digits) else -1
        else:
            magnitude = state.order
        if state.count == 0:
            exponent = 0 if self.exponent == 0 else (-1 if self.exponent > 0 else 1)
        elif state.minus != (self.exponent < 0):
            exponent = -1 if state.minus else 1
        else:
            exponent = -magnitude if state.minus else magnitude
        return exponent or state.scientific


def _order(left: str, right: str) -> int:
    return (left > right) - (left < right)


_RELATIONS = {
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "!=": lambda order: order != 0,
}


@functools.lru_cache(maxsize=512)
def compared(relation: str, bound: Decimal) -> ByteAutomaton:
    """Numbers in a relation to a bound.

    Args:
        relation: `<`, `<=`, `>`, `>=` or `!=`.
        bound: finite.
    """
    reader = _Bound(bound)
    holds = _RELATIONS[relation]

    def accepts(state: _Compared) -> bool:
        order = reader.result(state)
        if order is None:
            return False
        if bound < 0:
            order = -order if state.negative else 1
        elif state.negative:
            order = -1 if bound > 0 else -order
        return holds(order)

    return algebra.intersection(explore(_Compared("start"), reader.step, accepts, _ALPHABET), number())


@functools.lru_cache(maxsize=512)
def equal(value: Decimal) -> ByteAutomaton:
    """The texts of one number: plain with any zeros at the end, or as Python writes it."""
    whole, _, fraction = f"{value.copy_abs():f}".partition(".")
    fraction = fraction.rstrip("0")
    if len(whole) + len(fraction) > _MAX_DIGITS:
        return choice([_python_text(value)])
    tail = rf"\.{fraction}0*" if fraction else r"(\.0+)?"
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    plain = compile_regex(f"{sign}{whole}{tail}")
    text = _python_text(value)
    return plain if plain.matches(text) else algebra.union(plain, choice([text]))


@functools.lru_cache(maxsize=512)
def equal_any(values: tuple[Decimal, ...]) -> ByteAutomaton:
    """The texts of some numbers."""
    result = equal(values[0])
    for value in values[1:]:
        result = algebra.union(result, equal(value))
    return result


def _python_text(value: Decimal) -> str:
    text = repr(float(value)) if abs(value.adjusted()) < 300 else ""
    return text if text and Decimal(text) == value else f"{value:e}"


@functools.lru_cache(maxsize=64)
def multiple(divisor: Decimal, *, negated: bool = False) -> ByteAutomaton:
    """Plain decimals that are (or, negated, are not) a whole multiple of a divisor.

    Raises:
        TooLarge: the divisor has too many digits.
    """
    if divisor == 1:
        return fractional() if negated else integer()
    scale = max(0, -int(divisor.normalize().as_tuple().exponent))
    modulus = int(divisor.scaleb(scale))
    if modulus > _MAX_MODULUS or scale > 30:
        raise TooLarge(f"multipleOf {divisor} needs more than {_MAX_MODULUS} states")

    def step(state: tuple[str, int, int], symbol: str) -> tuple[str, int, int] | None:
        phase, rest, places = state
        if symbol == "-":
            return ("sign", 0, 0) if phase == "start" else None
        if symbol == ".":
            return ("point", rest, 0) if phase in ("zero", "int") else None
        digit = int(symbol)
        if phase in ("start", "sign"):
            return ("int" if digit else "zero", digit % modulus, 0)
        if phase == "int":
            return ("int", (rest * 10 + digit) % modulus, 0)
        if phase == "zero":
            return None
        if places < scale:
            return ("frac", (rest * 10 + digit) % modulus, places + 1)
        if digit:  # more places than any multiple has
            rest = -1
        return ("frac", rest, places)

    def accepts(state: tuple[str, int, int]) -> bool:
        phase, rest, places = state
        if phase not in ("zero", "int", "frac"):
            return False
        whole = rest >= 0 and rest * 10 ** (scale - places) % modulus == 0
        return whole != negated

    return explore(("start", 0, 0), step, accepts, [*"0123456789", "-", "."])
