"""Forced tokens: canonical whatever comes next, and no fewer than llguidance forces."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.grammar.compiled import OnDevice
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
    grammar = OnDevice("call", build_tables(compile_regex(CALL), vocabulary, canonical=True))
    theirs = llguidance.LLTokenizer(
        tokenizer.vocabulary.backend.to_str(),  # pyright: ignore[reportAttributeAccessIssue]
        n_vocab=tokenizer.vocab_size,
        eos_token=min(tokenizer.eos_ids),
    )
    total = ours_forced = theirs_forced = 0
    for text in CALLS:
        ids = tokenizer.encode(text, add_bos=False)
        ours_forced += num_forced(grammar, ids)
        theirs_forced += num_forced_by_llguidance(llguidance, theirs, ids)
        total += len(ids)
    assert ours_forced >= theirs_forced, f"{ours_forced} forced of {total}; llguidance {theirs_forced}"
    assert ours_forced >= 0.4 * total


def num_forced(grammar: OnDevice, ids: list[int]) -> int:
    """Tokens of `ids` that need no decode step; each must be the one the tokenizer has there, and the mask's only one."""
    matcher = TokenMatcher(grammar.tables)
    position = count = 0
    while position < len(ids):
        given = grammar.forced_after(matcher.state)
        assert list(given) == ids[position : position + len(given)]
        count += len(given)
        for token in given or ids[position : position + 1]:
            assert not given or np.flatnonzero(matcher.mask()).tolist() == [token]
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


def test_a_choice_or_an_end_forces_nothing(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    grammar = OnDevice("choice", build_tables(compile_regex("(yes( indeed)?|no)"), vocabulary, canonical=True))
    matcher = TokenMatcher(grammar.tables)
    assert grammar.forced_after(matcher.state) == ()
    assert matcher.advance(tokenizer.encode("yes", add_bos=False)[0])
    assert grammar.forced_after(matcher.state) == ()


@pytest.mark.parametrize("pattern", [CALL, "weather forecast", r'\{"a":"[a-z]{2,5}","b":\[(\{"c":[0-9]+\},?)*\]\}'])
def test_the_texts_are_the_same_and_their_spelling_is_the_tokenizer_s(tokenizer: Tokenizer, pattern: str) -> None:
    """Random walks: what the canonical tables allow the plain ones allow too; forced text is written as it is encoded."""
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex(pattern)
    plain, canonical = (build_tables(automaton, vocabulary, canonical=flag) for flag in (False, True))
    assert plain.min_tokens <= canonical.min_tokens < 60
    grammar, random = OnDevice("", canonical), np.random.default_rng(0)
    num_given = 0
    for _ in range(8):
        ours, theirs, left = (
            TokenMatcher(canonical),
            TokenMatcher(plain),
            canonical.min_tokens + int(random.integers(20)),
        )
        while left and not (ours.is_accepting and random.random() < 0.3):
            given = grammar.forced_after(ours.state)
            text = b"".join(map(vocabulary.token_bytes, given)).decode()
            assert list(given) == tokenizer.encode(text, add_bos=False)
            allowed = np.setdiff1d(np.flatnonzero(ours.mask(left)), vocabulary.end_ids)
            if not len(allowed):
                break
            assert not given or allowed.tolist() == [given[0]]
            token = int(random.choice(allowed))
            assert ours.advance(token) and theirs.advance(token)
            num_given, left = num_given + bool(given), left - 1
        assert ours.is_accepting and theirs.is_accepting
    assert num_given > 0
