"""How paged attention on Hopper is cut into blocks, and which keys a block visits; `gpu_attend` says what it does with them.

Axis letters as in `gpu_attend`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 64  # of a warpgroup's wgmma
CHUNK = 64  # keys of an iteration: score tiles of 64 x 64 float32 are 32 registers a thread
ALIGN = 8  # tokens at whose multiples TMA fills what wgmma reads
NEG_INF = -1e30  # finite: an all-masked row must not produce NaN
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """What a block's queries see, chunk by chunk: the keys that were in the pool before the call, in chunks that start at
    multiples of CHUNK, then those that the call brings, from where TMA can read them; int32, all of one shape."""

    first: Any  # position of the first key seen
    first_new: Any  # of the first chunk of the call's, some positions before the first of these that is seen
    row_start: Any  # of the first key that the call brings, seen or not
    end: Any  # of the tile's last token, plus one
    num_old: Any  # chunks from the pool
    num_chunks: Any  # of both kinds; 0 if all queries are padding

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Position of a chunk's first key; of the first of its kind that is seen; where these end. The rest is not the row's."""
        old = index < self.num_old
        begin_old = (self.first // CHUNK + index) * CHUNK
        begin_new = self.first_new + (index - self.num_old) * CHUNK
        first = jnp.where(old, self.first, jnp.maximum(self.first, self.row_start))
        return jnp.where(old, begin_old, begin_new), first, jnp.where(old, self.row_start, self.end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a call is cut into blocks and how a block works; static."""

    width: int  # Q
    groups: int  # G
    warpgroups: int  # that compute, ROWS queries each
    splits: int  # X, at most
    min_chunks: int  # of a split; shorter rows have fewer splits
    stages: int  # chunks in flight
    write_tokens: int  # that a block stores at a time
    scale: float
    soft_cap: float | None
    windowed: bool

    @property
    def block_rows(self) -> int:
        return self.warpgroups * ROWS

    def keys(self, start: Any, num_tokens: Any, row_start: Any, tile: Any, block: Any, window: Any) -> Keys:
        """What the queries of a tile's block see."""
        first_query = block * self.block_rows // self.groups
        last_query = jnp.minimum(((block + 1) * self.block_rows - 1) // self.groups, num_tokens - 1)
        first = jnp.maximum(start + first_query - window + 1, 0) if self.windowed else jnp.zeros_like(start)
        first_new = jnp.maximum(first, row_start)
        first_new -= (tile * self.width + first_new - start) % ALIGN
        num_old = jnp.where(first < row_start, (row_start - 1) // CHUNK + 1 - first // CHUNK, 0)
        num_new = (start + last_query - first_new) // CHUNK + 1
        return Keys(
            first=first, first_new=first_new, row_start=row_start, end=start + num_tokens, num_old=num_old,
            num_chunks=jnp.where(first_query < num_tokens, num_old + num_new, 0),
        )  # fmt: skip

    def chunks_per_split(self, num_chunks: Any) -> Any:
        return jnp.maximum((num_chunks + self.splits - 1) // self.splits, self.min_chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one block does; int32 []."""

    tile: Any
    head: Any
    split: Any
    width: int  # Q
    first_row: Any  # of the block's queries, in B
    start: Any  # position of the tile's first token
    keys: Keys
    first_chunk: Any  # of the split
    num_chunks: Any  # 0 if the split has no keys or the block no queries
    writes: Any  # bool []: the block that has the last chunk stores the K/V of its queries' tokens:
    write_from: Any  # of the tile's tokens
    write_end: Any
    layer: Any  # its null page
    window: Any

    def token_at(self, position: Any) -> Any:
        """Which of the call's tokens is the row's at that position."""
        return self.tile * self.width + position - self.start


def find_job(start: Any, num_tokens: Any, row_start: Any, scalars: Any, plan: Plan) -> Job:
    """The calling block's, from references to the tiles' arrays."""
    tile, index = jax.lax.axis_index("tile"), jax.lax.axis_index("block")
    block, split = index // plan.splits, index % plan.splits
    window = scalars[1]
    keys = plan.keys(start[tile], num_tokens[tile], row_start[tile], tile, block, window)
    per_split = plan.chunks_per_split(keys.num_chunks)
    left = keys.num_chunks - split * per_split
    return Job(
        tile=tile,
        head=jax.lax.axis_index("head"),
        split=split,
        first_row=block * plan.block_rows,
        start=start[tile],
        width=plan.width,
        keys=keys,
        first_chunk=split * per_split,
        num_chunks=jnp.minimum(left, per_split),
        writes=(left > 0) & (left <= per_split),
        write_from=block * plan.block_rows // plan.groups,
        write_end=jnp.minimum((block + 1) * plan.block_rows // plan.groups, num_tokens[tile]),
        layer=scalars[0],
        window=window,
    )
