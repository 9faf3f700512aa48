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


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """Attributes: what whole strings do, and the places where the walk was told to stop, with the depth of each."""

    edges: Steps
    stops: Steps
    stop_depth: np.ndarray


def join_steps(parts: list[Steps]) -> Steps:
    """The steps of all parts, one after another."""
    if not parts:
        none = np.zeros(0, np.int32)
        return Steps(none, none, none, none.astype(bool), none, none)
    names = [field.name for field in dataclasses.fields(Steps)]
    return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def walk(
    automaton: ByteAutomaton,
    trie: Trie,
    origins: np.ndarray,
    *,
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
        counts: int32 [O], the counter at each origin, with which all limits are checked. None: it is not known; an
            origin inside a region then reports ticks, and its limits are checked by whoever knows the counter.
        stop: where to go no deeper.
        visit: told of every place reached.
        max_work: most branches to look at.

    Raises:
        TooLarge: there are more.
    """
    table, num_classes = automaton.next.ravel(), automaton.num_classes
    symbol = automaton.byte_class[trie.byte].astype(np.int32)
    rules = None if automaton.counters is None else _CounterRules(automaton)
    front = Steps(
        origin=np.arange(len(origins), dtype=np.int32),
        where=np.zeros(len(origins), np.int32),
        state=origins.astype(np.int32),
        left=np.ones(len(origins), bool) if rules is None or counts is not None else rules.region[origins] == 0,
        ticks=np.zeros(len(origins), np.int32),
        count=np.zeros(len(origins), np.int32) if counts is None else counts.astype(np.int32),
    )
    edges: list[Steps] = []
    stops: list[Steps] = []
    depths: list[np.ndarray] = []
    depth = 0
    while len(front):
        first = trie.first_child[front.where].astype(np.int64)
        fanout = trie.first_child[front.where + 1] - first
        total = int(fanout.sum())
        max_work -= total
        if max_work < 0:
            raise TooLarge("the token table takes too long to build; the host matcher serves such a grammar")
        parent = np.repeat(np.arange(len(front)), fanout)
        child = np.arange(total) + np.repeat(first - (np.cumsum(fanout) - fanout), fanout)
        cell = (front.state.astype(np.int64) * num_classes)[parent] + symbol[child]
        alive = np.flatnonzero(table[cell])
        parent, child, cell = parent[alive], child[alive].astype(np.int32), cell[alive]
        before, front = front, _advance(front, parent, child, table[cell], counted=rules is not None)
        if rules is not None:
            front = rules.apply(before.state[parent], cell, front)
        depth += 1
        if visit is not None:
            visit(front.origin, front.state, front.where)
        if stop is not None:
            halt = stop(front.state, front.where)
            stops.append(front.take(np.flatnonzero(halt)))
            depths.append(np.full(len(stops[-1]), depth, np.int32))
            front = front.take(np.flatnonzero(~halt))
        ending = front.take(np.flatnonzero(trie.ends[front.where]))
        edges.append(dataclasses.replace(ending, where=trie.low[ending.where]))
    none = np.zeros(0, np.int32)
    return Walk(join_steps(edges), join_steps(stops), np.concatenate(depths) if depths else none)


def _advance(front: Steps, parent: np.ndarray, child: np.ndarray, state: np.ndarray, *, counted: bool) -> Steps:
    if counted:
        return Steps(front.origin[parent], child, state, front.left[parent], front.ticks[parent], front.count[parent])
    size = len(parent)  # nothing is counted: constants instead of gathers
    zeros = np.zeros(size, np.int32)
    return Steps(front.origin[parent], child, state, np.ones(size, bool), zeros, zeros)


class _CounterRules:
    """The rules of `Counters`, for arrays of transitions."""

    def __init__(self, automaton: ByteAutomaton) -> None:
        assert automaton.counters is not None
        counters = automaton.counters
        self.region = counters.region.astype(np.int32)
        self.tick = counters.tick.ravel()
        self.least = counters.limits[:, 0]
        self.most = counters.limits[:, 1]

    def apply(self, source: np.ndarray, cell: np.ndarray, after: Steps) -> Steps:
        """Counts the transitions out of `source`, and drops those that a limit forbids."""
        region, target = self.region[source], self.region[after.state]
        tick = self.tick[cell]
        leaving = (region != 0) & (target != region)
        entering = tick == ENTER
        assert not np.any(entering & (region == target)), "a region is entered from inside itself"
        assert not np.any((tick == TICK) & (region != target)), "a tick crosses the border of a region"
        known = after.left
        alive = ~(known & leaving & (after.count < self.least[region]))
        left = known | leaving
        count = np.where(entering | (leaving & ~known), 0, after.count) + (tick == TICK)
        most = np.where(known, self.most[target], np.minimum(self.most[target], MAX_TICKS))
        alive &= (tick != TICK) | (count <= most)
        ticks = np.where(left, after.ticks, count)
        count = np.where(target == 0, 0, count)
        moved = Steps(after.origin, after.where, after.state, left, ticks, count.astype(np.int32))
        return moved if alive.all() else moved.take(np.flatnonzero(alive))
