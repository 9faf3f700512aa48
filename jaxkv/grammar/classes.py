"""Tokens that do the same in every state form a class; the transition table has one column for each."""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.borrowing import Borrowing
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.hashing import cell_hash, mix, sum_by
from jaxkv.grammar.rows import Rows, expand
from jaxkv.grammar.vocabulary import TokenVocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class Transitions:
    """Attributes:
    class_of_rank: int32 [ranks], 0 for tokens that no state allows.
    sample: int32 [K], a rank of each class; ascending, so that a range of ranks is a range of classes. -1 for class 0.
    next: int32 [N, K], state after a token of a class; 0 if it is not allowed.
    count: int16 [N, K], what it does to the counter: n >= 0 adds n, n < 0 sets it to ~n. None without counters.
    """

    class_of_rank: np.ndarray
    sample: np.ndarray
    next: np.ndarray
    count: np.ndarray | None


def effects(automaton: ByteAutomaton, state: np.ndarray, left: np.ndarray, count: np.ndarray) -> np.ndarray:
    """What steps to `state` do to the counter, as `Transitions.count` says it. Outside regions it means nothing: 0."""
    if automaton.counters is None:
        return np.zeros(len(state), np.int32)
    return np.where(automaton.counters.region[state] == 0, 0, np.where(left, ~count, count))


def transitions(automaton: ByteAutomaton, rows: Rows, vocabulary: TokenVocabulary, max_bytes: int) -> Transitions:
    """Finds the classes and fills the table.

    Columns are told apart by hashes, the sum over all states of weight(state) x hash(state after, effect); that no two
    different columns got one hash is checked afterwards.

    Raises:
        TooLarge: the table would have more than `max_bytes`.
    """
    steps = rows.single
    effect = effects(automaton, steps.state, steps.left, steps.count)
    borrowing = Borrowing(rows, len(vocabulary.strings))
    columns = _column_hashes(automaton, rows, effect, borrowing, len(vocabulary.strings))
    alive = np.flatnonzero(columns)
    _, first, inverse = np.unique(columns[alive], return_index=True, return_inverse=True)
    by_rank = np.argsort(first)
    new_number = np.empty(len(first), np.int32)
    new_number[by_rank] = 1 + np.arange(len(first), dtype=np.int32)
    class_of_rank = np.zeros(len(vocabulary.strings), np.int32)
    class_of_rank[alive] = new_number[inverse]
    sample = np.concatenate([[-1], alive[first[by_rank]]]).astype(np.int32)
    if automaton.num_states * len(sample) * 2 > max_bytes:
        raise TooLarge(
            f"{automaton.num_states} states x {len(sample)} token classes need more than max_bytes={max_bytes}"
        )
    if len(sample) > 1 << 16:
        raise TooLarge(f"{len(sample)} token classes are more than 65536; the host matcher serves such a grammar")
    result = Transitions(
        class_of_rank,
        sample,
        np.zeros((automaton.num_states, len(sample)), np.int32),
        None if automaton.counters is None else np.zeros((automaton.num_states, len(sample)), np.int16),
    )
    _fill(result, rows, effect)
    _check(result, rows, effect, borrowing)
    return result


def _column_hashes(
    automaton: ByteAutomaton, rows: Rows, effect: np.ndarray, borrowing: Borrowing, num_ranks: int
) -> np.ndarray:
    """uint64 [ranks]; 0 for tokens that no state allows."""
    steps = rows.single
    weight = mix(np.arange(automaton.num_states), 1) | np.uint64(1)
    cell = cell_hash(steps.state, effect)
    columns = sum_by(steps.where, weight[steps.origin] * cell, num_ranks)
    for group in rows.groups:
        pairs = group.template.pairs
        after = group.states[:, pairs[:, 1]]  # [loops, P]
        counted = automaton.counters is not None and automaton.counters.region[group.states[0, 0]] != 0
        ticks = pairs[:, 2] if counted else np.zeros(len(pairs), np.int32)
        hashes = cell_hash(after, ticks)
        total = np.add.reduce(weight[group.states[:, pairs[:, 0]]] * hashes, axis=0)
        np.add.at(columns, group.template.stay_rank, total[group.template.stay_pair])
    borrowing.add_to_columns(columns, weight, cell)
    return columns


def _fill(table: Transitions, rows: Rows, effect: np.ndarray) -> None:
    steps, classes = rows.single, table.class_of_rank
    is_sample = np.zeros(len(classes), bool)
    is_sample[table.sample[1:]] = True
    chosen = np.flatnonzero(is_sample[steps.where])
    place = steps.origin[chosen], classes[steps.where[chosen]]
    table.next[place] = steps.state[chosen]
    if table.count is not None:
        table.count[place] = effect[chosen]
    for group in rows.groups:
        template = group.template
        chosen = np.flatnonzero(is_sample[template.stay_rank])
        column = classes[template.stay_rank[chosen]]
        source, target, ticks = template.pairs[template.stay_pair[chosen]].T
        table.next[group.states[:, source], column] = group.states[:, target]
        if table.count is not None:
            table.count[group.states[:, source], column] = ticks  # an uncounted loop has none
    if len(rows.ranges):
        index, column = _range_cells(table, rows)
        state, head = rows.ranges[index, 0], rows.ranges[index, 3]
        answer = table.next[head, column]
        keep = np.flatnonzero(answer)
        table.next[state[keep], column[keep]] = answer[keep]
        if table.count is not None:
            table.count[state[keep], column[keep]] = table.count[head[keep], column[keep]]


def _range_cells(table: Transitions, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(index of the range, class) of all cells that ranges fill."""
    low = np.searchsorted(table.sample, rows.ranges[:, 1])
    high = np.searchsorted(table.sample, rows.ranges[:, 2])
    return expand(low, high)


def _check(table: Transitions, rows: Rows, effect: np.ndarray, borrowing: Borrowing) -> None:
    """Asserts that the table says of every token what the rows say, so that no hash stood for two columns.

    Every (state, token) of the rows agrees with its cell, and there are as many as the cells that are not 0 stand for.
    """
    steps, classes = rows.single, table.class_of_rank
    column = classes[steps.where]
    same = table.next[steps.origin, column] == steps.state
    if table.count is not None:
        same &= table.count[steps.origin, column] == effect
    assert same.all(), "two columns of the token table have one hash"
    total = len(steps)
    for group in rows.groups:
        template = group.template
        source = template.pairs[:, 0]
        pair_of_cell = np.full((group.states.shape[1], len(table.sample)), -1, np.int32)
        column = classes[template.stay_rank]
        pair_of_cell[source[template.stay_pair], column] = template.stay_pair
        assert np.array_equal(pair_of_cell[source[template.stay_pair], column], template.stay_pair)
        total += len(template.stay_rank) * len(group.states)
    members = np.bincount(classes, minlength=len(table.sample))
    total += int(borrowing.sums(np.ones(len(classes), np.uint64)).sum())
    assert total == int((np.count_nonzero(table.next, axis=0) * members).sum()), "two columns have one hash"
