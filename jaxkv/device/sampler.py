"""Logits and row parameters to token ids and log-probabilities: pure functions, no state.

Order, as Hugging Face and vLLM have it: masks (allowed ids, bad words, stop ids before `min_tokens`), logit bias,
penalties, temperature, top-k, top-p, min-p, draw. Every feature stands under a `lax.cond` on "does any row want it". A
`cond` that changes nothing may still copy the logits (XLA:GPU always does), so those for features that few requests have
stand under one more, and `programs` has a batch of rows that are all plain (`is_plain`) pay for an argmax only.

No sort of the vocabulary: top-k and top-p are thresholds on the logits, found exactly by bisection over the 2^32
float32 bit patterns. Tokens that tie with the threshold are all kept.

Draws use the Gumbel-max trick with a counter-based key `fold_in(fold_in(key(seed), child), position)`, so that a draw
depends neither on row, batch, preemption nor mesh.

Axis letters: N sampled rows, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.device.row_state import MAX_COUNT, NO_TOKEN, RowParams
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_LOGPROBS

NEG_INF = float("-inf")
_MAX = float(jnp.finfo(jnp.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities; zeros where no row of the batch asked."""

    chosen: jax.Array  # float32 [N]
    top_ids: jax.Array  # int32 [N, MAX_LOGPROBS]
    top: jax.Array  # float32 [N, MAX_LOGPROBS]


def sample(
    logits: jax.Array,  # float32 [N, V]
    params: RowParams,  # of the N rows
    position: jax.Array,  # int32 [N]: position the sampled token will have
    counts: jax.Array,  # uint16 [R, V], all rows
    rows: jax.Array,  # int32 [N]: which of them
    recent: jax.Array,  # int32 [N, MAX_BAD_WORD_LEN]
    live: jax.Array,  # bool [N]: entries that matter; others never switch a feature on
) -> jax.Array:
    """int32 [N] token ids."""
    params = dataclasses.replace(params, temperature=jnp.where(live, params.temperature, 0.0))
    logits = adjust(logits, params, position, counts, rows, recent, live)
    logits = _where_any(params.temperature > 0, lambda x: perturb(x, params, position), logits)
    return argmax(logits)


def is_plain(params: RowParams, position: jax.Array) -> jax.Array:
    """bool [N]: rows that get the token of the largest raw logit, unless a grammar says otherwise."""
    return (params.temperature == 0) & ~_any(_wanted(params, position))


class _Wanted(NamedTuple):
    """bool [N] each: rows for which `adjust` has something to do."""

    allowed: jax.Array
    bad_words: jax.Array
    min_len: jax.Array
    bias: jax.Array
    penalties: jax.Array


def _wanted(params: RowParams, position: jax.Array) -> _Wanted:
    return _Wanted(
        allowed=params.has_allowed,
        bad_words=params.bad_words[:, 0, -1] != NO_TOKEN,
        min_len=position < params.min_total_len,
        bias=params.bias_ids[:, 0] != NO_TOKEN,
        penalties=params.penalised,
    )


def _any(wanted: _Wanted) -> jax.Array:
    return functools.reduce(jnp.logical_or, wanted)


def adjust(
    logits: jax.Array,
    params: RowParams,
    position: jax.Array,
    counts: jax.Array,
    rows: jax.Array,
    recent: jax.Array,
    live: jax.Array,
) -> jax.Array:
    """Logits [N, V] after masks, bias and penalties, which greedy rows choose from; arguments as of `sample`."""
    wanted = _Wanted(*(live & flags for flags in _wanted(params, position)))

    def change(x: jax.Array) -> jax.Array:
        x = _where_any(wanted.allowed, lambda x: mask_allowed(x, params), x)
        x = _where_any(wanted.bad_words, lambda x: mask_bad_words(x, params.bad_words, recent), x)
        x = _where_any(wanted.min_len, lambda x: mask_stop_ids(x, params.stop_ids, wanted.min_len), x)
        x = _where_any(wanted.bias, lambda x: add_bias(x, params), x)
        # Row by row: XLA:TPU gathers all rows' counts into VMEM at once, and does not compile where they exceed it.
        return _where_any(
            wanted.penalties, lambda x: penalise(x, jax.lax.map(lambda row: counts[row], rows), params), x
        )

    return _where_any(_any(wanted), change, logits)


