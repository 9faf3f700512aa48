"""Numbers that depend on the counter only near its limits: how a table of them is addressed.

What a token may do at counter c changes with c near the least and near the most count of a counted string, within as
many characters as one token can have, and nowhere else. So a row of a table is addressed by

    base + clip(c - low_a, 0, len_a) + clip(c - low_b, 0, len_b)

which grows in the two windows and stands still elsewhere. Both lengths are 0 for states that count nothing.
"""

import numpy as np

BASE, LOW_A, LEN_A, LOW_B, LEN_B = range(5)
UNLIMITED = 1 << 30  # as most count


def address(windows: np.ndarray, state: np.ndarray | int, counter: np.ndarray | int) -> np.ndarray:
    """Index into the table.

    Args:
        windows: int32 [S, 5], columns BASE .. LEN_B.
        state: indices into it.
        counter: of the same shape.
    """
    base, low_a, len_a, low_b, len_b = np.moveaxis(windows[state], -1, 0)
    return base + np.clip(counter - low_a, 0, len_a) + np.clip(counter - low_b, 0, len_b)


def plain_windows(index: np.ndarray) -> np.ndarray:
    """int32 [S, 5] for states whose entry is `index` whatever the counter."""
    windows = np.zeros((len(index), 5), np.int32)
    windows[:, BASE] = index
    return windows
