"""The jitted programs of one engine, made from a model with real or with abstract parameters.

`runner` runs them; compiling them for a chip that is not there needs nothing but shapes.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.config import GrammarSizes
from jaxkv.device import automata, kv_pool, page_transfer, row_state
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.device.program_cache import ProgramCache
from jaxkv.device.programs import DecodeOutput, StepShape, decode, mixed
from jaxkv.ops import Backend
from jaxkv.sharding import DATA, on_data_shards, spec


class StepPrograms:
    """Jitted functions; `num_traces` counts how often each was traced, by name.

    `decode` and `mixed` take `(params, pool, state, tables, *args)` with the parameters as the flat list of the model's
    leaves, see `programs`; they donate pool and state, as do the small ones that change only one of them, or the tables.
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
        grammars: GrammarSizes,
    ):
        """
        Args:
            model: `hidden` and `logits` as in `models.decoder`; only the structure of its parameters is used.
            max_rows: rows that run at once, over all data shards.
            max_len: tokens a row may hold.
            max_steps: most decode steps of one call.
            vocab_size: width of the logits.
            grammars: sizes of the tables of grammars.
        """
        self.num_traces: collections.Counter[str] = collections.Counter()
        graph, params = nnx.split(model)
        tree = jax.tree.structure(params)
        shape = StepShape(pool_spec.num_pages, pool_spec.page_size, backend.query_tile, max_steps, pool_spec.groups)

        def with_model(program: Callable[..., Any]) -> Callable[..., Any]:
            def run(params: list[jax.Array], pool: jax.Array, state: row_state.RowState, *args: Any) -> Any:
                model = nnx.merge(graph, jax.tree.unflatten(tree, params))
                return program(model, pool, state, *args, shape, backend)

            return run

        def set_counts(state: row_state.RowState, row: jax.Array, *args: jax.Array) -> row_state.RowState:
            return row_state.set_counts(state, row[0], *args)  # int32 [1]: a row of each shard, or its null row

        # How arguments and results lie over the mesh.
        pool, rows, steps_and_rows, whole = spec(*kv_pool.AXES), spec("rows"), spec(None, "rows"), P()
        params, state = whole, rows
        of_decode: Any = steps_and_rows, rows, steps_and_rows
        in_step, out_of = (params, pool, state, whole), (pool, state)  # `whole`: the tables
        copy = functools.partial(kv_pool.copy_pages, num_layers=pool_spec.num_layers)
        self._mesh, self._options = mesh, dict(backend.compiler_options) or None
        self.decode = self._jit(
            "decode", with_model(decode), (*in_step, rows, whole), (*out_of, DecodeOutput(*of_decode)), donate=(1, 2)
        )
        self.mixed = self._jit("mixed", with_model(mixed), (*in_step, *[rows] * 4), (*out_of, rows), donate=(1, 2))
        self.set_rows = self._jit("set_rows", row_state.set_rows, (state, *[rows] * 4), state)
        self.set_pages = self._jit("set_pages", row_state.set_pages, (state, rows), state)
        self.set_counts = self._jit("set_counts", set_counts, (state, rows, whole, whole), state)
        self.copy_pages = self._jit("copy_pages", copy, (pool, rows), pool)
        moved = spec(*page_transfer.axes(pool_spec))
        read = functools.partial(page_transfer.read_pages, of=pool_spec)
        write = functools.partial(page_transfer.write_pages, of=pool_spec)
        to_host = page_transfer.host_sharding(pool_spec, mesh)
        self.read_pages = self._jit("read_pages", read, (pool, rows), moved, donate=(), out_shardings=to_host)
        self.write_pages = self._jit("write_pages", write, (pool, rows, moved), pool)
        self.load_grammar = self._jit("load_grammar", automata.load, (whole, whole), whole)
        self.set_masks = self._jit("set_masks", automata.set_masks, (whole, whole, whole), whole)
        max_pages = -(-max_len // pool_spec.page_size) * pool_spec.num_groups
        init = functools.partial(row_state.init_row_state, max_rows // mesh.shape[DATA], max_pages, vocab_size)
        self.init_state = jax.jit(on_data_shards(init, mesh, (), state), out_shardings=NamedSharding(mesh, state))
        empty = functools.partial(automata.init_tables, grammars, max_rows, vocab_size)
        self.init_tables = jax.jit(empty, out_shardings=NamedSharding(mesh, whole))

    def keep_in(self, cache: ProgramCache) -> None:
        """From now on the programs of whole steps come from `cache` where it has them; the others compile quickly."""
        self.decode = cache.program("decode", self.decode, num_fixed=4)
        self.mixed = cache.program("mixed", self.mixed, num_fixed=4)

    def _jit(
        self,
        name: str,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        donate: tuple[int, ...] = (0,),
        out_shardings: Any = None,
    ) -> Any:
        """`function`, written for one data shard, over the mesh.

        Shardings of results are given and not left to the compiler: one that is spelled differently after a step, though
        the same, would compile every program again.
        """

        def counted(*args: Any) -> Any:
            self.num_traces[name] += 1  # runs when traced only
            return function(*args)

        counted.__name__ = name  # what profiles and compile logs call it
        shardings = out_shardings or jax.tree.map(functools.partial(NamedSharding, self._mesh), out_specs)
        run = on_data_shards(counted, self._mesh, in_specs, out_specs)
        run.__name__ = name
        return jax.jit(run, donate_argnums=donate, out_shardings=shardings, compiler_options=self._options)
