"""Pages leave and enter a pool by id: the one mechanism for lower tiers and for moving requests between pools.

Outside the pool a page is *canonical*, whatever layout, back end or split over devices it has inside: `[L, 2, K, S, D]`
of the K/V dtype's bits, each KV head of the model once. So a page written by one layout can be read by another.

Axis letters: L layers, K KV heads of the checkpoint, C copies of each in the pool, S tokens per page, D head dim, B pages
moved at once.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxkv.device.kv_pool import PoolSpec
from jaxkv.plan import PageAt
from jaxkv.sharding import spec
from jaxkv.shards import Shards

MOVE_BYTES = 64 << 20  # most that one call moves, for a shard: what it needs beside the pool
BITS = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by the bytes of a value


def sizes(page_bytes: int) -> tuple[int, ...]:
    """Pages a call moves: 1, 8 and 64, as far as they stay below `MOVE_BYTES`."""
    return tuple(size for size in (1, 8, 64) if size == 1 or size * page_bytes <= MOVE_BYTES)


def canonical_shape(pool: PoolSpec) -> tuple[int, int, int, int, int]:
    """`[L, 2, K, S, D]` of a page outside the pool."""
    return pool.num_layers, 2, pool.num_kv_heads // pool.kv_copies, pool.page_size, pool.head_dim


def page_bytes(pool: PoolSpec) -> int:
    """Of a page outside the pool."""
    return math.prod(canonical_shape(pool)) * canonical_dtype(pool).itemsize


def canonical_dtype(pool: PoolSpec) -> np.dtype:
    """Unsigned integers: the bits of the values."""
    return BITS[np.dtype(pool.dtype).itemsize]


def read_pages(pool: jax.Array, pages: jax.Array, of: PoolSpec) -> jax.Array:
    """Pages `pages` (int32 [B]) of a data shard's pool as `[B, L, 2, K, S, D]` bits."""
    stored = pool[_places(pool, pages, of.num_layers)]  # [B * L, planes, K * C, S, lanes]
    # Bits before anything else: XLA:CPU pads bfloat16 as float32, and between devices picking heads may become a sum; both
    # would lose denormals, the second -0.0 too.
    bits = jax.lax.bitcast_convert_type(stored, canonical_dtype(of))
    kv = of.unpack(bits, of.head_dim)[:, :, :: of.kv_copies]
    return kv.reshape(len(pages), of.num_layers, *kv.shape[1:])


def write_pages(pool: jax.Array, pages: jax.Array, kv: jax.Array, of: PoolSpec) -> jax.Array:
    """The inverse: a data shard's pool with `kv` `[B, L, 2, K, S, D]` bits in pages `pages`; the null page is padding."""
    bits = jnp.repeat(kv.reshape(-1, *kv.shape[2:]), of.kv_copies, axis=2)
    stored = jax.lax.bitcast_convert_type(of.pack(bits), pool.dtype)
    return pool.at[_places(pool, pages, of.num_layers)].set(stored, mode="promise_in_bounds")


def _places(pool: jax.Array, pages: jax.Array, num_layers: int) -> jax.Array:
    """int32 [B * L]: where each page's layers lie."""
    base = jnp.arange(num_layers, dtype=jnp.int32) * (pool.shape[0] // num_layers)
    return (pages[:, None] + base[None, :]).reshape(-1)


def axes(pool: PoolSpec) -> tuple[str | None, ...]:
    """Logical axes of `[B, L, 2, K, S, D]`: heads that the pool holds copies of are too few to be split."""
    return ("pages", None, None, "kv_heads" if pool.kv_copies == 1 else None, None, None)


def host_sharding(pool: PoolSpec, mesh: Mesh) -> NamedSharding:
    """Where `read_pages` puts what it reads: pinned host memory, where devices have memory of their own."""
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    is_apart = mesh.devices.flat[0].platform != "cpu" and "pinned_host" in kinds
    return NamedSharding(mesh, spec(*axes(pool)), memory_kind="pinned_host" if is_apart else None)


@dataclasses.dataclass(frozen=True)
class PagesInFlight:
    """Pages on their way to the host."""

    array: jax.Array  # [num_shards * size, L, 2, K, S, D] bits
    places: np.ndarray  # intp [num]: of the pages asked for, in order

    def result(self) -> np.ndarray:
        """Waits for them: `[num, L, 2, K, S, D]` bits, memory of its own."""
        return np.asarray(self.array)[self.places]


def spread_pages(pages: Sequence[PageAt], shards: Shards, table: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pages as a call takes them: int32 [num_shards * size], page 0 as padding, and where each one stands there."""
    shard = np.array([page.shard for page in pages], np.intp)
    counts = np.bincount(shard, minlength=shards.num)
    size = next(size for size in table if size >= counts.max(initial=0))
    order = np.argsort(shard, kind="stable")
    places = np.empty(len(pages), np.intp)
    first = np.arange(shards.num) * size - (np.cumsum(counts) - counts)
    places[order] = np.arange(len(pages)) + np.repeat(first, counts)
    ids = np.zeros(shards.num * size, np.int32)
    ids[places] = [page.page for page in pages]
    return ids, places
