"""Runs an automaton from many states over a whole set of byte strings at once.

The frontier holds (origin, state, trie node) for every prefix that is still alive, one level of the trie after another;
dead branches are left out as soon as they die, so the work follows the answer's size, not states x vocabulary.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxkv.grammar.automaton import ENTER, TICK, ByteAutomaton
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.trie import Trie

# Inside a counted string no token may count more characters than this: the masks near the limits differ for each count.
# The language stays the same, single characters remain; 99.9 % of the tokens of 128 k are shorter.
MAX_TICKS = 32

Stop = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (states, nodes) -> bool: go no deeper, note the place
Visit = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # (origins, states, nodes) of a level


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """What tokens, or beginnings of tokens, do to origins. All arrays have one entry for each (origin, string).

    Attributes:
        origin: int32, index into the origins.
        where: int32, rank of the string; of a stop, the trie node.
        state: int32, the state after it.
        left: bool, the origin's own region was left, or the origin is in none. If so `count` is the counter after the
            string, else it is what the string adds to the counter.
        ticks: int32, characters counted in the origin's region, until it was left.
        count: int32.
    """

    origin: np.ndarray
    where: np.ndarray
    state: np.ndarray
    left: np.ndarray
    ticks: np.ndarray
    count: np.ndarray

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, places: np.ndarray) -> "Steps":
        return Steps(*(getattr(self, field.name)[places] for field in dataclasses.fields(self)))


def join_steps(parts: list[Steps]) -> Steps:
    """The steps of all parts, one after another."""
    if not parts:
        none = np.zeros(0, np.int32)
        return Steps(none, none, none, none.astype(bool), none, none)
    names = [field.name for field in dataclasses.fields(Steps)]
    return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """Attributes: what whole strings do, and the places where the walk was told to stop, with the depth of each."""

    edges: Steps
    stops: Steps
    stop_depth: np.ndarray


# (origin, node, state) of every place of a level, and (left, ticks, count) as `Steps` has them where there are counters.
_Columns = tuple[np.ndarray, ...]


def walk(
    automaton: ByteAutomaton,
    trie: Trie,
    origins: np.ndarray,
    *,
    nodes: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    stop: Stop | None = None,
    visit: Visit | None = None,
    max_work: int = 1 << 62,
) -> Walk:
    """Runs every string of the trie from every origin.

    Args:
        automaton: with `Counters` or without.
        trie: of the strings.
        origins: int32 [O], states to start in.
        nodes: int [O], where in the trie each starts; None is the root.
        counts: int32 [O], the counter at each origin, with which all limits are checked. None: it is not known; an
            origin inside a region then reports ticks, and its limits are checked by whoever knows the counter.
        stop: where to go no deeper.
        visit: told of every place reached.
        max_work: most branches to look at.

    Raises:
        TooLarge: there are more.
    """
    table, num_classes = automaton.next.ravel(), automaton.num_classes
    symbol = automaton.byte_class[trie.byte].astype(np.int64)
    rules = None if automaton.counters is None else _CounterRules(automaton)
    start = np.zeros(len(origins), np.int64) if nodes is None else nodes
    front: _Columns = (np.arange(len(origins), dtype=np.int32), start, origins)
    if rules is not None:
        left = np.ones(len(origins), bool) if counts is not None else rules.region[origins] == 0
        none = np.zeros(len(origins), np.int32)
        front += (left, none, none if counts is None else counts.astype(np.int32))
    edges: list[_Columns] = []
    stops: list[_Columns] = []
    depths: list[np.ndarray] = []
    depth = 0
    while len(front[0]):
        origin, node, state = front[:3]
        fanout = trie.fanout[node]
        ends = np.cumsum(fanout)
        total = int(ends[-1])
        max_work -= total
        if max_work < 0:
            raise TooLarge("the token table takes too long to build; the host matcher serves such a grammar")
        parent = np.repeat(np.arange(len(node)), fanout)
        child = np.arange(total)
        child += (trie.first_child[node] - (ends - fanout))[parent]
        cell = (state.astype(np.int64) * num_classes)[parent]
        cell += symbol[child]
        after = table[cell]
        alive = np.flatnonzero(after)
        parent, child, after = parent[alive], child[alive], after[alive]
        front = (origin[parent], child, after, *(column[parent] for column in front[3:]))
        if rules is not None:
            front = rules.apply(state[parent], cell[alive], front)
        depth += 1
        if visit is not None:
            visit(front[0], front[2], front[1])
        if stop is not None:
            halt = stop(front[2], front[1])
            stops.append(_take(front, np.flatnonzero(halt)))
            depths.append(np.full(len(stops[-1][0]), depth, np.int32))
            front = _take(front, np.flatnonzero(~halt))
        edges.append(_take(front, np.flatnonzero(trie.ends[front[1]])))
    result = _steps(edges)
    none = np.zeros(0, np.int32)
    return Walk(
        dataclasses.replace(result, where=trie.low[result.where]),
        _steps(stops),
        np.concatenate(depths) if depths else none,
    )


def _take(columns: _Columns, places: np.ndarray) -> _Columns:
    return tuple(column[places] for column in columns)


def _steps(parts: list[_Columns]) -> Steps:
    """The places of all parts, one after another."""
    if not parts:
        return join_steps([])
    origin, where, state, *counted = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not counted:  # nothing is counted: constants
        zeros = np.zeros(len(origin), np.int32)
        counted = [np.ones(len(origin), bool), zeros, zeros]
    return Steps(origin, where.astype(np.int32), state, *counted)


class _CounterRules:
    """The rules of `Counters`, for arrays of transitions."""

    def __init__(self, automaton: ByteAutomaton) -> None:
        assert automaton.counters is not None
        counters = automaton.counters
        self.region = counters.region.astype(np.int32)
        self.tick = counters.tick.ravel()
        self.least = counters.limits[:, 0]
        self.most = counters.limits[:, 1]

    def apply(self, source: np.ndarray, cell: np.ndarray, after: _Columns) -> _Columns:
        """Counts the transitions out of `source`, and drops those that a limit forbids."""
        origin, node, state, known, ticks, count = after
        region, target = self.region[source], self.region[state]
        if not region.any() and not target.any():  # most levels of most walks
            return origin, node, state, known, ticks, np.zeros_like(count)
        tick = self.tick[cell]
        leaving = (region != 0) & (target != region)
        entering = tick == ENTER
        assert not np.any(entering & (region == target)), "a region is entered from inside itself"
        assert not np.any((tick == TICK) & (region != target)), "a tick crosses the border of a region"
        alive = ~(known & leaving & (count < self.least[region]))
        left = known | leaving
        count = np.where(entering | (leaving & ~known), 0, count) + (tick == TICK)
        most = np.where(known, self.most[target], np.minimum(self.most[target], MAX_TICKS))
        alive &= (tick != TICK) | (count <= most)
        ticks = np.where(left, ticks, count)
        count = np.where(target == 0, 0, count).astype(np.int32)
        moved = (origin, node, state, left, ticks, count)
        return moved if alive.all() else _take(moved, np.flatnonzero(alive))
