"""Trimming and minimising, with whole arrays at a time.

Moore's refinement takes as many rounds as the longest chain of states has links when it starts from "accepting or not".
It starts here from the distance to acceptance, which equivalent states share: chains fall apart in the first round.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.hashing import number_rows

FAR = np.iinfo(np.int32).max  # distance of a state that cannot reach acceptance


@dataclasses.dataclass(frozen=True, eq=False)
class _Edges:
    """Which states lead to which, each pair once; sorted by source.

    Attributes:
        source, target: int32.
        num_states: with the dead one, to which no edge leads.
    """

    source: np.ndarray
    target: np.ndarray
    num_states: int

    @classmethod
    def of(cls, table: np.ndarray) -> "_Edges":
        ordered = np.sort(table, axis=1)
        fresh = ordered > 0
        fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        source, column = np.nonzero(fresh)
        return cls(source.astype(np.int32), ordered[source, column], len(table))

    def forwards(self) -> tuple[np.ndarray, np.ndarray]:
        """(targets by source, int64 [N + 1] where those of each source begin)."""
        return self.target, np.searchsorted(self.source, np.arange(self.num_states + 1))

    def backwards(self) -> tuple[np.ndarray, np.ndarray]:
        """(sources by target, int64 [N + 1] where those of each target begin)."""
        order = np.argsort(self.target, kind="stable")
        return self.source[order], np.searchsorted(self.target[order], np.arange(self.num_states + 1))

    def take(self, keep: np.ndarray, number: np.ndarray) -> "_Edges":
        """The edges between the states `keep` bool [N], renamed by `number` int32 [N], which is ascending there."""
        kept = keep[self.source] & keep[self.target]
        return _Edges(number[self.source[kept]], number[self.target[kept]], int(keep.sum()))


def _distances(starts: list[int], others: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """int32 [N]: the fewest edges from `starts`; `FAR` where there is no way.

    In Python: there are hundreds of levels of few states, and a level takes numpy longer than all its states take here.
    """
    to, first = others.tolist(), begin.tolist()
    distance = [FAR] * (len(first) - 1)
    for state in starts:
        distance[state] = 0
    steps, frontier = 0, starts
    while frontier:
        steps += 1
        after = []
        for state in frontier:
            for other in to[first[state] : first[state + 1]]:
                if distance[other] == FAR:
                    distance[other] = steps
                    after.append(other)
        frontier = after
    return np.array(distance, np.int32)


def _sources(source: np.ndarray, begin: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """int32, sources of the edges to some states."""
    lengths = begin[targets + 1] - begin[targets]
    offsets = np.repeat(begin[targets] - (np.cumsum(lengths) - lengths), lengths)
    return source[offsets + np.arange(int(lengths.sum()))]


def _select(automaton: ByteAutomaton, states: np.ndarray, number: np.ndarray) -> ByteAutomaton:
    """The automaton of some states, each renamed by `number` [N]."""
    counters = automaton.counters
    table = number[automaton.next[states]]
    if counters is not None:
        tick = np.where(table > 0, counters.tick[states], 0).astype(np.int8)
        counters = dataclasses.replace(counters, region=counters.region[states], tick=tick)
    return ByteAutomaton(
        automaton.byte_class, table, automaton.accepting[states], int(number[automaton.start]), counters
    )


def minimise(automaton: ByteAutomaton) -> ByteAutomaton:
    """The smallest automaton of the same language (with counters: of the same counting); all states are of use."""
    edges = _Edges.of(automaton.next)
    distance = _distances(np.flatnonzero(automaton.accepting).tolist(), *edges.backwards())
    keep = (distance < FAR) & (_distances([automaton.start], *edges.forwards()) < FAR)
    keep[0] = True
    number = np.where(keep, np.cumsum(keep) - 1, 0).astype(np.int32)
    automaton = _select(automaton, np.flatnonzero(keep), number)
    if automaton.num_states > 2:
        number, states = _equivalence(automaton, edges.take(keep, number), distance[keep])
        automaton = _select(automaton, states, number)
    return _merge_classes(automaton)


def _equivalence(automaton: ByteAutomaton, edges: _Edges, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 [N] the class of each state, and one state of each class; class 0 is the dead state's.

    Args:
        automaton: trimmed.
        edges: of it.
        distance: int32 [N], bytes from each state to acceptance.
    """
    table = automaton.next
    effect = np.zeros((1, 1), np.int64)
    key = np.where(distance == FAR, -1, distance).astype(np.int64)
    if automaton.counters is not None:
        counters = automaton.counters
        key = key * (int(counters.region.max()) + 1) + counters.region
        effect = counters.tick.astype(np.int64)
    rng = np.random.default_rng(0)
    while True:
        blocks = _refine(table, effect, key, edges, rng)
        _, states, number = np.unique(blocks, return_index=True, return_inverse=True)
        dead = number[0]
        number = np.where(number == dead, 0, np.where(number < dead, number + 1, number)).astype(np.int32)
        states = np.concatenate([[0], np.delete(states, dead)])
        same = (number[table] == number[table[states]][number]).all()
        if automaton.counters is not None:
            same = same and bool((automaton.counters.tick == automaton.counters.tick[states][number]).all())
        if same:  # else two states fell together by a hash: again with other numbers
            return number, states


