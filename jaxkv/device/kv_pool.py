"""The page pool: one preallocated, sharded array that every step updates in place.

Layout `[L * P, 2, K, S, D]` (see `kernels_pallas.paged_attention.reference`), or what the kernels make of it (`ops`), with
the same first and third axes: layer l's page p is entry `l * P + p`. Where layers are split into groups (`models.groups`),
l counts within the group.
Data shards have pages of their own, so the whole array is as many of these as there are shards, one after the other.

Axis letters: L layers of a page, P pages, K KV heads, S tokens per page, D head dim, B pages moved at once.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.errors import CapacityError, ConfigError
from jaxkv.models.groups import LayerGroups
from jaxkv.ops import plain_pack, plain_shape, plain_unpack
from jaxkv.sharding import named

AXES = ("pages", None, "kv_heads", None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Geometry of a pool."""

    num_layers: int  # whose K/V a page holds: those of a group
    num_pages: int  # of a data shard, including the null page 0
    num_kv_heads: int  # as stored, copies included
    page_size: int  # tokens
    head_dim: int
    dtype: jnp.dtype

    storage_dtype: jnp.dtype  # what the array holds, see the kernels' `storage_dtype`
    storage_shape: Callable[[int, int, int, int], tuple[int, ...]] = plain_shape  # the kernels' layout, see `ops`
    # From `[., 2, K, S, D]` to what `storage_shape` stores, and back with D; see `ops`.
    pack: Callable[[jax.Array], jax.Array] = plain_pack
    unpack: Callable[[jax.Array, int], jax.Array] = plain_unpack
    kv_copies: int = 1  # of each of the model's KV heads
    num_shards: int = 1  # data shards
    groups: LayerGroups | None = None  # None: all layers are one

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array, over all devices."""
        return self._stored(self.num_shards * self.num_layers * self.num_pages)

    def _stored(self, num_pages: int) -> tuple[int, ...]:
        return self.storage_shape(num_pages, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def num_groups(self) -> int:
        return 1 if self.groups is None else self.groups.num

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes over all layers, as long as all see it."""
        return self.page_bytes * self.num_groups // self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes a page takes over all its layers, as it is stored."""
        return self.num_layers * math.prod(self._stored(1)) * self.storage_dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Over all devices."""
        return self.page_bytes * self.num_pages * self.num_shards


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
    num_pages = spec.num_pages * spec.num_shards
    fits = max(free // (spec.page_bytes * spec.num_shards) - 1, 0) // spec.num_groups  # on a shard, of all layers
    return (
        f"the page pool needs {spec.pool_bytes:,} bytes ({num_pages} pages of {spec.page_bytes:,}), {free:,} are "
        f"free; at most num_pages={fits * spec.num_shards}, max_len={fits * spec.page_size} would fit"
    )


def free_memory_bytes(mesh: Mesh) -> int:
    """Bytes still free over all devices of the mesh; on CPU, the host's available memory, rounded down.

    That one differs a little from start to start, and with it would the pool's shape and so every program.
    """
    devices = mesh.devices.flatten().tolist()
    stats = [device.memory_stats() for device in devices]
    if all(s and "bytes_limit" in s for s in stats):
        return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats) * len(devices)
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return _five_bits(int(fields["MemAvailable"].split()[0]) * 1024)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no figure of what is free: half of all


def _five_bits(num: int) -> int:
    """`num` rounded down to its five leading bits: at most 1/16 less."""
    drop = max(num.bit_length() - 5, 0)
    return num >> drop << drop


def copy_pages(pool: jax.Array, pairs: jax.Array, num_layers: int) -> jax.Array:
    """A data shard's pool with page `pairs[:, 1]` a copy of `pairs[:, 0]` (int32 [B, 2]) in every layer.

    (0, 0) is padding.
    """
    base = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * (pool.shape[0] // num_layers)
    source, target = ((base + pairs[None, :, i]).reshape(-1) for i in (0, 1))
    return pool.at[target].set(pool[source], mode="promise_in_bounds")
