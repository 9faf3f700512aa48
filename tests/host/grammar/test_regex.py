"""Regular expressions, against Python's."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.grammar.chars import json_escape
from jaxkv.grammar.errors import RegexError
from jaxkv.grammar.regex import compile_regex, json_pattern

ATOMS = st.sampled_from(["a", "b", "é", "[ab]", "[^a]", "\\d", ".", "[a-c]", '"', "\\\\", "€", "[^\\w]"])


def _compose(inner):
    quantifier = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,1}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, quantifier).map(lambda pair: f"({pair[0]}){pair[1]}"),
        inner.map(lambda part: f"(?:{part}|)"),
    )


PATTERNS = st.recursive(ATOMS, _compose, max_leaves=6)
TEXTS = st.text(alphabet='abcd1é€"\\ 😀', max_size=6)


@given(PATTERNS, st.lists(TEXTS, min_size=10, max_size=20))
@settings(deadline=None, max_examples=150)
def test_whole_matches_are_those_of_python(pattern, texts):
    automaton = compile_regex(pattern)
    for text in texts:
        assert automaton.matches(text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


@given(
    st.sampled_from(["{}", "^{}", "{}$", "^{}$", "^{}|{}$", "(?:^{}|b){}", "(?={})b", "^(?!{})", "a(?!{}$)"]),
    PATTERNS,
    PATTERNS,
)
@settings(deadline=None, max_examples=150)
def test_patterns_of_json_strings_are_searched_in_the_decoded_text(frame, left, right):
    pattern = frame.format(left, right) if frame.count("{}") == 2 else frame.format(left)
    automaton = json_pattern(pattern)
    for text in ["", "a", "b", "ab", "ba", "abab", 'a"', "\\", "é1", "€a b", "😀", "aab", "b\\a", "11", "a\tb"]:
        expected = bool(re.search(pattern.replace("$", "\\Z"), text, re.ASCII))
        assert automaton.matches(json_escape(text)) == expected, text


def test_partial_characters_are_not_accepted():
    automaton = compile_regex("[^a]*")
    assert automaton.matches("é😀") and not automaton.matches("é".encode()[:1]) and not automaton.matches(b"\xff")
    assert not automaton.matches(b"\xed\xa0\x80")  # a surrogate
    assert not automaton.matches(b"\xc1\x81")  # an overlong form of A


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\p{Lu}\P{Lu}", ["Éa", "A1"], ["aa", "AA"]),
        (r"\p{Letter}+", ["aéß中"], ["1", ""]),
        (r"\u00e9\x41\u{1F600}\cJ\0", ["éA😀\n\0"], ["eA😀\n\0"]),
        (r"\ud83d\ude00", ["😀"], ["\\ud83d"]),
        (r"[\w-.]+", ["a-b.c"], ["a b"]),
        (r"[]|[^]", ["x", "\n"], ["", "xx"]),
        (r"a{,2}", ["a{,2}"], ["aa"]),
        (r"x{2,3}?", ["xx", "xxx"], ["x", "xxxx"]),
        (r"(?<name>a)b", ["ab"], ["a"]),
        (r".", ["é", "\t"], ["\n", "\u2028"]),
        (r"\s", ["\ufeff", "\u3000", " "], ["\x1c", "\u200b"]),
        (r"[\b]", ["\b"], ["b"]),
        (r"[\uD800-\uDBFF]|\uD800", [], ["-", ""]),  # surrogates are in no text, but can be the ends of a range
        (r"[\u0000-\uDFFF]", ["a", "\ud7ff"], ["\ue000"]),
        (r"[^\uD800-\uDFFF]", ["-", "😀"], [""]),
        (r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,4}$", ["ab1", "1abc"], ["abc", "123", "ab1cd"]),
    ],
)
def test_ecma_262(pattern, good, bad):
    automaton = compile_regex(pattern)
    assert [text for text in good if not automaton.matches(text)] == []
    assert [text for text in bad if automaton.matches(text)] == []


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"(a)\1", "backreference"),
        (r"(?<=a)b", "lookbehind"),
        (r"(?<!a)b", "lookbehind"),
        (r"\bword", "word boundary"),
        (r"(?:a(?=b))*", "lookahead inside a repeat"),
        (r"(?i)a", "'\\(\\?i'"),
        (r"\p{Script=Greek}", "Script=Greek"),
        (r"(a", "missing '\\)'"),
        (r"a)", "unmatched '\\)'"),
        (r"*a", "nothing to repeat"),
        (r"a{2}{3}", "nothing to repeat"),
        (r"{2}", "nothing to repeat"),
        (r"[b-a]", "out of order"),
        (r"\Z", "'\\\\Z' is unknown"),
        (r"[a", "unexpected end"),
        (r"a{3,2}", "repeat from 3 to 2"),
    ],
)
def test_what_is_not_supported_is_named(pattern, what):
    with pytest.raises(RegexError, match=what):
        compile_regex(pattern)


def test_json_text_of_a_string_is_canonical():
    for text in ['a"b\\', "\x00\x1f\n\t", "é😀", "\x7f"]:
        escaped = b'"' + json_escape(text) + b'"'
        assert json.loads(escaped) == text
        assert escaped.decode() == json.dumps(text, ensure_ascii=False)
