"""Boolean operations on automata: products of two, built breadth first with whole frontiers at a time."""

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.determinise import byte_classes
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.minimise import minimise


def empty() -> ByteAutomaton:
    """Accepts nothing."""
    return ByteAutomaton(np.zeros(256, np.uint8), np.zeros((1, 1), np.int32), np.zeros(1, bool), 0)


def everything() -> ByteAutomaton:
    """Accepts all byte strings."""
    return ByteAutomaton(np.zeros(256, np.uint8), np.array([[0], [1]], np.int32), np.array([False, True]), 1)


def intersection(left: ByteAutomaton, right: ByteAutomaton, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """What both accept."""
    return product(left, right, np.logical_and, budget)


def union(left: ByteAutomaton, right: ByteAutomaton, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """What either accepts."""
    return product(left, right, np.logical_or, budget)


def difference(left: ByteAutomaton, right: ByteAutomaton, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """What `left` accepts and `right` does not."""
    return product(left, right, lambda a, b: a & ~b, budget)


def complement(automaton: ByteAutomaton, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """All byte strings that are not accepted."""
    return difference(everything(), automaton, budget)


def equivalent(left: ByteAutomaton, right: ByteAutomaton) -> bool:
    """Whether both accept the same texts."""
    return product(left, right, np.logical_xor, DEFAULT_BUDGET).is_empty


def product(left: ByteAutomaton, right: ByteAutomaton, accept, budget: Budget) -> ByteAutomaton:
    """Runs both at once.

    Args:
        left, right: automata without counters.
        accept: elementwise, from the acceptance of both to that of the pair; False, False must give False.
        budget: bounds the number of pairs.

    Returns:
        The minimal automaton.

    Raises:
        TooLarge: more pairs than the budget's states, or counters.
    """
    if left.counters is not None or right.counters is not None:
        raise TooLarge("counted strings have no product; their counts must become states")
    byte_class, first = byte_classes([left.byte_class, right.byte_class])
    lefts, rights = left.next[:, left.byte_class[first]], right.next[:, right.byte_class[first]]
    width = right.num_states
    alive_left = accept(np.array([True, False]), np.array([False, False]))[0]  # may the left side go on alone?
    alive_right = accept(np.array([False, False]), np.array([True, False]))[0]
    start = left.start * width + right.start

    def prune(pairs: np.ndarray) -> np.ndarray:
        a, b = pairs // width, pairs % width
        gone = ((b == 0) & ~alive_left) | ((a == 0) & ~alive_right)
        return np.where(gone, 0, pairs)

    known = np.array([0], np.int64)
    frontier = prune(np.array([start], np.int64))
    start = int(frontier[0])
    frontier = frontier[frontier > 0]
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    while len(frontier):
        known = np.union1d(known, frontier)
        budget.check(len(known), "a combination of schemas or patterns")
        after = prune(lefts[frontier // width].astype(np.int64) * width + rights[frontier % width])
        rows.append((frontier, after))
        new = np.unique(after)
        frontier = new[~np.isin(new, known, assume_unique=True)]
    table = np.zeros((len(known), len(first)), np.int32)
    for pairs, after in rows:
        table[np.searchsorted(known, pairs)] = np.searchsorted(known, after)
    accepting = accept(left.accepting[known // width], right.accepting[known % width])
    accepting[0] = False
    return minimise(ByteAutomaton(byte_class, table, accepting, int(np.searchsorted(known, start))))
