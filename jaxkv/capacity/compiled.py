"""Compiles an engine's step programs from shapes alone, and says what the compiler made of them.

Everything is built as `LLM.load` builds it (`models.registry`, `settings.resolve`, `StepPrograms`), with
`jax.ShapeDtypeStruct`s where weights, pool and row state would be.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxkv import ops, sharding
from jaxkv.capacity import hlo, traffic
from jaxkv.device import kv_pool
from jaxkv.device.batch import TILE_COLUMNS
from jaxkv.device.settings import EngineConfig, resolve
from jaxkv.device.step_programs import StepPrograms
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.quant import shardings
from jaxkv.models.registry import find_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the compiler says about one step program. Bytes are one device's."""

    program: str  # decode, mixed or prefill
    num_tokens: int  # computed in one pass, over all data shards
    vocab_size: int
    pool_bytes: int  # the pool as it lies on a device
    layer_pool_bytes: int  # one layer's share of it
    argument_bytes: int  # weights, pool, row state, batch
    alias_bytes: int  # arguments that results take the place of
    temp_bytes: int
    output_bytes: int  # aliased ones included
    moved_bytes: int  # in one pass, without the K/V that attention reads
    pool_is_aliased: bool
    collectives: Mapping[str, int]  # in one layer, by kind
    pool_sized: Mapping[str, int]  # operations that make an array as large as a layer of the pool
    copied_argument_bytes: int  # of arguments that are laid out anew at each call: weights, tables
    pool_scatters: int
    has_layer_loop: bool
    attention: str  # the back end's name
    compile_s: float

    @property
    def peak_bytes(self) -> int:
        """Memory a device needs while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class AbstractEngine:
    """An engine without arrays."""

    def __init__(
        self,
        config: Mapping[str, Any],
        mesh: Mesh,
        engine: EngineConfig,
        *,
        dtype: str = "bfloat16",
        quant: str | None = None,
    ) -> None:
        """
        Args:
            config: as in config.json.
            mesh: of compile-only devices.
            engine: with `num_pages` given: there is no memory to ask.
            dtype: of weights, activations and K/V.
            quant: of the weights' matrices, see `models.quant`.

        Raises:
            CheckpointError: no family runs the model.
            ConfigError: there is no such `quant`, the mesh does not divide the model, or settings contradict each other.
        """
        family = find_family(config)
        self.geometry: ModelConfig = copy_kv_heads(
            family.config_from_hf(config).for_len(engine.max_len), mesh.shape[sharding.TENSOR]
        )
        self.mesh, self.dtype = mesh, jnp.dtype(dtype)
        device = mesh.devices.flat[0]
        backend = ops.select(device.platform, device.device_kind, quantised=quant is not None)
        self.resolved = resolve(engine, self.geometry, self.dtype, mesh, backend)
        model = family.build(self.geometry, self.dtype, per_layer=False, quant=quant)
        scheduler = self.resolved.scheduler
        self.programs = StepPrograms(
            model, self.resolved.pool, mesh, self.resolved.backend,
            max_rows=scheduler.max_rows, max_len=scheduler.max_len, max_steps=scheduler.decode_steps,
            vocab_size=self.geometry.vocab_size, grammars=scheduler.grammars,
        )  # fmt: skip
        variables = jax.tree.leaves(nnx.split(model)[1], is_leaf=lambda x: isinstance(x, nnx.Variable))
        self.params = [
            self._placed(array, where)
            for variable in variables
            for array, where in zip(jax.tree.leaves(variable), shardings(variable, mesh), strict=True)
        ]
        pool = self.resolved.pool
        self.pool = self._placed(
            jax.ShapeDtypeStruct(pool.shape, pool.storage_dtype), sharding.named(mesh, kv_pool.AXES)
        )
        by_row = sharding.named(mesh, ("rows",))
        self.state = jax.tree.map(lambda a: self._placed(a, by_row), jax.eval_shape(self.programs.init_state))
        whole = sharding.named(mesh, ())
        self.tables = jax.tree.map(lambda a: self._placed(a, whole), jax.eval_shape(self.programs.init_tables))

    def _placed(self, array: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
        try:
            where.shard_shape(array.shape)
        except ValueError as error:
            raise ConfigError(
                f"tensor={self.mesh.shape[sharding.TENSOR]} does not divide an array of shape {tuple(array.shape)} of the "
                f"model; num_kv_heads={self.geometry.num_kv_heads}: choose a divisor"
            ) from error
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    @property
    def num_shards(self) -> int:
        """Data shards."""
        return self.mesh.shape[sharding.DATA]

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Of one device."""
        return sum(local_bytes(leaf) for leaf in self.params)

    @property
    def page_bytes(self) -> int:
        """One page on one device, over all its layers, as it is stored."""
        return local_bytes(self.pool) // self.resolved.pool.num_pages

    def _batch(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An int32 argument whose first axis goes over the data shards."""
        return jax.ShapeDtypeStruct(
            (shape[0] * self.num_shards, *shape[1:]), jnp.int32, sharding=sharding.named(self.mesh, ("rows",))
        )

    def arguments(self, program: str, *, rows: int, tiles: int = 0) -> tuple[Any, ...]:
        """Shapes of all arguments of `programs.decode` or `programs.mixed`; `rows` and `tiles` of each data shard."""
        if program == "decode":
            steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.named(self.mesh, ()))
            return self.params, self.pool, self.state, self.tables, self._batch(rows), steps
        width = self.resolved.backend.query_tile
        tokens = self._batch(tiles * width)
        batch = tokens, tokens, self._batch(tiles, TILE_COLUMNS), self._batch(rows)
        return self.params, self.pool, self.state, self.tables, *batch

    def decode(self, rows: int) -> StepFacts:
        """Compiles the decode program for `rows` rows of each data shard."""
        return self._compile("decode", "decode", rows=rows)

    def mixed(self, rows: int, tiles: int) -> StepFacts:
        """Compiles chunks of `tiles` query tiles beside `rows` decode rows; without rows it is the prefill program."""
        return self._compile("mixed" if rows else "prefill", "mixed", rows=rows, tiles=tiles)

    def _compile(self, name: str, program: str, *, rows: int, tiles: int = 0) -> StepFacts:
        num_tokens = (rows + tiles * self.resolved.backend.query_tile) * self.num_shards
        jitted = getattr(self.programs, program)
        return self.facts(name, jitted, self.arguments(program, rows=rows, tiles=tiles), num_tokens)

    def facts(self, name: str, jitted: Any, arguments: Sequence[Any], num_tokens: int) -> StepFacts:
        """Compiles any function of these arguments and reads the result.

        Raises:
            CapacityError: the compiler says that the program does not fit into memory.
        """
        start = time.perf_counter()
        try:
            compiled = jitted.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise CapacityError(f"the {name} program: {summary(str(error))}") from error
        seconds = time.perf_counter() - start
        memory, module = compiled.memory_analysis(), hlo.parse(compiled.as_text())
        pool_shape = self.pool.sharding.shard_shape(self.pool.shape)
        num_layers, elements = self.resolved.pool.num_layers, math.prod(pool_shape)  # of a page: of one group
        loop = hlo.layer_loop(module, self.geometry.num_layers, elements)
        return StepFacts(
            program=name,
            num_tokens=num_tokens,
            vocab_size=self.geometry.vocab_size,
            pool_bytes=local_bytes(self.pool),
            layer_pool_bytes=local_bytes(self.pool) // num_layers,
            argument_bytes=memory.argument_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            moved_bytes=traffic.step_bytes(module, loop, elements),
            pool_is_aliased=module.aliases.get(0) == len(self.params),
            collectives=dict(hlo.collectives(module, loop.body)) if loop else {},
            pool_sized=dict(hlo.large_results(module, elements // num_layers, pool_shape[1:])),
            copied_argument_bytes=hlo.copied_arguments(module),
            pool_scatters=hlo.scatters(module, elements // num_layers),
            has_layer_loop=loop is not None,
            attention=self.resolved.backend.name,
            compile_s=seconds,
        )


def local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * np.dtype(array.dtype).itemsize


def summary(text: str) -> str:
    """The first lines of a compiler's page-long error."""
    return " ".join(line.strip() for line in text.splitlines()[:3] if line.strip())[:250]
