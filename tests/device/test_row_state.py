"""Deltas to the row state: what a setup writes, what it leaves alone, and the counts that penalties use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.device import row_state
from jaxkv.device.row_state import MAX_COUNT, NO_TOKEN, PROMPT_BIT
from jaxkv.grammar_layout import GrammarPlace
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS
from tests.device.sampling import Row, row

V, MAX_ROWS, MAX_PAGES = 70, 3, 5

set_rows, set_pages = jax.jit(row_state.set_rows), jax.jit(row_state.set_pages)
set_counts, count_tokens = jax.jit(row_state.set_counts), jax.jit(row_state.count_tokens)


def fresh() -> row_state.RowState:
    return row_state.init_row_state(MAX_ROWS, MAX_PAGES, V)


def setup(state: row_state.RowState, *rows: tuple[int, Row], size: int = 3) -> row_state.RowState:
    at = np.array([*(i for i, _ in rows), *[MAX_ROWS] * (size - len(rows))], np.int32)
    return set_rows(state, at, *row_state.pack_setups([r.setup(i) for i, r in rows], np.arange(len(rows)), size, V))


def entry(state: row_state.RowState, at: int) -> dict[str, np.ndarray]:
    """All that belongs to one row."""
    fields = {**vars(state.params), **{k: v for k, v in vars(state).items() if k != "params"}}
    return {name: np.asarray(value)[at] for name, value in fields.items()}


def test_starts_with_every_row_done() -> None:
    state = fresh()
    assert state.done.all() and state.done.shape == (MAX_ROWS + 1,)
    assert state.page_table.shape == (MAX_ROWS + 1, MAX_PAGES) and not state.page_table.any()


def test_setup_writes_every_field() -> None:
    r = row(
        prompt=(1, 2, 3), output=(4, 5), stop_ids=(7, 9), bad_words_ids=[(3,), (5, 6)], seed=2**40 + 17, child=5,
        max_tokens=30, min_tokens=6, temperature=0.25, top_k=11, top_p=0.75, min_p=0.125, repetition_penalty=1.5,
        frequency_penalty=-0.5, presence_penalty=0.25, logit_bias={8: 1.5, 2: -3.0}, allowed_token_ids=(0, 31, 32, 69),
        logprobs=0,
    )  # fmt: skip
    r = dataclasses.replace(r, grammar=GrammarPlace(states=2, transitions=3, classes=4), grammar_state=6)
    got = entry(setup(fresh(), (1, r)), 1)
    pad = lambda ids, length: list(ids) + [NO_TOKEN] * (length - len(ids))  # noqa: E731
    scalars = {
        name: value.item()
        for name, value in got.items()
        if value.ndim == 0 and name not in ("last_token", "position", "done")
    }
    assert scalars == dict(
        prompt_len=3, max_total_len=33, min_total_len=9, temperature=0.25, top_k=11, top_p=0.75, min_p=0.125,
        repetition=1.5, frequency=-0.5, presence=0.25, child=5, wants_logprobs=True, has_allowed=True,
        grammar_states=2, grammar_transitions=3, grammar_classes=4, grammar_state=6, grammar_count=0,
    )  # fmt: skip
    assert got["seed"].tolist() == [2**8, 17]
    assert got["stop_ids"].tolist() == pad((7, 9), MAX_STOP_IDS)
    assert got["bias_ids"].tolist() == pad((8, 2), MAX_LOGIT_BIAS) and got["bias"][:3].tolist() == [1.5, -3.0, 0.0]
    assert got["allowed"].tolist() == [1 | 1 << 31, 1, 1 << 5]
    words = got["bad_words"]
    assert words.shape == (MAX_BAD_WORDS, MAX_BAD_WORD_LEN) and (words[2:] == NO_TOKEN).all()
    assert words[:2, -3:].tolist() == [[NO_TOKEN, NO_TOKEN, 3], [NO_TOKEN, 5, 6]] and (words[:, :-2] == NO_TOKEN).all()
    assert got["recent"][-3:].tolist() == [NO_TOKEN, 4, 5] and not got["done"]


def test_defaults_switch_nothing_on() -> None:
    state = setup(fresh(), (0, row()))
    got = entry(state, 0)
    assert not (got["has_allowed"] or got["wants_logprobs"] or state.params.penalised[0])
    assert got["top_p"] == 1 and got["min_p"] == got["top_k"] == 0
    assert all((got[name] == NO_TOKEN).all() for name in ("stop_ids", "bias_ids", "bad_words", "recent"))


def test_limits_are_full() -> None:
    """As many entries as a request may have, and the last ones arrive."""
    r = row(
        stop_ids=range(MAX_STOP_IDS), bad_words_ids=[tuple(range(i, i + MAX_BAD_WORD_LEN)) for i in range(MAX_BAD_WORDS)],
        output=range(40), logit_bias={t: float(t) for t in range(MAX_LOGIT_BIAS)},
    )  # fmt: skip
    got = entry(setup(fresh(), (2, r)), 2)
    assert got["stop_ids"][-1] == MAX_STOP_IDS - 1 and got["bias"][-1] == MAX_LOGIT_BIAS - 1
    assert got["bad_words"][-1, 0] == MAX_BAD_WORDS - 1 and (got["bad_words"] != NO_TOKEN).all()
    assert got["recent"].tolist() == list(range(40 - MAX_BAD_WORD_LEN, 40))


@pytest.mark.parametrize("fields", [dict(min_tokens=2**40, max_tokens=2**41), dict(top_k=2**40)], ids=str)
def test_numbers_beyond_int32(fields: dict) -> None:
    """Requests may ask for more than any vocabulary or sequence holds; it means all of it."""
    r = row(**(dict(max_tokens=5) | fields))
    packed = row_state.pack_setups([dataclasses.replace(r.setup(0), max_total_len=12)], np.zeros(1, int), 1, V)
    got = entry(set_rows(fresh(), np.zeros(1, np.int32), *packed), 0)
    assert got["min_total_len"] <= got["max_total_len"] == 12 and got["top_k"] <= V


def test_a_setup_touches_its_own_row_only() -> None:
    """Padding goes to the null row, which stays done; other rows and the counts stay as they are."""
    busy = row(temperature=0.5, allowed_token_ids=(3,), stop_ids=(1,), output=(9,))
    state = setup(fresh(), (0, busy), (2, busy))
    state = set_pages(state, np.array([[0, 1, 7], [2, 0, 8], [1, 4, 9]], np.int32))
    changed = setup(state, (1, row()))
    for at in (0, 2):
        jax.tree.map(np.testing.assert_array_equal, entry(changed, at), entry(state, at))
    assert changed.done.tolist() == [False, False, False, True]
    assert not changed.page_table[1].any(), "the row's page list starts empty"


def test_page_writes() -> None:
    padding = [MAX_ROWS, 0, 0]
    state = set_pages(fresh(), np.array([[0, 0, 4], [2, 4, 6], [0, 3, 5], padding, padding], np.int32))
    assert state.page_table.tolist() == [[4, 0, 0, 5, 0], [0] * 5, [0, 0, 0, 0, 6], [0] * 5]


@given(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=32), st.lists(st.integers(0, V - 1), max_size=32)
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_counts(prompt: list[int], output: list[int]) -> None:
    padded = np.full(64, NO_TOKEN, np.int32)
    padded[: len(prompt) + len(output)] = prompt + output
    state = dataclasses.replace(fresh(), counts=jnp.full((MAX_ROWS + 1, V), 9, jnp.uint16))
    counts = np.asarray(set_counts(state, np.int32(1), padded, np.int32(len(prompt))).counts)
    expected = np.bincount(output, minlength=V) if output else np.zeros(V, int)
    assert (counts[1] & MAX_COUNT).tolist() == expected.tolist()
    assert np.flatnonzero(counts[1] & PROMPT_BIT).tolist() == sorted({*prompt})
    assert (np.delete(counts, 1, axis=0) == 9).all()


def test_counts_are_full_at_their_limit() -> None:
    """One more of a token that came 32,767 times must not turn into "stands in the prompt"."""
    counts = jnp.zeros((2, V), jnp.uint16).at[0, :3].set(jnp.array([MAX_COUNT, PROMPT_BIT | MAX_COUNT, 6], jnp.uint16))
    for token, expected in ((0, MAX_COUNT), (1, PROMPT_BIT | MAX_COUNT), (2, 7), (3, 1)):
        after = count_tokens(counts, np.array([0], np.int32), np.array([token], np.int32))
        assert int(after[0, token]) == expected and not after[1].any()
    many = np.full(40_000, 5, np.int32)
    after = set_counts(fresh(), np.int32(0), many, np.int32(1)).counts
    assert int(after[0, 5]) == PROMPT_BIT | MAX_COUNT
