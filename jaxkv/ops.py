"""The one table from hardware to kernels; models and scheduler never ask which platform they are on."""

import dataclasses
import logging
from collections.abc import Callable

import jax
import numpy as np

from kernels_pallas.paged_attention import reference

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How one kind of device runs a step. The kernel's signature: `kernels_pallas.paged_attention.reference`."""

    name: str
    paged_attention: Callable[..., tuple[jax.Array, jax.Array]] = reference.paged_attention
    storage_dtype: Callable[[np.dtype], np.dtype] = reference.storage_dtype
    per_layer: bool = False  # one array per layer and parameter; else stacked, see models.layers.PerLayer
    query_tile: int = 32  # tokens of one row that attend together in a prefill chunk
    max_rows: int = 256  # default of LLM.load
    token_budget: int = 1024  # default tokens of a step with chunks
    decode_steps: int = 8  # default tokens a row makes in one device loop
    min_rows_bf16: int = 1  # smallest decode bucket in bf16
    auto_dtype: np.dtype | None = None  # what dtype="auto" stands for; None: the checkpoint's
    memory_fraction: float = 0.9  # default share of free memory for the page pool


CPU = Backend(
    name="cpu",
    per_layer=True,
    # One-row bf16 products are slow: 18-26 ms against 13 ms for two rows (SmolLM2's products, AVX512-BF16).
    min_rows_bf16=2,
    max_rows=64,
    token_budget=512,
    decode_steps=8,
    memory_fraction=0.1,
    auto_dtype=np.dtype(np.float32),  # exact, and for few rows as fast as bf16
)
XLA = Backend(name="xla")

TABLE: dict[str, Backend] = {"cpu": CPU}  # platform -> back end; platforms without kernels take XLA


def select(platform: str) -> Backend:
    """The back end for a jax platform name ("cpu", "tpu", "gpu"); says so when there are no kernels for it."""
    if platform not in TABLE:
        log.warning("no paged-attention kernel for platform %r: using the XLA reference path", platform)
    return TABLE.get(platform, XLA)