def _where_any(flags: jax.Array, change, logits: jax.Array) -> jax.Array:
    return jax.lax.cond(flags.any(), change, lambda x: x, logits)


def argmax(x: jax.Array) -> jax.Array:
    """int32 [N]: the lowest index of each row's maximum (two vectorised passes; XLA:CPU's own argmax is scalar)."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    is_peak = x == x.max(axis=1, keepdims=True)
    return jnp.where(is_peak, index, x.shape[1] - 1).min(axis=1)


def mask_allowed(logits: jax.Array, params: RowParams) -> jax.Array:
    """-inf where a row's `allowed` bits are 0 (rows without the field keep everything)."""
    token = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = (params.allowed[:, token // 32] >> (token % 32)[None, :]) & 1
    return jnp.where((bits == 1) | ~params.has_allowed[:, None], logits, NEG_INF)


def mask_bad_words(logits: jax.Array, bad_words: jax.Array, recent: jax.Array) -> jax.Array:
    """-inf for the last token of every sequence whose earlier tokens are the newest output tokens, unless all would be."""
    prefix = bad_words[:, :, :-1]  # [N, MAX_BAD_WORDS, LEN - 1]; the token at LEN - 1 would complete the word
    tail = recent[:, None, 1:]
    complete = ((prefix == NO_TOKEN) | (prefix == tail)).all(axis=-1)
    return _forbid(logits, jnp.where(complete, bad_words[:, :, -1], NO_TOKEN))


def mask_stop_ids(logits: jax.Array, stop_ids: jax.Array, too_early: jax.Array) -> jax.Array:
    """-inf for the stop ids of rows that must not stop yet, unless these are all that is left (behaviour 29)."""
    return _forbid(logits, jnp.where(too_early[:, None], stop_ids, NO_TOKEN))


def _forbid(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """-inf at each row's `token_ids` int32 [N, .]; a row in which nothing would be left stays as it is."""
    forbidden = logits.at[jnp.arange(logits.shape[0])[:, None], token_ids].set(NEG_INF, mode="drop")
    is_left = (forbidden > NEG_INF).any(axis=1, keepdims=True)
    return jnp.where(is_left, forbidden, logits)


def add_bias(logits: jax.Array, params: RowParams) -> jax.Array:
    return logits.at[jnp.arange(logits.shape[0])[:, None], params.bias_ids].add(params.bias, mode="drop")


def penalise(logits: jax.Array, counts: jax.Array, params: RowParams) -> jax.Array:
    """Repetition (prompt and output), frequency and presence (output) penalties; `counts` uint16 [N, V]."""
    output = (counts & MAX_COUNT).astype(jnp.float32)
    factor = jnp.where(counts > 0, params.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - params.frequency[:, None] * output - jnp.where(output > 0, params.presence[:, None], 0.0)


def perturb(logits: jax.Array, params: RowParams, position: jax.Array) -> jax.Array:
    """Scores whose argmax is a draw from the truncated, tempered distribution; greedy rows pass unchanged."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[1],), jnp.float32))(
        jax.vmap(draw_key)(params.seed, params.child, position)
    )
    greedy = (params.temperature == 0)[:, None]
    return jnp.where(greedy, logits, truncate(logits, params) + noise)


def truncate(logits: jax.Array, params: RowParams) -> jax.Array:
    """Tempered logits with their peak at 0, and -inf where top-k, top-p or min-p cut. Greedy rows hold anything."""
    # Off with the peak before the division: a temperature of 1e-6 would leave no bits for the noise, 1e-38 infinities.
    peak = jnp.clip(logits.max(axis=1, keepdims=True), -_MAX, _MAX)  # finite: inf - inf is NaN
    logits = jnp.minimum(logits, _MAX) - peak
    logits = logits / jnp.where(params.temperature == 0, 1.0, params.temperature)[:, None]
    return jnp.where(logits >= threshold(logits, params)[:, None], logits, NEG_INF)


def draw_key(seed: jax.Array, child: jax.Array, position: jax.Array) -> jax.Array:
    """`fold_in(fold_in(key(seed), child), position)` for a 64-bit seed given as uint32 [2]."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, child), position)


def threshold(logits: jax.Array, params: RowParams) -> jax.Array:
    """float32 [N]: the smallest logit that top-k, then top-p (on what top-k left), then min-p keep; rows peak at 0."""
    none = jnp.full(logits.shape[0], NEG_INF, jnp.float32)
    cut = params.temperature > 0
    by_k = jax.lax.cond((cut & (params.top_k > 0)).any(), lambda: _top_k_threshold(logits, params.top_k), lambda: none)
    by_p = jax.lax.cond(
        (cut & (params.top_p < 1)).any(), lambda: _top_p_threshold(logits, by_k, params.top_p), lambda: none
    )
    by_min = jnp.where(params.min_p > 0, jnp.log(params.min_p), NEG_INF)
    return jnp.maximum(jnp.maximum(by_k, by_p), by_min)


def _top_k_threshold(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1])
    found = _largest(logits, lambda kept: kept.sum(axis=1) >= k)
    return jnp.where(top_k > 0, found, NEG_INF)


def _top_p_threshold(logits: jax.Array, by_k: jax.Array, top_p: jax.Array) -> jax.Array:
    prob = jnp.where(logits >= by_k[:, None], jnp.exp(logits), 0.0)
    enough = top_p * prob.sum(axis=1)
    found = _largest(logits, lambda kept: jnp.where(kept, prob, 0.0).sum(axis=1) >= enough)
    return jnp.where(top_p < 1, found, NEG_INF)


def _largest(x: jax.Array, is_enough) -> jax.Array:
    """float32 [N]: the largest threshold t with `is_enough(x >= t)` (bool [N]), by bisection over bit patterns."""
    keys = _order_key(x)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough at low, not enough above high
        middle = low + (high - low + jnp.uint32(1)) // jnp.uint32(2)
        ok = is_enough(keys >= middle[:, None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - jnp.uint32(1))

    start = _order_key(jnp.full(x.shape[0], NEG_INF, jnp.float32)), _order_key(x.max(axis=1))
    return _from_order_key(jax.lax.fori_loop(0, 32, halve, start)[0])


def _order_key(x: jax.Array) -> jax.Array:
    """uint32 in the order of the float32 `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_order_key(key: jax.Array) -> jax.Array:
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def logprobs_of(logits: jax.Array, token_ids: jax.Array, wanted: jax.Array) -> Logprobs:
    """Raw log-probabilities of `token_ids` int32 [N] and the likeliest tokens, if any of `wanted` bool [N]."""
    n = logits.shape[0]
    k = min(MAX_LOGPROBS, logits.shape[1])

    def compute() -> Logprobs:
        logp = jax.nn.log_softmax(logits, axis=1)
        top, ids = jax.lax.top_k(logp, k)
        pad = ((0, 0), (0, MAX_LOGPROBS - k))
        chosen = jnp.take_along_axis(logp, token_ids[:, None], axis=1)[:, 0]
        return Logprobs(chosen, jnp.pad(ids, pad), jnp.pad(top, pad, constant_values=NEG_INF))

    return jax.lax.cond(wanted.any(), compute, lambda: no_logprobs(n))


def no_logprobs(n: int) -> Logprobs:
    return Logprobs(
        jnp.zeros(n, jnp.float32), jnp.zeros((n, MAX_LOGPROBS), jnp.int32), jnp.zeros((n, MAX_LOGPROBS), jnp.float32)
    )


def push_recent(recent: jax.Array, token_ids: jax.Array) -> jax.Array:
    """`recent` int32 [N, MAX_BAD_WORD_LEN] with each row's newest token appended."""
    assert recent.shape[1] == MAX_BAD_WORD_LEN
    return jnp.concatenate([recent[:, 1:], token_ids[:, None]], axis=1)
