"""What each token does in each state of an automaton, in the form that is cheapest to hold.

A row is a state's answer to the whole vocabulary. It has up to three parts: single tokens; ranges of tokens, in the
order of their bytes, that do what they do in the head of some loop; and, for states of a loop, the loop's template.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.loops import LoopGroup, find_loops
from jaxkv.grammar.trie import join_tries
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.walk import Steps, join_steps, walk


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Attributes:
    single: tokens on their own; `origin` is the state before, in ascending order.
    first: int64 [N + 1], where the single tokens of each state start.
    ranges: int32 [G, 4] (state, low, high, head): tokens of ranks low .. high - 1 do what they do in state `head`.
    groups: loops of one template.
    """

    single: Steps
    first: np.ndarray
    ranges: np.ndarray
    groups: tuple["LoopGroup", ...]


def token_rows(automaton: ByteAutomaton, vocabulary: TokenVocabulary, *, barred: np.ndarray, max_work: int) -> Rows:
    """Walks the vocabulary from every state.

    Args:
        automaton: with `Counters` or without.
        vocabulary: of the model.
        barred: bool [N], states in which no token may end.
        max_work: most branches of a walk.

    Raises:
        TooLarge: there are more.
    """
    groups = find_loops(automaton, vocabulary, barred)
    plain = np.ones(automaton.num_states, bool)
    plain[0] = False
    for group in groups:
        plain[group.states] = False
    origins = np.flatnonzero(plain).astype(np.int32)
    trie = vocabulary.trie
    stop = _HeadStops(automaton, groups)
    # From inside a counted string a token also depends on the counter, and no head can stand for that.
    counted = np.zeros(len(origins), bool) if automaton.counters is None else automaton.counters.region[origins] != 0
    inside, outside = origins[counted], origins[~counted]
    result = walk(automaton, trie, outside, stop=stop if stop.any else None, max_work=max_work)
    single = [dataclasses.replace(result.edges, origin=outside[result.edges.origin])]
    if len(inside):
        edges = walk(automaton, trie, inside, max_work=max_work).edges
        single.append(dataclasses.replace(edges, origin=inside[edges.origin]))
    single.append(_leaving(automaton, groups, max_work))
    steps = join_steps(single)
    if barred.any():
        steps = steps.take(np.flatnonzero(~barred[steps.state]))
    narrow = steps.origin.astype(np.uint16) if automaton.num_states <= 1 << 16 else steps.origin  # sorted by radix
    steps = steps.take(np.argsort(narrow, kind="stable"))
    first = np.searchsorted(steps.origin, np.arange(automaton.num_states + 1))
    stops = result.stops
    ranges = _merge(outside[stops.origin], trie.low[stops.where], trie.high[stops.where], stops.state)
    return Rows(steps, first, ranges, tuple(groups))


class _HeadStops:
    """Where a walk may stop because the head of an uncounted loop, walked from the root, is there as well."""

    def __init__(self, automaton: ByteAutomaton, groups: Sequence[LoopGroup]) -> None:
        region = None if automaton.counters is None else automaton.counters.region
        self._map = np.full(automaton.num_states, -1, np.int32)
        in_head: list[np.ndarray] = []
        for group in groups:
            heads = group.states[:, 0]
            uncounted = heads if region is None else heads[region[heads] == 0]
            if len(uncounted):
                self._map[uncounted] = len(in_head)
                in_head.append(group.template.in_head)
        self._in_head = np.stack(in_head) if in_head else np.zeros((0, 0), bool)
        self.any = bool(in_head)

    def __call__(self, state: np.ndarray, node: np.ndarray) -> np.ndarray:
        index = self._map[state]
        result = np.zeros(len(state), bool)
        at_head = np.flatnonzero(index >= 0)
        result[at_head] = self._in_head[index[at_head], node[at_head]]
        return result


