"""Loops of an automaton that read almost any text, such as the inside of a JSON string.

From such a state nearly every token is alive, so a walk over the vocabulary from each of a hundred strings would be a
hundred times the same work. Loops that look alike, but for where they lead when they are left, share one walk: its
result is a *template*, kept with the vocabulary for later grammars. Where other walks enter a loop, they stop too:
below a trie node at which the loop's own walk is in the same state, both do the same.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import DEAD, NO_TICK, ByteAutomaton, Counters
from jaxkv.grammar.hashing import mix, split_by
from jaxkv.grammar.trie import Trie, build_trie
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.walk import MAX_TICKS, Steps, walk

MIN_WIDTH = 4  # bytes that lead a state to itself before it is worth a template; digits are 10, white space is 4
MAX_DETOUR = 12  # longest way from the state back to itself: an escaped surrogate pair, `\ud83d\ude00`, has 12 bytes
MAX_TEMPLATES = 64  # kept with a vocabulary, some 2 MB each at 128 k tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """What all tokens do inside a loop, in the loop's own numbering: state 0 is the head.

    Attributes:
        stay_rank, stay_pair: int32 [E], tokens that stay inside; `pairs[stay_pair]` says from where to where.
        pairs: int32 [P, 3] (state before, state after, characters counted), distinct and in order.
        head_pair: int32 [ranks], the pair of a token that stays when read in the head; -1 if it does not.
        exits: one entry for each way out.
        in_head: bool [nodes], the loop, started in its head, is in its head at this node of the vocabulary's trie.
    """

    stay_rank: np.ndarray
    stay_pair: np.ndarray
    pairs: np.ndarray
    head_pair: np.ndarray
    exits: tuple["Exit", ...]
    in_head: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Exit:
    """The tokens that leave a loop by one way out.

    Attributes:
        state: int32 [X], the loop's state before the token, sorted by `suffix`.
        rank: int32 [X], the token.
        ticks: int32 [X], characters counted inside the loop.
        first: int32 [suffixes + 2], where the entries of each suffix start; suffix 0 is the empty one, the others
            are the strings of `trie`.
        trie: what is left of the tokens after the way out.
    """

    state: np.ndarray
    rank: np.ndarray
    ticks: np.ndarray
    first: np.ndarray
    trie: Trie


@dataclasses.dataclass(frozen=True, eq=False)
class LoopGroup:
    """Loops of one automaton that share a template.

    Attributes:
        template: what tokens do inside.
        states: int32 [loops, n], the states of each, the head first, in the order of the template.
        outside: int32 [loops, exits], the state that each way out leads to.
    """

    template: Template
    states: np.ndarray
    outside: np.ndarray


def find_loops(automaton: ByteAutomaton, vocabulary: TokenVocabulary, barred: np.ndarray) -> list[LoopGroup]:
    """All wide loops, no two with a state in common, none with a state of `barred` bool [N]."""
    width = np.bincount(automaton.byte_class, minlength=automaton.num_classes)
    to_itself = automaton.next == np.arange(automaton.num_states)[:, None]
    to_itself[DEAD] = False
    heads = np.flatnonzero(to_itself @ width >= MIN_WIDTH)
    if not len(heads):
        return []
    owner = _owners(automaton, heads)
    groups: list[LoopGroup] = []
    for states, outside in _alike(automaton, heads, owner):
        good = ~barred[states].any(axis=1)
        if automaton.counters is not None:  # a count cannot go on outside its loop
            region = automaton.counters.region
            inside = region[states[:, 0]]
            good &= (inside == 0) | ~np.any(region[outside] == inside[:, None], axis=1)
        if good.any():
            states, outside = states[good], outside[good]
            groups.append(LoopGroup(_template_of(automaton, states[0], outside[0], vocabulary), states, outside))
    return groups


def _owners(automaton: ByteAutomaton, heads: np.ndarray) -> np.ndarray:
    """int32 [N]: the head that a state cannot but come back to; -1 for states that can do else, and the dead one."""
    table, region = automaton.next, None if automaton.counters is None else automaton.counters.region
    near = _near(table, heads)
    near = near[~automaton.accepting[near]]
    owner = np.full(automaton.num_states, -1, np.int32)
    owner[heads] = heads
    for _ in range(MAX_DETOUR):
        rows = table[near]
        dead = rows == DEAD
        owners = owner[rows]
        highest = np.where(dead, -2, owners).max(axis=1, initial=-2)
        lowest = np.where(dead, automaton.num_states, owners).min(axis=1, initial=automaton.num_states)
        found = (highest == lowest) & (highest >= 0)
        if region is not None:  # a detour may not leave the counted string
            found &= region[near] == region[highest]
        if not found.any():
            break
        owner[near[found]] = highest[found]
        near = near[~found]
    return owner


def _near(table: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Other states that a head leads to within MAX_DETOUR bytes."""
    seen = np.zeros(len(table), bool)
    seen[heads] = seen[DEAD] = True
    found, front = [heads[:0]], heads
    for _ in range(MAX_DETOUR):
        reached = np.zeros(len(table), bool)
        reached[table[front]] = True
        front = np.flatnonzero(reached & ~seen)
        seen[front] = True
        found.append(front)
    return np.concatenate(found)


