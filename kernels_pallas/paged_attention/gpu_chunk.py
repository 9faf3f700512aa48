"""What the computing warpgroups of `gpu_attend` do with the chunks of keys and values in shared memory.

The weights go to wgmma through shared memory and every product into a fresh accumulator, because that is what jax's
interpreter can run. Weights from registers and a running accumulator would save an 8 KiB store a chunk in prefill.

K and V of 8 bit pools are widened by each computing warpgroup into its own shared memory before they are multiplied.

Axis letters as in `gpu_attend`; `shared` is a `gpu_attend.Shared`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.gpu_plan import CHUNK, LOG2E, NEG_INF, ROWS, Job, Plan


def attend_chunks(job: Job, shared: Any, plan: Plan, warpgroup: Any) -> None:
    """Attends over the job's chunks; leaves the output in `queries` and log2 of the denominators in `log_sums`."""
    head_dim = shared.queries.shape[2]
    columns = _columns(head_dim)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    query = (row + job.first_row + warpgroup * ROWS) // plan.groups
    last_key = jnp.minimum(job.start + query, job.keys.end - 1)

    def visit(index: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, *acc = carry
        stage = index % plan.stages
        begin, first, end = job.keys.chunk(job.first_chunk + index)
        real = first - begin, end - begin
        plgpu.barrier_wait(shared.keys_here.at[stage])
        keys = shared.keys.at[stage]
        if shared.wide is not None:
            keys = _widen(keys, shared.wide.at[warpgroup], 0, CHUNK)
        scores = _scores(_product(shared.queries.at[warpgroup], keys.transpose((1, 0))), plan)
        scores = jnp.where(
            _seen(begin, first, jnp.minimum(last_key, end - 1), last_key - job.window, plan), scores, NEG_INF
        )
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


def _seen(begin: Any, first: Any, last: jax.Array, before_window: jax.Array, plan: Plan) -> jax.Array:
    """bool [ROWS, CHUNK]: which keys of the chunk that begins at a position each query sees, the last two given per query."""
    shape = (ROWS, CHUNK)
    key = begin + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    seen = (key >= first) & (key <= _across(last, CHUNK))
    return seen & (key > _across(before_window, CHUNK)) if plan.windowed else seen


def _widen(narrow: Any, wide: Any, first: Any, end: Any) -> Any:
    """`wide [CHUNK, D]`, filled with keys `[first, end)` of `narrow [CHUNK, D]`, and zeros around them."""
    for part in _columns(wide.shape[1]):
        wide[:, part] = _only_rows(narrow[:, part], first, end, wide.dtype)
    plgpu.commit_smem()
    return wide


def _clear_unreal(values: Any, cleared: Any, warpgroup: Any, first: Any, end: Any) -> None:
    """Zeroes values beyond the end of those in the pool, or of the row: they weigh nothing, but 0 * NaN is NaN. At most twice
    a block, in the last chunk of either.

    What stands before `first`, if this chunk is also the block's first one, may be that same tail: a window shorter than a
    page makes the last page the first one, too, which the producer reads once more in place of those before.
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


def _across(per_row: jax.Array, columns: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(per_row, (per_row.shape[0], columns), (0,))


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
