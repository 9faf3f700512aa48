"""Masks of all rows that the host matches, made in parallel while the device is busy with the step before."""

import functools

import llguidance
import numpy as np

from jaxkv.grammar.compiled import Matcher
from jaxkv.grammar.host import GuidanceMatcher

HostRow = tuple[Matcher, tuple[int, ...]]  # with stop ids, sorted, which are allowed exactly where the output may end


class HostMasks:
    """Makes masks for the same rows again and again, in the same memory.

    What depends on who they are and not on where they are is kept until others come: it costs as much as llguidance's
    own work, which is 50 us for 32 rows of 128 k tokens that were met before. So would a new array, whose pages have to
    be found and cleared.
    """

    def __init__(self) -> None:
        self._rows: list[HostRow] = []
        self._parsers: list[tuple[llguidance.LLMatcher, int]] = []  # with the row of each
        self._others: list[tuple[Matcher, int]] = []
        self._cells: _StopCells | None = None
        self._masks, self._pointer = np.empty((0, 0), np.uint32), 0  # [rows or more, words]

    def fill(self, rows: list[HostRow]) -> np.ndarray:
        """The masks of all rows: uint32 [num_rows, ceil(V / 32)], good until the next call. No matcher has failed."""
        if rows != self._rows:
            self._take(rows)
        masks = self._masks
        if self._parsers:
            # What llguidance.numpy.fill_next_token_bitmask_par does, without looking the array up every time.
            _executor().unsafe_compute_mask_ptr(self._parsers, self._pointer, masks.shape[1] * 4, len(masks))
        for matcher, row in self._others:
            matcher.fill(masks[row])
        if self._cells is not None:
            self._cells.write(masks)
        return masks[: len(rows)]

    def _take(self, rows: list[HostRow]) -> None:
        self._rows = [*rows]
        self._parsers, self._others = [], []
        for row, (matcher, _) in enumerate(rows):
            if isinstance(matcher, GuidanceMatcher):
                self._parsers.append((matcher.parser, row))
            else:
                self._others.append((matcher, row))
        num_words = rows[0][0].num_words
        changed = {row: (m, stop_ids) for row, (m, stop_ids) in enumerate(rows) if m.end_ids != stop_ids}
        self._cells = _StopCells(changed, num_words) if changed else None
        if len(self._masks) < len(rows) or self._masks.shape[1] != num_words:
            self._masks = np.empty((len(rows), num_words), np.uint32)
            self._pointer = self._masks.ctypes.data


class _StopCells:
    """The words of the masks that have stop ids in them, each once, for rows whose stop ids are not their matcher's.

    Args:
        rows: by number.
        num_words: of a mask.
    """

    def __init__(self, rows: dict[int, HostRow], num_words: int) -> None:
        allowed: dict[tuple[int, int], int] = {}  # by index among `rows`, cell; bits
        cleared: dict[tuple[int, int], int] = {}
        own: list[tuple[int, int]] = []  # by index: cell and bit of an end id of the matcher's own
        self._without: list[tuple[int, Matcher]] = []  # those that have none
        for index, (row, (matcher, stop_ids)) in enumerate(rows.items()):
            for stop in {*matcher.end_ids, *stop_ids}:
                key = index, row * num_words + stop // 32
                cleared[key] = cleared.get(key, 0) | 1 << stop % 32
                allowed[key] = allowed.get(key, 0) | (stop in stop_ids) << stop % 32
            end = next(iter(matcher.end_ids), None)
            own.append((0, 0) if end is None else (row * num_words + end // 32, 1 << end % 32))
            self._without += [(index, matcher)] * (end is None)
        self._index, self._cell = np.array([*cleared], np.intp).reshape(-1, 2).T
        self._kept, self._allowed = ~np.array([*cleared.values()], np.uint32), np.array([*allowed.values()], np.uint32)
        self._end_cell, self._end_bit = np.array([cell for cell, _ in own]), np.array([b for _, b in own], np.uint32)

    def write(self, masks: np.ndarray) -> None:
        """Sets the stop ids' bits in `masks` uint32 [rows, num_words]."""
        words = masks.reshape(-1)
        may_end = words[self._end_cell] & self._end_bit != 0  # a fifth of the time that asking the matchers takes
        for index, matcher in self._without:
            may_end[index] = matcher.is_accepting
        words[self._cell] = words[self._cell] & self._kept | may_end[self._index] * self._allowed


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """One thread pool for all, started when first needed."""
    return llguidance.LLExecutor()