def _refine(
    table: np.ndarray, effect: np.ndarray, key: np.ndarray, edges: _Edges, rng: np.random.Generator
) -> np.ndarray:
    """int64 [N] blocks of states whose transitions lead to the same blocks, by random linear hashes."""
    weights = rng.integers(1, 2**63, table.shape[1], dtype=np.uint64) | np.uint64(1)
    _, blocks = np.unique(key, return_inverse=True)
    count = int(blocks.max()) + 1
    single = np.bincount(blocks) == 1
    effect = np.broadcast_to(effect, table.shape)
    mix = rng.integers(1, 2**63, 2 * len(table) + 2, dtype=np.uint64)  # a random number for each block
    before, begin = edges.backwards()
    signature = np.zeros(len(table), np.uint64)
    affected = np.arange(len(table))  # states of which a successor changed its block
    while len(affected := affected[~single[blocks[affected]]]):
        rows = mix[blocks[table[affected]]] + effect[affected].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        signature[affected] = (rows * weights).sum(axis=1, dtype=np.uint64)
        touched = np.zeros(count, bool)
        touched[blocks[affected]] = True
        members = np.flatnonzero(touched[blocks])
        members = members[np.lexsort((signature[members], blocks[members]))]
        old, signed = blocks[members], signature[members]
        fresh = np.concatenate([[True], old[1:] != old[:-1]])
        split = np.concatenate([[False], (signed[1:] != signed[:-1]) & ~fresh[1:]])
        # The first part of a block keeps its number, so that only what leads to the others must be looked at again.
        part = np.where(split, 1, 0).cumsum()
        at_fresh = np.maximum.accumulate(np.where(fresh, np.arange(len(part)), 0))
        moved = part - part[at_fresh] > 0
        blocks[members[moved]] = count - 1 + part[moved]
        count += int(split.sum())
        single = np.bincount(blocks, minlength=count) == 1
        affected = np.unique(_sources(before, begin, members[moved]))
    return blocks


def _merge_classes(automaton: ByteAutomaton) -> ByteAutomaton:
    """With one column for each set of bytes that no state tells apart."""
    table, counters = automaton.next, automaton.counters
    number, first = number_rows(table.T if counters is None else np.concatenate([table, counters.tick]).T)
    if counters is not None:
        counters = dataclasses.replace(counters, tick=counters.tick[:, first])
        if not counters.region.any():
            counters = None
    return ByteAutomaton(
        number.astype(np.uint8)[automaton.byte_class],
        np.ascontiguousarray(table[:, first]),
        automaton.accepting,
        automaton.start,
        counters,
    )
