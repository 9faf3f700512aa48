"""The running sequences as columns: one array entry per row, so that a step costs numpy calls, not Python per row.

At 256 rows a step over Python objects costs a millisecond, over these columns some 50 microseconds. A sequence checks
in with `place` and out with `remove`; `Sequence` reads its numbers through the columns in between.

Columns, all indexed by row:

    known      tokens known: prompt and output
    computed   leading positions whose K/V are computed by steps dispatched so far
    limit      the most positions that ever need K/V: the last token of a full sequence needs none
    capacity   positions its pages can hold
    last_step  newest step that computes for it
    decoding   the device row holds its last token: a decode step needs nothing from the host
    watched    see `Sequence`
    on_host    see `Sequence.is_on_host`
    may_jump   see `Sequence.may_jump`
    leaves_at  position from which on pages may have left windows that were not given back
    epoch      changes whenever the row changes hands, so that a late result finds out
"""

import heapq
from collections.abc import Iterable

import numpy as np

from jaxkv.cache.prefix_cache import TOKEN_DTYPE
from jaxkv.schedule.sequence import Sequence
from jaxkv.shards import Shards

NEVER = np.iinfo(np.int64).max


class DecodeBatch:
    """Rows that decode in the next step, with their numbers gathered once.

    Args:
        columns: where the numbers come from.
        rows: intp [num], in request order.
    """

    def __init__(self, columns: "Rows", rows: np.ndarray) -> None:
        self._columns = columns
        self.rows = rows
        self._computed, self._limit = columns.computed[rows], columns.limit[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: np.ndarray) -> "DecodeBatch":
        """The batch of the rows where `keep` (bool [num])."""
        return self if keep.all() else DecodeBatch(self._columns, self.rows[keep])

    def with_room(self) -> "DecodeBatch":
        """The batch of the rows that are not full (full ones wait for their last tokens to come back)."""
        return self.select(self._computed < self._limit)

    def max_remaining(self) -> int:
        """Most tokens that any of the rows can still make."""
        return int((self._limit - self._computed).max(initial=0))

    def pages_lacking(self, num_steps: int, page_size: int) -> np.ndarray:
        """Pages each row needs on top of its own to decode `num_steps` tokens: int64 [num]."""
        # A step at position p writes the K/V of p and samples p + 1; the last token sampled has no K/V yet.
        lacking = self._end(num_steps) - self._columns.capacity[self.rows]
        return np.maximum(lacking + (page_size - 1), 0) // page_size

    def advance(self, num_steps: int, step_id: int) -> np.ndarray:
        """Books the step; returns the tokens each row makes unless the device finds it done: int64 [num]."""
        end = self._end(num_steps)
        self._columns.computed[self.rows] = end
        self._columns.last_step[self.rows] = step_id
        return end - self._computed

    def _end(self, num_steps: int) -> np.ndarray:
        return np.minimum(self._computed + num_steps, self._limit)


