"""From the name of a topology to devices that only compile: no accelerator, no driver.

`v6e:2x4` is a slice of 2 x 4 chips as Google Cloud counts them, `h200x8` eight GPUs of one host.
"""

import dataclasses
import importlib.util
import math
import os
import re
import sys
from typing import Any

from jaxkv.capacity.chips import Chip, find_chip
from jaxkv.errors import ConfigError

_TPU = re.compile(r"(?P<chip>[a-z]\w*):(?P<dims>\d+(x\d+)*)")
_GPU = re.compile(r"(?P<chip>[a-z]\d+)x(?P<count>\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Some chips of one kind."""

    name: str
    chip: Chip
    dims: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices as jax counts them; a tpu7x chip is two."""
        return math.prod(self.dims) * self.chip.devices_per_chip


def parse_topology(name: str) -> Topology:
    """Reads "v6e:2x4", "tpu7x:2x2x1" or "h200x8".

    Raises:
        ConfigError: the name is malformed, or the chip is not known.
    """
    text = name.lower()
    if match := _TPU.fullmatch(text):
        chip, dims = find_chip(match["chip"]), tuple(int(n) for n in match["dims"].split("x"))
    elif match := _GPU.fullmatch(text):
        chip, dims = find_chip(match["chip"]), (int(match["count"]),)
    else:
        raise ConfigError(f"topology {name!r} is not CHIP:AxB, as in v6e:2x4 or tpu7x:2x2x1, or GPUxN, as in h200x8")
    is_tpu = chip.platform == "tpu"
    if is_tpu != (":" in text) or len(dims) != chip.num_dims:
        shape = f"{chip.name}:{'x'.join('2' * chip.num_dims)}" if is_tpu else f"{chip.name}x8"
        raise ConfigError(f"topology {name!r}: {chip.name} is written like {shape}")
    if min(dims) < 1:
        raise ConfigError(f"topology {name!r} has no devices")
    return Topology(name=text, chip=chip, dims=dims)


def prepare_environment() -> None:
    """Keeps jax from looking for real accelerators. Must run before jax makes its first device.

    JAX_PLATFORMS=cpu: else jax starts libtpu or CUDA for this machine, waits for chips and fails. TPU_SKIP_MDS_QUERY:
    else libtpu asks Google Cloud's metadata server, with long time-outs elsewhere. ALLOW_MULTIPLE_LIBTPU_LOAD: else a
    lock file admits one process at a time, though nothing here touches a chip. The other two are what the server would
    have said: without them libtpu complains at length; what they say does not matter for other topologies.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read the variable already
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
    }.items():
        os.environ.setdefault(name, value)


def devices(topology: Topology) -> list[Any]:
    """Compile-only devices.

    Raises:
        ConfigError: the compiler is not installed, or does not know the topology.
    """
    check_compiler(topology.chip)
    from jax.experimental import topologies

    try:
        if topology.chip.platform == "tpu":
            # A slice of one chip needs its bounds spelled out for older versions of libtpu.
            single = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(topology.dims) == 1 else {}
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **single).devices
        else:
            found = topologies.get_topology_desc(
                platform="cuda", topology=f"1x1x{topology.num_devices}", target_config=gpu_target(topology.chip)
            ).devices
    except Exception as error:  # the plugins raise errors of many kinds
        raise ConfigError(f"the compiler for {topology.chip.name} refuses {topology.name!r}: {error}") from error
    assert len(found) == topology.num_devices, (len(found), topology)
    return list(found)


def usable_bytes(chip: Chip) -> int:
    """Bytes that programs may take of a device, with jax's own setting of a GPU's share honoured.

    Raises:
        ConfigError: the variable holds no share.
    """
    text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if chip.platform != "gpu" or not text:
        return chip.usable_bytes
    try:
        share = float(text)
    except ValueError as error:
        raise ConfigError(f"XLA_PYTHON_CLIENT_MEM_FRACTION={text!r} must be a number") from error
    return int(chip.hbm_bytes * share)


def check_compiler(chip: Chip) -> None:
    """Raises ConfigError, with the command that helps, if the chip's compiler is not installed."""
    needed = {"libtpu": "libtpu"} if chip.platform == "tpu" else {"jax_plugins.xla_cuda13": "jax-cuda13-plugin"}
    missing = [package for module, package in needed.items() if not _is_there(module)]
    if missing:
        raise ConfigError(
            f"compiling for {chip.name} needs {', '.join(missing)}, which is not installed: pip install 'jaxkv[plan]'"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def gpu_target(chip: Chip) -> str:
    """XLA's `GpuTargetConfigProto` for a GPU that is not there, as text.

    All limits are given: with the compute capability alone some versions of XLA divide by zero.
    """
    gpu = chip.gpu
    assert gpu is not None
    major, minor = gpu.compute_capability
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_core}
  shared_memory_per_block_optin: {gpu.shared_memory_block}
  threads_per_core_limit: 2048
  core_count: {gpu.num_cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.hbm_bytes_s)}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.hbm_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  device_vendor: "NVIDIA Corporation"
  name: "{chip.device_kind}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""
