"""The compile proof: which models are compiled for which chips, in CI and for the README's table.

Pairwise: every chip meets small, middle and large models where they fit, every model meets 1 to 16 devices, and heads of
64 and 128 numbers, tied tables, copied KV heads and data shards all occur on TPUs and GPUs.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxkv import ops
from jaxkv.capacity import topology as topologies
from jaxkv.capacity.checks import complaints
from jaxkv.capacity.compiled import AbstractEngine, StepFacts
from jaxkv.capacity.geometry import Layout
from jaxkv.capacity.known import KNOWN
from jaxkv.capacity.report import MEMORY_FRACTION
from jaxkv.capacity.topology import Topology, parse_topology
from jaxkv.device.settings import EngineConfig
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.registry import find_family

ROWS = 16  # decode rows of a data shard
TILES = 8  # query tiles of a data shard: a chunk of 256 tokens
MAX_LEN = 8192  # tokens of a row
CONTEXT_LEN = 1024  # tokens that each row holds when bytes are compared


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one mesh."""

    topology: str
    model: str
    tensor: int = 1
    data: int = 1
    programs: tuple[str, ...] = ("decode", "mixed")
    quant: str | None = None

    def __str__(self) -> str:
        quant = f"-{self.quant}" if self.quant else ""
        return f"{self.topology}-{self.model}{quant}-{self.data}x{self.tensor}".replace(":", "-")

    @property
    def parsed(self) -> Topology:
        return parse_topology(self.topology)


_PREFILL = ("decode", "prefill")

CASES = (
    Case("v5e:1x1", "llama-3.2-1b"),
    Case("v5e:2x2", "llama-3.1-8b", tensor=4, programs=_PREFILL),
    Case("v5e:4x4", "llama-3.3-70b", tensor=16),
    Case("v6e:1x1", "llama-3.1-8b", programs=_PREFILL),
    Case("v6e:2x4", "llama-3.1-8b", tensor=8, programs=("decode", "mixed", "prefill")),
    Case("v6e:2x4", "llama-3.3-70b", tensor=8),
    Case("v6e:4x4", "llama-3.2-1b", tensor=4, data=4, programs=_PREFILL),
    Case("tpu7x:1x1x1", "llama-3.2-1b", tensor=2),
    Case("tpu7x:2x2x1", "llama-3.3-70b", tensor=8, programs=_PREFILL),
    Case("tpu7x:2x2x2", "llama-3.1-8b", tensor=8, data=2),
    Case("h100x1", "llama-3.2-1b", programs=_PREFILL),
    Case("h100x8", "llama-3.3-70b", tensor=8),
    Case("h200x1", "llama-3.1-8b"),
    Case("h200x8", "llama-3.1-8b", tensor=8, programs=("decode", "mixed", "prefill")),
    Case("h200x16", "llama-3.3-70b", tensor=8, data=2, programs=_PREFILL),
    # Without kernels of their own yet: the XLA reference, which copies the pool.
    Case("a100x4", "llama-3.1-8b", tensor=4, programs=("decode",)),
    Case("b200x4", "llama-3.1-8b", tensor=4, programs=("decode",)),
)


# One configuration of each other family on a TPU and on a GPU.
_FAMILIES = (
    "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-8b", "gemma-2-2b", "gemma-3-1b", "phi-3-mini-4k", "olmo-2-7b",
    "granite-3.1-8b", "smollm3-3b", "olmoe-1b-7b",
)  # fmt: skip
FAMILY_CASES = (
    *(Case(chip, model, programs=("decode",)) for model in _FAMILIES for chip in ("v6e:1x1", "h200x1")),
    Case("v6e:2x4", "mixtral-8x7b", tensor=8, programs=("decode",)),
    Case("h200x4", "mixtral-8x7b", tensor=4, programs=("decode",)),
    Case("v6e:2x2", "qwen3-30b-a3b", tensor=4, programs=("decode",)),
    Case("h200x4", "qwen3-30b-a3b", tensor=4, programs=("decode",)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What came out for one case."""

    case: Case
    weight_bytes: int  # of a device, as are all
    num_pages: int  # of a data shard: 90% of what weights and known copies of them leave
    steps: tuple[StepFacts, ...]
    complaints: tuple[tuple[str, ...], ...]  # of each step
    min_bytes: float  # that decode must move
    moved_bytes: float  # that it moves

    @property
    def ratio(self) -> float:
        """Bytes that the compiled decode step moves over those it must."""
        return self.moved_bytes / self.min_bytes


def layout_of(case: Case, dtype_bytes: int = 2) -> Layout:
    """The case's model over its mesh."""
    config = KNOWN[case.model]
    cfg = copy_kv_heads(find_family(config).config_from_hf(config), case.tensor)
    return Layout(
        cfg=cfg, tensor=case.tensor, data=case.data, dtype_bytes=dtype_bytes, kv_dtype_bytes=dtype_bytes,
        quant=case.quant,
    )  # fmt: skip


def engine_of(case: Case, *, page_size: int = 16) -> AbstractEngine:
    """An engine whose pool takes 90% of what the weights, and known copies of them, leave."""
    layout, topology = layout_of(case), case.parsed
    free = topologies.usable_bytes(topology.chip) - layout.weight_bytes - layout.copied_bytes(topology.chip)
    backend = ops.select(topology.chip.platform, topology.chip.device_kind)
    cfg = layout.cfg
    page = backend.storage_shape(1, cfg.num_kv_heads // case.tensor, page_size, cfg.head_dim)
    page_bytes = cfg.num_layers * int(np.prod(page)) * layout.kv_dtype_bytes
    num_pages = int(free * MEMORY_FRACTION) // page_bytes - 1
    config = EngineConfig(
        num_pages=num_pages * case.data, max_rows=ROWS * case.data, max_len=MAX_LEN, page_size=page_size
    )
    return AbstractEngine(KNOWN[case.model], mesh_of(case), config, quant=case.quant)


def mesh_of(case: Case) -> Any:
    """The first devices of the topology."""
    devices = np.asarray(topologies.devices(case.parsed)[: case.data * case.tensor])
    return Mesh(devices.reshape(case.data, case.tensor), ("data", "tensor"))


def compile_step(engine: AbstractEngine, program: str) -> StepFacts:
    """Compiles "decode", "mixed" or "prefill" at the proof's sizes."""
    if program == "decode":
        return engine.decode(ROWS)
    return engine.mixed(ROWS if program == "mixed" else 0, TILES)


def prove(case: Case) -> Proof:
    """Compiles a case's programs.

    Raises:
        ConfigError: a compiler is missing.
        CapacityError: a compiler says that a program does not fit.
    """
    engine = engine_of(case)
    steps = tuple(compile_step(engine, program) for program in case.programs)
    chip, layout = case.parsed.chip, layout_of(case)
    limits = {"usable_bytes": topologies.usable_bytes(chip), "copied_bytes": layout.copied_bytes(chip)}
    work = layout.decode(ROWS * case.data, CONTEXT_LEN)
    return Proof(
        case=case,
        weight_bytes=engine.weight_bytes,
        num_pages=engine.resolved.pool.num_pages - 1,
        steps=steps,
        complaints=tuple(tuple(complaints(step, tensor=case.tensor, **limits)) for step in steps),
        min_bytes=work.bytes,
        moved_bytes=steps[0].moved_bytes + work.kv_bytes,
    )
