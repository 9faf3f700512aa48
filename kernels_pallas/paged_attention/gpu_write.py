"""Stores new K/V in the pool, in place (Pallas, Mosaic GPU).

One block a token: a TMA copy brings its K and V to shared memory, another puts them at `[page, :, :, offset]`. No register is
touched, so it works for every dtype, and XLA sees one custom call that aliases the pool, no scatter.

Axis letters: T tokens, L layers, P pages, K KV heads, S tokens per page, D head dim.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def write_kv(
    pool: jax.Array,  # [L * P, 2, K, S, D]
    kv: jax.Array,  # [T, 2, K, D], in the pool's dtype
    page: jax.Array,  # int32 [T]: page within the layer; 0, the null page, is not written
    offset: jax.Array,  # int32 [T]: place of the token within its page
    scalars: jax.Array,  # int32 [.]: first page of the layer, and what only `attend` needs
    interpret: Any = None,
) -> jax.Array:
    """The pool with each token's K and V stored at `(first_page + page, offset)`; padding, page 0, is skipped."""

    def body(*refs: Any) -> None:
        buffer = plgpu.SMEM(kv.shape[1:], pool.dtype)
        pl.run_scoped(functools.partial(_write_token, *refs), buffer, plgpu.Barrier())

    # A ref is how a Mosaic GPU kernel updates an operand: it becomes an input that aliases an output. Not `plgpu.kernel`,
    # which does not take refs in jax 0.10.
    mesh = plgpu.Mesh(grid=(kv.shape[0],), grid_names=("token",))
    write: Any = pl.kernel(
        body, mesh=mesh, compiler_params=plgpu.CompilerParams(), interpret=interpret, name="write_kv"
    )
    pool_ref = jax.new_ref(pool)
    write(kv, page, offset, scalars, pool_ref)
    return jax.freeze(pool_ref)


def _write_token(kv, page, offset, scalars, pool, buffer, arrived) -> None:
    token = jax.lax.axis_index("token")

    @pl.when(page[token] != 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(kv.at[token], buffer, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(buffer, pool.at[scalars[0] + page[token], :, :, offset[token]])
        plgpu.wait_smem_to_gmem(0)
