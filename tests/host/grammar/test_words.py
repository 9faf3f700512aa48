"""Grammars written with some of the tokens only: allowed ones, and without those that end an output."""

import concurrent.futures
import itertools
import threading
import time

import numpy as np
import pytest

from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import OnDevice, OnHost
from jaxkv.grammar.compiler import GrammarCompiler, Words
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary
from jaxkv.structured import Choice, Form, Grammar, JsonSchema, Regex

LETTERS = [bytes([i]) for i in range(97, 123)]
TOKENS = [*LETTERS, b"ab", b"cd", b"abc", b"", b"b"]  # the last one spells what token 1 does
A, B, C, AB, ABC, SILENT, OTHER_B = 0, 1, 2, 26, 28, 29, 30
VOCABULARY = make_vocabulary(TOKENS, size=32)
COMPILER = GrammarCompiler(lambda _: VOCABULARY, lambda _: True)


def compiled(form: Form, allowed: tuple[int, ...] | None = None, stops: tuple[int, ...] = ()) -> OnDevice:
    grammar = COMPILER.submit(form, allowed, stops).result()
    assert isinstance(grammar, OnDevice)
    return grammar


def language(grammar: OnDevice, max_len: int) -> set[tuple[int, ...]]:
    """All token sequences of whole texts up to a length; no mask on the way is empty where nothing may end."""
    found, front = set(), [()]
    for _ in range(max_len + 1):
        following = []
        for ids in front:
            matcher = TokenMatcher(grammar.tables)
            assert all(matcher.advance(token) for token in ids)
            allowed = np.flatnonzero(matcher.mask()).tolist()
            if matcher.is_accepting:
                found.add(ids)
            assert allowed or matcher.is_accepting, "a dead end"
            following += [(*ids, token) for token in allowed]
        front = following
    return found


@pytest.mark.parametrize("form", [Choice(["abc", "abd", "cab", "ca", "b"]), Regex("(ab|c)*d?"), Regex("[ab]{2,3}")])
@pytest.mark.parametrize(
    ("allowed", "stops"),
    [((A, B, C, AB), ()), (None, (B,)), (None, (ABC, OTHER_B)), ((A, B, C, 3, AB), (AB,)), ((A, B), (SILENT,))],
)
def test_what_is_left_and_no_dead_ends(form: Form, allowed: tuple[int, ...] | None, stops: tuple[int, ...]) -> None:
    """Exactly the sequences of the whole grammar that have none of the other tokens; distances count with them alone."""
    words = {*(range(len(TOKENS)) if allowed is None else allowed)} - {*stops}
    want = {ids for ids in language(compiled(form), 4) if words >= {*ids}}
    grammar = compiled(form, allowed, stops)
    assert language(grammar, 4) == want
    assert grammar.min_tokens == min(map(len, want))
    for ids in want:  # and within its tokens, if the budget is as tight as that
        matcher = TokenMatcher(grammar.tables)
        for index, token in enumerate(ids):
            assert matcher.mask(len(ids) - index)[token]
            matcher.advance(token)


def test_what_cannot_be_written_is_refused() -> None:
    for allowed, stops, names in [((A, B), (), "allowed_token_ids"), (None, (C, ABC, 27), "stop_token_ids"),
                                  ((A, B, C), (C,), "allowed_token_ids and stop_token_ids")]:  # fmt: skip
        with pytest.raises(RequestError, match=f"^{names}: no text that the grammar allows can be written"):
            COMPILER.submit(Choice(["abcd"]), allowed, stops).result()


def test_a_stop_id_that_is_text_cannot_go_with_a_grammar_on_the_host() -> None:
    """llguidance would still want it as text; where it spells nothing it is no matter."""
    form = Grammar('start: "a" start "b" | "c"')
    with pytest.raises(RequestError, match="grammar with stop_token_ids: only grammars that fit the device"):
        COMPILER.submit(form, None, (B,)).result()
    assert isinstance(COMPILER.submit(form, None, (SILENT,)).result(), OnHost)


def test_counted_strings_can_go_with_chosen_words() -> None:
    vocabulary = make_vocabulary([bytes([i]) for i in range(256)] + [b"ab", b"ba"], size=258)
    compiler = GrammarCompiler(lambda _: vocabulary, lambda _: True)
    form = JsonSchema({"type": "string", "minLength": 3, "maxLength": 200})
    for allowed, stops, none_of in [(None, (97, 256), {97, 256}), ((*b'"abc', 257), (), {256, 100})]:
        grammar = compiler.submit(form, allowed, stops).result()
        assert isinstance(grammar, OnDevice) and grammar.tables.count is not None
        matcher = TokenMatcher(grammar.tables)
        for token in [*b'"b', 257]:
            assert matcher.advance(token) and not none_of & {*np.flatnonzero(matcher.mask()).tolist()}
        assert matcher.dist == 1 and np.flatnonzero(matcher.mask(1)).tolist() == [34]


def test_words_make_different_grammars() -> None:
    form = Choice(["abcd"])
    futures = [COMPILER.submit(form, *words) for words in [(), ((A, B),), (None, (A, B)), ((A, B), (A, B))]]
    assert all(one is not other for one, other in itertools.combinations(futures, 2))
    assert COMPILER.submit(form, None, (B, A)) is futures[2]
    concurrent.futures.wait(futures)
    assert COMPILER._choose(Words(None, (SILENT,)), False) is COMPILER.vocabulary


def test_threads_that_ask_at_once_get_the_same_chosen_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(lambda _: VOCABULARY, lambda _: True)
    make, begun, num_made = Words.of, threading.Barrier(4), []

    def make_slowly(words: Words, vocabulary: TokenVocabulary) -> TokenVocabulary:
        num_made.append(words)
        time.sleep(0.05)  # for the others to come in
        return make(words, vocabulary)

    def ask(_: int) -> TokenVocabulary:
        begun.wait()
        return compiler._choose(Words(None, (A, B)), False)

    monkeypatch.setattr(Words, "of", make_slowly)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(ask, range(4))
    assert first is not compiler.vocabulary and all(other is first for other in others) and len(num_made) == 1
