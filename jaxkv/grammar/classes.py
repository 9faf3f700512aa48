"""Tokens that do the same in every state form a class; the transition table has one column for each."""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.hashing import mix, sum_by
from jaxkv.grammar.rows import LoopGroup, Rows, expand
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
    columns = _column_hashes(automaton, rows, effect, len(vocabulary.strings))
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
    result = Transitions(
        class_of_rank,
        sample,
        np.zeros((automaton.num_states, len(sample)), np.int32),
        None if automaton.counters is None else np.zeros((automaton.num_states, len(sample)), np.int16),
    )
    _fill(result, rows, effect)
    _check(result, rows, effect)
    return result


def _column_hashes(automaton: ByteAutomaton, rows: Rows, effect: np.ndarray, num_ranks: int) -> np.ndarray:
    """uint64 [ranks]; 0 for tokens that no state allows."""
    steps = rows.single
    weight = mix(np.arange(automaton.num_states), 1) | np.uint64(1)
    cell = _cell_hash(steps.state, effect)
    columns = sum_by(steps.where, weight[steps.origin] * cell, num_ranks)
    for group in rows.groups:
        pairs = group.template.pairs
        after = group.states[:, pairs[:, 1]]  # [loops, P]
        counted = automaton.counters is not None and automaton.counters.region[group.states[0, 0]] != 0
        ticks = pairs[:, 2] if counted else np.zeros(len(pairs), np.int32)
        hashes = _cell_hash(after, ticks)
        total = np.add.reduce(weight[group.states[:, pairs[:, 0]]] * hashes, axis=0)
        np.add.at(columns, group.template.stay_rank, total[group.template.stay_pair])
    _add_ranges(columns, rows, weight, cell)
    return columns


def _add_ranges(columns: np.ndarray, rows: Rows, weight: np.ndarray, cell: np.ndarray) -> None:
    """For each head: the weights of all states that borrow its answer to a token, times the hash of that answer."""
    if not len(rows.ranges):
        return
    order = np.argsort(rows.single.origin, kind="stable")
    origin = rows.single.origin[order]
    for head, ranges in split_by(rows.ranges, rows.ranges[:, 3]):
        borrowed = np.zeros(len(columns) + 1, np.uint64)
        np.add.at(borrowed, ranges[:, 1], weight[ranges[:, 0]])
        np.subtract.at(borrowed, ranges[:, 2], weight[ranges[:, 0]])
        borrowed = np.cumsum(borrowed, dtype=np.uint64)
        group, states = loop_of_head(rows, head)
        pairs, pair = group.template.pairs, group.template.head_pair
        stays = np.flatnonzero(pair >= 0)
        hashes = _cell_hash(states[pairs[:, 1]], np.zeros(len(pairs), np.int32))
        columns[stays] += borrowed[stays] * hashes[pair[stays]]
        own = order[slice(*np.searchsorted(origin, [head, head + 1]))]
        rank = rows.single.where[own]
        columns[rank] += borrowed[rank] * cell[own]


def _cell_hash(state: np.ndarray, effect: np.ndarray) -> np.ndarray:
    return mix(state.astype(np.int64) * (1 << 20) + effect + (1 << 18), 2)


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


def _check(table: Transitions, rows: Rows, effect: np.ndarray) -> None:
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
    for head, ranges in split_by(rows.ranges, rows.ranges[:, 3]) if len(rows.ranges) else []:
        before = np.concatenate([[0], np.cumsum(table.next[head][classes] != 0)])
        total += int((before[ranges[:, 2]] - before[ranges[:, 1]]).sum())
    assert total == int((np.count_nonzero(table.next, axis=0) * members).sum()), "two columns have one hash"


def loop_of_head(rows: Rows, head: int) -> tuple[LoopGroup, np.ndarray]:
    """The group of the loop with this head, and the loop's states."""
    for group in rows.groups:
        found = np.flatnonzero(group.states[:, 0] == head)
        if len(found):
            return group, group.states[found[0]]
    raise AssertionError(f"state {head} is the head of no loop")


def split_by(values: np.ndarray, keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(key, the values that have it) for each key, ascending."""
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    return [(int(k), part) for k, part in zip(distinct, np.split(values[order], first[1:]), strict=False)]
