"""What the device remembers about each row between steps.

The host sends deltas (`set_rows`, `set_pages`, `set_counts`); steps read and advance the rest, so that a step can be
dispatched before the tokens of the previous one are known. All functions here are pure; `runner` jits them and
donates the state.

Axis letters: R rows of a data shard (the last one, index `max_rows`, is the *null row*: always done, target of padding),
M pages per row (of all groups of layers, one group's after the other's), V vocabulary, B entries of a batch of setups.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.grammar_layout import GrammarPlace
from jaxkv.plan import RowSetup
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS

NO_TOKEN = 2**31 - 1  # pads id lists; beyond every vocabulary, so that scatters drop it and comparisons fail
PROMPT_BIT = 1 << 15  # in `counts`: the token stands in the prompt; the low 15 bits count it in the output
MAX_COUNT = PROMPT_BIT - 1  # where counting stops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """Constants of a request, one entry per row; what `set_rows` writes. All fields `[R, ...]`."""

    prompt_len: jax.Array  # int32 [R]
    max_total_len: jax.Array  # int32 [R]: done at this many tokens
    min_total_len: jax.Array  # int32 [R]: no stop id before this many tokens
    stop_ids: jax.Array  # int32 [R, MAX_STOP_IDS], padded with NO_TOKEN
    temperature: jax.Array  # float32 [R], 0 is greedy
    top_k: jax.Array  # int32 [R], 0 keeps all
    top_p: jax.Array  # float32 [R]
    min_p: jax.Array  # float32 [R]
    repetition: jax.Array  # float32 [R]
    frequency: jax.Array  # float32 [R]
    presence: jax.Array  # float32 [R]
    seed: jax.Array  # uint32 [R, 2], high and low word
    child: jax.Array  # uint32 [R]
    wants_logprobs: jax.Array  # bool [R]
    bias_ids: jax.Array  # int32 [R, MAX_LOGIT_BIAS], padded with NO_TOKEN
    bias: jax.Array  # float32 [R, MAX_LOGIT_BIAS]
    has_allowed: jax.Array  # bool [R]
    allowed: jax.Array  # uint32 [R, ceil(V / 32)]: bit (token % 32) of word (token // 32)
    bad_words: jax.Array  # int32 [R, MAX_BAD_WORDS, MAX_BAD_WORD_LEN], aligned right, padded left with NO_TOKEN
    grammar_states: jax.Array  # int32 [R]: see `grammar_layout`; 0 is no grammar
    grammar_transitions: jax.Array  # int32 [R]
    grammar_classes: jax.Array  # int32 [R]

    @property
    def penalised(self) -> jax.Array:  # bool [R]
        return (self.repetition != 1) | (self.frequency != 0) | (self.presence != 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """Everything a step reads and advances."""

    params: RowParams
    page_table: jax.Array  # int32 [R, M]
    last_token: jax.Array  # int32 [R]: newest token, whose K/V are not yet in the pool
    position: jax.Array  # int32 [R]: its position
    done: jax.Array  # bool [R]
    recent: jax.Array  # int32 [R, MAX_BAD_WORD_LEN]: last output tokens, newest last, padded with NO_TOKEN
    counts: jax.Array  # uint16 [R, V]: see PROMPT_BIT
    grammar_state: jax.Array  # int32 [R]: counted from the grammar's first
    grammar_count: jax.Array  # int32 [R]: its counter register


def init_row_state(max_rows: int, max_pages: int, vocab_size: int) -> RowState:
    """A state in which every row is done and owns no pages."""
    rows = max_rows + 1
    params = jax.tree.map(
        lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), pack_setups([], np.zeros(0, np.intp), 1, vocab_size)[0]
    )
    return RowState(
        params=params,
        page_table=jnp.zeros((rows, max_pages), jnp.int32),
        last_token=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros(rows, jnp.int32),
        done=jnp.ones(rows, bool),
        recent=jnp.full((rows, MAX_BAD_WORD_LEN), NO_TOKEN, jnp.int32),
        counts=jnp.zeros((rows, vocab_size), jnp.uint16),
        grammar_state=jnp.zeros(rows, jnp.int32),
        grammar_count=jnp.zeros(rows, jnp.int32),
    )


def set_rows(state: RowState, rows: jax.Array, params: RowParams, recent: jax.Array, grammar: jax.Array) -> RowState:
    """Starts requests in `rows` int32 [B]; the others hold one entry each. Padding goes to the null row."""
    null_row = state.done.shape[0] - 1
    return dataclasses.replace(
        state,
        params=jax.tree.map(lambda old, new: old.at[rows].set(new), state.params, params),
        page_table=state.page_table.at[rows].set(0),
        done=state.done.at[rows].set(rows == null_row),
        recent=state.recent.at[rows].set(recent),
        grammar_state=state.grammar_state.at[rows].set(grammar[:, 0]),
        grammar_count=state.grammar_count.at[rows].set(grammar[:, 1]),
    )


def set_pages(state: RowState, writes: jax.Array) -> RowState:
    """`page_table[row, index] = page` for each of `writes` int32 [B, 3]; padding writes the null row."""
    return dataclasses.replace(
        state, page_table=state.page_table.at[writes[:, 0], writes[:, 1]].set(writes[:, 2], mode="promise_in_bounds")
    )


def set_counts(state: RowState, row: jax.Array, token_ids: jax.Array, num_prompt: jax.Array) -> RowState:
    """Rebuilds the counts of `row` from its tokens; `token_ids` int32 [B] is padded with NO_TOKEN."""
    is_prompt = jnp.arange(token_ids.shape[0]) < num_prompt
    empty = jnp.zeros(state.counts.shape[1], jnp.uint16)
    seen = empty.at[jnp.where(is_prompt, token_ids, NO_TOKEN)].set(jnp.uint16(PROMPT_BIT), mode="drop")
    counts = empty.astype(jnp.int32).at[jnp.where(is_prompt, NO_TOKEN, token_ids)].add(1, mode="drop")
    counts = jnp.minimum(counts, MAX_COUNT).astype(jnp.uint16)
    return dataclasses.replace(state, counts=state.counts.at[row].set(seen | counts))


def count_tokens(counts: jax.Array, rows: jax.Array, token_ids: jax.Array) -> jax.Array:
    """`counts` with one more of `token_ids` int32 [N] in each of `rows` int32 [N]."""
    is_full = (counts[rows, token_ids] & MAX_COUNT) == MAX_COUNT
    return counts.at[rows, token_ids].add(jnp.where(is_full, 0, 1).astype(jnp.uint16), mode="promise_in_bounds")


def pack_setups(
    setups: Sequence[RowSetup], places: np.ndarray, size: int, vocab_size: int
) -> tuple[RowParams, np.ndarray, np.ndarray]:
    """`RowParams`, `recent`, and int32 [size, 2] grammar state and count; all with `size` entries, as numpy.

    Setup i stands at `places[i]`, the others are padding.
    """
    grammar = np.zeros((size, 2), np.int32)
    recent = np.full((size, MAX_BAD_WORD_LEN), NO_TOKEN, np.int32)
    words = -(-vocab_size // 32)
    fields: dict[str, Any] = dict(  # numpy stands in for jax arrays until it is handed over
        **{name: np.zeros(size, np.int32) for name in ("prompt_len", "max_total_len", "min_total_len", "top_k")},
        **{f"grammar_{name}": np.zeros(size, np.int32) for name in GrammarPlace._fields},
        **{name: np.zeros(size, np.float32) for name in ("temperature", "min_p", "frequency", "presence")},
        **{name: np.ones(size, np.float32) for name in ("top_p", "repetition")},
        **{name: np.zeros(size, bool) for name in ("wants_logprobs", "has_allowed")},
        stop_ids=np.full((size, MAX_STOP_IDS), NO_TOKEN, np.int32),
        seed=np.zeros((size, 2), np.uint32),
        child=np.zeros(size, np.uint32),
        bias_ids=np.full((size, MAX_LOGIT_BIAS), NO_TOKEN, np.int32),
        bias=np.zeros((size, MAX_LOGIT_BIAS), np.float32),
        allowed=np.zeros((size, words), np.uint32),
        bad_words=np.full((size, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NO_TOKEN, np.int32),
    )
    p = RowParams(**fields)
    for i, setup in zip(places.tolist(), setups, strict=True):
        _pack_one(p, i, setup, vocab_size)
        tail = setup.token_ids[setup.prompt_len :][-MAX_BAD_WORD_LEN:]
        recent[i, MAX_BAD_WORD_LEN - len(tail) :] = tail
        grammar[i] = setup.grammar_state, setup.grammar_count
    return p, recent, grammar


def _pack_one(p: RowParams, i: int, setup: RowSetup, vocab_size: int) -> None:
    s = setup.params
    p.prompt_len[i] = setup.prompt_len  # type: ignore[index]
    p.max_total_len[i] = setup.max_total_len  # type: ignore[index]
    p.min_total_len[i] = min(setup.prompt_len + s.min_tokens, setup.max_total_len)  # type: ignore[index]
    p.stop_ids[i, : len(setup.stop_ids)] = setup.stop_ids  # type: ignore[index]
    p.temperature[i], p.top_k[i] = _to_float32(s.temperature), min(s.top_k, vocab_size)  # type: ignore[index]
    p.top_p[i], p.min_p[i] = s.top_p, s.min_p  # type: ignore[index]
    p.repetition[i], p.frequency[i] = _to_float32(s.repetition_penalty), s.frequency_penalty  # type: ignore[index]
    p.presence[i] = s.presence_penalty  # type: ignore[index]
    p.seed[i] = (setup.seed >> 32, setup.seed & 0xFFFFFFFF)  # type: ignore[index]
    p.child[i] = setup.child  # type: ignore[index]
    p.wants_logprobs[i] = s.logprobs is not None  # type: ignore[index]
    if s.logit_bias:
        p.bias_ids[i, : len(s.logit_bias)] = list(s.logit_bias)  # type: ignore[index]
        p.bias[i, : len(s.logit_bias)] = [_to_float32(bias) for bias in s.logit_bias.values()]  # type: ignore[index]
    if s.allowed_token_ids is not None and s.structured is None:  # else they are part of the grammar's tables
        p.has_allowed[i] = True  # type: ignore[index]
        p.allowed[i] = pack_bits(np.asarray(s.allowed_token_ids), vocab_size)  # type: ignore[index]
    for name, value in (setup.grammar._asdict() if setup.grammar is not None else {}).items():
        getattr(p, f"grammar_{name}")[i] = value
    for j, word in enumerate(setup.bad_words_ids):
        p.bad_words[i, j, MAX_BAD_WORD_LEN - len(word) :] = word  # type: ignore[index]


def _to_float32(value: float) -> float:
    """The nearest normal float32: 1e300 must not become infinite, nor a temperature of 1e-300 zero (which is greedy)."""
    limits = np.finfo(np.float32)
    size = min(max(abs(value), float(limits.tiny)), float(limits.max)) if value else 0.0
    return math.copysign(size, value)


def pack_bits(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint32 [ceil(V / 32)] with the bits of `token_ids` set, bit `t % 32` of word `t // 32`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[token_ids] = True
    return np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view("<u4")[:, 0]
