"""64-bit hashes of sets: the sum of the hashes of the members, so that a set can be put together in any order."""

import numpy as np


def mix(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64, a hash of each integer (splitmix64, Steele et al. 2014)."""
    x = values.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sum_by(index: np.ndarray, hashes: np.ndarray, size: int) -> np.ndarray:
    """uint64 [size], the sum of the hashes of each index, modulo 2**64."""
    total = np.zeros(size, np.uint64)
    np.add.at(total, index, hashes)
    return total


def cell_hash(state: np.ndarray, effect: np.ndarray | int) -> np.ndarray:
    """uint64, of what a token does: the state after it and its effect on the counter."""
    return mix(state.astype(np.int64) * (1 << 20) + effect + (1 << 18), 2)


def number_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the distinct rows of an integer array in the order of their first places.

    Returns:
        int64 [n], the number of each row, and int64 [distinct], the first place of each number.
    """
    weights = mix(np.arange(rows.shape[1]), 6) | np.uint64(1)
    hashes = (mix(rows) * weights).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    number, first = rank[inverse], first[order]
    assert np.array_equal(rows[first][number], rows), "two rows have one hash"
    return number, first


def split_by(values: np.ndarray, keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(key, the values that have it) for each key, ascending."""
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    return [(int(k), part) for k, part in zip(distinct, np.split(values[order], first[1:]), strict=False)]
