"""Rows of a transition table without the dead ends on both sides, one after another: how the device holds them.

Classes are in the order of their tokens' bytes, so what a state allows stands close together; over real schemas this is
a third of the cells. A cell outside of a row's own is another row's: nobody looks at it, for the mask forbids its class.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """Attributes:
    first: int32 [S], `next[first[state] + class]` is the state after a token of a class that `state` allows.
    next: uint16 [cells].
    count: int16 [cells], what it does to the counter; None if nothing is counted.
    """

    first: np.ndarray
    next: np.ndarray
    count: np.ndarray | None

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.next.nbytes + (0 if self.count is None else self.count.nbytes)


def pack_rows(next: np.ndarray, count: np.ndarray | None) -> PackedRows:
    """Packs `next` uint16 [S, K] and `count` int16 [S, K]."""
    alive = next != 0
    low = np.argmax(alive, axis=1)
    sizes = np.where(alive.any(axis=1), next.shape[1] - np.argmax(alive[:, ::-1], axis=1) - low, 0)
    ends = np.cumsum(sizes)
    first = ends - sizes - low
    column = np.arange(ends[-1]) - np.repeat(first, sizes)
    row = np.repeat(np.arange(len(next)), sizes)
    pad = max(0, -int(first.min()))  # the first rows would otherwise begin before the table
    cells, effects = next[row, column], None if count is None else count[row, column]
    return PackedRows(
        first=(first + pad).astype(np.int32),
        next=np.concatenate([np.zeros(pad, cells.dtype), cells]),
        count=None if effects is None else np.concatenate([np.zeros(pad, effects.dtype), effects]),
    )