class Rows:
    """Places for running sequences.

    Args:
        shards: how many there are on each data shard.
        max_len: tokens a sequence may hold.
        page_size: tokens a page holds.
        max_steps: tokens a row can make in one step.
    """

    def __init__(self, shards: Shards, *, max_len: int, page_size: int, max_steps: int) -> None:
        max_rows = shards.num_rows
        self.shards = shards
        self._page_size = page_size
        self._free = [list(shards.rows_of(shard)) for shard in range(shards.num)]  # heaps: the lowest row first
        self._step = np.arange(max_steps)
        self.sequences = np.full(max_rows, None, object)
        # A step may write past a row's end before its tokens are cut, never past max_len + max_steps.
        # Untouched memory costs nothing: the operating system maps it on first use.
        self.tokens = np.empty((max_rows, max_len + max_steps), TOKEN_DTYPE)
        # Token id -> running sequences that it may stop: a look-up, where a comparison of every token with every stop
        # id of its row would cost 20 us. Ids beyond the last stop id fall on the last entry, which is always 0.
        self._num_stopping = np.zeros(1, np.int32)
        self.known, self.computed, self.limit, self.capacity = np.zeros((4, max_rows), np.int64)
        self.last_step, self.epoch, self._arrival = np.zeros((3, max_rows), np.int64)
        self.leaves_at = np.full(max_rows, NEVER)
        self.decoding, self.watched, self.on_host, self.may_jump = np.zeros((4, max_rows), bool)
        self.num_on_host = self.num_may_jump = 0  # rows in use that are, or do
        self._decoding_rows: np.ndarray | None = None  # intp [num], in request order; None: must be made again

    @property
    def any_free(self) -> bool:
        return any(self._free)

    @property
    def num_placed(self) -> int:
        return self.shards.num_rows - sum(map(len, self._free))

    def num_free_on(self, shard: int) -> int:
        return len(self._free[shard])

    def num_placed_on(self, shard: int) -> int:
        return self.shards.rows_each - len(self._free[shard])

    def placed(self) -> list[Sequence]:
        """All running sequences, by row."""
        return [seq for seq in self.sequences if seq is not None]

    def placed_on(self, shard: int) -> list[Sequence]:
        """The running sequences of a data shard, by row."""
        return [seq for seq in self.sequences[self.shards.rows_of(shard)] if seq is not None]

    def place(self, seq: Sequence, shard: int, num_computed: int) -> int:
        """Checks a sequence in; returns its row. Its pages must be there already."""
        row = heapq.heappop(self._free[shard])
        num_tokens = seq.num_tokens
        self.tokens[row, :num_tokens] = seq.tokens[:num_tokens]
        self.known[row], self.computed[row] = num_tokens, num_computed
        self.capacity[row] = min(map(len, seq.tables)) * self._page_size
        self.leaves_at[row] = 0
        self.limit[row] = seq.max_total_len - 1
        self.last_step[row] = seq.last_step_id
        self._arrival[row] = seq.rank[1]
        self.watched[row], self.on_host[row] = seq.watched, seq.is_on_host
        self.may_jump[row] = seq.may_jump
        self.num_on_host += seq.is_on_host
        self.num_may_jump += seq.may_jump
        self.epoch[row] += 1
        self._count_stop_ids(seq.request.stop_ids, 1)
        self.sequences[row] = seq
        seq.tokens, seq.row, seq.rows = self.tokens[row], row, self
        return row

    def remove(self, seq: Sequence) -> None:
        """Checks a sequence out; its row is free at once (device steps run in order)."""
        row, num_tokens = seq.row, seq.num_tokens
        seq.last_step_id = int(self.last_step[row])
        seq.tokens, seq.row, seq.rows = seq.tokens[:num_tokens].copy(), -1, None
        seq.num_tokens = num_tokens
        self.sequences[row] = None
        self.known[row] = self.computed[row] = 0
        self.leaves_at[row] = NEVER
        self.num_on_host -= int(self.on_host[row])
        self.num_may_jump -= int(self.may_jump[row])
        self.on_host[row] = self.may_jump[row] = False
        self.epoch[row] += 1
        self._count_stop_ids(seq.request.stop_ids, -1)
        self._set_decoding(row, False)
        heapq.heappush(self._free[self.shards.of(row)], row)

    def leaving(self) -> Iterable[tuple[int, int]]:
        """Rows whose pages may leave windows now, each with the first position whose view counts.

        That is a page's worth before the first that is not known or not computed: whoever goes on from the last full page of
        the tokens finds what it sees.
        """
        start = np.minimum(self.known, self.computed) - self._page_size
        rows = np.flatnonzero(start >= self.leaves_at)
        return zip(rows.tolist(), start[rows].tolist(), strict=True)

    def start_decoding(self, row: int) -> None:
        """The row's last chunk is in a plan: from the next one on it decodes."""
        self._set_decoding(row, True)

    def behind(self) -> list[Sequence]:
        """Running sequences that need a chunk, best rank first."""
        rows = np.flatnonzero(~self.decoding & (self.computed < self.known))
        return sorted(self.sequences[rows], key=lambda seq: seq.rank)

    def decode_batch(self) -> DecodeBatch:
        """Rows that can decode, in request order."""
        if self._decoding_rows is None:
            rows = np.flatnonzero(self.decoding)
            self._decoding_rows = rows[np.argsort(self._arrival[rows])]
        return DecodeBatch(self, self._decoding_rows).with_room()

    def without_awaited(self, batch: DecodeBatch, committed_id: int) -> DecodeBatch:
        """The batch without rows whose next mask needs tokens that steps after `committed_id` make."""
        if not self.num_on_host:
            return batch
        return batch.select(~(self.on_host[batch.rows] & (self.last_step[batch.rows] > committed_id)))

    def append(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Makes the tokens of a decode step known, except in rows that they may end.

        Args:
            rows: intp [num].
            token_ids: int32 [num, num_steps].
            counts: int [num]: leading tokens that are meant.

        Returns:
            bool [num]: the tokens may end the row, which was left as it is; `Sequence.judge` says after which token.
        """
        start = self.known[rows]
        end = start + counts
        positions = start[:, None] + self._step[: token_ids.shape[1]]
        self.tokens[rows[:, None], positions] = token_ids  # beyond `counts` they are overwritten or never read
        ended = end > self.limit[rows]
        may_stop = self._num_stopping.take(token_ids, mode="clip") > 0
        if may_stop.any():
            ended |= may_stop.any(1)
        self.known[rows] = np.where(ended, start, end) if ended.any() else end
        return ended

    def check(self) -> None:
        """Asserts that the look-up of stop ids counts those of placed sequences; for tests."""
        assert self._num_stopping.sum() == sum(len(seq.request.stop_ids) for seq in self.placed())
        assert self._num_stopping.min() >= 0 and self._num_stopping[-1] == 0

    def _set_decoding(self, row: int, decoding: bool) -> None:
        if self.decoding[row] != decoding:
            self.decoding[row] = decoding
            self._decoding_rows = None

    def _count_stop_ids(self, stop_ids: tuple[int, ...], change: int) -> None:
        for token in stop_ids:
            if token >= len(self._num_stopping) - 1:
                self._num_stopping = np.pad(self._num_stopping, (0, token + 2 - len(self._num_stopping)))
            self._num_stopping[token] += change
