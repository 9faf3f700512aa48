"""What each token does in each state of an automaton, in the form that is cheapest to hold.

A row is a state's answer to the whole vocabulary. It has up to three parts: single tokens; ranges of tokens, in the
order of their bytes, that do what they do in the head of some loop; and, for states of a loop, the loop's template.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.loops import LoopGroup, find_loops
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
    for group in groups:
        single += _leaving(automaton, group, max_work)
    steps = join_steps(single)
    if barred.any():
        steps = steps.take(np.flatnonzero(~barred[steps.state]))
    steps = steps.take(np.argsort(steps.origin, kind="stable"))
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


def _leaving(automaton: ByteAutomaton, group: LoopGroup, max_work: int) -> list[Steps]:
    """Tokens that leave the loops of a group: each way out is walked with what is left of them there."""
    parts: list[Steps] = []
    for way, exit in enumerate(group.template.exits):
        targets, index = np.unique(group.outside[:, way], return_inverse=True)
        zeros = np.zeros(len(targets), np.int32)
        rests = walk(automaton, exit.trie, targets, counts=zeros, max_work=max_work).edges
        none = np.arange(len(targets), dtype=np.int32)  # nothing is left: the token ends right there
        origin = np.concatenate([none, rests.origin])
        order = np.argsort(origin, kind="stable")
        origin = origin[order]
        suffix = np.concatenate([zeros, rests.where + 1])[order]
        state = np.concatenate([targets, rests.state])[order]
        count = np.concatenate([zeros, rests.count])[order]
        first = np.searchsorted(origin, np.arange(len(targets) + 1))
        loop_of, result = expand(first[index], first[index + 1])
        which, entry = expand(exit.first[suffix[result]], exit.first[suffix[result] + 1])
        result, loop_of = result[which], loop_of[which]
        parts.append(
            Steps(
                origin=group.states[loop_of, exit.state[entry]],
                where=exit.rank[entry],
                state=state[result],
                left=np.ones(len(entry), bool),
                ticks=exit.ticks[entry],
                count=count[result],
            )
        )
    return parts


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
