"""Paged attention for TPUs: one kernel per part writes its tiles' K/V into the pool, in place, and attends.

Axis letters as in `reference`, and GQ: the queries of a tile times the G query heads of a KV head, queries outermost;
U: write units (`tpu_layout.Problem.unit` tokens each).

`tpu_layout` holds the pool's layout, tile sizes and what is refused; `tpu_kernel` the body of the kernel.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import tpu_kernel
from kernels_pallas.paged_attention.tiles import Tiles, to_stored
from kernels_pallas.paged_attention.tpu_layout import LANES as LANES
from kernels_pallas.paged_attention.tpu_layout import Problem as Problem
from kernels_pallas.paged_attention.tpu_layout import cost as cost
from kernels_pallas.paged_attention.tpu_layout import pack as pack
from kernels_pallas.paged_attention.tpu_layout import storage_dtype as storage_dtype
from kernels_pallas.paged_attention.tpu_layout import storage_shape as storage_shape
from kernels_pallas.paged_attention.tpu_layout import unpack as unpack
from kernels_pallas.paged_attention.tpu_layout import unsupported as unsupported


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    pool: jax.Array,  # of `storage_shape(L * P, K, S, D)` and `storage_dtype`
    parts: Sequence[Tiles],  # T = the sum of their sizes, one part's tokens after the other's
    first_page: jax.Array | int,  # int32 []: layer * P
    *,
    scale: float,
    window: jax.Array | int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: tuple[float, float] = (1.0, 1.0),
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.paged_attention`. Tiles of one row may stand in one part only, in order of position.

    Args:
        interpret: how Pallas is to interpret the kernel, where there is no TPU.

    Raises:
        ValueError: `unsupported` says why, or the pool has another shape.
    """
    _check_pool(pool, k)
    stored = [to_stored(x, s, pool.dtype) for x, s in zip((k, v), kv_scale, strict=True)]
    kv = pack(jnp.stack(stored, axis=1))  # [T, planes, K, lanes]
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (first_page, 0 if window is None else window)])
    outs, begin = [], 0
    for part in parts:
        problem = _problem(q, pool, part)
        if why := unsupported(problem):
            raise ValueError(f"paged attention on TPU: {why}")
        static = tpu_kernel.Static(
            page_size=problem.page_size,
            tile_pages=problem.tile_pages,
            groups=problem.groups,
            heads_together=problem.heads_together,
            unit=problem.unit,
            scale=scale,
            kv_scale=kv_scale,
            soft_cap=soft_cap,
            has_window=window is not None,
            dot_dtype=problem.dot_dtype,
        )
        rows = slice(begin, begin + part.size)
        out, pool = _attend_part(q[rows], kv[rows], pool, part, scalars, sinks, problem, static, interpret)
        outs.append(out)
        begin += part.size
    return jnp.concatenate(outs), pool


def _check_pool(pool: jax.Array, k: jax.Array) -> None:
    _, num_kv_heads, head_dim = k.shape
    shape = storage_shape(pool.shape[0], num_kv_heads, pool.shape[3], head_dim)
    if pool.shape != shape:
        raise ValueError(f"pool.shape={pool.shape} is not {shape}; make the pool with tpu.storage_shape")


def _problem(q: jax.Array, pool: jax.Array, part: Tiles) -> Problem:
    return Problem(
        num_tiles=part.start.shape[0],
        width=part.width,
        table_pages=part.page_table.shape[1],
        num_heads=q.shape[1],
        num_kv_heads=pool.shape[2],
        head_dim=q.shape[2],
        page_size=pool.shape[3],
        dtype=jnp.dtype(q.dtype),
        pool_dtype=jnp.dtype(pool.dtype),
    )


