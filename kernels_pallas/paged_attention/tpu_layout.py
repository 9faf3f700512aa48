"""How a page looks on TPUs, which tile sizes a kernel gets, what it does not take, and what it costs.

Axis letters as in `reference`.

A register holds 8 x 128 values and memory is tiled alike, so D is stored as a multiple of 128 lanes. XLA would pick
another layout for a pool of narrower heads, and copy all of it in and out at each call of the kernel.

- D = 128, 256, ...: `[L * P, 2, K, S, D]`, as everywhere.
- D <= 64: `[L * P, 1, K, S, 128]`, K in the first D lanes and V in the last: nothing is wasted at 64. Neither are the
  two taken apart again: queries with zeros beyond D ignore V, and of the weighted sum of both the last D lanes are kept.
- D = 96 and the like: `[L * P, 2, K, S, 128]`, zeros beyond D: 4/3 of the memory at 96.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.paged_attention import tuned

LANES = 128
POOL_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn))
DTYPES = POOL_DTYPES[:2]  # of q, k, v


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What the array of a pool of `dtype` holds: the values as they are."""
    return jnp.dtype(dtype)


def storage_shape(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """Shape of the array of a pool of `num_pages` (all layers') pages."""
    planes = 1 if 2 * head_dim <= LANES else 2
    return (num_pages, planes, num_kv_heads, page_size, _up(head_dim, LANES))


def pack(kv: jax.Array) -> jax.Array:
    """`[., 2, ..., D]`, pages or tokens, as they are stored: `[., planes, ..., lanes]`."""
    head_dim = kv.shape[-1]
    if 2 * head_dim > LANES:
        return jnp.pad(kv, ((0, 0),) * (kv.ndim - 1) + ((0, -head_dim % LANES),))
    gap = jnp.zeros((*kv[:, :1].shape[:-1], LANES - 2 * head_dim), kv.dtype)
    return jnp.concatenate([kv[:, :1], gap, kv[:, 1:]], axis=-1)


def unpack(stored: jax.Array, head_dim: int) -> jax.Array:
    """The inverse of `pack`."""
    if stored.shape[1] == 2:
        return stored[..., :head_dim]
    return jnp.concatenate([stored[..., :head_dim], stored[..., -head_dim:]], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The shapes of one part of a call: all that decides about tile sizes, memory and cost."""

    num_tiles: int  # N
    width: int  # Q
    table_pages: int  # M
    num_heads: int  # H, of this device
    num_kv_heads: int  # K, of this device
    head_dim: int  # D
    page_size: int  # S
    dtype: jnp.dtype  # of q, k, v
    pool_dtype: jnp.dtype

    @property
    def groups(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """GQ: rows of a KV head's matmuls."""
        return self.groups * self.width

    @property
    def page_bytes(self) -> int:
        return math.prod(storage_shape(1, self.num_kv_heads, self.page_size, self.head_dim)) * self.pool_dtype.itemsize

    @property
    def tile_pages(self) -> int:
        """Pages of a key tile."""
        most = min(tuned.TPU_KEY_TILE // self.page_size, tuned.TPU_KV_BYTES // (2 * self.page_bytes), self.table_pages)
        return max(most, 1)

    @property
    def heads_together(self) -> int:
        """KV heads whose matmuls are issued together; divides K."""
        most = max(tuned.TPU_ROWS_TOGETHER // _up(self.rows, 8), 1)
        return max(k for k in range(1, min(most, self.num_kv_heads) + 1) if self.num_kv_heads % k == 0)

    @property
    def unit(self) -> int:
        """Tokens of a write unit: what fills a tile of memory (16 rows of bf16), or a page where that is not whole tiles.
        Copies of less do not compile."""
        rows = 32 // self.pool_dtype.itemsize
        return self.page_size if self.page_size % rows else rows

    @property
    def num_units(self) -> int:
        """Write units that a tile's new tokens may touch."""
        return pl.cdiv(self.width + self.unit - 1, self.unit)

    @property
    def dot_dtype(self) -> jnp.dtype:
        """Of the matmuls' operands: bf16 holds int8 and float8 exactly."""
        return jnp.dtype(jnp.float32) if jnp.float32 in (self.dtype, self.pool_dtype) else self.dtype

    @property
    def vmem_bytes(self) -> int:
        """At most what the kernel needs of VMEM: buffers twice, as Pallas fetches the next while it works on one."""
        _, planes, heads, _, lanes = storage_shape(1, self.num_kv_heads, self.page_size, self.head_dim)
        rows, keys = _up(self.rows, 16), self.tile_pages * self.page_size
        buffers = 2 * self.tile_pages * self.page_bytes
        # One token of new K/V takes a whole tile of memory, so units count as if they were full.
        buffers += 2 * planes * heads * self.num_units * _up(self.unit, 32) * lanes * self.pool_dtype.itemsize
        buffers += 2 * 2 * heads * rows * lanes * self.dtype.itemsize  # q and out
        state = heads * rows * (lanes + 3 * LANES) * 4  # acc; peak, total and sinks take a lane of 128 each
        values = (
            self.heads_together * keys * (3 * lanes + 4 * rows) * 4
        )  # K, V, scores, weights, masks that are spilled
        return buffers + state + values

    @property
    def smem_bytes(self) -> int:
        """What the kernel needs of SMEM: the page tables of a tile and the next one, twice as in VMEM, and two numbers a tile."""
        return 4 * (4 * _up(self.table_pages, LANES) + 2 * self.num_tiles)


def unsupported(problem: Problem) -> str | None:
    """Why the kernel does not take the problem, and the way out; None if it does."""
    if problem.num_heads % problem.num_kv_heads:
        return f"num_heads={problem.num_heads} is not a multiple of num_kv_heads={problem.num_kv_heads}"
    if problem.dtype not in DTYPES:
        return f"dtype={problem.dtype}: the kernel takes bfloat16 and float32; cast the activations"
    if problem.pool_dtype not in POOL_DTYPES:
        return (
            f"a pool of {problem.pool_dtype}: the kernel takes {', '.join(map(str, POOL_DTYPES))}; choose one of them"
        )
    if problem.page_size % 8:  # 12 does not compile; fewer than 8 would be stored as 8
        return f"page_size={problem.page_size} is not a multiple of 8; use 16, 32, 64 or 128"
    if problem.smem_bytes > tuned.TPU_SMEM_BYTES:
        return (
            f"table_pages={problem.table_pages} pages a row need {problem.smem_bytes >> 10} KiB of SMEM of "
            f"{tuned.TPU_SMEM_BYTES >> 10}; use larger pages, or a smaller max_len"
        )
    if problem.vmem_bytes > tuned.TPU_VMEM_BYTES:
        return (
            f"width={problem.width} queries of {problem.groups} x {problem.num_kv_heads} heads of {problem.head_dim} with "
            f"page_size={problem.page_size} need {problem.vmem_bytes >> 20} MiB of VMEM of {tuned.TPU_VMEM_BYTES >> 20}; "
            "use narrower tiles, smaller pages, or shard the KV heads over more devices"
        )
    return None


def cost(problem: Problem, kv_len: float | None = None) -> pl.CostEstimate:
    """What a call costs when its tiles have `kv_len` keys on average: at most as many as their tables have places for, which
    is what the compiler is told, as nothing else is known before the call."""
    if kv_len is None:
        kv_len = problem.table_pages * problem.page_size
    tokens = problem.num_tiles * problem.width
    stored = problem.page_bytes // problem.page_size
    read = problem.num_tiles * math.ceil(kv_len / problem.page_size) * problem.page_bytes
    written = problem.num_tiles * problem.num_units * problem.unit * stored
    lanes = _up(problem.head_dim, LANES)
    return pl.CostEstimate(
        flops=int(4 * tokens * problem.num_heads * lanes * kv_len),
        transcendentals=int(tokens * problem.num_heads * kv_len),
        bytes_accessed=read + 2 * written + 2 * tokens * problem.num_heads * lanes * problem.dtype.itemsize,
    )


def _up(x: int, multiple: int) -> int:
    return pl.cdiv(x, multiple) * multiple
