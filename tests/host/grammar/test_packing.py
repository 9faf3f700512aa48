"""Packed rows against the table they are made of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxkv.grammar.packing import pack_rows


@given(
    hnp.arrays(np.uint16, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.sampled_from([0, 0, 0, 1, 5]))
)
def test_what_a_state_allows_is_where_its_row_says(table: np.ndarray) -> None:
    count = (table * 3 - 7).astype(np.int16)
    packed = pack_rows(table, count)
    state, token_class = np.nonzero(table)
    cells = packed.first[state] + token_class
    assert (packed.next[cells] == table[state, token_class]).all()
    assert packed.count is not None and (packed.count[cells] == count[state, token_class]).all()
    assert (packed.first >= 0).all(), "a device clamps what begins before the table"
    assert len(packed.next) <= table.size + table.shape[1]


def test_dead_ends_take_no_cells() -> None:
    table = np.array([[0, 0, 0, 0], [0, 7, 0, 8], [0, 0, 9, 0], [3, 0, 0, 0]], np.uint16)
    packed = pack_rows(table, None)
    assert packed.count is None and packed.next.tolist() == [0, 7, 0, 8, 9, 3], (
        "one cell before: class 0 of the first row"
    )
