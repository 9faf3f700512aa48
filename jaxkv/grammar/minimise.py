"""Trimming and minimising, with whole arrays at a time.

Moore's refinement takes as many rounds as the longest chain of states has links when it starts from "accepting or not".
It starts here from the distance to acceptance, which equivalent states share: chains fall apart in the first round.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton

FAR = np.iinfo(np.int32).max  # distance of a state that cannot reach acceptance


def distances(automaton: ByteAutomaton) -> np.ndarray:
    """int32 [N]: the fewest bytes from each state to acceptance, counters aside; `FAR` where there is no way."""
    count = automaton.num_states
    source, begin = _predecessors(automaton.next)
    distance = np.full(count, FAR, np.int32)
    frontier = np.flatnonzero(automaton.accepting)
    distance[frontier] = 0
    steps = 0
    while len(frontier):
        steps += 1
        before = _sources(source, begin, frontier)
        frontier = np.unique(before[distance[before] == FAR])
        distance[frontier] = steps
    return distance


def _predecessors(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32, the sources of all transitions, by target, and int64 [N + 1] where those of each target begin."""
    count, classes = table.shape
    source = np.repeat(np.arange(count, dtype=np.int32), classes)
    target = table.reshape(-1)
    alive = target > 0
    source, target = source[alive], target[alive]
    order = np.argsort(target, kind="stable")
    return source[order], np.searchsorted(target[order], np.arange(count + 1))


def _sources(source: np.ndarray, begin: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """int32, sources of the transitions to some states."""
    lengths = begin[targets + 1] - begin[targets]
    offsets = np.repeat(begin[targets] - (np.cumsum(lengths) - lengths), lengths)
    return source[offsets + np.arange(int(lengths.sum()))]


def reachable(automaton: ByteAutomaton) -> np.ndarray:
    """bool [N]: states that some text leads to."""
    seen = np.zeros(automaton.num_states, bool)
    frontier = np.array([automaton.start])
    seen[frontier] = True
    while len(frontier):
        after = np.unique(automaton.next[frontier])
        frontier = after[~seen[after]]
        seen[frontier] = True
    return seen


def trim(automaton: ByteAutomaton) -> ByteAutomaton:
    """Without states that are not reachable or cannot reach acceptance; the dead state stays state 0."""
    keep = reachable(automaton) & (distances(automaton) < FAR)
    keep[0] = True
    number = np.where(keep, np.cumsum(keep) - 1, 0).astype(np.int32)
    return _select(automaton, np.flatnonzero(keep), number)


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
    """The smallest automaton of the same language (with counters: of the same counting), states in order of first reach."""
    automaton = trim(automaton)
    if automaton.num_states > 2:
        number, states = _equivalence(automaton)
        automaton = _select(automaton, states, number)
    return _merge_classes(automaton)


def _equivalence(automaton: ByteAutomaton) -> tuple[np.ndarray, np.ndarray]:
    """int32 [N] the class of each state, and one state of each class; class 0 is the dead state's."""
    table = automaton.next
    effect = np.zeros((1, 1), np.int64)
    distance = distances(automaton)
    key = np.where(distance == FAR, -1, distance).astype(np.int64)
    if automaton.counters is not None:
        counters = automaton.counters
        key = key * (int(counters.region.max()) + 1) + counters.region
        effect = counters.tick.astype(np.int64)
    rng = np.random.default_rng(0)
    while True:
        blocks = _refine(table, effect, key, rng)
        _, states, number = np.unique(blocks, return_index=True, return_inverse=True)
        dead = number[0]
        number = np.where(number == dead, 0, np.where(number < dead, number + 1, number)).astype(np.int32)
        states = np.concatenate([[0], np.delete(states, dead)])
        same = (number[table] == number[table[states]][number]).all()
        if automaton.counters is not None:
            same = same and bool((automaton.counters.tick == automaton.counters.tick[states][number]).all())
        if same:  # else two states fell together by a hash: again with other numbers
            return number, states


def _refine(table: np.ndarray, effect: np.ndarray, key: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """int64 [N] blocks of states whose transitions lead to the same blocks, by random linear hashes."""
    weights = rng.integers(1, 2**63, table.shape[1], dtype=np.uint64) | np.uint64(1)
    _, blocks = np.unique(key, return_inverse=True)
    count = int(blocks.max()) + 1
    single = np.bincount(blocks) == 1
    effect = np.broadcast_to(effect, table.shape)
    mix = rng.integers(1, 2**63, 2 * len(table) + 2, dtype=np.uint64)  # a random number for each block
    before, begin = _predecessors(table)
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
    columns = table.T.copy()
    effects = counters.tick.T.copy() if counters is not None else None
    seen: dict[bytes, int] = {}
    first = []
    number = np.empty(table.shape[1], np.uint8)
    for column in range(table.shape[1]):
        key = columns[column].tobytes() + (effects[column].tobytes() if effects is not None else b"")
        index = seen.setdefault(key, len(seen))
        if index == len(first):
            first.append(column)
        number[column] = index
    if counters is not None:
        counters = dataclasses.replace(counters, tick=counters.tick[:, first])
        if not counters.region.any():
            counters = None
    return ByteAutomaton(
        number[automaton.byte_class],
        np.ascontiguousarray(table[:, first]),
        automaton.accepting,
        automaton.start,
        counters,
    )