def _alike(automaton: ByteAutomaton, heads: np.ndarray, owner: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(states [loops, n], outside [loops, exits]) of loops that look alike.

    A search over bytes in their order, of all loops at once: it starts with all heads in one group, and parts those
    whose next row of the table differs, in what was met before, what is new, and where.
    """
    table = automaton.next
    order = np.argsort(automaton.class_bytes)
    done: list[tuple[np.ndarray, np.ndarray]] = []
    todo = [(heads[:, None].astype(np.int32), np.zeros((len(heads), 0), np.int32), 0)]
    while todo:
        states, outside, index = todo.pop()
        if index == states.shape[1]:
            done.append((states, outside))
            continue
        rows = table[states[:, index]][:, order]
        owned = owner[rows] == states[:, :1]
        # What a cell is: dead, a state or way out met before, or new. New ones by where in the row they first stand.
        what = np.where(owned, 0, 1 << 10) + _first_places(rows) + (1 << 11)
        for i, known in enumerate(states.T):
            what[rows == known[:, None]] = 1 + i
        for i, known in enumerate(outside.T):
            what[rows == known[:, None]] = 1 << 12 | i
        what[rows == DEAD] = 0
        if automaton.counters is not None:
            what += automaton.counters.tick[states[:, index]][:, order].astype(np.int64) << 14
        hashes = np.add.reduce(mix(what) * (mix(np.arange(rows.shape[1]), 5) | np.uint64(1)), axis=1)
        for _, group in split_by(np.arange(len(rows)), hashes):
            first = what[group[0]]
            assert (what[group] == first).all(), "two rows have one hash"
            fresh = (first & (1 << 11) != 0) & (first & ((1 << 10) - 1) == np.arange(len(first)))
            inner, outer = (np.flatnonzero(fresh & (first & (1 << 10) == bit)) for bit in (0, 1 << 10))
            members = rows[group]
            todo.append(
                (
                    np.concatenate([states[group], members[:, inner]], axis=1),
                    np.concatenate([outside[group], members[:, outer]], axis=1),
                    index + 1,
                )
            )
    return done


def _first_places(rows: np.ndarray) -> np.ndarray:
    """int64 [R, C]: the first column of the row that holds the same value."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    starts = np.ones(rows.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    at = np.maximum.accumulate(np.where(starts, np.arange(rows.shape[1]), 0), axis=1)
    result = np.empty(rows.shape, np.int64)
    np.put_along_axis(result, order, np.take_along_axis(order, at, axis=1), axis=1)
    return result


def _template_of(
    automaton: ByteAutomaton, states: np.ndarray, outside: np.ndarray, vocabulary: TokenVocabulary
) -> Template:
    local, ticks = _isolate(automaton, states, outside)
    key = local.next.astype(np.int16).tobytes() + ticks.tobytes() + len(states).to_bytes(4, "little")
    templates = vocabulary.templates
    template = templates.pop(key, None)
    if template is None:
        for oldest in [*templates][: len(templates) - MAX_TEMPLATES + 1]:  # a copy: others compile at the same time
            templates.pop(oldest, None)
        template = make_template(local, len(states), vocabulary)
    templates[key] = template  # the last one used stands last
    return template


def _isolate(automaton: ByteAutomaton, states: np.ndarray, outside: np.ndarray) -> tuple[ByteAutomaton, np.ndarray]:
    """The loop alone, over all 256 bytes: states 1 .. n, then one state for each way out; and its ticks, if it has."""
    size = len(states)
    number = np.zeros(automaton.num_states, np.int32)
    number[states] = 1 + np.arange(size)
    number[outside] = 1 + size + np.arange(len(outside))
    table = np.zeros((1 + size + len(outside), 256), np.int32)
    table[1 : 1 + size] = number[automaton.next[states]][:, automaton.byte_class]
    alone = ByteAutomaton(
        byte_class=np.arange(256, dtype=np.uint8), next=table, accepting=np.zeros(len(table), bool), start=1
    )
    counters = automaton.counters
    if counters is None or counters.region[states[0]] == 0:
        return alone, np.zeros(0, np.int8)
    ticks = np.zeros(table.shape, np.int8)
    ticks[1 : 1 + size] = counters.tick[states][:, automaton.byte_class]
    ticks[table > size] = NO_TICK  # what a way out does to the counter is not the loop's business
    region = np.zeros(len(table), np.int16)
    region[1 : 1 + size] = 1
    limits = np.array([[0, 0], [0, 1 << 30]], np.int32)
    return dataclasses.replace(alone, counters=Counters(region, limits, ticks)), ticks


def make_template(local: ByteAutomaton, size: int, vocabulary: TokenVocabulary) -> Template:
    """Walks the vocabulary through a loop that stands alone; states past `size` are its ways out."""
    trie = vocabulary.trie
    in_head = np.zeros(trie.num_nodes, bool)

    def visit(origin: np.ndarray, state: np.ndarray, node: np.ndarray) -> None:
        in_head[node[(origin == 0) & (state == 1)]] = True

    result = walk(local, trie, np.arange(1, 1 + size), stop=lambda state, _: state > size, visit=visit)
    edges = result.edges
    key = (edges.origin.astype(np.int64) * len(local.next) + edges.state - 1) * (MAX_TICKS + 1) + edges.ticks
    _, first, pair = np.unique(key, return_index=True, return_inverse=True)
    pairs = np.stack([edges.origin[first], edges.state[first] - 1, edges.ticks[first]], axis=1)
    pair = pair.astype(np.int32)
    head_pair = np.full(len(vocabulary.strings), -1, np.int32)
    of_head = edges.origin == 0
    head_pair[edges.where[of_head]] = pair[of_head]
    num_exits = len(local.next) - 1 - size
    exits = tuple(_make_exit(result.stops, result.stop_depth, 1 + size + i, vocabulary) for i in range(num_exits))
    return Template(edges.where, pair, pairs, head_pair, exits, in_head)


def _make_exit(stops: Steps, depths: np.ndarray, state: int, vocabulary: TokenVocabulary) -> Exit:
    chosen = np.flatnonzero(stops.state == state)
    stops, depths = stops.take(chosen), depths[chosen]
    low, high = vocabulary.trie.low[stops.where], vocabulary.trie.high[stops.where]
    entry = np.repeat(np.arange(len(stops)), high - low)
    rank = np.arange(len(entry)) + np.repeat(low - (np.cumsum(high - low) - (high - low)), high - low)
    strings = vocabulary.strings
    rests = [strings[r][d:] for r, d in zip(rank.tolist(), depths[entry].tolist(), strict=True)]
    distinct = sorted({rest for rest in rests if rest})
    number = {b"": 0} | {rest: 1 + i for i, rest in enumerate(distinct)}
    suffix = np.fromiter((number[rest] for rest in rests), np.int64, len(rests))
    order = np.argsort(suffix, kind="stable")
    first = np.searchsorted(suffix[order], np.arange(len(distinct) + 2))
    return Exit(
        state=stops.origin[entry][order],
        rank=rank[order].astype(np.int32),
        ticks=stops.ticks[entry][order],
        first=first.astype(np.int32),
        trie=build_trie(distinct),
    )
