"""Paged attention in plain jnp: the oracle for the kernels, and what CPUs run.

Axis letters: T tokens, N query tiles, Q queries of a tile, M pages per tile's row, P pages, S tokens per page, L layers,
H query heads, K KV heads, G = H // K, R = G * Q the queries that share a KV head, D head dim.

Pool layout: `[L * P, 2, K, S, D]`, K at index 0 and V at 1 of the second axis, heads before tokens, so that a
gathered page is a ready operand for the dot. A layer's pages start at `layer * P`; its page 0 is the null page:
writes that must not land go there and nobody reads it.

bf16 and float8 pools are arrays of their bits (`BITS`): XLA:CPU scatters and gathers bf16 as float32, and would convert
the whole pool to and fro at every write and read (500 ms a token instead of 40).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.tiles import Tiles, to_stored

NEG_INF = -1e30  # finite: an all-masked tile must not produce NaN

# Keys read per iteration. Of 32/64/128/256/512, 128 was fastest on two cores with AVX512-BF16 (bf16: 49/30/25/32/47 ms
# for the attention of a SmolLM2 step with 16 rows of 320 tokens; float32: 50/45/45/59/76 ms).
TILE_TOKENS = 128

NO_KEY = jnp.iinfo(jnp.int32).max
# Query tiles that are worth a loop of their own, where others' keys end before theirs. Each loop is compiled: one attention
# takes 0.4 s with a single one, 0.9 with two (16 tiles), 2 with six (256).
MIN_SPLIT = 8

BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}
VALUES = {bits: dtype for dtype, bits in BITS.items()}


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What the array of a pool of `dtype` holds."""
    return BITS.get(jnp.dtype(dtype), dtype)


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    pool: jax.Array,  # [L * P, 2, K, S, D], of `storage_dtype`
    parts: Sequence[Tiles],  # T = the sum of their sizes, one part's tokens after the other's
    first_page: jax.Array | int,  # int32 []: layer * P
    *,
    scale: float,
    window: jax.Array | int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: tuple[float, float] = (1.0, 1.0),
    max_single: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Writes the tokens' K/V into the pool, then causal attention of each token over its row's keys.

    Args:
        scale: the scores are `q . k * scale`.
        window: a token at position i sees keys at positions in `(i - window, i]`; int32 [], may differ between layers.
        soft_cap: scores become `cap * tanh(score / cap)` (arXiv:2408.00118).
        sinks: float32 [H]; a further score per head that takes part in the softmax and has no value (arXiv:2309.17453).
        kv_scale: of K and of V: what is stored is the value divided by it; only for int8 and float8 pools.
        max_single: most queries of a KV head that are multiplied with the keys one by one; more are one product.

    Returns:
        `[T, H, D]` in q's dtype, anything finite for padding; and the pool. What lies beyond a row's length in its pages, NaN
        included, does not matter; the null page may hold anything afterwards.
    """
    places = [part.places(pool.shape[3]) for part in parts]
    page, offset = (jnp.concatenate(arrays) for arrays in zip(*places, strict=True))
    # All are written before any is read: a write between two reads makes XLA copy the pool.
    pool = write_kv(pool, k, v, page + first_page, offset, kv_scale)
    outs, begin = [], 0
    for part in parts:
        queries = q[begin : begin + part.size].reshape(-1, part.width, *q.shape[1:])
        outs.append(attend(queries, pool, part, first_page, scale, window, soft_cap, sinks, kv_scale, max_single))
        begin += part.size
    return jnp.concatenate([out.reshape(-1, *q.shape[1:]) for out in outs]), pool


def write_kv(
    pool: jax.Array,  # [L * P, 2, K, S, D], of `storage_dtype`
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    page: jax.Array,  # int32 [T]: absolute page (layer offset included) of each token
    offset: jax.Array,  # int32 [T]: place of the token within its page
    kv_scale: tuple[float, float] = (1.0, 1.0),
) -> jax.Array:
    """The pool with each token's K and V stored at `(page, offset)`; several tokens may go to a null page."""
    dtype = VALUES.get(pool.dtype, pool.dtype)
    kv = jnp.stack([to_stored(x, s, dtype) for x, s in zip((k, v), kv_scale, strict=True)], axis=1)  # [T, 2, K, D]
    if dtype != pool.dtype:
        kv = jax.lax.bitcast_convert_type(kv, pool.dtype)
    return pool.at[page, :, :, offset].set(kv, mode="promise_in_bounds")


