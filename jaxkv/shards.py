"""How rows lie over data shards: the one split that scheduler and packing share.

Rows are numbered through: data shard s has the `rows_each` rows from `s * rows_each` on. What belongs to a row, its
pages before all, lives on its shard, and page ids mean something only there; so whatever names a row names a shard.
"""

import dataclasses
import typing

import numpy as np

Row = typing.TypeVar("Row", int, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Shards:
    """An even split of rows."""

    num: int
    rows_each: int

    @property
    def num_rows(self) -> int:
        return self.num * self.rows_each

    def of(self, row: Row) -> Row:
        """The shard of a row, or of each of an array of rows."""
        return row // self.rows_each

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_each, (shard + 1) * self.rows_each)

    def sums(self, rows: np.ndarray, values: np.ndarray) -> list[int]:
        """Sums of `values` int [num], one a shard; `rows` intp [num] says whose they are."""
        if self.num == 1:
            return [int(values.sum())]
        return np.bincount(self.of(rows), values, self.num).astype(np.int64).tolist()
