"""The page pool: one preallocated, sharded array that every step updates in place.

Layout `[L * P, 2, K, S, D]` (see `kernels_pallas.paged_attention.reference`): layer l's page p is entry `l * P + p`.

Axis letters: L layers, P pages, K KV heads, S tokens per page, D head dim, B pages moved at once.
"""

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.errors import CapacityError, ConfigError
from jaxkv.sharding import named

AXES = (None, None, "kv_heads", None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Geometry of a pool."""

    num_layers: int
    num_pages: int  # including the null page 0
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: jnp.dtype

    storage_dtype: jnp.dtype  # what the array holds, see the kernels' `storage_dtype`

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers * self.num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.num_pages


def allocate(spec: PoolSpec, mesh: Mesh) -> jax.Array:
    """A pool of zeros, created in its final sharding.

    Raises:
        CapacityError: the device has not enough memory; the message says how many pages would fit.
    """
    if spec.num_kv_heads % mesh.shape["tensor"]:
        raise ConfigError(
            f"tensor={mesh.shape['tensor']} does not divide num_kv_heads={spec.num_kv_heads}; use a divisor of it"
        )
    free = free_memory_bytes(mesh)
    if spec.pool_bytes > free:  # asked first: a CPU would hand out the memory and be killed on using it
        raise CapacityError(_too_large(spec, free))
    try:
        return jax.block_until_ready(jnp.zeros(spec.shape, spec.storage_dtype, device=named(mesh, AXES)))
    except jax.errors.JaxRuntimeError as error:
        raise CapacityError(_too_large(spec, free)) from error


def _too_large(spec: PoolSpec, free: int) -> str:
    fits = max(free // spec.page_bytes - 1, 0)
    return (
        f"the page pool needs {spec.pool_bytes:,} bytes ({spec.num_pages} pages of {spec.page_bytes:,}), {free:,} are "
        f"free; at most num_pages={fits}, max_len={fits * spec.page_size} would fit"
    )


def free_memory_bytes(mesh: Mesh) -> int:
    """Bytes still free over all devices of the mesh; on CPU, the host's available memory."""
    devices = mesh.devices.flatten().tolist()
    stats = [device.memory_stats() for device in devices]
    if all(s and "bytes_limit" in s for s in stats):
        return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats) * len(devices)
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no figure of what is free: half of all


def copy_pages(pool: jax.Array, pairs: jax.Array, num_layers: int) -> jax.Array:
    """The pool with page `pairs[:, 1]` a copy of `pairs[:, 0]` (int32 [B, 2]) in every layer; (0, 0) is padding."""
    base = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * (pool.shape[0] // num_layers)
    source, target = ((base + pairs[None, :, i]).reshape(-1) for i in (0, 1))
    return pool.at[target].set(pool[source], mode="promise_in_bounds")
