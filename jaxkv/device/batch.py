"""The only padding code: a `StepPlan` becomes the few fixed-shape arrays a program takes.

Shapes come from short bucket tables, so that a handful of programs serve every batch. Every data shard gets as many
entries as the fullest one needs, on the first axis, shard after shard; rows become rows of their shard, whose null row
is `shards.rows_each`. Chunks are cut into query tiles
of Q tokens, each of one row; the last tile of a chunk may be partly empty. Arrays are fresh for every step: a
dispatched step may still read them (behaviour 16).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.plan import Chunk, PageCopy, PageWrite, StepPlan
from jaxkv.shards import Shards

ROW, START, LENGTH, SAMPLES, SCORES, CHUNK_START = range(TILE_COLUMNS := 6)  # of MixedBatch.tiles


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that programs are compiled for, ascending; each is one data shard's."""

    decode_rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]  # decode rows beside chunks; 0 is the pure prefill program
    mixed_tiles: tuple[int, ...]
    setups: tuple[int, ...]
    page_writes: tuple[int, ...]
    page_copies: tuple[int, ...]
    count_tokens: tuple[int, ...]
    page_moves: tuple[int, ...] = ()  # pages read or written at once; none where there are no lower tiers


def make_buckets(*, max_rows: int, token_budget: int, query_tile: int, max_pages: int, max_len: int) -> Buckets:
    """Powers of two for decode; a coarser table where combinations multiply. `max_rows` is a data shard's."""
    max_tiles = -(-token_budget // query_tile)
    most_writes = max_rows * 2 + max_pages
    return Buckets(
        decode_rows=_powers(1, max_rows, 2),
        mixed_rows=(0, *_powers(4, max_rows, 4)),
        mixed_tiles=_powers(1, max_tiles, 4),
        setups=_powers(1, max_rows, 8),
        page_writes=_powers(16, most_writes, 8),
        page_copies=_powers(1, max_rows, 8),
        count_tokens=_powers(256, max_len, 8),
    )


def _powers(first: int, last: int, ratio: int) -> tuple[int, ...]:
    """first, first * ratio, ... and `last` itself; never beyond it."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= ratio
    return (*sizes, last)


def fit(size: int, table: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`, or the largest one."""
    return next((bucket for bucket in table if bucket >= size), table[-1])


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where items stand in arrays of `size` entries a data shard."""

    shards: Shards
    size: int
    places: np.ndarray  # intp [num_items]: in order within each shard
    rows: np.ndarray  # int [num_items]: of the shard

    def full(self, value: int, *inner: int) -> np.ndarray:
        """int32 [num_shards * size, *inner]"""
        return np.full((self.shards.num * self.size, *inner), value, np.int32)

    def padded_rows(self) -> np.ndarray:
        """int32 [num_shards * size]: the items' rows, and null rows."""
        out = self.full(self.shards.rows_each)
        out[self.places] = self.rows
        return out


def spread(rows: np.ndarray, shards: Shards, table: tuple[int, ...]) -> Spread:
    """Gives each item of `rows` int [num_items] an entry on its row's shard; the size is a bucket of `table`."""
    if shards.num == 1:  # the common case for next to nothing
        size = fit(len(rows), table)
        assert len(rows) <= size, "more than the scheduler may plan"
        return Spread(shards, size, np.arange(len(rows)), rows)
    shard, local = np.divmod(rows, shards.rows_each)
    counts = np.bincount(shard, minlength=shards.num)
    size = fit(int(counts.max()), table)
    assert counts.max() <= size, "more than the scheduler may plan"
    first = np.arange(shards.num) * size - (np.cumsum(counts) - counts)
    places = np.empty(len(rows), np.intp)
    places[np.argsort(shard, kind="stable")] = np.arange(len(rows)) + np.repeat(first, counts)
    return Spread(shards, size, places, local)


def _named_rows(items: Sequence[PageWrite | PageCopy]) -> np.ndarray:
    """int32 [num_items, 3], the row first."""
    return np.array(items, np.int32).reshape(-1, 3)


def pad_pairs(copies: Sequence[PageCopy], shards: Shards, table: tuple[int, ...]) -> np.ndarray:
    """int32 [num_shards * size, 2] (source, target); the null page onto itself is padding."""
    items = _named_rows(copies)
    to = spread(items[:, 0], shards, table)
    out = to.full(0, 2)
    out[to.places] = items[:, 1:]
    return out


def pad_writes(writes: Sequence[PageWrite], shards: Shards, table: tuple[int, ...]) -> np.ndarray:
    """int32 [num_shards * size, 3] (row, index, page)."""
    items = _named_rows(writes)
    to = spread(items[:, 0], shards, table)
    out = to.full(0, 3)
    out[:, 0] = to.padded_rows()
    out[to.places, 1:] = items[:, 1:]
    return out


@dataclasses.dataclass(frozen=True)
class MixedBatch:
    """Chunks as query tiles, and decode rows beside them; N tiles and R rows over all data shards, shard after shard."""

    token_ids: np.ndarray  # int32 [N * Q]
    next_token_ids: np.ndarray  # int32 [N * Q]: what prompt_logprobs scores; 0 elsewhere
    tiles: np.ndarray  # int32 [N, 6], columns above; padding tiles have LENGTH 0 and the null row
    decode_rows: np.ndarray  # int32 [R]
    # Host side: where the plan's items are found in the program's output, which has a shard's rows, then its tiles.
    row_places: np.ndarray  # intp [num_decode_rows]
    end_places: np.ndarray  # intp [num_chunks]: of the tile in which each chunk ends
    first_tiles: np.ndarray  # intp [num_chunks]: among all shards' tiles, where each chunk begins


def pack_mixed(plan: StepPlan, buckets: Buckets, query_tile: int, shards: Shards) -> MixedBatch:
    """Tiles of all chunks, on each shard in plan order."""
    counts = np.array([-(-len(chunk.token_ids) // query_tile) for chunk in plan.chunks])
    chunk_rows = np.repeat(np.array([chunk.row for chunk in plan.chunks]), counts)
    to = spread(chunk_rows, shards, buckets.mixed_tiles)
    token_ids, next_ids, tiles = to.full(0, query_tile), to.full(0, query_tile), to.full(0, TILE_COLUMNS)
    tiles[:, ROW] = to.padded_rows()
    ends = np.cumsum(counts)
    firsts = to.places[ends - counts]
    for chunk, first, count in zip(plan.chunks, firsts.tolist(), counts.tolist(), strict=True):
        part = slice(first, first + count)
        _fill(chunk, token_ids[part], next_ids[part], tiles[part])
    rows = spread(plan.decode_rows, shards, buckets.mixed_rows)
    return MixedBatch(
        token_ids=token_ids.reshape(-1),
        next_token_ids=next_ids.reshape(-1),
        tiles=tiles,
        decode_rows=rows.padded_rows(),
        row_places=rows.places + rows.places // max(rows.size, 1) * to.size,
        end_places=firsts + counts - 1 + (firsts // to.size + 1) * rows.size,
        first_tiles=firsts,
    )


def _fill(chunk: Chunk, token_ids: np.ndarray, next_ids: np.ndarray, tiles: np.ndarray) -> None:
    count, query_tile = token_ids.shape
    length = len(chunk.token_ids)
    token_ids.reshape(-1)[:length] = chunk.token_ids
    tiles[:, START] = chunk.start + np.arange(count) * query_tile
    tiles[:, LENGTH] = np.minimum(length - np.arange(count) * query_tile, query_tile)
    tiles[:, CHUNK_START] = chunk.start
    tiles[-1, SAMPLES] = chunk.samples
    if chunk.next_token_ids is not None:
        tiles[:, SCORES] = 1
        next_ids.reshape(-1)[:length] = chunk.next_token_ids