def _leaving(automaton: ByteAutomaton, groups: Sequence[LoopGroup], max_work: int) -> Steps:
    """Tokens that leave loops: each way out is walked with what is left of them there, all ways at once."""
    ways = [(group, group.outside[:, way], exit) for group in groups for way, exit in enumerate(group.template.exits)]
    if not ways:
        return join_steps([])
    forest, roots = join_tries([exit.trie for _, _, exit in ways])
    found = [np.unique(outside, return_inverse=True) for _, outside, _ in ways]
    targets = np.concatenate([distinct for distinct, _ in found])
    first_target = _starts([len(distinct) for distinct, _ in found])
    zeros = np.zeros(len(targets), np.int32)
    nodes = np.repeat(roots, np.diff(first_target))
    rests = walk(automaton, forest, targets, nodes=nodes, counts=zeros, max_work=max_work).edges
    # What is left of a token, and what it does, for each target; suffix 0 is nothing: the token ends right there.
    of_target = np.concatenate([np.arange(len(targets)), rests.origin])
    order = np.argsort(of_target, kind="stable")
    suffix = np.concatenate([zeros, rests.where + 1])[order]
    state = np.concatenate([targets, rests.state])[order]
    count = np.concatenate([zeros, rests.count])[order]
    first = np.searchsorted(of_target[order], np.arange(len(targets) + 1))
    # A pair is a loop and a way out of it.
    target = np.concatenate([first_target[way] + index for way, (_, index) in enumerate(found)])
    way_of = np.repeat(np.arange(len(ways)), [len(outside) for _, outside, _ in ways])
    pair, result = expand(first[target], first[target + 1])
    first_suffix = _starts([len(exit.first) for _, _, exit in ways])
    first_entry = _starts([len(exit.rank) for _, _, exit in ways])
    entries = np.concatenate([exit.first + start for (_, _, exit), start in zip(ways, first_entry[:-1], strict=True)])
    place = first_suffix[way_of[pair]] + suffix[result]
    which, entry = expand(entries[place], entries[place + 1])
    pair, result = pair[which], result[which]
    states = np.concatenate([group.states.ravel() for group, _, _ in ways])
    base = _starts([group.states.shape[1] for group, outside, _ in ways for _ in outside])[:-1]
    inside, rank, ticks = (
        np.concatenate([getattr(exit, name) for _, _, exit in ways]) for name in ("state", "rank", "ticks")
    )
    return Steps(
        origin=states[base[pair] + inside[entry]],
        where=rank[entry],
        state=state[result],
        left=np.ones(len(entry), bool),
        ticks=ticks[entry],
        count=count[result],
    )


def _starts(sizes: Sequence[int]) -> np.ndarray:
    """int64 [n + 1], where each of some parts begins if they lie one after another."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def expand(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (i, j) with `low[i] <= j < high[i]`, in order."""
    sizes = (high - low).astype(np.int64)
    index = np.repeat(np.arange(len(low)), sizes)
    return index, np.arange(len(index)) + np.repeat(low - (np.cumsum(sizes) - sizes), sizes)


def _merge(state: np.ndarray, low: np.ndarray, high: np.ndarray, head: np.ndarray) -> np.ndarray:
    """int32 [G, 4]: ranges of one state and head that touch become one."""
    if not len(state):
        return np.zeros((0, 4), np.int32)
    # An automaton has less than 2**20 states, a vocabulary 2**22 tokens.
    key = (state.astype(np.int64) << 42) + (head.astype(np.int64) << 22) + low
    order = np.argsort(
        key, kind="stable"
    )  # one sorted run a level of the trie: merging is 10 times faster than sorting
    key, high = key[order], high[order]
    starts = np.ones(len(key), bool)
    starts[1:] = key[1:] != (key[:-1] >> 22 << 22) + high[:-1]
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(key)) - 1
    key = key[first]
    columns = [key >> 42, key & (1 << 22) - 1, high[last], key >> 22 & (1 << 20) - 1]
    return np.stack(columns, axis=1).astype(np.int32)
