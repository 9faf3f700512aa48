"""Attention of query tiles over a paged K/V pool for Hopper (Pallas, Mosaic GPU), which also stores their new K/V there: decode
and prefill in one kernel.

The queries of a tile that share a KV head, Q * G of them, are rows of one matrix, cut into blocks of 64 per warpgroup. A
block walks its row's keys, `CHUNK` at a time: a producer warpgroup brings K and V by TMA into a ring in shared memory, the
others (`gpu_chunk`) do wgmma(Q, K^T), the online softmax in float32 (arXiv:1805.02867) and wgmma(weights, V).

Blocks run in any order, so none may need what another one stores. What a row had before the call is read from the pool, what
the call brings from the call's own K/V, rounded as the pool stores them: a token sees the same values however its prompt is
cut into calls. Of a partly filled page TMA also brings the tail, which another block may be writing; it is masked as keys and
zeroed as values like anything else beyond the row's end.

Decode has few queries, so the keys of a row are also cut into splits, one block each (flash-decoding); every split
returns its normalised output and the log2 of its softmax's denominator, which `gpu` combines. How a row is cut depends on its
own length only, so that its result does not depend on what runs beside it, to the last bit.

A decode step fills G of the 64 rows that wgmma has, and that is free: a chunk of 64 keys with D = 128 is 32 KiB, which takes
0.9 us at an SM's share of an H200 (36 of 4800 GB/s); its 64 x 64 exponentials take 256 cycles, 0.15 us, its products 0.15 us.

Axis letters: T tokens, N tiles, Q queries of a tile, M pages per tile's row, P pages, S tokens per page, L layers, K KV heads,
G = H // K, D head dim, B queries of a tile that share a KV head, padded, X splits.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.gpu_chunk import attend_chunks
from kernels_pallas.paged_attention.gpu_plan import ALIGN, CHUNK, ROWS, Job, Plan, find_job


def heads_together(head_dim: int, itemsize: int) -> int:
    """KV heads whose new K and V a block stores: TMA takes them from shared memory at multiples of 128 bytes."""
    return 128 // math.gcd(128, 2 * head_dim * itemsize)


def attend(
    q: jax.Array,  # [N, K, B, D]; B a multiple of 8, and of `block_rows` if larger than ROWS
    kv: jax.Array,  # [N * Q + padding, 2, K, D], in the pool's dtype: new K/V, and CHUNK tokens more
    pool: Any,  # reference to [L * P, 2, K, S, D], which is updated
    page_table: jax.Array,  # int32 [N, M]
    start: jax.Array,  # int32 [N]
    num_tokens: jax.Array,  # int32 [N]
    row_start: jax.Array,  # int32 [N]
    scalars: jax.Array,  # int32 [2]: first page of the layer, window
    plan: Plan,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Each split's output `[N, K, X, B, D]` and log2 of its softmax's denominator, float32 `[N, K, X, B]`.

    Splits without keys, and blocks of padding, are not written.
    """
    num_tiles, num_kv_heads, rows, head_dim = q.shape
    blocks = -(-rows // plan.block_rows)
    assert rows % 8 == 0 and (rows <= ROWS or rows % plan.block_rows == 0)
    smem = functools.partial(_swizzled, head_dim)
    narrow = pool.dtype != q.dtype
    copies = max(CHUNK // pool.shape[3], 1)  # TMA copies a chunk, of K as of V
    heads = heads_together(head_dim, pool.dtype.itemsize)
    scratch = dict(
        queries=smem((plan.warpgroups, ROWS, head_dim), q.dtype),
        keys=smem((plan.stages, CHUNK, head_dim), pool.dtype),
        values=smem((plan.stages, CHUNK, head_dim), pool.dtype),
        wide=smem((plan.warpgroups, CHUNK, head_dim), q.dtype) if narrow else None,
        weights=smem((plan.warpgroups, ROWS, CHUNK), q.dtype),
        log_sums=plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
        new=plgpu.SMEM((plan.write_tokens, 2, heads, head_dim), pool.dtype),
        queries_here=plgpu.Barrier(num_barriers=plan.warpgroups),
        keys_here=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        values_here=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        used=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
        cleared=plgpu.Barrier(num_arrivals=plan.warpgroups),
        new_here=plgpu.Barrier(),
    )

    def body(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_attend_block, *refs, plan=plan), collective_axes="warpgroup", **scratch)

    mesh = plgpu.Mesh(
        # The last axis runs fastest: blocks and splits of one row and head are neighbours, they share its pages in L2.
        grid=(num_tiles, num_kv_heads, blocks * plan.splits),
        grid_names=("tile", "head", "block"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
    )
    # A ref is how a Mosaic GPU kernel updates an operand: it becomes an input that aliases an output. Not `plgpu.kernel`,
    # which does not take refs in jax 0.10.
    run: Any = pl.kernel(
        body,
        (
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, plan.splits, rows, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, plan.splits, rows), jnp.float32),
        ),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        name="paged_attention",
    )
    return run(q, kv, pool, page_table, start, num_tokens, row_start, scalars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A block's shared memory and barriers; W computing warpgroups."""

    queries: Any  # [W, ROWS, D], at the end the output
    keys: Any  # [stages, CHUNK, D]
    values: Any  # [stages, CHUNK, D]
    wide: Any  # [W, CHUNK, D]: K, then V of an 8 bit pool in the queries' dtype; None for other pools
    weights: Any  # [W, ROWS, CHUNK]
    log_sums: Any  # float32 [W, ROWS]
    new: Any  # [write_tokens, 2, heads together, D]: K/V on their way into the pool
    queries_here: Any  # barriers [W]
    keys_here: Any  # barriers [stages]
    values_here: Any  # barriers [stages]
    used: Any  # barriers [stages]: every warpgroup has read the stage, it can be filled again
    cleared: Any  # barrier: what is not of the row in the last chunk's values is zero
    new_here: Any  # barrier


def _attend_block(
    q, kv, pool, page_table, start, num_tokens, row_start, scalars, out, log_sum, *, plan: Plan, **scratch: Any
) -> None:
    shared = Shared(**scratch)
    warpgroup = jax.lax.axis_index("warpgroup")
    job = find_job(start, num_tokens, row_start, scalars, plan)
    rows = min(ROWS, q.shape[2])

    @pl.when((job.num_chunks > 0) & (warpgroup == plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:  # 64 Ki registers are 168 a thread for three warpgroups; TMA needs few
            plgpu.set_max_registers(40, action="decrease")
        _produce(job, shared, kv, pool, page_table, plan)
        _store_new(job, shared, kv, pool, page_table)

    @pl.when((job.num_chunks > 0) & (warpgroup < plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")
        first_row = job.first_row + warpgroup * ROWS
        queries, here = shared.queries.at[warpgroup, pl.ds(0, rows)], shared.queries_here.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[job.tile, job.head, pl.ds(first_row, rows)], queries, here)
        plgpu.barrier_wait(here)
        attend_chunks(job, shared, plan, warpgroup)
        place = (job.tile, job.head, job.split, pl.ds(first_row, rows))
        plgpu.copy_smem_to_gmem(queries, out.at[place])
        plgpu.copy_smem_to_gmem(shared.log_sums.at[warpgroup, pl.ds(0, rows)], log_sum.at[place])
        plgpu.wait_smem_to_gmem(0)


def _produce(job: Job, shared: Shared, kv, pool, page_table, plan: Plan) -> None:
    """Fills the ring: a chunk of the pool is several pages, or a part of one. Where it is longer than what the block sees there,
    the first or last page is read once more: those before may have been released, and the null page may hold NaN."""
    page_size, keys = pool.shape[3], job.keys
    length = min(page_size, CHUNK)  # tokens of a copy
    first_page, last_page = keys.first // page_size, (keys.row_start - 1) // page_size

    def fetch(index: Any, _: None) -> None:
        stage, chunk = index % plan.stages, job.first_chunk + index
        first_key, _, _ = keys.chunk(chunk)

        @pl.when(index >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(shared.used.at[stage])

        def bring(part: int, k: Any, v: Any) -> None:
            here = (stage, pl.ds(part * length, length))
            plgpu.copy_gmem_to_smem(k, shared.keys.at[here], shared.keys_here.at[stage])
            plgpu.copy_gmem_to_smem(v, shared.values.at[here], shared.values_here.at[stage])

        @pl.when(chunk < keys.num_old)
        def _() -> None:
            for part in range(CHUNK // length):
                key = first_key + part * length
                page = job.layer + page_table[job.tile, jnp.clip(key // page_size, first_page, last_page)]
                offset = pl.ds(key % page_size // CHUNK * CHUNK if page_size > CHUNK else 0, length)
                bring(part, *(pool.at[page, which, job.head, offset] for which in (0, 1)))

        @pl.when(chunk >= keys.num_old)
        def _() -> None:
            first = job.token_at(first_key) // ALIGN * ALIGN  # it is one, but the compiler must see that
            for part in range(CHUNK // length):
                tokens = pl.ds(first + part * length, length)
                bring(part, *(kv.at[tokens, which, job.head] for which in (0, 1)))

    jax.lax.fori_loop(0, job.num_chunks, fetch, None)


def _store_new(job: Job, shared: Shared, kv, pool, page_table) -> None:
    """Stores the job's tokens in the pool: a TMA copy brings several to shared memory, another puts each where it belongs."""
    together, _, num_heads, _ = shared.new.shape
    page_size, heads = pool.shape[3], pl.ds(job.head, num_heads)

    def store(index: Any, _: None) -> None:
        first = job.write_from + index * together
        plgpu.copy_gmem_to_smem(
            kv.at[pl.ds(job.token_at(job.start) + first, together), :, heads], shared.new, shared.new_here
        )
        plgpu.barrier_wait(shared.new_here)
        for i in range(together):

            @pl.when(first + i < job.write_end)
            def _(i: int = i) -> None:
                position = job.start + first + i
                page = job.layer + page_table[job.tile, position // page_size]
                plgpu.copy_smem_to_gmem(shared.new.at[i], pool.at[page, :, heads, position % page_size])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(job.writes & (job.head % num_heads == 0))
    def _() -> None:
        times = (job.write_end - job.write_from + together - 1) // together
        jax.lax.fori_loop(0, times, store, None)


def _swizzled(head_dim: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout wgmma wants; its two operands must have the same swizzle, so all follow D."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = max(width for width in (32, 64, 128) if head_dim * itemsize % width == 0)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    )
