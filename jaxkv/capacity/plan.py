"""`jaxkv plan`: from a model and a topology to a report."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.capacity import topology as topologies
from jaxkv.capacity.checks import complaints
from jaxkv.capacity.compiled import AbstractEngine, StepFacts
from jaxkv.capacity.geometry import Layout
from jaxkv.capacity.report import (
    Advice,
    BoundAt,
    Budget,
    advise,
    batch_sizes,
    bounds,
    larger_slice,
    rows_at,
)
from jaxkv.capacity.topology import Topology
from jaxkv.device.settings import KV_DTYPES, EngineConfig
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.groups import group_layers
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.quant import check_scheme
from jaxkv.models.registry import find_family
from jaxkv.ops import XLA

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
KV_DTYPE_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in KV_DTYPES.items()}
LENGTHS = (1024, 4096, 16384, 65536)
CONTEXT_LEN = 1024  # of the roofline, unless asked otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan."""

    model: str  # its name in the report
    config: Mapping[str, Any]  # as in config.json
    topology: Topology
    dtype: str = "bfloat16"  # of weights and activations
    quant: str | None = None  # of the weights' matrices, see `models.quant`
    kv_dtype: str | None = None  # of K/V; None: the same
    max_len: int | None = None  # tokens a row may hold; None: what the model was trained for, or as many as fit
    max_rows: int | None = None  # None: the engine's default
    page_size: int = 16
    tensor: int | None = None  # None: as many devices as share the KV heads evenly
    data: int | None = None  # None: the devices that are left
    lengths: tuple[int, ...] = LENGTHS
    context_len: int = CONTEXT_LEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsAt:
    """Most rows of one length."""

    context_len: int
    num_rows: int  # whose pages fit at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The answer; bytes are one device's."""

    model: str
    topology: str
    device_kind: str
    num_devices: int
    tensor: int
    data: int
    dtype: str
    quant: str | None
    kv_dtype: str
    page_size: int
    max_len: int
    max_rows: int
    budget: Budget
    num_pages: int  # of one data shard
    num_tokens: int  # of cache over all data shards, as long as every layer keeps them
    missing_bytes: int  # 0 if it fits
    rows_at: tuple[RowsAt, ...]
    steps: tuple[StepFacts, ...]
    complaints: Mapping[str, tuple[str, ...]]  # program -> what is wrong with it
    min_bytes: float  # of the compiled decode step: weights, K/V of `context_len` tokens a row, logits
    moved_bytes: float  # what it moves
    bounds: tuple[BoundAt, ...]  # decode, at `context_len` tokens a row
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]  # what was made smaller than asked for
    windows: tuple[int | None, ...] = (None,)  # of each group of layers, which has pages of its own; None: it sees all

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


def make_plan(question: Question) -> Report:
    """Compiles the step programs and works out what follows.

    Raises:
        CheckpointError: no family runs the model.
        ConfigError: settings or topology are impossible, or the compiler is missing.
    """
    return _Planner(question).report()


