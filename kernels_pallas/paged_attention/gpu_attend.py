"""Attention of query tiles over a paged K/V pool for Hopper (Pallas, Mosaic GPU), decode and prefill in one kernel.

The queries of a tile that share a KV head, Q * G of them, are rows of one matrix, cut into blocks of 64 per warpgroup. A
block walks its row's keys, `CHUNK` at a time: a producer warpgroup brings the pages' K and V by TMA into a ring in shared
memory, the others do wgmma(Q, K^T), the online softmax in float32 (arXiv:1805.02867) and wgmma(weights, V).

Decode has few queries, so the keys of a row are also cut into splits, one block each (flash-decoding); every split
returns its normalised output and the log2 of its softmax's denominator, which `gpu` combines. How a row is cut depends on its
own length only, so that its result does not depend on what runs beside it, to the last bit.

A decode step fills G of the 64 rows that wgmma has, and that is free: a chunk of 64 keys with D = 128 is 32 KiB, which takes
0.9 us at an SM's share of an H200 (36 of 4800 GB/s); its 64 x 64 exponentials take 256 cycles, 0.15 us, its products 0.15 us.

The weights go to wgmma through shared memory and every product into a fresh accumulator, because that is what jax's
interpreter can run. Weights from registers and a running accumulator would save an 8 KiB store a chunk in prefill.

K and V of 8 bit pools are widened by each computing warpgroup into its own shared memory before they are multiplied.

Axis letters: N tiles, Q queries of a tile, M pages per tile's row, P pages, S tokens per page, L layers, K KV heads,
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

ROWS = 64  # of a warpgroup's wgmma
CHUNK = 64  # keys of an iteration: score tiles of 64 x 64 float32 are 32 registers a thread
NEG_INF = -1e30  # finite: an all-masked row must not produce NaN
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a call is cut into blocks and how a block works; static."""

    groups: int  # G
    warpgroups: int  # that compute, ROWS queries each
    splits: int  # X, at most
    min_chunks: int  # of a split; shorter rows have fewer splits
    stages: int  # chunks in flight
    scale: float
    soft_cap: float | None
    windowed: bool

    @property
    def block_rows(self) -> int:
        return self.warpgroups * ROWS

    def keys(self, start: Any, num_tokens: Any, block: Any, window: Any) -> tuple[Any, Any]:
        """Position of the first key that the block's queries see, and chunks from there; 0 if all queries are padding."""
        first_query = block * self.block_rows // self.groups
        last_query = jnp.minimum(((block + 1) * self.block_rows - 1) // self.groups, num_tokens - 1)
        first_key = jnp.maximum(start + first_query - window + 1, 0) if self.windowed else jnp.zeros_like(start)
        num_chunks = (start + last_query) // CHUNK + 1 - first_key // CHUNK
        return first_key, jnp.where(first_query < num_tokens, num_chunks, 0)

    def chunks_per_split(self, num_chunks: Any) -> Any:
        return jnp.maximum((num_chunks + self.splits - 1) // self.splits, self.min_chunks)


def attend(
    q: jax.Array,  # [N, K, B, D]; B a multiple of 8, and of `block_rows` if larger than ROWS
    pool: jax.Array,  # [L * P, 2, K, S, D], with the tokens' own K/V already written
    page_table: jax.Array,  # int32 [N, M]
    start: jax.Array,  # int32 [N]
    num_tokens: jax.Array,  # int32 [N]
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
    run = plgpu.kernel(
        functools.partial(_attend_block, plan=plan),
        kernel_name="paged_attend",
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, plan.splits, rows, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, plan.splits, rows), jnp.float32),
        ),
        # The last axis runs fastest: blocks and splits of one row and head are neighbours, they share its pages in L2.
        grid=(num_tiles, num_kv_heads, blocks * plan.splits),
        grid_names=("tile", "head", "block"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            queries=smem((plan.warpgroups, ROWS, head_dim), q.dtype),
            keys=smem((plan.stages, CHUNK, head_dim), pool.dtype),
            values=smem((plan.stages, CHUNK, head_dim), pool.dtype),
            wide=smem((plan.warpgroups, CHUNK, head_dim), q.dtype) if narrow else None,
            weights=smem((plan.warpgroups, ROWS, CHUNK), q.dtype),
            log_sums=plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
            queries_here=plgpu.Barrier(num_barriers=plan.warpgroups),
            keys_here=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            values_here=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            used=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
            cleared=plgpu.Barrier(num_arrivals=plan.warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return run(q, pool, page_table, start, num_tokens, scalars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """A block's shared memory and barriers; W computing warpgroups."""

    queries: Any  # [W, ROWS, D], at the end the output
    keys: Any  # [stages, CHUNK, D]
    values: Any  # [stages, CHUNK, D]
    wide: Any  # [W, CHUNK, D]: K, then V of an 8 bit pool in the queries' dtype; None for other pools
    weights: Any  # [W, ROWS, CHUNK]
    log_sums: Any  # float32 [W, ROWS]
    queries_here: Any  # barriers [W]
    keys_here: Any  # barriers [stages]
    values_here: Any  # barriers [stages]
    used: Any  # barriers [stages]: every warpgroup has read the stage, it can be filled again
    cleared: Any  # barrier: what is not of the row in the last chunk's values is zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What one block does; int32 []."""

    tile: Any
    head: Any
    split: Any
    first_row: Any  # of the block's queries, in B
    start: Any  # position of the tile's first query
    kv_len: Any
    first_key: Any  # that any of the block's queries sees
    first_chunk: Any  # of the split
    num_chunks: Any  # 0 if the split has no keys or the block no queries
    layer: Any  # its null page
    window: Any


def _attend_block(q, pool, page_table, start, num_tokens, scalars, out, log_sum, *, plan: Plan, **scratch: Any) -> None:
    shared = _Shared(**scratch)
    warpgroup = jax.lax.axis_index("warpgroup")
    job = _find_job(start, num_tokens, scalars, plan)
    rows = min(ROWS, q.shape[2])

    @pl.when((job.num_chunks > 0) & (warpgroup == plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:  # 64 Ki registers are 168 a thread for three warpgroups; TMA needs few
            plgpu.set_max_registers(40, action="decrease")
        _produce(job, shared, pool, page_table, plan)

    @pl.when((job.num_chunks > 0) & (warpgroup < plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")
        first_row = job.first_row + warpgroup * ROWS
        queries, here = shared.queries.at[warpgroup, pl.ds(0, rows)], shared.queries_here.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[job.tile, job.head, pl.ds(first_row, rows)], queries, here)
        plgpu.barrier_wait(here)
        _consume(job, shared, plan, warpgroup)
        place = (job.tile, job.head, job.split, pl.ds(first_row, rows))
        plgpu.copy_smem_to_gmem(queries, out.at[place])
        plgpu.copy_smem_to_gmem(shared.log_sums.at[warpgroup, pl.ds(0, rows)], log_sum.at[place])
        plgpu.wait_smem_to_gmem(0)


def _find_job(start, num_tokens, scalars, plan: Plan) -> _Job:
    tile, index = jax.lax.axis_index("tile"), jax.lax.axis_index("block")
    block, split = index // plan.splits, index % plan.splits
    window = scalars[1]
    first_key, num_chunks = plan.keys(start[tile], num_tokens[tile], block, window)
    per_split = plan.chunks_per_split(num_chunks)
    return _Job(
        tile=tile,
        head=jax.lax.axis_index("head"),
        split=split,
        first_row=block * plan.block_rows,
        start=start[tile],
        kv_len=start[tile] + num_tokens[tile],
        first_key=first_key,
        first_chunk=first_key // CHUNK + split * per_split,
        num_chunks=jnp.minimum(num_chunks - split * per_split, per_split),
        layer=scalars[0],
        window=window,
    )


def _produce(job: _Job, shared: _Shared, pool, page_table, plan: Plan) -> None:
    """Fills the ring: a chunk is several pages, or a part of one. Where the chunk is longer than what the block sees, its first
    or last page is read once more: those before may have been released, and the null page may hold NaN."""
    page_size = pool.shape[3]
    length = min(page_size, CHUNK)  # tokens of a copy
    first_page, last_page = job.first_key // page_size, (job.kv_len - 1) // page_size

    def fetch(index: Any, _: None) -> None:
        stage, chunk = index % plan.stages, job.first_chunk + index

        @pl.when(index >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(shared.used.at[stage])

        for part in range(CHUNK // length):
            key = chunk * CHUNK + part * length
            page = job.layer + page_table[job.tile, jnp.clip(key // page_size, first_page, last_page)]
            offset = pl.ds(key % page_size if page_size > CHUNK else 0, length)
            here = (stage, pl.ds(part * length, length))
            plgpu.copy_gmem_to_smem(
                pool.at[page, 0, job.head, offset], shared.keys.at[here], shared.keys_here.at[stage]
            )
            plgpu.copy_gmem_to_smem(
                pool.at[page, 1, job.head, offset], shared.values.at[here], shared.values_here.at[stage]
            )

    jax.lax.fori_loop(0, job.num_chunks, fetch, None)


def _consume(job: _Job, shared: _Shared, plan: Plan, warpgroup: Any) -> None:
    """Attends over the job's chunks; leaves the output in `queries` and log2 of the denominators in `log_sums`."""
    head_dim = shared.queries.shape[2]
    columns = _columns(head_dim)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    query = (row + job.first_row + warpgroup * ROWS) // plan.groups
    last_key = jnp.minimum(job.start + query, job.kv_len - 1)

    def visit(index: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, *acc = carry
        stage, first_key = index % plan.stages, (job.first_chunk + index) * CHUNK
        real = job.first_key - first_key, job.kv_len - first_key
        plgpu.barrier_wait(shared.keys_here.at[stage])
        keys = shared.keys.at[stage]
        if shared.wide is not None:
            keys = _widen(keys, shared.wide.at[warpgroup], 0, CHUNK)
        scores = _scores(_product(shared.queries.at[warpgroup], keys.transpose((1, 0))), plan)
        scores = jnp.where(_seen(first_key, last_key, job, plan), scores, NEG_INF)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weight = jnp.exp2(scores - _across(new_peak, CHUNK))
        keep = jnp.exp2(peak - new_peak)
        total = total * keep + weight.sum(axis=1)
        shared.weights[warpgroup] = weight.astype(shared.weights.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(shared.values_here.at[stage])
        values = shared.values.at[stage]
        if shared.wide is not None:
            values = _widen(values, shared.wide.at[warpgroup], *real)
        else:
            _clear_unreal(values, shared.cleared, warpgroup, *real)
        for i, part in enumerate(columns):
            added = _product(shared.weights.at[warpgroup], values.at[:, part])
            acc[i] = acc[i] * _across(keep, part.size) + added
        plgpu.barrier_arrive(shared.used.at[stage])
        return new_peak, total, *acc

    per_row = lambda value: _filled((ROWS,), value, plgpu.Layout.WGMMA.reduce(1))  # noqa: E731
    acc = [_filled((ROWS, part.size), 0.0, plgpu.Layout.WGMMA) for part in columns]
    start = (per_row(NEG_INF / 2), per_row(0.0), *acc)  # above NEG_INF: masked keys weigh exp2(-5e29) = 0
    peak, total, *acc = jax.lax.fori_loop(0, job.num_chunks, visit, start)
    safe = jnp.where(total == 0, 1.0, total)  # rows whose window lies in other splits, and padding
    for i, part in enumerate(columns):
        out = acc[i] / _across(safe, part.size)
        shared.queries[warpgroup, :, part] = out.astype(shared.queries.dtype)
    shared.log_sums[warpgroup] = jnp.where(total == 0, NEG_INF, peak + jnp.log(safe) * LOG2E)
    plgpu.commit_smem()


def _product(a: Any, b: Any) -> jax.Array:
    """`a @ b` of shared memory, float32 in registers."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _scores(products: jax.Array, plan: Plan) -> jax.Array:
    """Scaled, capped, and in units of log 2, for exp2 is what the hardware has."""
    if plan.soft_cap is None:
        return products * (plan.scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's own tanh is wrong by 5e-4, which a cap of 50 would make 0.02
    exponential = jnp.exp2(products * (2 * LOG2E * plan.scale / plan.soft_cap))
    return (1 - 2 / (1 + exponential)) * (plan.soft_cap * LOG2E)


def _seen(first_key: Any, last_key: jax.Array, job: _Job, plan: Plan) -> jax.Array:
    shape = (ROWS, CHUNK)
    key = first_key + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    seen = key <= _across(last_key, CHUNK)
    return seen & (key > _across(last_key - job.window, CHUNK)) if plan.windowed else seen


def _widen(narrow: Any, wide: Any, first: Any, end: Any) -> Any:
    """`wide [CHUNK, D]`, filled with keys `[first, end)` of `narrow [CHUNK, D]`, and zeros around them."""
    for part in _columns(wide.shape[1]):
        wide[:, part] = _only_rows(narrow[:, part], first, end, wide.dtype)
    plgpu.commit_smem()
    return wide


def _clear_unreal(values: Any, cleared: Any, warpgroup: Any, first: Any, end: Any) -> None:
    """Zeroes values beyond the row's end: they weigh nothing, but 0 * NaN is NaN. At most once a block, in its last chunk.

    What stands before `first`, if this chunk is also the block's first one, may be that same tail: a window shorter than a
    page makes the last page the first one, too, which `_produce` reads once more in place of those before.
    """

    @pl.when(end < CHUNK)
    def _() -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            for part in _columns(values.shape[1]):
                values[:, part] = _only_rows(values[:, part], first, end, values.dtype)
            plgpu.commit_smem()

        plgpu.barrier_arrive(cleared)
        plgpu.barrier_wait(cleared)


def _only_rows(values: jax.Array, first: Any, end: Any, dtype: Any) -> jax.Array:
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    values = plgpu.layout_cast(values, plgpu.Layout.WGMMA)
    if values.dtype == jnp.float8_e4m3fn:  # Hopper converts it to float16 alone
        values = values.astype(jnp.float32)
    values = values.astype(dtype)
    return jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))


def _columns(head_dim: int) -> list[Any]:
    """Cuts D into what is held in registers at a time: 64 a thread, beside the accumulator's D / 2."""
    return [pl.ds(at, min(128, head_dim - at)) for at in range(0, head_dim, 128)]


def _swizzled(head_dim: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout wgmma wants; its two operands must have the same swizzle, so all follow D."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = max(width for width in (32, 64, 128) if head_dim * itemsize % width == 0)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    )


def _across(per_row: jax.Array, columns: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(per_row, (per_row.shape[0], columns), (0,))


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
