"""A set of byte strings as a trie in flat arrays, level by level, so that numpy can walk all of it at once.

A padded `[strings, longest]` array would be mostly padding: of 128 k tokens the longest has 128 bytes, 99 % at most 17.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Trie:
    """Nodes in level order; node 0 is the root, the children of a node lie together, in order of their bytes.

    Attributes:
        num_strings: of the set.
        byte: uint8 [nodes], last byte of the node's prefix.
        first_child: int32 [nodes + 1]; the children of node n are `first_child[n] .. first_child[n + 1] - 1`.
        low, high: int32 [nodes]; the strings below node n, its own included, have the ranks `low[n] .. high[n] - 1`.
        ends: bool [nodes], whether the prefix is a string of the set; its rank is then `low[n]`.
    """

    num_strings: int
    byte: np.ndarray
    first_child: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ends: np.ndarray

    @functools.cached_property
    def fanout(self) -> np.ndarray:
        """int64 [nodes], children of each node."""
        return np.diff(self.first_child).astype(np.int64)

    @property
    def num_nodes(self) -> int:
        return len(self.byte)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.byte, self.first_child, self.low, self.high, self.ends))


def build_trie(strings: Sequence[bytes]) -> Trie:
    """Builds the trie of `strings`, which are sorted, distinct and not empty; the rank of a string is its place."""
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    data = np.frombuffer(b"".join(strings), np.uint8)
    shared = _shared_with_previous(data, starts, lengths)
    levels = [(np.zeros(1, np.uint8), np.zeros(1, np.int64), np.array([len(strings)]), np.zeros(1, bool))]
    counts: list[np.ndarray] = []  # children of each node of a level
    alive = np.arange(len(strings))
    for depth in range(int(lengths.max(initial=0))):
        alive = alive[lengths[alive] > depth]
        heads = alive[shared[alive] <= depth]  # the first string below each node of the next level
        parent = np.searchsorted(levels[-1][1], heads, side="right") - 1
        counts.append(np.bincount(parent, minlength=len(levels[-1][0])))
        # Strings of one node are neighbours; a shorter string may stand between two nodes, but never inside one.
        last = alive[np.append(np.searchsorted(alive, heads)[1:], len(alive)) - 1] if len(heads) else heads
        levels.append((data[starts[heads] + depth], heads, last + 1, lengths[heads] == depth + 1))
    counts.append(np.zeros(len(levels[-1][0]), np.int64))
    byte, low, high, ends = (np.concatenate(parts) for parts in zip(*levels, strict=True))
    first_child = np.concatenate(([1], 1 + np.cumsum(np.concatenate(counts))))
    return Trie(
        num_strings=len(strings),
        byte=byte,
        first_child=first_child.astype(np.int32),
        low=low.astype(np.int32),
        high=high.astype(np.int32),
        ends=ends,
    )


def join_tries(tries: Sequence[Trie]) -> tuple[Trie, np.ndarray]:
    """Tries side by side, and int64, the root of each; ranks stay those of each trie.

    A node that nothing leads to stands after each, so that `first_child` says where the last node's children end.
    """
    roots = np.cumsum([0] + [trie.num_nodes + 1 for trie in tries])[:-1]
    pairs = list(zip(tries, roots, strict=True))
    joined = Trie(
        num_strings=sum(trie.num_strings for trie in tries),
        byte=np.concatenate([np.append(trie.byte, np.uint8(0)) for trie in tries]),
        first_child=np.concatenate([*(trie.first_child + root for trie, root in pairs), [0]]),
        low=np.concatenate([np.append(trie.low, 0) for trie in tries]),
        high=np.concatenate([np.append(trie.high, 0) for trie in tries]),
        ends=np.concatenate([np.append(trie.ends, False) for trie in tries]),
    )
    return joined, roots


def find_node(trie: Trie, prefix: bytes) -> int | None:
    """The node of a prefix; None if no string begins so."""
    node = 0
    for byte in prefix:
        first, last = int(trie.first_child[node]), int(trie.first_child[node + 1])
        node = first + int(np.searchsorted(trie.byte[first:last], byte))
        if node == last or trie.byte[node] != byte:
            return None
    return node


def _shared_with_previous(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [strings]: how many leading bytes each string shares with the one before it."""
    shared = np.zeros(len(starts), np.int64)
    same = np.arange(1, len(starts))
    depth = 0
    while len(same):
        same = same[np.minimum(lengths[same], lengths[same - 1]) > depth]
        same = same[data[starts[same] + depth] == data[starts[same - 1] + depth]]
        depth += 1
        shared[same] = depth
    return shared
