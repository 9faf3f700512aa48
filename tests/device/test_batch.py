"""Packing: what comes out of the padded arrays is what the plan said, and the bucket tables hold every plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.device import batch
from jaxkv.device.batch import Buckets, fit, make_buckets, pack_mixed, pad_pairs, pad_writes, spread
from jaxkv.plan import Chunk, PageCopy, PageWrite, StepPlan
from jaxkv.shards import Shards

MAX_ROWS, BUDGET = 8, 64
ONE = Shards(1, MAX_ROWS)


def buckets(query_tile: int, **changes: int) -> Buckets:
    sizes = dict(max_rows=MAX_ROWS, token_budget=BUDGET, max_pages=10, max_len=160) | changes
    return make_buckets(query_tile=query_tile, **sizes)


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """Chunks and decode rows that fit the budget, and a query tile."""
    tile = draw(st.sampled_from([1, 4, 8]))
    rows = draw(st.permutations(range(MAX_ROWS)))
    num_chunks = draw(st.integers(1, 3))
    chunks, left = [], BUDGET
    for row in rows[:num_chunks]:
        most = left // tile * tile
        if most == 0:
            break
        length = draw(st.integers(1, most))
        left -= -(-length // tile) * tile
        scores = draw(st.booleans())
        ids = np.array(draw(st.lists(st.integers(0, 9999), min_size=2 * length, max_size=2 * length)), np.int32)
        chunks.append(
            Chunk(
                row=row, start=draw(st.integers(0, 100)), token_ids=ids[:length], samples=draw(st.booleans()),
                prompt_logprobs=3 if scores else None, next_token_ids=ids[length:] if scores else None,
            )
        )  # fmt: skip
    decode = rows[num_chunks : num_chunks + draw(st.integers(0, min(MAX_ROWS - num_chunks, left)))]
    return StepPlan(step_id=1, chunks=tuple(chunks), decode_rows=np.array(decode, np.int32)), tile


@given(plans(), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_pack_mixed_round_trip(case: tuple[StepPlan, int], num_shards: int) -> None:
    """On each data shard its own rows, in plan order; all shards are equally large."""
    plan, tile = case
    shards = Shards(num_shards, MAX_ROWS // num_shards)
    table = buckets(tile, max_rows=shards.rows_each)
    packed = pack_mixed(plan, table, tile, shards)
    num_tiles, num_rows = len(packed.tiles) // num_shards, len(packed.decode_rows) // num_shards
    assert num_tiles in table.mixed_tiles and num_rows in table.mixed_rows
    assert len(packed.token_ids) == len(packed.next_token_ids) == num_shards * num_tiles * tile
    sent = (packed.token_ids, packed.next_token_ids, packed.tiles, packed.decode_rows)
    assert all(array.dtype == np.int32 for array in sent)
    # What a program would give back: who stands at each place of its output.
    rows = packed.decode_rows.reshape(num_shards, num_rows)
    tile_rows = packed.tiles[:, batch.ROW].reshape(num_shards, num_tiles)
    first_row = np.arange(num_shards)[:, None] * shards.rows_each
    output = np.concatenate([rows + first_row, tile_rows + first_row], axis=1).reshape(-1)
    assert output[packed.row_places].tolist() == plan.decode_rows.tolist()
    assert output[packed.end_places].tolist() == [chunk.row for chunk in plan.chunks]
    for shard in range(num_shards):
        mine = [row % shards.rows_each for row in plan.decode_rows.tolist() if shards.of(row) == shard]
        assert rows[shard].tolist() == mine + [shards.rows_each] * (num_rows - len(mine))

    ids, following = packed.token_ids.reshape(-1, tile), packed.next_token_ids.reshape(-1, tile)
    used = np.zeros(len(packed.tiles), bool)
    ends = [0] * num_shards
    for chunk, first, place in zip(plan.chunks, packed.first_tiles.tolist(), packed.end_places.tolist(), strict=True):
        shard = shards.of(chunk.row)
        assert first - shard * num_tiles == ends[shard]
        end = first + -(-len(chunk.token_ids) // tile)
        ends[shard] = end - shard * num_tiles
        assert end - 1 == place - (shard + 1) * num_rows
        used[first:end] = True
        tiles, lengths = packed.tiles[first:end], packed.tiles[first:end, batch.LENGTH]
        assert (tiles[:, batch.ROW] == chunk.row % shards.rows_each).all()
        assert (tiles[:, batch.CHUNK_START] == chunk.start).all()
        assert (lengths[:-1] == tile).all() and 1 <= lengths[-1] <= tile
        positions = np.concatenate([start + np.arange(n) for start, n in tiles[:, [batch.START, batch.LENGTH]]])
        assert positions.tolist() == list(range(chunk.start, chunk.start + len(chunk.token_ids)))
        tokens = np.concatenate([row[:n] for row, n in zip(ids[first:end], lengths, strict=True)])
        assert tokens.tolist() == chunk.token_ids.tolist()
        assert tiles[:, batch.SAMPLES].tolist() == [0] * (end - 1 - first) + [int(chunk.samples)]
        assert (tiles[:, batch.SCORES] == (chunk.prompt_logprobs is not None)).all()
        if chunk.next_token_ids is not None:
            scored = np.concatenate([row[:n] for row, n in zip(following[first:end], lengths, strict=True)])
            assert scored.tolist() == chunk.next_token_ids.tolist()
    padding = packed.tiles[~used]
    assert (padding[:, batch.ROW] == shards.rows_each).all() and not padding[:, batch.START :].any()


def test_arrays_are_fresh() -> None:
    """A dispatched step may still read its arrays: no two steps share one (behaviour 16)."""
    plan = StepPlan(step_id=1, chunks=(Chunk(0, 0, np.arange(5, dtype=np.int32), True),))
    one, two = (pack_mixed(plan, buckets(4), 4, ONE) for _ in range(2))
    arrays = [a for packed in (one, two) for a in vars(packed).values() if isinstance(a, np.ndarray) and a.size]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert not any(np.shares_memory(a, plan.chunks[0].token_ids) for a in arrays)


@pytest.mark.parametrize("query_tile", [1, 7, 32])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 64, 256])
@pytest.mark.parametrize("budget", [300, 2000])
def test_every_plan_fits_a_bucket(max_rows: int, budget: int, query_tile: int) -> None:
    table = buckets(query_tile, max_rows=max_rows, token_budget=budget, max_pages=33, max_len=1000)
    most = dict(
        decode_rows=max_rows, mixed_rows=max_rows, mixed_tiles=-(-budget // query_tile), setups=max_rows,
        page_copies=max_rows, count_tokens=1000,
    )  # fmt: skip
    for name, largest in most.items():
        sizes = getattr(table, name)
        assert list(sizes) == sorted({*sizes}) and sizes[-1] == largest, name
        for size in range(1, largest + 1):
            assert size <= fit(size, sizes) <= largest
    assert table.mixed_rows[0] == 0, "prefill alone computes no decode row"
    assert sum(map(len, vars(table).values())) <= 45


def test_padding() -> None:
    assert spread(np.array([3, 1], np.int32), ONE, (4,)).padded_rows().tolist() == [3, 1, 8, 8]
    assert pad_pairs((PageCopy(0, 4, 5),), ONE, (2,)).tolist() == [[4, 5], [0, 0]]
    assert pad_writes((PageWrite(1, 2, 3),), ONE, (3,)).tolist() == [[1, 2, 3], [8, 0, 0], [8, 0, 0]]
    assert pad_pairs((), ONE, (1,)).tolist() == [[0, 0]] and pad_writes((), ONE, (1,)).tolist() == [[8, 0, 0]]


def test_padding_of_two_shards() -> None:
    two = Shards(2, 4)
    to = spread(np.array([6, 1, 4, 3, 7], np.int32), two, (1, 4))
    assert to.places.tolist() == [4, 0, 5, 1, 6] and to.padded_rows().tolist() == [1, 3, 4, 4, 2, 0, 3, 4]
    assert pad_pairs((PageCopy(5, 8, 9),), two, (1, 4)).tolist() == [[0, 0], [8, 9]]
    assert pad_writes((PageWrite(4, 2, 3), PageWrite(7, 0, 1)), two, (2,)).tolist() == [
        [4, 0, 0], [4, 0, 0], [0, 2, 3], [3, 0, 1],
    ]  # fmt: skip
