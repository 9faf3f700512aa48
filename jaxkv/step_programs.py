"""The jitted programs of one engine, made from a model with real or with abstract parameters.

`runner` runs them; compiling them for a chip that is not there needs nothing but shapes.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxkv import kv_pool, row_state
from jaxkv.kv_pool import PoolSpec
from jaxkv.ops import Backend
from jaxkv.programs import StepShape, decode, mixed
from jaxkv.sharding import named, replicated


class StepPrograms:
    """Jitted functions; `num_traces` counts how often each was traced, by name.

    `decode` and `mixed` take `(params, pool, state, *args)` with the parameters as the flat list of the model's leaves,
    see `programs`; they donate pool and state, as do the small ones that change only one of them.
    """

    def __init__(
        self,
        model: nnx.Module,
        pool_spec: PoolSpec,
        mesh: Mesh,
        backend: Backend,
        *,
        max_rows: int,
        max_len: int,
        max_steps: int,
        vocab_size: int,
        scale: float,
    ):
        """
        Args:
            model: `hidden` and `logits` as in `models.llama`; only the structure of its parameters is used.
            max_rows: rows that run at once.
            max_len: tokens a row may hold.
            max_steps: most decode steps of one call.
            vocab_size: width of the logits.
            scale: attention scale.
        """
        self.num_traces: collections.Counter[str] = collections.Counter()
        graph, params = nnx.split(model)
        tree = jax.tree.structure(params)
        shape = StepShape(pool_spec.num_pages, pool_spec.page_size, backend.query_tile, max_steps, scale)

        def with_model(program: Callable[..., Any]) -> Callable[..., Any]:
            def run(params: list[jax.Array], pool: jax.Array, state: row_state.RowState, *args: jax.Array) -> Any:
                model = nnx.merge(graph, jax.tree.unflatten(tree, params))
                return program(model, pool, state, *args, shape, backend)

            return run

        # Shardings are given and not left to the compiler: one that is spelled differently after a step, though the
        # same, would compile every program again.
        pool, same = named(mesh, kv_pool.AXES), replicated(mesh)
        copy = functools.partial(kv_pool.copy_pages, num_layers=pool_spec.num_layers)
        self.decode = self._jit("decode", with_model(decode), donate=(1, 2), out=(pool, same, same))
        self.mixed = self._jit("mixed", with_model(mixed), donate=(1, 2), out=(pool, same, same))
        self.set_rows = self._jit("set_rows", row_state.set_rows, donate=(0,), out=same)
        self.set_pages = self._jit("set_pages", row_state.set_pages, donate=(0,), out=same)
        self.set_counts = self._jit("set_counts", row_state.set_counts, donate=(0,), out=same)
        self.copy_pages = self._jit("copy_pages", copy, donate=(0,), out=pool)
        init = functools.partial(
            row_state.init_row_state, max_rows, max_pages=-(-max_len // pool_spec.page_size), vocab_size=vocab_size
        )
        self.init_state = jax.jit(init, out_shardings=same)

    def _jit(self, name: str, function: Callable[..., Any], *, donate: tuple[int, ...], out: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.num_traces[name] += 1  # runs when traced only
            return function(*args)

        counted.__name__ = name  # what profiles and compile logs call it
        return jax.jit(counted, donate_argnums=donate, out_shardings=out)
