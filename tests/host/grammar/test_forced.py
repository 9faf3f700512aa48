"""Forced tokens: canonical whatever comes next, and no fewer than llguidance forces."""

import json
from pathlib import Path

import pytest

from jaxkv.grammar.forced import ForcedTokens
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.regex import compile_regex
from jaxkv.grammar.tables import build_tables
from jaxkv.grammar.vocabulary import vocabulary_of
from jaxkv.tokenizer.base import Tokenizer
from jaxkv.tokenizer.load import load_tokenizer

STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
CALL = (
    r'\{"name":"get_weather","arguments":\{"location":' + STRING + r',"unit":"(celsius|fahrenheit)",'
    r'"days":([1-9]|1[0-4])\}\}'
)
CALLS = [
    json.dumps(
        {"name": "get_weather", "arguments": {"location": location, "unit": unit, "days": days}},
        separators=(",", ":"),
        ensure_ascii=False,
    )
    for location, unit, days in [("Paris, France", "celsius", 7), ("x", "fahrenheit", 14), ("São Paulo", "celsius", 1)]
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf_path)


def test_whole_calls_stay_canonical_and_much_of_them_is_forced(tokenizer: Tokenizer) -> None:
    llguidance = pytest.importorskip("llguidance")
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex(CALL)
    forced = ForcedTokens(automaton, build_tables(automaton, vocabulary), vocabulary)
    theirs = llguidance.LLTokenizer(
        tokenizer.vocabulary.backend.to_str(),  # pyright: ignore[reportAttributeAccessIssue]
        n_vocab=tokenizer.vocab_size,
        eos_token=min(tokenizer.eos_ids),
    )
    total = ours_forced = theirs_forced = 0
    for text in CALLS:
        ids = tokenizer.encode(text, add_bos=False)
        ours_forced += num_forced(forced, ids)
        theirs_forced += num_forced_by_llguidance(llguidance, theirs, ids)
        total += len(ids)
    assert ours_forced >= theirs_forced, f"{ours_forced} forced of {total}; llguidance {theirs_forced}"
    assert ours_forced >= 0.4 * total


def num_forced(forced: ForcedTokens, ids: list[int]) -> int:
    """Tokens of `ids` that need no decode step; each must be the one the tokenizer has there."""
    matcher = TokenMatcher(forced.tables)
    position = count = 0
    while position < len(ids):
        given = forced.after(matcher.state, ids[:position])
        assert list(given) == ids[position : position + len(given)]
        count += len(given)
        for token in given or ids[position : position + 1]:
            assert matcher.advance(token)
            position += 1
    assert matcher.is_accepting
    return count


def num_forced_by_llguidance(llguidance, tokenizer, ids: list[int]) -> int:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(CALL))
    position = count = 0
    while position < len(ids):
        given = matcher.compute_ff_tokens()
        count += len(given)
        step = given or ids[position : position + 1]
        assert matcher.consume_tokens(step)
        position += len(step)
    return count


def test_nothing_is_forced_inside_a_token_the_model_would_not_have_split(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex(r"(weather|wind) forecast")
    forced = ForcedTokens(automaton, build_tables(automaton, vocabulary), vocabulary)
    matcher = TokenMatcher(forced.tables)
    whole = tokenizer.encode("weather forecast", add_bos=False)
    assert matcher.advance(whole[0])
    assert list(forced.after(matcher.state, whole[:1])) == whole[1:]
    split = TokenMatcher(forced.tables)
    (start,) = tokenizer.encode("we", add_bos=False)
    assert split.advance(start)
    assert forced.after(split.state, [start]) == ()  # "weather" is one token: "we" + "ather" is not how it is written


def test_a_choice_or_an_end_forces_nothing(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex("(yes( indeed)?|no)")
    forced = ForcedTokens(automaton, build_tables(automaton, vocabulary), vocabulary)
    matcher = TokenMatcher(forced.tables)
    assert forced.after(matcher.state, []) == ()
    assert matcher.advance(tokenizer.encode("yes", add_bos=False)[0])
    assert forced.after(matcher.state, tokenizer.encode("yes", add_bos=False)) == ()