class Queries(NamedTuple):
    """N tiles of queries, and which keys they see."""

    q: jax.Array  # [N, K, R, D], float32, or bf16 as the pool is
    page_table: jax.Array  # int32 [N, M]
    kv_len: jax.Array  # int32 [N]
    oldest: jax.Array  # int32 [N]: the first key that any query of the tile sees, `NO_KEY` if none sees any
    last_key: jax.Array  # int32 [N, 1, R, 1]: the last that a query sees


Carry = tuple[jax.Array, ...]  # the online softmax: peak and total [N, K, R, 1], weighted sum [N, K, R, D]


def attend(
    q: jax.Array,  # [N, Q, H, D]
    pool: jax.Array,  # [L * P, 2, K, S, D], with the tokens' own K/V already written
    tiles: Tiles,
    first_page: jax.Array | int,
    scale: float,
    window: jax.Array | int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scale: tuple[float, float],
    max_single: int,
) -> jax.Array:  # [N, Q, H, D]
    """Walks the pages in tiles of keys with an online softmax in float32 (arXiv:1805.02867, arXiv:2309.06180), from the
    first key that any query still sees to the last."""
    num_tiles, num_queries, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    groups = num_heads // num_kv_heads
    tile_pages = max(1, min(TILE_TOKENS // page_size, tiles.page_table.shape[1]))
    tile = tile_pages * page_size
    # bf16 products are exact in float32, so bf16 operands lose nothing; on CPUs (where the pool is bits) they halve the time
    # of a chunk's scores, while for single queries the conversion would cost more.
    in_bf16 = q.dtype == VALUES.get(pool.dtype) == jnp.bfloat16 and num_queries > 1
    scale *= kv_scale[0]

    def visit(queries: Queries, index: jax.Array, carry: Carry) -> Carry:
        peak, total, acc = carry
        pages = jax.lax.dynamic_slice_in_dim(queries.page_table, index * tile_pages, tile_pages, axis=1) + first_page
        position = index * tile + jnp.arange(tile)
        # Pages before the window may have been released, and the null page may hold NaN.
        exists = (position[None, :] < queries.kv_len[:, None]) & (position[None, :] >= queries.oldest[:, None])
        keys = _gather(pool, pages, 0, as_float32=not in_bf16)
        values = jnp.where(exists[:, None, :, None], _gather(pool, pages, 1), 0.0)  # 0 * NaN is NaN
        scores = _products(queries.q, keys, max_single) * scale  # [N, K, R, tile]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position = position[None, None, None, :]
        seen = position <= queries.last_key
        if window is not None:
            seen &= position > queries.last_key - window
        scores = jnp.where(seen, scores, NEG_INF)
        new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weight = jnp.exp(scores - new_peak)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weight.sum(axis=-1, keepdims=True)
        acc = acc * keep + _batched_dot(weight, values, 2)
        return new_peak, total, acc

    order = jnp.argsort(-tiles.kv_len)  # the longest first, for `walk`
    kv_len, begin, page_table = tiles.kv_len[order], tiles.start[order], tiles.page_table[order]
    by_head = q[order].reshape(num_tiles, num_queries, num_kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    last_key = jnp.minimum(begin[:, None] + jnp.arange(num_queries)[None, :], kv_len[:, None] - 1)  # [N, Q]
    queries = Queries(
        q=by_head.astype(q.dtype if in_bf16 else jnp.float32).reshape(num_tiles, num_kv_heads, -1, head_dim),
        page_table=_pad_to_multiple(page_table, tile_pages),
        kv_len=kv_len,
        oldest=jnp.where(kv_len > 0, 0 if window is None else jnp.maximum(begin - window + 1, 0), NO_KEY),
        last_key=jnp.tile(last_key, (1, groups))[:, None, :, None],
    )
    each = (num_tiles, num_kv_heads, groups * num_queries)
    peak = jnp.full((*each, 1), NEG_INF / 2, jnp.float32)  # above NEG_INF: masked keys weigh exp(-5e29) = 0
    total = jnp.zeros((*each, 1), jnp.float32)
    if sinks is not None:  # a key that comes first and adds nothing
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, groups), num_queries, axis=1)
        peak, total = jnp.broadcast_to(sink[None, :, :, None], peak.shape), jnp.ones_like(total)
    start = (peak, total, jnp.zeros((*each, head_dim), jnp.float32))
    _, total, acc = walk(visit, tile, queries, start)
    out = acc * kv_scale[1] / jnp.where(total == 0, 1.0, total)
    out = out.reshape(num_tiles, num_kv_heads, groups, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)[jnp.argsort(order)]


def walk(
    visit: Callable[[Queries, jax.Array, Carry], Carry],
    tile: int,
    queries: Queries,
    carry: Carry,
    first: jax.Array | int = 0,
) -> Carry:
    """Visits the tiles of keys from `first` on, as far as any of the queries sees them.

    Queries are sorted, those with the most keys first: where the keys of the second half end, the first half goes on by
    itself. XLA:CPU compiles the loop of the half otherwise for some shapes, so where the neighbours' keys end may show in
    the last bit.
    """
    first = jnp.maximum(first, queries.oldest.min() // tile)
    half = queries.kv_len.shape[0] // 2
    is_split = half >= MIN_SPLIT
    stop = (queries.kv_len[half if is_split else 0 :].max() + tile - 1) // tile
    carry = jax.lax.fori_loop(first, stop, functools.partial(visit, queries), carry)
    if not is_split:
        return carry
    longer, begun = Queries(*(each[:half] for each in queries)), tuple(each[:half] for each in carry)
    ended = tuple(each[half:] for each in carry)
    pairs = zip(walk(visit, tile, longer, begun, jnp.maximum(first, stop)), ended, strict=True)
    return tuple(jnp.concatenate(pair) for pair in pairs)


def _pad_to_multiple(page_table: jax.Array, tile_pages: int) -> jax.Array:
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))


