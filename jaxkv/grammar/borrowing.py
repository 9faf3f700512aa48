"""Sums over the ranges of `Rows`, in which states borrow a loop head's answers.

A grammar may have 60,000 ranges and 400 heads; all sums are differences of running totals, none goes through a range.
"""

import numpy as np

from jaxkv.grammar.hashing import cell_hash
from jaxkv.grammar.loops import LoopGroup
from jaxkv.grammar.rows import Rows


class Borrowing:
    """The ranges of `rows`, for a vocabulary of `num_ranks` spellings."""

    def __init__(self, rows: Rows, num_ranks: int) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        _, low, high, head = self._ranges = rows.ranges.T.astype(np.int64)
        # (head, rank) as one number, so that all heads are searched at once.
        stride = num_ranks + 1
        self._low, self._high = head * stride + low, head * stride + high
        is_head = np.zeros(len(rows.first), bool)
        is_head[head] = True
        own = np.flatnonzero(is_head[rows.single.origin])
        key = rows.single.origin[own] * np.int64(stride) + rows.single.where[own]
        order = np.argsort(key, kind="stable")  # nearly sorted
        self._own, self._own_key = own[order], key[order]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """uint64 [ranges]: the sum of `values` uint64 [ranks] over the tokens that are allowed in each range."""
        totals = _running(values[self._rows.single.where[self._own]])
        result = totals[np.searchsorted(self._own_key, self._high)] - totals[np.searchsorted(self._own_key, self._low)]
        for group, mine, _ in self._groups():
            totals = _running(np.where(group.template.head_pair >= 0, values, np.uint64(0)))
            result[mine] += totals[self._ranges[2, mine]] - totals[self._ranges[1, mine]]
        return result

    def add_to_columns(self, columns: np.ndarray, weight: np.ndarray, hashes: np.ndarray) -> None:
        """Adds to `columns` uint64 [ranks] what states do that borrow.

        Args:
            columns: changed in place.
            weight: uint64 [N], of each state.
            hashes: uint64, of what each of `rows.single` does.
        """
        state, low, high, _ = self._ranges
        by_low, by_high = np.argsort(self._low), np.argsort(self._high)
        opened, closed = _running(weight[state[by_low]]), _running(weight[state[by_high]])
        borrowed = opened[np.searchsorted(self._low[by_low], self._own_key, side="right")]
        borrowed -= closed[np.searchsorted(self._high[by_high], self._own_key, side="right")]
        np.add.at(columns, self._rows.single.where[self._own], borrowed * hashes[self._own])
        for group, mine, member in self._groups():
            template = group.template
            for pair in np.flatnonzero(template.pairs[:, 0] == 0).tolist():
                after = group.states[member, template.pairs[pair, 1]]
                change = weight[state[mine]] * cell_hash(after, 0)
                steps = np.zeros(self._num_ranks + 1, np.uint64)
                np.add.at(steps, low[mine], change)
                np.subtract.at(steps, high[mine], change)
                places = np.flatnonzero(template.head_pair == pair)
                columns[places] += np.cumsum(steps, dtype=np.uint64)[places]

    def _groups(self) -> "list[tuple[LoopGroup, np.ndarray, np.ndarray]]":
        """(group, its ranges, the loop of each) for each group with ranges."""
        number = np.full(len(self._rows.first), -1, np.int64)
        found: list[tuple[LoopGroup, np.ndarray, np.ndarray]] = []
        for group in self._rows.groups:
            number[:] = -1
            number[group.states[:, 0]] = np.arange(len(group.states))
            member = number[self._ranges[3]]
            mine = np.flatnonzero(member >= 0)
            if len(mine):
                found.append((group, mine, member[mine]))
        return found


def _running(values: np.ndarray) -> np.ndarray:
    """uint64 [n + 1], the sum of the values before each place."""
    totals = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, dtype=np.uint64, out=totals[1:])
    return totals