class _Planner:
    def __init__(self, question: Question) -> None:
        check_scheme(question.quant)
        self.question = question
        self.chip = question.topology.chip
        self.notes: list[str] = []
        self.cfg = find_family(question.config).config_from_hf(question.config)
        self.tensor, self.data = mesh_sizes(question, self.cfg)
        self.kv_dtype = question.kv_dtype or question.dtype
        self.groups = group_layers(self.cfg.windows, question.max_len or self.cfg.max_len)
        self.layout = Layout(
            cfg=copy_kv_heads(self.cfg, self.tensor), tensor=self.tensor, data=self.data,
            dtype_bytes=DTYPE_BYTES[question.dtype], kv_dtype_bytes=KV_DTYPE_BYTES[self.kv_dtype],
            quant=question.quant, groups=self.groups,
        )  # fmt: skip
        self.paging = self.layout.paging(question.page_size, XLA.token_budget)
        topologies.check_compiler(self.chip)  # said before arithmetic that may end without it

    def report(self) -> Report:
        budget = Budget(
            usable=topologies.usable_bytes(self.chip), weights=self.layout.weight_bytes, state=0,
            temp=self.layout.copied_bytes(self.chip),
            page=self.layout.page_bytes(self.question.page_size),
        )  # fmt: skip
        steps: tuple[StepFacts, ...] = ()
        engine = None
        if budget.missing(self._wanted_pages(budget)) == 0:
            engine, steps = self._compile(budget)
            budget = dataclasses.replace(
                budget, weights=engine.weight_bytes, page=engine.page_bytes,
                state=max(step.argument_bytes for step in steps) - engine.weight_bytes - steps[0].pool_bytes,
                temp=max(step.temp_bytes + step.output_bytes - step.alias_bytes for step in steps),
            )  # fmt: skip
        return self._report(budget, engine, steps)

    def _wanted_pages(self, budget: Budget) -> int:
        """Pages without which the answer is no: one row of `max_len`, if that was asked for."""
        return self.paging.num_needed(self.question.max_len) if self.question.max_len else len(self.paging.windows)

    def _compile(self, budget: Budget) -> tuple[AbstractEngine, tuple[StepFacts, ...]]:
        """All three programs at their largest, with what the compiler does not take made smaller."""
        num_pages, max_rows = budget.num_pages, self.question.max_rows
        while True:
            engine = self._engine(num_pages, max_rows)
            rows, tiles = engine.resolved.buckets.decode_rows[-1], engine.resolved.buckets.mixed_tiles[-1]
            try:
                return engine, (engine.decode(rows), engine.mixed(0, tiles), engine.mixed(rows, tiles))
            except CapacityError as error:
                if "vmem" in str(error).lower():  # on-chip memory: fewer rows need less
                    if rows == 1:
                        raise
                    max_rows = rows // 2 * self.data
                    self.notes.append(f"{error}: compiled for max_rows={max_rows} instead")
                elif num_pages == 1:
                    raise
                else:
                    num_pages //= 2

    @functools.cached_property
    def mesh(self) -> Any:
        from jax.sharding import Mesh

        devices = np.asarray(topologies.devices(self.question.topology)[: self.tensor * self.data])
        return Mesh(devices.reshape(self.data, self.tensor), ("data", "tensor"))

    def _engine(self, num_pages: int, max_rows: int | None) -> AbstractEngine:
        q = self.question
        max_len = q.max_len or max(self.paging.longest(num_pages, self.cfg.max_len), q.page_size)
        most = max((max_rows or XLA.max_rows * self.data) // self.data, 1) * self.paging.num_needed(max_len)
        # Settings count pages of all layers.
        size = self.groups.size
        whole = max(min(num_pages, most) * size // self.cfg.num_layers, 1)
        config = EngineConfig(
            max_len=max_len, max_rows=max_rows, page_size=q.page_size, num_pages=whole * self.data,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        return AbstractEngine(q.config, self.mesh, config, dtype=q.dtype, quant=q.quant)

    def _report(self, budget: Budget, engine: AbstractEngine | None, steps: tuple[StepFacts, ...]) -> Report:
        q, chip = self.question, self.chip
        max_len = q.max_len or max(self.paging.longest(budget.num_pages, self.cfg.max_len), q.page_size)
        max_rows = engine.resolved.scheduler.max_rows if engine else q.max_rows or XLA.max_rows * self.data
        missing = budget.missing(self._wanted_pages(budget))
        lengths = sorted({length for length in (*q.lengths, max_len) if length <= max_len})
        decode = next((step for step in steps if step.program == "decode"), None)
        work = self.layout.decode(decode.num_tokens if decode else 1, q.context_len)
        return Report(
            model=q.model, topology=q.topology.name, device_kind=chip.device_kind,
            num_devices=q.topology.num_devices, tensor=self.tensor, data=self.data, dtype=q.dtype, quant=q.quant,
            kv_dtype=self.kv_dtype, page_size=q.page_size, max_len=max_len, max_rows=max_rows, budget=budget,
            num_pages=budget.num_pages,
            windows=self.groups.windows,
            num_tokens=budget.num_pages // self.groups.num * q.page_size * self.data, missing_bytes=missing,
            rows_at=tuple(RowsAt(context_len=n, num_rows=self._rows_at(budget, n)) for n in lengths),
            steps=steps,
            complaints={step.program: tuple(self._complaints(step, budget)) for step in steps},
            min_bytes=work.bytes, moved_bytes=decode.moved_bytes + work.kv_bytes if decode else math.nan,
            bounds=self._bounds(budget, max_rows), advice=self._advice(budget, missing), notes=tuple(self.notes),
        )  # fmt: skip

    def _rows_at(self, budget: Budget, context_len: int) -> int:
        return rows_at(budget.num_pages, self.layout.paging(self.question.page_size), self.data, context_len)

    def _complaints(self, step: StepFacts, budget: Budget) -> list[str]:
        return complaints(
            step, tensor=self.tensor, usable_bytes=budget.usable, copied_bytes=self.layout.copied_bytes(self.chip)
        )

    def _bounds(self, budget: Budget, max_rows: int) -> tuple[BoundAt, ...]:
        q = self.question
        fit = self._rows_at(budget, q.context_len)
        return tuple(bounds(self.layout, self.chip, batch_sizes(min(fit, max_rows)), q.context_len)) if fit else ()

    def _advice(self, budget: Budget, missing: int) -> tuple[Advice, ...]:
        if not missing:
            return ()
        q = self.question
        max_len = q.max_len or q.page_size
        found = advise(
            self.layout, budget, num_devices=q.topology.num_devices, page_size=q.page_size, max_len=max_len,
            dtypes=DTYPE_BYTES, kv_dtypes=KV_DTYPE_BYTES,
        )  # fmt: skip
        larger = larger_slice(self.layout, budget, self.chip, page_size=q.page_size, max_len=max_len)
        return tuple(found or ([larger] if larger else []))


def mesh_sizes(question: Question, cfg: ModelConfig) -> tuple[int, int]:
    """(tensor, data): what was asked for, else all devices, as many of them for `tensor` as need no copies of KV heads.

    Raises:
        ConfigError: there are not that many devices.
    """
    num = question.topology.num_devices
    data = question.data
    tensor = question.tensor or math.gcd(cfg.num_kv_heads, num // (data or 1))
    data = data or num // tensor
    if min(tensor, data) < 1 or tensor * data > num:
        raise ConfigError(
            f"tensor={tensor} x data={data} needs {tensor * data} devices, {question.topology.name} has {num}"
        )
    return tensor, data