def _gather(pool: jax.Array, pages: jax.Array, which: int, *, as_float32: bool = True) -> jax.Array:
    """K (`which` = 0) or V (1) of `pages [N, TP]` -> `[N, K, TP * S, D]`, float32 or as the pool's values
    are, laid out by the gather itself."""
    _, _, num_kv_heads, page_size, head_dim = pool.shape
    index = jnp.stack([pages, jnp.full_like(pages, which)], axis=-1)
    gathered = jax.lax.gather(
        pool,
        index,
        jax.lax.GatherDimensionNumbers(offset_dims=(1, 3, 4), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)),
        slice_sizes=(1, 1, num_kv_heads, page_size, head_dim),
        mode="promise_in_bounds",
    )  # [N, K, TP, S, D]
    if pool.dtype in VALUES:
        gathered = jax.lax.bitcast_convert_type(gathered, VALUES[pool.dtype])
    return (gathered.astype(jnp.float32) if as_float32 else gathered).reshape(
        pages.shape[0], num_kv_heads, -1, head_dim
    )


def _products(q: jax.Array, keys: jax.Array, max_single: int) -> jax.Array:
    """`q [N, K, R, D]` times `keys [N, K, tile, D]` -> float32 `[N, K, R, tile]`."""
    if q.shape[2] > max_single:
        return _batched_dot(q, keys, 3)
    numbers = (((2,), (3,)), ((0, 1), (0, 1)))
    one = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.stack([one(q[:, :, row], keys) for row in range(q.shape[2])], axis=2)


def _batched_dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """Contract the last axis of `a [N, K, ., .]` with axis `contract_b` of `b [N, K, ., .]`; into float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((3,), (contract_b,)), ((0, 1), (0, 1))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
