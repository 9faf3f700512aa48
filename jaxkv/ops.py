"""The one table from hardware to kernels; models and scheduler never ask which platform they are on.

`select` picks the back end for a device, `fit` makes sure that it takes the model: what it refuses runs on the XLA
reference, and the log says why. A kernel's module is imported only where its platform is selected.
"""

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable
from types import ModuleType

import jax
import numpy as np

from kernels_pallas.paged_attention import reference

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What decides whether a kernel takes a model; heads are one device's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int  # a row may have
    dtype: np.dtype  # of q, k and v
    kv_dtype: np.dtype  # of what the pool holds


def plain_shape(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """The reference's `[L * P, 2, K, S, D]`."""
    return (num_pages, 2, num_kv_heads, page_size, head_dim)


def plain_pack(kv: jax.Array) -> jax.Array:
    """Pages `[., 2, K, S, D]` as they are stored: the same."""
    return kv


def plain_unpack(stored: jax.Array, head_dim: int) -> jax.Array:
    """The inverse."""
    return stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How one kind of device runs a step. The kernel's signature: `kernels_pallas.paged_attention.reference`."""

    name: str
    paged_attention: Callable[..., tuple[jax.Array, jax.Array]] = reference.paged_attention
    storage_dtype: Callable[[np.dtype], np.dtype] = reference.storage_dtype
    storage_shape: Callable[[int, int, int, int], tuple[int, int, int, int, int]] = plain_shape  # of the pool's array
    pack: Callable[[jax.Array], jax.Array] = plain_pack  # pages into that shape
    unpack: Callable[[jax.Array, int], jax.Array] = plain_unpack
    refuses: Callable[[Shapes, int], str | None] = lambda shapes, query_tile: None  # why these do not run, if so
    compiler_options: tuple[tuple[str, bool], ...] = ()  # name and value, for the programs of whole steps
    quantised_options: tuple[tuple[str, bool], ...] = ()  # the same where weights are quantised
    per_layer: bool = False  # one array per layer and parameter; else stacked, see models.layers.PerLayer
    query_tile: int = 32  # tokens of one row that attend together in a prefill chunk
    max_rows: int = 256  # default of LLM.load
    token_budget: int = 1024  # default prompt tokens of a step
    decode_steps: int = 8  # default tokens a row makes in one device loop
    one_row_bits: bool = False  # bf16 matrices are read as bits where one row decodes, see models.one_row
    auto_dtype: np.dtype | None = None  # what dtype="auto" stands for; None: the checkpoint's
    memory_fraction: float = 0.9  # default share of free memory for the page pool


CPU = Backend(
    name="cpu",
    # XLA:CPU multiplies the three queries of a KV head with a tile of keys in 95 us, each by itself in 19 (16 rows of SmolLM2).
    paged_attention=functools.partial(reference.paged_attention, max_single=4),
    per_layer=True,
    one_row_bits=True,
    max_rows=64,
    token_budget=512,
    decode_steps=8,
    memory_fraction=0.1,
    auto_dtype=np.dtype(np.float32),  # exact, and for few rows as fast as bf16
)
# Accelerators keep values as they are: the reference's bits are for XLA:CPU.
XLA = Backend(name="xla", storage_dtype=np.dtype)
# Weights are stacked over layers. cuBLAS takes a layer's matrices where they lie; Triton's products have XLA copy them out of
# the stack first, which made a decode step of Llama 3.1 8B move 2.68 times the least bytes instead of 1.02.
GPU_OPTIONS = (("xla_gpu_enable_triton_gemm", False),)
# cuBLAS multiplies no int8 with bf16, so XLA would write a layer's matrices in bf16 first: 5 bytes moved for each number,
# against 3 with Triton's products, which convert what they read. (bf16 weights: 2; the same model, one H200.)
GPU_QUANTISED_OPTIONS = (("xla_gpu_enable_triton_gemm", True),)


# Left alone, XLA lays out all weights anew for a TPU7x at each call (tiles of 16 x 128 bf16 numbers instead of 8 x 128): twice
# their memory, and 2.7 times the bytes that a decode step must move.
TPU7X_OPTIONS = (("xla_tpu_control_large_2nd_minor_layout_for_x16", False),)


def select(platform: str, device_kind: str = "", *, quantised: bool = False) -> Backend:
    """The back end for a jax platform ("cpu", "tpu", "gpu") and a kind of device ("TPU v6 lite", "NVIDIA H200").

    Where there are no kernels it is the XLA reference, and the log says so once.

    Args:
        quantised: weights are, see `models.quant`.
    """
    backend = _by_platform(platform, device_kind)
    return dataclasses.replace(backend, compiler_options=backend.quantised_options) if quantised else backend


@functools.cache
def _by_platform(platform: str, device_kind: str) -> Backend:
    if platform == "cpu":
        return CPU
    if platform == "tpu" and re.search(r"v[2-9]|\d+x", device_kind, re.IGNORECASE):
        options = TPU7X_OPTIONS if "7x" in device_kind.lower() else ()
        return _tpu(importlib.import_module("kernels_pallas.paged_attention.tpu"), options)
    if platform == "gpu" and re.search(_HOPPER, device_kind):
        return _gpu(importlib.import_module("kernels_pallas.paged_attention.gpu"))
    log.warning("no paged-attention kernel for %s %r: using the XLA reference path", platform, device_kind)
    if platform != "gpu":
        return XLA
    return dataclasses.replace(XLA, compiler_options=GPU_OPTIONS, quantised_options=GPU_QUANTISED_OPTIONS)


_HOPPER = r"\bG?H\d+"  # H100, H200, GH200, H20, ...: compute capability 9.0


def _tpu(kernel: ModuleType, options: tuple[tuple[str, bool], ...]) -> Backend:
    def refuses(shapes: Shapes, query_tile: int) -> str | None:
        problem = kernel.Problem(
            num_tiles=1, width=query_tile, table_pages=shapes.max_pages, num_heads=shapes.num_heads,
            num_kv_heads=shapes.num_kv_heads, head_dim=shapes.head_dim, page_size=shapes.page_size,
            dtype=shapes.dtype, pool_dtype=shapes.kv_dtype,
        )  # fmt: skip
        return kernel.unsupported(problem)

    return Backend(
        name="tpu", paged_attention=kernel.paged_attention, storage_dtype=kernel.storage_dtype,
        storage_shape=kernel.storage_shape, pack=kernel.pack, unpack=kernel.unpack, refuses=refuses,
        compiler_options=options, quantised_options=options,  # the embedding stays in bf16
    )  # fmt: skip


def _gpu(kernel: ModuleType) -> Backend:
    def refuses(shapes: Shapes, query_tile: int) -> str | None:
        return kernel.supported(
            compute_capability="9.0", head_dim=shapes.head_dim, page_size=shapes.page_size,
            num_heads=shapes.num_heads, num_kv_heads=shapes.num_kv_heads, dtype=shapes.dtype,
            kv_dtype=shapes.kv_dtype,
        )  # fmt: skip

    return Backend(
        name="gpu", paged_attention=kernel.paged_attention, storage_dtype=kernel.storage_dtype, refuses=refuses,
        compiler_options=GPU_OPTIONS, quantised_options=GPU_QUANTISED_OPTIONS,
    )  # fmt: skip


def fit(backend: Backend, shapes: Shapes) -> Backend:
    """The back end if it takes the model, maybe with narrower query tiles; else the XLA reference, said once."""
    reason = backend.refuses(shapes, 1)
    if reason is not None:
        _say_refused(backend.name, reason)
        shared = (
            "query_tile", "max_rows", "token_budget", "decode_steps", "memory_fraction", "compiler_options",
        )  # fmt: skip
        return dataclasses.replace(XLA, **{name: getattr(backend, name) for name in shared})
    tile = backend.query_tile
    while backend.refuses(shapes, tile) is not None:  # the width of a tile takes on-chip memory
        tile //= 2
    return dataclasses.replace(backend, query_tile=tile)


@functools.cache
def _say_refused(name: str, reason: str) -> None:
    log.warning(
        "the %s paged-attention kernel does not take this model (%s): using the XLA reference path", name, reason
    )
