"""Paged attention in plain jnp: the oracle for the kernels, and what CPUs run.

Axis letters: N query tiles, Q queries of a tile, M pages per tile's row, P pages, S tokens per page, L layers,
H query heads, K KV heads, G = H // K, D head dim.

Pool layout: `[L * P, 2, K, S, D]`, K at index 0 and V at 1 of the second axis, heads before tokens, so that a
gathered page is a ready operand for the dot. A layer's pages start at `layer * P`; its page 0 is the null page:
writes that must not land go there and nobody reads it.

A bf16 pool is an array of its bits, `BF16_BITS`: XLA:CPU scatters and gathers bf16 as float32, and would convert the
whole pool to and fro at every write and read (500 ms a token instead of 40).
"""

import jax
import jax.numpy as jnp

BF16_BITS = jnp.dtype(jnp.uint16)

NEG_INF = -1e30  # finite: an all-masked tile must not produce NaN

TILE_TOKENS = (
    64  # keys read per iteration: of 64/128/512, 64 was fastest on two AVX2 cores (37/77/179 ms a SmolLM2 step)
)


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What the array of a pool of `dtype` holds."""
    return BF16_BITS if dtype == jnp.bfloat16 else dtype


def write_kv(
    pool: jax.Array,  # [L * P, 2, K, S, D], of `storage_dtype`
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    page: jax.Array,  # int32 [T]: absolute page (layer offset included) of each token
    offset: jax.Array,  # int32 [T]: place of the token within its page
) -> jax.Array:
    """The pool with each token's K and V stored at `(page, offset)`; several tokens may go to a null page."""
    kv = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    if pool.dtype == BF16_BITS:
        kv = jax.lax.bitcast_convert_type(kv.astype(jnp.bfloat16), BF16_BITS)
    return pool.at[page, :, :, offset].set(kv.astype(pool.dtype), mode="promise_in_bounds")


def paged_attention(
    q: jax.Array,  # [N, Q, H, D]
    pool: jax.Array,  # [L * P, 2, K, S, D], with the queries' own K/V already written
    page_table: jax.Array,  # int32 [N, M]: pages within the layer
    first_page: jax.Array | int,  # int32 []: layer * P
    q_start: jax.Array,  # int32 [N]: position of the tile's first query
    kv_len: jax.Array,  # int32 [N]: keys that exist for the tile; 0 for a padding tile
    *,
    scale: float,
) -> jax.Array:
    """Causal attention: query i of tile n sees keys at positions `<= q_start[n] + i` and `< kv_len[n]`.

    Walks each row's pages in tiles with an online softmax in float32 (arXiv:1805.02867, arXiv:2309.06180) and stops at
    the longest live row. What lies beyond `kv_len` in the pool, NaN included, does not matter.

    Returns:
        `[N, Q, H, D]` in q's dtype; zeros for padding tiles.
    """
    num_tiles, num_queries, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    groups = num_heads // num_kv_heads
    tile_pages = max(1, min(TILE_TOKENS // page_size, page_table.shape[1]))
    tile = tile_pages * page_size
    page_table = _pad_to_multiple(page_table, tile_pages)
    # [N, K, G * Q, D]: the queries that share a KV head are the rows of one matmul
    qk = (q.astype(jnp.float32) * scale).reshape(num_tiles, num_queries, num_kv_heads, groups, head_dim)
    qk = qk.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, groups * num_queries, head_dim)
    last_key = jnp.minimum(q_start[:, None] + jnp.arange(num_queries)[None, :], kv_len[:, None] - 1)  # [N, Q]
    last_key = jnp.tile(last_key, (1, groups))[:, None, :, None]  # [N, 1, G * Q, 1]

    def visit(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        peak, total, acc = carry
        pages = jax.lax.dynamic_slice_in_dim(page_table, index * tile_pages, tile_pages, axis=1) + first_page
        position = index * tile + jnp.arange(tile)
        exists = (position[None, :] < kv_len[:, None])[:, None, :, None]  # [N, 1, tile, 1]
        keys = _gather(pool, pages, 0)
        values = jnp.where(exists, _gather(pool, pages, 1), 0.0)  # 0 * NaN is NaN
        scores = _batched_dot(qk, keys, 3)  # [N, K, G * Q, tile]
        scores = jnp.where(position[None, None, None, :] <= last_key, scores, NEG_INF)
        new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weight = jnp.exp(scores - new_peak)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weight.sum(axis=-1, keepdims=True)
        acc = acc * keep + _batched_dot(weight, values, 2)
        return new_peak, total, acc

    row = (num_tiles, num_kv_heads, groups * num_queries)
    start = (
        jnp.full((*row, 1), NEG_INF / 2, jnp.float32),  # above NEG_INF: masked keys weigh exp(-5e29) = 0
        jnp.zeros((*row, 1), jnp.float32),
        jnp.zeros((*row, head_dim), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, (kv_len.max() + tile - 1) // tile, visit, start)
    out = acc / jnp.where(total == 0, 1.0, total)
    out = out.reshape(num_tiles, num_kv_heads, groups, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tiles, num_queries, num_heads, head_dim).astype(q.dtype)


def _pad_to_multiple(page_table: jax.Array, tile_pages: int) -> jax.Array:
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))


def _gather(pool: jax.Array, pages: jax.Array, which: int) -> jax.Array:
    """K (`which` = 0) or V (1) of `pages [N, TP]` -> float32 `[N, K, TP * S, D]`, laid out by the gather itself."""
    _, _, num_kv_heads, page_size, head_dim = pool.shape
    index = jnp.stack([pages, jnp.full_like(pages, which)], axis=-1)
    gathered = jax.lax.gather(
        pool,
        index,
        jax.lax.GatherDimensionNumbers(offset_dims=(1, 3, 4), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)),
        slice_sizes=(1, 1, num_kv_heads, page_size, head_dim),
        mode="promise_in_bounds",
    )  # [N, K, TP, S, D]
    if pool.dtype == BF16_BITS:
        gathered = jax.lax.bitcast_convert_type(gathered, jnp.bfloat16)
    return gathered.astype(jnp.float32).reshape(pages.shape[0], num_kv_heads, -1, head_dim)


def _batched_dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """Contract the last axis of `a [N, K, ., .]` with axis `contract_b` of `b [N, K, ., .]`; float32 all through."""
    return jax.lax.dot_general(
        a,
        b,
        (((3,), (contract_b,)), ((0, 1), (0, 1))),
        precision=jax.lax.Precision.HIGHEST,
    )
