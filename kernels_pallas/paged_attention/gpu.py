"""Paged attention for NVIDIA Hopper: the contract of `reference.paged_attention` on the kernel of `gpu_attend`.

Axis letters: T tokens, N query tiles, Q queries of a tile, M pages per tile's row, P pages, S tokens per page, L layers,
H query heads, K KV heads, G = H // K, D head dim, B = Q * G padded, X splits of a row's keys.

Pool layout: `[L * P, 2, K, S, D]`, the reference's, in the pool's own dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import tuned
from kernels_pallas.paged_attention.gpu_attend import attend, heads_together
from kernels_pallas.paged_attention.gpu_plan import ALIGN, CHUNK, LOG2E, NEG_INF, ROWS, Plan
from kernels_pallas.paged_attention.tiles import Tiles, to_stored


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What the array of a pool of `dtype` holds: the same."""
    return dtype


def supported(
    *,
    compute_capability: str,  # of the device, "9.0" for H100 and H200
    head_dim: int,
    page_size: int,
    num_heads: int,  # of a device, as is the next
    num_kv_heads: int,
    dtype: Any,  # of q, k, v
    kv_dtype: Any,  # of the pool
) -> str | None:
    """None, or why these kernels cannot serve the model, and the way out; the XLA path serves everything.

    Ask before compiling: for other chips the compiler refuses wgmma (B200) or ends the process (A100).
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    narrow = kv_dtype in (jnp.int8, jnp.float8_e4m3fn)
    step = 32 if narrow else 16  # columns that 32 bytes hold, the shortest swizzle
    if not compute_capability.startswith("9."):
        return f"compute_capability={compute_capability}: wgmma, which the kernel uses, is Hopper's (9.0) alone"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype={dtype}: wgmma takes bfloat16 or float16; run the model in one of them"
    if not narrow and kv_dtype != dtype:
        return f"kv_dtype={kv_dtype} must be {dtype}, the queries', or int8 or float8_e4m3fn"
    if page_size % 8 or (CHUNK % page_size and page_size % CHUNK):
        return f"page_size={page_size} must be 8, 16, 32 or a multiple of 64"
    if head_dim % step or not 32 <= head_dim <= 256:
        return f"head_dim={head_dim} must be a multiple of {step} from 32 to 256"
    if num_heads % num_kv_heads or num_kv_heads > 256:
        return f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, which may be 256"
    if 2 * num_kv_heads * head_dim * kv_dtype.itemsize % 128:
        return f"num_kv_heads={num_kv_heads} x head_dim={head_dim}: K and V of a token must be a multiple of 128 bytes"
    return None


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    pool: jax.Array,  # [L * P, 2, K, S, D]
    parts: Sequence[Tiles],  # T = the sum of their sizes, one part's tokens after the other's
    first_page: jax.Array | int,  # int32 []: layer * P
    *,
    scale: float,
    window: jax.Array | int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: tuple[float, float] = (1.0, 1.0),
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.paged_attention`, which says what the arguments mean.

    Args:
        interpret: `plgpu.InterpretGPUParams` to run on the CPU (jax >= 0.11).

    Raises:
        ValueError: shapes or dtypes that `supported` refuses.
    """
    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    shapes = dict(head_dim=head_dim, page_size=pool.shape[3], num_heads=num_heads, num_kv_heads=num_kv_heads)
    reason = supported(compute_capability="9.0", dtype=q.dtype, kv_dtype=pool.dtype, **shapes)
    if reason is not None:
        raise ValueError(f"{reason}; or use the XLA path")

    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (first_page, 0 if window is None else window)])
    stored = [to_stored(x, s, pool.dtype) for x, s in zip((k, v), kv_scale, strict=True)]
    pool_ref = jax.new_ref(pool)
    outs, begin = [], 0
    for part in parts:
        tokens = slice(begin, begin + part.size)
        options = dict(scale=scale * kv_scale[0], soft_cap=soft_cap, windowed=window is not None)
        plan = _plan(part, num_heads // num_kv_heads, pool, **options)
        # Behind a barrier: XLA:GPU would wrap slice and kernel in a fusion that does not say which result is the pool.
        queries = jax.lax.optimization_barrier(_rows(q[tokens], part.width, num_kv_heads))
        kv = jnp.stack([x[tokens] for x in stored], axis=1)
        kv = jnp.pad(kv, ((0, -part.size % ALIGN + CHUNK), (0, 0), (0, 0), (0, 0)))  # the kernel reads whole chunks
        arrays = (part.page_table, part.start, part.num_tokens, part.row_start, scalars)
        split_outs, log_sums = attend(queries, kv, pool_ref, *arrays, plan, interpret)
        outs.append(_combine(split_outs, log_sums, part, scalars[1], sinks, plan, kv_scale[1]))
        begin += part.size
    return jnp.concatenate(outs), jax.freeze(pool_ref)


def _plan(part: Tiles, groups: int, pool: jax.Array, **options: Any) -> Plan:
    """The cut of a part's work. It must not know the number of rows: a row's result may not depend on its neighbours."""
    _, _, num_kv_heads, page_size, head_dim = pool.shape
    few = part.width * groups <= ROWS  # decode: the keys are split to fill the device; prefill has queries enough
    warpgroups = 1 if few else 2
    longest = part.page_table.shape[1] * page_size
    wide = 0 if pool.dtype.itemsize == 2 else CHUNK * head_dim * 2
    token_bytes = 2 * heads_together(head_dim, pool.dtype.itemsize) * head_dim * pool.dtype.itemsize
    write_tokens = min(part.width, tuned.GPU_WRITE_BYTES // token_bytes)
    other_bytes = warpgroups * (ROWS * head_dim * 2 + wide + ROWS * CHUNK * 2) + write_tokens * token_bytes
    return Plan(
        width=part.width,
        groups=groups,
        warpgroups=warpgroups,
        splits=min(tuned.gpu_splits(num_kv_heads), -(-longest // tuned.GPU_MIN_SPLIT)) if few else 1,
        min_chunks=tuned.GPU_MIN_SPLIT // CHUNK,
        write_tokens=write_tokens,
        stages=tuned.gpu_stages(2 * CHUNK * head_dim * pool.dtype.itemsize, other_bytes),
        **options,
    )


def _rows(q: jax.Array, width: int, num_kv_heads: int) -> jax.Array:
    """`[N * Q, H, D]` -> `[N, K, B, D]`, the queries of a KV head as the rows of one matrix, padded to whole tiles."""
    _, num_heads, head_dim = q.shape
    rows = width * num_heads // num_kv_heads
    q = q.reshape(-1, width, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(-1, num_kv_heads, rows, head_dim)
    padding = -rows % (8 if rows <= ROWS else 2 * ROWS)
    return jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _combine(
    outs: jax.Array,  # [N, K, X, B, D]
    log_sums: jax.Array,  # float32 [N, K, X, B], base 2
    part: Tiles,
    window: jax.Array,  # int32 []
    sinks: jax.Array | None,  # float32 [H]
    plan: Plan,
    value_scale: float,
) -> jax.Array:  # [N * Q, H, D]
    """The mean of the splits' outputs, weighed by their denominators; a sink is one more split, whose output is zero.

    In plain jnp: it reads 1 / GPU_MIN_SPLIT of what the kernel read, and XLA fuses it with the transpose back.
    """
    (num_tiles, num_kv_heads, splits, _, head_dim), dtype = outs.shape, outs.dtype
    width, groups = part.width, plan.groups
    shape = (num_tiles, num_kv_heads, splits, width, groups)
    outs = outs[:, :, :, : width * groups].reshape(*shape, head_dim).astype(jnp.float32)
    log_sums = log_sums[:, :, :, : width * groups].reshape(shape)
    written = _written(part, window, plan)[:, None, :, :, None]  # [N, 1, X, Q, 1]
    log_sums = jnp.where(written, log_sums, NEG_INF)
    peak = log_sums.max(axis=2, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, 1, 1, groups) * LOG2E
        peak = jnp.maximum(peak, sink)
    weights = jnp.where(written, jnp.exp2(log_sums - peak), 0.0)
    total = weights.sum(axis=2, keepdims=True)
    if sinks is not None:
        total += jnp.exp2(sink - peak)
    weights *= value_scale / jnp.where(total == 0, 1.0, total)
    out = (jnp.where(written[..., None], outs, 0.0) * weights[..., None]).sum(axis=2)  # [N, K, Q, G, D]
    return out.transpose(0, 2, 1, 3, 4).reshape(num_tiles * width, -1, head_dim).astype(dtype)


def _written(part: Tiles, window: jax.Array, plan: Plan) -> jax.Array:
    """bool [N, X, Q]: which splits of which queries the kernel wrote, and not for padding."""
    token = jnp.arange(part.width, dtype=jnp.int32)[None, :]
    block = token * plan.groups // plan.block_rows  # of its first head; a next block of a real token is written, too
    start, num_tokens, row_start = part.start[:, None], part.num_tokens[:, None], part.row_start[:, None]
    tile = jnp.arange(part.start.shape[0], dtype=jnp.int32)[:, None]
    num_chunks = plan.keys(start, num_tokens, row_start, tile, block, window).num_chunks  # [N, Q]
    split = jnp.arange(plan.splits, dtype=jnp.int32)[None, :, None]
    written = split * plan.chunks_per_split(num_chunks)[:, None, :] < num_chunks[:, None, :]
    return written & (token < num_tokens)[:, None, :]
