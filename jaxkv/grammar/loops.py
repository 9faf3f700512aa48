"""Loops of an automaton that read almost any text, such as the inside of a JSON string.

From such a state nearly every token is alive, so a walk over the vocabulary from each of a hundred strings would be a
hundred times the same work. Loops that look alike, but for where they lead when they are left, share one walk: its
result is a *template*, kept with the vocabulary for later grammars. Where other walks enter a loop, they stop too:
below a trie node at which the loop's own walk is in the same state, both do the same.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import DEAD, NO_TICK, ByteAutomaton, Counters
from jaxkv.grammar.trie import Trie, build_trie
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.walk import MAX_TICKS, Steps, walk

MIN_WIDTH = 16  # bytes that lead a state to itself before it is worth a template
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
class Loop:
    """A loop of one automaton.

    Attributes:
        states: int32 [n], its states, the head first, in the order of the template.
        outside: int32 [exits], the state that each way out leads to.
        template: shared by all loops of this form.
    """

    states: np.ndarray
    outside: np.ndarray
    template: Template


def find_loops(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> list[Loop]:
    """All wide loops, no two with a state in common."""
    width = np.bincount(automaton.byte_class, minlength=automaton.num_classes)
    to_itself = automaton.next == np.arange(automaton.num_states)[:, None]
    to_itself[DEAD] = False
    heads = np.flatnonzero(to_itself @ width >= MIN_WIDTH)
    if not len(heads):
        return []
    owner = _owners(automaton, heads)
    order = np.argsort(automaton.class_bytes)  # of the byte classes, the same in every automaton
    loops = (_make_loop(automaton, vocabulary, head, owner, order) for head in heads.tolist())
    return [loop for loop in loops if loop is not None]


def _owners(automaton: ByteAutomaton, heads: np.ndarray) -> np.ndarray:
    """int32 [N]: the head that a state cannot but come back to; -1 for states that can do else, and the dead one."""
    table, region = automaton.next, None if automaton.counters is None else automaton.counters.region
    near = heads
    for _ in range(MAX_DETOUR):
        near = np.union1d(near, table[near])
    near = np.setdiff1d(near, np.append(heads, DEAD))
    owner = np.full(automaton.num_states, -1, np.int32)
    owner[heads] = heads
    for _ in range(MAX_DETOUR):
        rows = table[near]
        owners = np.where(rows == DEAD, -2, owner[rows])
        highest = owners.max(axis=1, initial=-2)
        agreed = np.where(owners == -2, highest[:, None], owners).min(axis=1, initial=1 << 30) == highest
        found = agreed & (highest >= 0) & ~automaton.accepting[near]
        if region is not None:  # a detour may not leave the counted string
            found &= region[near] == region[highest]
        if not found.any():
            break
        owner[near[found]] = highest[found]
        near = near[~found]
    return owner


def _make_loop(
    automaton: ByteAutomaton, vocabulary: TokenVocabulary, head: int, owner: np.ndarray, order: np.ndarray
) -> Loop | None:
    """The loop of `head`; None if a way out stays in the counted string: its count would have to go on."""
    states, outside = _trace(automaton.next, head, owner, order)
    counters = automaton.counters
    if (
        counters is not None
        and counters.region[head] != 0
        and np.any(counters.region[outside] == counters.region[head])
    ):
        return None
    local, ticks = _isolate(automaton, states, outside)
    key = local.next.astype(np.int16).tobytes() + ticks.tobytes() + len(states).to_bytes(4, "little")
    templates = vocabulary.templates
    template = templates.pop(key, None)
    if template is None:
        while len(templates) >= MAX_TEMPLATES:
            templates.pop(next(iter(templates)))
        template = make_template(local, len(states), vocabulary)
    templates[key] = template  # the last one used stands last
    return Loop(states, outside, template)


def _trace(table: np.ndarray, head: int, owner: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States of the loop of `head`, and the states it leads to, as a search over bytes in their order meets them."""
    states, place, outside = [head], {head}, dict[int, None]()
    for state in states:  # grows while it is read
        row = table[state, order]
        _, firsts = np.unique(row, return_index=True)
        for target in row[np.sort(firsts)].tolist():
            if target == DEAD or target in place:
                continue
            if owner[target] == head:
                place.add(target)
                states.append(target)
            else:
                outside[target] = None
    return np.array(states, np.int32), np.array(list(outside), np.int32)


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
