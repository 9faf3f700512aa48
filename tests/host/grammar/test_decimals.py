"""Sets of numbers, against decimal arithmetic."""

import itertools
import operator
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv.grammar import decimals
from jaxkv.grammar.errors import TooLarge

RELATIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne}
BOUNDS = ["0", "1", "-1", "100", "0.5", "-0.25", "99.99", "1e-5", "12345", "2.5e10", "25", "-300"]
PLAIN = st.from_regex(r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,4})?", fullmatch=True, alphabet="-.0123456789")
SCIENTIFIC = st.from_regex(r"-?[1-9](\.[0-9]{1,4})?[eE][+-]?[0-9]{1,2}", fullmatch=True, alphabet="-.0123456789eE+")


@pytest.mark.parametrize("bound", BOUNDS)
@given(texts=st.lists(PLAIN | SCIENTIFIC, min_size=30, max_size=60))
@settings(deadline=None, max_examples=8)
def test_comparisons(bound, texts):
    bound = Decimal(bound)
    for relation, holds in RELATIONS.items():
        automaton = decimals.compared(relation, bound)
        for text in [*texts, str(bound), "-0", "0.0", f"{bound:f}0" if "." in f"{bound:f}" else f"{bound:f}.00"]:
            if "E" in text and text == str(bound):
                continue  # written with an exponent that the grammar has otherwise
            assert automaton.matches(text) == holds(Decimal(text), bound), (relation, text)


@pytest.mark.parametrize("divisor", ["1", "2", "3", "0.01", "1.5", "0.0001", "60"])
@given(texts=st.lists(PLAIN, min_size=30, max_size=60))
@settings(deadline=None, max_examples=8)
def test_multiples(divisor, texts):
    divisor = Decimal(divisor)
    whole, broken = decimals.multiple(divisor), decimals.multiple(divisor, negated=True)
    for text in [*texts, "0", "-0.0", str(divisor), str(divisor * 7)]:
        assert whole.matches(text) == (Decimal(text) % divisor == 0), text
        assert broken.matches(text) != whole.matches(text), text


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-1000, max_value=1000),
    st.lists(PLAIN, max_size=20),
)
@settings(deadline=None, max_examples=40)
def test_equality_is_by_value(value, texts):
    automaton = decimals.equal(value)
    assert automaton.matches(f"{value:f}")
    for text in texts:
        assert automaton.matches(text) == (Decimal(text) == value), text


FLOATS = st.floats(allow_nan=False, min_value=-1e100, max_value=1e100, exclude_min=True, exclude_max=True)


@given(FLOATS.filter(lambda value: value == 0 or abs(value) >= 1e-99) | st.integers())
@settings(deadline=None, max_examples=100)
def test_what_python_writes_is_a_number(value):
    text = repr(value)
    assert decimals.number().matches(text)
    assert decimals.compared("<", Decimal(0)).matches(text) == (value < 0)
    assert decimals.compared(">=", Decimal(0)).matches(text) == (value >= 0)


@pytest.mark.parametrize(
    "automaton",
    [decimals.number(), decimals.integer(), decimals.fractional(), decimals.compared("!=", Decimal(7)),
     decimals.compared("<", Decimal(0)), decimals.compared(">", Decimal(0)), decimals.compared("<", Decimal("1e-350"))],
)  # fmt: skip
def test_no_exponent_is_beyond_what_a_double_holds(automaton):
    """What SmolLM2 wrote once, hot, for an integer: -2.0E+801807178393660903212600021043274081715597."""
    for sign, mantissa, letter, exponent in itertools.product(
        ["", "-"], ["2", "1.5", "2.0", "12.5", "300"], "eE", ["308", "+400", "-308", "0999", "-" + "9" * 40]
    ):
        assert not automaton.matches(sign + mantissa + letter + exponent)
    assert decimals.number().matches("30e99") and decimals.compared(">", Decimal(0)).matches("9.9e+99")
    assert decimals.fractional().matches("1.5e-99") and decimals.integer().matches("2e99")


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,20})\.[0-9]{1,24}", fullmatch=True, alphabet="-.0123456789"))
@example("449484390500321584760746368496327287174657324088866753386527044485703293042358964027718827577654.216")
@example("0.99999999999999999")
@example("4503599627370497.5")
@settings(deadline=None, max_examples=300)
def test_fractions_are_not_integers_as_doubles_either(text):
    """As random weights wrote one, over 262,144 tokens, where a schema asked for no integer."""
    value = Fraction(text)
    distance = abs(value - round(value))
    if decimals.fractional().matches(text):
        assert distance and not float(text).is_integer()
    else:
        assert distance < max(abs(value), 1) * Fraction(1, 10**14), "only what is nearly an integer is missing"


@given(st.floats(allow_nan=False, min_value=-1e13, max_value=1e13).filter(lambda value: abs(value % 1 - 0.5) < 0.49))
@settings(deadline=None, max_examples=200)
def test_pythons_fractions_are_fractions(value):
    assert decimals.fractional().matches(repr(value))


def test_integers_and_fractions_exclude_each_other():
    for text, whole in [
        ("3", True),
        ("3.0", True),
        ("3e2", True),
        ("-0", True),
        ("3.5", False),
        ("5e-1", False),
        ("1.5e-7", False),
    ]:
        assert decimals.integer().matches(text) == whole
        assert decimals.fractional().matches(text) != whole


def test_a_divisor_with_too_many_digits_is_refused():
    with pytest.raises(TooLarge, match="multipleOf 123457"):
        decimals.multiple(Decimal(123457))
