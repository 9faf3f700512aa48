"""The only padding code: a `StepPlan` becomes the few fixed-shape arrays a program takes.

Shapes come from short bucket tables, so that a handful of programs serve every batch. Chunks are cut into query tiles
of Q tokens, each of one row; the last tile of a chunk may be partly empty. Arrays are fresh for every step: a
dispatched step may still read them (behaviour 16).
"""

import dataclasses

import numpy as np

from jaxkv.plan import Chunk, PageWrite, StepPlan

ROW, START, LENGTH, SAMPLES, SCORES = range(5)  # columns of Batch.tiles


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that programs are compiled for, ascending."""

    decode_rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]  # decode rows beside chunks; 0 is the pure prefill program
    mixed_tiles: tuple[int, ...]
    setups: tuple[int, ...]
    page_writes: tuple[int, ...]
    page_copies: tuple[int, ...]
    count_tokens: tuple[int, ...]


def make_buckets(
    *, max_rows: int, min_rows: int, token_budget: int, query_tile: int, max_pages: int, max_len: int
) -> Buckets:
    """Powers of two for decode; a coarser table where combinations multiply."""
    max_tiles = -(-token_budget // query_tile)
    most_writes = max_rows * 2 + max_pages
    return Buckets(
        decode_rows=_powers(min_rows, max_rows, 2),
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
    """The smallest bucket that holds `size`; several rounds of the largest are needed beyond the table's end."""
    return next((bucket for bucket in table if bucket >= size), table[-1])


def pad_rows(rows: np.ndarray, size: int, null_row: int) -> np.ndarray:
    """int32 [size]: `rows` followed by the null row."""
    out = np.full(size, null_row, np.int32)
    out[: len(rows)] = rows
    return out


def pad_pairs(pairs: tuple[tuple[int, int], ...], size: int) -> np.ndarray:
    out = np.zeros((size, 2), np.int32)
    if pairs:
        out[: len(pairs)] = pairs
    return out


def pad_writes(writes: tuple[PageWrite, ...], size: int, null_row: int) -> np.ndarray:
    """int32 [size, 3] (row, index, page)."""
    out = np.zeros((size, 3), np.int32)
    out[:, 0] = null_row
    if writes:
        out[: len(writes)] = np.array(writes, np.int32)
    return out


@dataclasses.dataclass(frozen=True)
class MixedBatch:
    """Chunks as query tiles, and decode rows beside them."""

    token_ids: np.ndarray  # int32 [NT * Q]
    next_token_ids: np.ndarray  # int32 [NT * Q]: what prompt_logprobs scores; 0 elsewhere
    tiles: np.ndarray  # int32 [NT, 5], columns above; padding tiles have LENGTH 0 and the null row
    decode_rows: np.ndarray  # int32 [R]
    last_tile: tuple[int, ...]  # host side: the tile in which each chunk ends
    first_tile: tuple[int, ...]  # host side: where each chunk begins


def pack_mixed(plan: StepPlan, buckets: Buckets, query_tile: int, null_row: int) -> MixedBatch:
    """Tiles of all chunks in plan order."""
    counts = [-(-len(chunk.token_ids) // query_tile) for chunk in plan.chunks]
    num_tiles = fit(sum(counts), buckets.mixed_tiles)
    assert sum(counts) <= num_tiles, "the scheduler planned more than the token budget"
    token_ids = np.zeros((num_tiles, query_tile), np.int32)
    next_ids = np.zeros((num_tiles, query_tile), np.int32)
    tiles = np.zeros((num_tiles, 5), np.int32)
    tiles[:, ROW] = null_row
    first = 0
    firsts = []
    for chunk, count in zip(plan.chunks, counts, strict=True):
        _fill(chunk, token_ids[first : first + count], next_ids[first : first + count], tiles[first : first + count])
        firsts.append(first)
        first += count
    rows = pad_rows(plan.decode_rows, fit(len(plan.decode_rows), buckets.mixed_rows), null_row)
    return MixedBatch(
        token_ids=token_ids.reshape(-1),
        next_token_ids=next_ids.reshape(-1),
        tiles=tiles,
        decode_rows=rows,
        last_tile=tuple(f + c - 1 for f, c in zip(firsts, counts, strict=True)),
        first_tile=tuple(firsts),
    )


def _fill(chunk: Chunk, token_ids: np.ndarray, next_ids: np.ndarray, tiles: np.ndarray) -> None:
    count, query_tile = token_ids.shape
    length = len(chunk.token_ids)
    token_ids.reshape(-1)[:length] = chunk.token_ids
    tiles[:, ROW] = chunk.row
    tiles[:, START] = chunk.start + np.arange(count) * query_tile
    tiles[:, LENGTH] = np.minimum(length - np.arange(count) * query_tile, query_tile)
    tiles[-1, SAMPLES] = chunk.samples
    if chunk.next_token_ids is not None:
        tiles[:, SCORES] = 1
        next_ids.reshape(-1)[:length] = chunk.next_token_ids
