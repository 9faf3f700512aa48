"""Fewest tokens from a state to a complete text, counters included.

With it a mask `dist[next] <= tokens that remain` completes any output in time, see `budget`.

States that count would be one node per count. Mostly far fewer do: two searches bracket the answer, one in which a
string that has its least count may grow without limit (nothing can take longer than in truth), one in which it may not
grow any more (nothing can be shorter). Where they agree, the number does not depend on the upper limit; where they do
not, the counts near it become nodes too.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.classes import Transitions
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.rows import Rows, expand
from jaxkv.grammar.windows import BASE, LEN_A, LEN_B, LOW_B, address

UNREACHABLE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """Distinct moves between states; all arrays have one entry for each.

    Attributes:
        source, target: int64, states.
        left: bool, the source's region is left, or it is in none.
        ticks: int64, characters counted before that.
        count: int64, the counter after a move that left.
    """

    source: np.ndarray
    target: np.ndarray
    left: np.ndarray
    ticks: np.ndarray
    count: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Distances:
    """Attributes:
    windows: int32 [N, 5], where in `table` a state and counter have their distance, see `windows`.
    table: int32, fewest tokens to a complete text, the end token not counted; UNREACHABLE if there is no way.
    """

    windows: np.ndarray
    table: np.ndarray


def find_moves(automaton: ByteAutomaton, rows: Rows, table: Transitions) -> Moves:
    """The distinct moves of all rows."""
    steps = rows.single
    parts = [_distinct(np.stack([steps.origin, steps.state, steps.left, steps.ticks, steps.count]))]
    for group in rows.groups:
        source, target, ticks = group.template.pairs.T
        counted = automaton.counters is not None and automaton.counters.region[group.states[0, 0]] != 0
        before, after = group.states[:, source].ravel(), group.states[:, target].ravel()
        ticks = np.tile(ticks, len(group.states))
        zeros = np.zeros(len(before), np.int64)
        parts.append(np.stack([before, after, np.full(len(before), not counted), ticks, zeros]).astype(np.int64))
    if len(rows.ranges):
        low, high = (np.searchsorted(table.sample, rows.ranges[:, i]) for i in (1, 2))
        index, column = expand(low, high)
        head = rows.ranges[index, 3]
        answer = table.next[head, column]
        keep = np.flatnonzero(answer)
        effect = np.zeros(len(keep), np.int64) if table.count is None else table.count[head[keep], column[keep]]
        # No head of a range is counted, so an effect is "set to ~effect" or nothing.
        count = np.where(effect < 0, ~effect, 0)
        ones = np.ones(len(keep), np.int64)
        parts.append(_distinct(np.stack([rows.ranges[index[keep], 0], answer[keep], ones, 0 * ones, count])))
    source, target, left, ticks, count = np.concatenate(parts, axis=1)
    return Moves(source, target, left.astype(bool), ticks, count)


def _distinct(columns: np.ndarray) -> np.ndarray:
    """int64 [5, moves] without repetition."""
    source, target, left, ticks, count = columns.astype(np.int64)
    key = (((source << 20) + target) << 20) + ((ticks << 12) + (count << 1) + left)
    assert not len(key) or (ticks.max() < 128 and count.max() < 2048 and source.max() < 1 << 20)
    return columns.astype(np.int64)[:, np.unique(key, return_index=True)[1]]


def reachable(moves: Moves, start: int, num_states: int) -> np.ndarray:
    """bool [N], states in which a token may end, and the start."""
    seen = np.zeros(num_states, bool)
    seen[start] = True
    order, first = _adjacency(moves.source, num_states)
    front = np.array([start])
    while len(front):
        _, place = expand(first[front], first[front + 1])
        front = np.unique(moves.target[order[place]])
        front = front[~seen[front]]
        seen[front] = True
    return seen


def distances(automaton: ByteAutomaton, moves: Moves, max_nodes: int) -> Distances:
    """Fewest tokens from each state and counter.

    Raises:
        TooLarge: strings with large counts need more than `max_nodes` moves between (state, count).
    """
    num_states, zeros = automaton.num_states, np.zeros(automaton.num_states, np.int64)
    if automaton.counters is None:
        return _search(automaton, moves, _Grid(zeros, zeros, zeros, zeros), max_nodes)
    region = automaton.counters.region
    least, most = automaton.counters.limits[region].T.astype(np.int64)
    least[region == 0] = most[region == 0] = 0
    longest = int(moves.ticks.max(initial=0))
    unlimited = _Grid(least, most, least, zeros, unlimited=True)
    lower = _search(automaton, moves, unlimited, max_nodes)
    grid = _Grid(least, most, np.minimum(most, np.where(least > 0, least + longest, 0)), zeros)
    room, exact = 2 * longest, np.zeros(num_states, bool)
    while True:
        upper = _search(automaton, moves, grid, max_nodes)
        wrong = ~exact & _differ(unlimited, lower, grid, upper)
        if not wrong.any():
            break
        wrong = np.isin(region, region[wrong])
        exact |= wrong & (least + longest + room >= most)
        low = np.where(exact, most, least + longest)
        grid = _Grid(least, most, np.where(wrong, low, grid.low), np.where(wrong & ~exact, room, grid.high))
        room *= 2
    return lower if not grid.high.any() and not exact.any() else upper


@dataclasses.dataclass(frozen=True, eq=False)
class _Grid:
    """Counts that are nodes of their own: up to `low`, and the last `high` ones before `most`.

    A search treats `low + high` as the most count (`unlimited`: as any greater count as well). All int64 [N].
    """

    least: np.ndarray
    most: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unlimited: bool = False

    @property
    def cap(self) -> np.ndarray:
        return self.low + self.high

    def windows(self) -> np.ndarray:
        """int32 [N, 5]."""
        result = np.zeros((len(self.low), 5), np.int32)
        result[:, BASE] = np.cumsum(self.cap + 1) - (self.cap + 1)
        result[:, LEN_A] = self.low
        result[:, LOW_B] = self.most - self.high
        result[:, LEN_B] = self.high
        return result


def _differ(unlimited: _Grid, lower: Distances, grid: _Grid, upper: Distances) -> np.ndarray:
    """bool [N], states where `upper` is not `lower` all the way up to the middle of their counts."""
    state, count = expand(np.zeros_like(grid.low), grid.low + 1)
    low = lower.table[lower.windows[state, BASE] + np.minimum(count, unlimited.least[state])]
    high = upper.table[upper.windows[state, BASE] + count]
    wrong = np.zeros(len(grid.low), bool)
    wrong[state[low != high]] = True
    return wrong


def _search(automaton: ByteAutomaton, moves: Moves, grid: _Grid, max_nodes: int) -> Distances:
    """Breadth-first search backwards from the accepting states."""
    windows, cap = grid.windows(), grid.cap
    num_edges = int((cap[moves.source] + 1).sum())
    if num_edges > max_nodes:
        raise TooLarge(f"the least counts of the strings need {num_edges} moves, more than max_work={max_nodes}")
    index, count = expand(np.zeros(len(moves.source), np.int64), cap[moves.source] + 1)
    source, target, left = moves.source[index], moves.target[index], moves.left[index]
    after = count + moves.ticks[index]
    allowed = (left & (after >= grid.least[source])) | ~left
    if not grid.unlimited:
        allowed &= after <= cap[source]
    after = np.where(left, moves.count[index], after)
    edge_source = (windows[source, BASE] + count)[allowed]
    # A count that was set is a real one; one that goes on from a node is the grid's.
    real = address(windows, target, after)
    going_on = windows[target, BASE] + np.minimum(after, cap[target])
    edge_target = np.where(left, real, going_on)[allowed]
    num_nodes = int((cap + 1).sum())
    state_of = np.repeat(np.arange(len(cap)), cap + 1)
    table = np.full(num_nodes, UNREACHABLE, np.int32)
    order, first = _adjacency(edge_target, num_nodes)
    front = np.flatnonzero(automaton.accepting[state_of])
    length = 0
    while len(front):
        table[front] = length
        _, place = expand(first[front], first[front + 1])
        front = np.unique(edge_source[order[place]])
        front = front[table[front] == UNREACHABLE]
        length += 1
    return Distances(windows, table)


def _adjacency(key: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(order of the edges by key, first int64 [size + 1] of each key)."""
    order = np.argsort(key, kind="stable")
    return order, np.searchsorted(key[order], np.arange(size + 1))
