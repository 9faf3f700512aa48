"""Figures of the accelerators that `jaxkv plan` knows, per device as jax counts them, each with its source.

Vendors print GB where they mean GiB for memory sizes; here all are bytes. Arithmetic figures are dense (NVIDIA's tables
show twice as much, "with sparsity"). Link bandwidth is one direction, all links of a device together: half of what
tables call bidirectional.

Sources, read 2026-11-29:
    v5e     https://cloud.google.com/tpu/docs/v5e, table "system architecture"
    v6e     https://cloud.google.com/tpu/docs/v6e, the same; https://cloud.google.com/tpu/docs/tpu7x for the bandwidth
    v5p     https://cloud.google.com/tpu/docs/v5p, the same
    tpu7x   https://cloud.google.com/tpu/docs/tpu7x, the same; two devices share a chip ("dual-chiplet architecture")
    a100    NVIDIA A100 Tensor Core GPU datasheet, column 80GB SXM
    h100    NVIDIA H100 Tensor Core GPU datasheet, column SXM
    h200    NVIDIA H200 Tensor Core GPU datasheet, column SXM
    b200    NVIDIA DGX B200 datasheet, an eighth of the system; its 180 GB are what HGX boards leave usable
Usable TPU memory is the limit that libtpu 0.0.52 names when a program exceeds it.
"""

import dataclasses
from typing import Literal

from jaxkv.errors import ConfigError

GIB, MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuLimits:
    """What XLA:GPU must be told about a device that is not there; from NVIDIA's tuning guides and `deviceQuery`."""

    compute_capability: tuple[int, int]
    num_cores: int  # streaming multiprocessors
    shared_memory_core: int  # bytes
    l2_cache: int  # bytes
    clock_ghz: float

    @property
    def shared_memory_block(self) -> int:
        """Bytes one block may have if it asks: the runtime keeps 1 KiB."""
        return self.shared_memory_core - 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device."""

    name: str  # as in --topology
    platform: Literal["tpu", "gpu"]
    device_kind: str  # `jax.Device.device_kind`
    devices_per_chip: int = 1
    num_dims: int  # of a topology; GPUs are counted
    hbm_bytes: int
    usable_bytes: int  # what programs of one process may take of it
    hbm_bytes_s: float
    bf16_flops: float
    int8_ops: float | None  # None: the vendor names none
    link_bytes_s: float  # TPU interconnect or NVLink
    gpu: GpuLimits | None = None


# JAX takes 75% of a GPU's memory at its start unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
# (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_MEMORY_SHARE = 0.75


def _tpu(
    name: str, kind: str, dims: int, hbm: int, usable: float, *, bandwidth: float, bf16: float, int8: float | None,
    link: float, devices_per_chip: int = 1,
) -> Chip:  # fmt: skip
    """Figures of a whole chip: GiB, GB/s, TFLOP/s, TOP/s, GB/s; but `usable` GiB is a device's."""
    n = devices_per_chip
    return Chip(
        name=name, platform="tpu", device_kind=kind, devices_per_chip=n, num_dims=dims, hbm_bytes=hbm * GIB // n,
        usable_bytes=int(usable * GIB), hbm_bytes_s=bandwidth * 1e9 / n, bf16_flops=bf16 * 1e12 / n,
        int8_ops=None if int8 is None else int8 * 1e12 / n, link_bytes_s=link * 1e9 / n,
    )  # fmt: skip


def _gpu(
    name: str, kind: str, mib: int, *, bandwidth: float, bf16: float, int8: float, link: float, limits: GpuLimits
) -> Chip:
    """MiB as nvidia-smi shows memory.total, GB/s, dense TFLOP/s and TOP/s, GB/s."""
    return Chip(
        name=name, platform="gpu", device_kind=kind, num_dims=1, hbm_bytes=mib * MIB,
        usable_bytes=int(mib * MIB * GPU_MEMORY_SHARE), hbm_bytes_s=bandwidth * 1e9, bf16_flops=bf16 * 1e12,
        int8_ops=int8 * 1e12, link_bytes_s=link * 1e9, gpu=limits,
    )  # fmt: skip


_HOPPER = GpuLimits(
    compute_capability=(9, 0), num_cores=132, shared_memory_core=228 * 1024, l2_cache=50 * MIB, clock_ghz=1.98
)
_AMPERE = GpuLimits(
    compute_capability=(8, 0), num_cores=108, shared_memory_core=164 * 1024, l2_cache=40 * MIB, clock_ghz=1.41
)
_BLACKWELL = GpuLimits(
    compute_capability=(10, 0), num_cores=148, shared_memory_core=228 * 1024, l2_cache=126 * MIB, clock_ghz=1.965
)

CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", "TPU v5 lite", 2, 16, 15.75, bandwidth=819, bf16=197, int8=393, link=200),
        _tpu("v6e", "TPU v6 lite", 2, 32, 31.24, bandwidth=1638, bf16=918, int8=1836, link=400),
        _tpu("v5p", "TPU v5", 3, 95, 95.73, bandwidth=2765, bf16=459, int8=918, link=600),
        _tpu("tpu7x", "TPU7x", 3, 192, 94.74, bandwidth=7380, bf16=2307, int8=None, link=600, devices_per_chip=2),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 81920, bandwidth=2039, bf16=312, int8=624, link=300, limits=_AMPERE),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 81559, bandwidth=3350, bf16=989, int8=1979, link=450, limits=_HOPPER),
        _gpu("h200", "NVIDIA H200", 143771, bandwidth=4800, bf16=989, int8=1979, link=450, limits=_HOPPER),
        _gpu("b200", "NVIDIA B200", 183359, bandwidth=8000, bf16=2250, int8=4500, link=900, limits=_BLACKWELL),
    )
}


def find_chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CHIPS:
        raise ConfigError(f"chip {name!r} is not known; known are {', '.join(CHIPS)}")
    return CHIPS[name]