def _attend_part(
    q: jax.Array,  # [N * Q, H, D]
    kv: jax.Array,  # [N * Q, planes, K, lanes], of the pool's dtype
    pool: jax.Array,
    part: Tiles,
    scalars: jax.Array,  # int32 [2]: first page, window
    sinks: jax.Array | None,  # float32 [H]
    problem: Problem,
    static: tpu_kernel.Static,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:  # [N * Q, H, D], pool
    start, num_tokens = (jnp.asarray(x) for x in (part.start, part.num_tokens))
    table = jnp.asarray(part.page_table)[:, None, :]  # a row is the last two axes: a block of one row is then allowed
    rows = _rows(q, problem)
    new = _in_units(kv, start, problem)
    # All tables would not fit into the 1 MiB of SMEM (256 rows of 2048 pages: 2 MiB), so two rows come along with each tile.
    operands = [table, table, rows, new]
    specs = [_row_of_table(problem, 0), _row_of_table(problem, 1), _of_tile(rows), _of_tile(new)]
    if sinks is not None:
        operands.append(_sink_rows(sinks, problem))
        specs.append(pl.BlockSpec(operands[-1].shape, lambda n, *_: (0, 0, 0)))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    prefetched = (start, num_tokens, scalars)
    call = pl.pallas_call(
        functools.partial(tpu_kernel.attend_tile, static),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rows, pool)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(problem.num_tiles,),
            in_specs=[*specs, in_hbm],
            out_specs=[_of_tile(rows), in_hbm],
            scratch_shapes=_scratch(problem),
        ),
        input_output_aliases={len(prefetched) + len(operands): 1},
        cost_estimate=cost(problem),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),  # tiles go in order: state is carried over
            vmem_limit_bytes=max(problem.vmem_bytes, 16 << 20),
            # A check of each copy's bounds makes starting one 38 bundles instead of 14: 800 of the 2400 that 32 pages of
            # 16 tokens take on v5e (K = 8). The interpreter checks them in the tests.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
    )
    out, pool = call(*prefetched, *operands, pool)
    return _tokens(out, problem), pool


def _of_tile(x: jax.Array) -> pl.BlockSpec:
    """Tile n's part of `x [N, ...]`."""
    return pl.BlockSpec((1, *x.shape[1:]), lambda n, *_: (n, *(0,) * (x.ndim - 1)))


def _row_of_table(problem: Problem, ahead: int) -> pl.BlockSpec:
    """The page table of tile `n + ahead`, or of the last one."""
    index = lambda n, *_: (jnp.minimum(n + ahead, problem.num_tiles - 1), 0, 0)  # noqa: E731
    return pl.BlockSpec((1, 1, problem.table_pages), index, memory_space=pltpu.SMEM)


def _scratch(problem: Problem) -> list:
    """As in `tpu_kernel.Refs`, from `kv` on."""
    _, planes, num_kv_heads, page_size, lanes = storage_shape(
        1, problem.num_kv_heads, problem.page_size, problem.head_dim
    )
    of_row = functools.partial(pltpu.VMEM, dtype=jnp.dtype(jnp.float32))
    return [
        pltpu.VMEM((2, planes, num_kv_heads, problem.tile_pages, page_size, lanes), problem.pool_dtype),
        of_row((num_kv_heads, problem.rows, 1)),
        of_row((num_kv_heads, problem.rows, 1)),
        of_row((num_kv_heads, problem.rows, lanes)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA(()),
    ]


def _rows(q: jax.Array, problem: Problem) -> jax.Array:
    """[N * Q, H, D] -> [N, K, GQ, lanes]: the queries that share a KV head are the rows of one matmul."""
    q = q.reshape(-1, problem.width, problem.num_kv_heads, problem.groups, problem.head_dim).swapaxes(1, 2)
    q = q.reshape(-1, problem.num_kv_heads, problem.rows, problem.head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -problem.head_dim % LANES)))


def _tokens(out: jax.Array, problem: Problem) -> jax.Array:
    """[N, K, GQ, lanes] -> [N * Q, H, D]: the inverse of `_rows`, but the values' lanes are the last where K is with V."""
    dim = problem.head_dim
    out = out[..., -dim:] if 2 * dim <= LANES else out[..., :dim]
    out = out.reshape(-1, problem.num_kv_heads, problem.width, problem.groups, dim).swapaxes(1, 2)
    return out.reshape(-1, problem.num_heads, dim)


def _sink_rows(sinks: jax.Array, problem: Problem) -> jax.Array:
    """[H] -> [K, GQ, 1]"""
    sinks = jnp.asarray(sinks, jnp.float32).reshape(problem.num_kv_heads, 1, problem.groups)
    return jnp.tile(sinks, (1, problem.width, 1)).reshape(problem.num_kv_heads, problem.rows, 1)


def _in_units(kv: jax.Array, start: jax.Array, problem: Problem) -> jax.Array:
    """[N * Q, planes, K, lanes] -> [N, planes, K, U, unit, lanes]: each token where it is within its write unit in the pool,
    and anything around them. A single token is `[N, planes, K, 1, 1, lanes]`, for every place in the unit."""
    kv = kv.reshape(problem.num_tiles, problem.width, *kv.shape[1:])
    unit, num_units = problem.unit, problem.num_units
    if problem.width > 1:
        token = jnp.arange(num_units * unit, dtype=jnp.int32)[None, :] - (start % unit)[:, None]
        token = jnp.clip(token, 0, problem.width - 1)[:, :, None, None, None]
        kv = jnp.take_along_axis(kv, token, axis=1, mode="promise_in_bounds")
    kv = kv.transpose(0, 2, 3, 1, 4)
    return kv.reshape(*kv.shape[:3], num_units, -1, kv.shape[4])
