"""Strings: formulas as automata of JSON string contents, and as whole values with their quotes."""

import functools

import numpy as np

from jaxkv.grammar import algebra
from jaxkv.grammar.automaton import ENTER, TICK, ByteAutomaton, Counters
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.minimise import FAR, minimise
from jaxkv.grammar.regex import json_whole
from jaxkv.grammar.schema.formula import Formula

_EXPANDED = (
    8  # characters: a count up to this becomes states, each of which costs as many states again as a character has
)
_ENDLESS = np.iinfo(np.int32).max


@functools.cache
def any_content() -> ByteAutomaton:
    """All JSON string contents in canonical form: raw UTF-8, escaped only what must be."""
    return json_whole(r"[^]*")


@functools.cache
def _characters() -> np.ndarray:
    """bool [256]: bytes that begin a character of a JSON string (a backslash does; a continuation byte does not).

    What follows a backslash also looks so; `_boundaries` says where a character can begin.
    """
    begins = np.ones(256, bool)
    begins[0x80:0xC0] = False
    return begins


def content(formula: Formula, budget: Budget) -> ByteAutomaton:
    """The contents that a formula of string atoms without `length` allows."""
    match formula.kind:
        case "and":
            result = any_content()
            for part in formula.args:
                result = algebra.intersection(result, content(part, budget), budget)
            return result
        case "or":
            result = algebra.empty()
            for part in formula.args:
                result = algebra.union(result, content(part, budget), budget)
            return result
        case "pattern":
            return formula.args[0]
        case "no_pattern":
            return algebra.difference(any_content(), formula.args[0], budget)
    raise AssertionError(formula.kind)


def quoted(automaton: ByteAutomaton) -> ByteAutomaton:
    """The JSON strings with these contents."""
    return minimise(quoted_table(automaton))


@functools.lru_cache(maxsize=512)
def counted(automaton: ByteAutomaton, low: int, high: int | None, budget: Budget) -> ByteAutomaton:
    """The JSON strings with these contents that have `low` to `high` characters; short counts as states, others with a counter.

    Raises:
        TooLarge: a counter cannot tell in time that too few or many characters must follow, and the states are too many.
    """
    if (high or low) > _EXPANDED or (high is not None and low > high):
        if high is not None and low > high:
            return algebra.empty()
        found = _with_counter(automaton, low, high)
        if found is not None:
            return found
    return quoted(expanded(automaton, low, high, budget))


def expanded(automaton: ByteAutomaton, low: int, high: int | None, budget: Budget) -> ByteAutomaton:
    """The contents with `low` to `high` characters, counted by states."""
    top = low if high is None else high
    if top * automaton.num_states > 4 * budget.states:
        raise TooLarge(f"a pattern with a length up to {top} needs more than {budget.states} states")
    return algebra.intersection(automaton, lengths(low, high), budget)


@functools.lru_cache(maxsize=256)
def lengths(low: int, high: int | None) -> ByteAutomaton:
    """All contents of `low` to `high` characters."""
    top = low if high is None else high
    base = any_content()
    boundary = base.accepting  # a text of whole characters is accepted
    count = base.num_states
    copies = top + 1
    table = np.zeros((count * copies + 1, base.num_classes), np.int32)
    accepting = np.zeros(len(table), bool)
    begins = _begin_columns(base)
    for index in range(copies):
        here = base.next + np.where(base.next > 0, index * count, 0)
        ahead = index + 1 if index < top else (index if high is None else None)
        shift = np.zeros_like(here) if ahead is None else np.where(base.next > 0, base.next + ahead * count, 0)
        ticks = boundary[:, None] & begins[None, :]
        table[index * count : (index + 1) * count] = np.where(ticks, shift, here)
        accepting[index * count : (index + 1) * count] = base.accepting & (index >= low)
    return minimise(ByteAutomaton(base.byte_class, table, accepting, base.start))


def _begin_columns(automaton: ByteAutomaton) -> np.ndarray:
    """bool [C]: classes of bytes that begin a character."""
    return _characters()[automaton.class_bytes]


def _boundaries(automaton: ByteAutomaton) -> np.ndarray | None:
    """bool [N]: states between two characters; None if a state is that after one text, and inside a character after another."""
    base = any_content()
    pairs = {(automaton.start, base.start)}
    stack = list(pairs)
    columns = sorted({(int(automaton.byte_class[byte]), int(base.byte_class[byte])) for byte in range(256)})
    table, other_table = automaton.next.tolist(), base.next.tolist()
    while stack:
        state, at = stack.pop()
        row, other_row = table[state], other_table[at]
        for own, other in columns:
            pair = (row[own], other_row[other])
            if pair[0] and pair not in pairs:
                pairs.add(pair)
                stack.append(pair)
    boundary = np.zeros(automaton.num_states, bool)
    inside = np.zeros(automaton.num_states, bool)
    for state, at in pairs:
        (boundary if base.accepting[at] else inside)[state] = True
    return None if (boundary & inside).any() else boundary


def _with_counter(automaton: ByteAutomaton, low: int, high: int | None) -> ByteAutomaton | None:
    """Strings whose length a counter checks; None if some state could then be a dead end.

    A state is none if the text may end there, or if the characters read until then are few enough for those that must follow;
    and if as many as are missing can follow.
    """
    boundary = _boundaries(automaton)
    if boundary is None or not _never_stuck(automaton, boundary, low, high):
        return None
    inside = quoted_table(automaton)
    begins = _begin_columns(inside)
    count = inside.num_states
    region = np.ones(count, np.int16)
    region[[0, count - 2, count - 1]] = 0  # dead, before the first quote, after the last
    between = np.zeros(count, bool)
    between[: automaton.num_states] = boundary
    tick = np.where(between[:, None] & begins[None, :] & (inside.next > 0), TICK, 0).astype(np.int8)
    tick[:, inside.byte_class[0x22]] = 0
    tick[count - 2, inside.byte_class[0x22]] = ENTER
    limits = np.array([[0, 0], [low, _ENDLESS if high is None else high]], np.int32)
    return minimise(
        ByteAutomaton(inside.byte_class, inside.next, inside.accepting, inside.start, Counters(region, limits, tick))
    )


def quoted_table(automaton: ByteAutomaton) -> ByteAutomaton:
    """`quoted` without renumbering: the states of `automaton`, one before the first quote, one after the last."""
    column = np.zeros(256, np.int64)
    column[0x22] = 1
    code = automaton.byte_class.astype(np.int64) * 2 + column
    _, first, byte_class = np.unique(code, return_index=True, return_inverse=True)
    count = automaton.num_states
    table = np.zeros((count + 2, len(first)), np.int32)
    table[:count] = automaton.next[:, automaton.byte_class[first]]
    quote = int(byte_class[0x22])
    # A quote ends the string between two characters; after a backslash it is one of them.
    table[:count, quote] = np.where(automaton.accepting, count + 1, table[:count, quote])
    table[count, quote] = automaton.start
    accepting = np.zeros(count + 2, bool)
    accepting[count + 1] = True
    return ByteAutomaton(byte_class.astype(np.uint8), table, accepting, count)


def _never_stuck(automaton: ByteAutomaton, boundary: np.ndarray, low: int, high: int | None) -> bool:
    """Whether a text that respects the counter can always be completed."""
    steps = _character_steps(automaton, boundary)
    places = np.flatnonzero(boundary)
    fewest = _fewest_to_end(automaton, places, steps)
    if high is not None and fewest[places].any():
        most_before = _longest(automaton.start, steps)
        if any(fewest[state] and most_before.get(int(state), FAR) + fewest[state] > high for state in places):
            return False
    # Any length beyond the fewest can be had if from each accepting place one more character leads to another.
    ends = {int(state) for state in np.flatnonzero(automaton.accepting)}
    return low == 0 or all(steps[state] & ends for state in ends)


def _character_steps(automaton: ByteAutomaton, boundary: np.ndarray) -> dict[int, set[int]]:
    """For each state between characters those that one character leads to."""
    steps: dict[int, set[int]] = {}
    for state in np.flatnonzero(boundary):
        found: set[int] = set()
        stack, seen = [int(state)], set()
        while stack:
            for after in {int(after) for after in automaton.next[stack.pop()] if after}:
                if boundary[after]:
                    found.add(after)
                elif after not in seen:
                    seen.add(after)
                    stack.append(after)
        steps[int(state)] = found
    return steps


def _fewest_to_end(automaton: ByteAutomaton, places: np.ndarray, steps: dict[int, set[int]]) -> np.ndarray:
    """int64 [N]: the fewest characters from each place to an accepting one."""
    fewest = np.full(automaton.num_states, FAR, np.int64)
    fewest[automaton.accepting] = 0
    changed = True
    while changed:
        changed = False
        for state in places:
            best = min((int(fewest[after]) + 1 for after in steps[int(state)]), default=FAR)
            if best < fewest[state]:
                fewest[state] = best
                changed = True
    return fewest


def _longest(start: int, steps: dict[int, set[int]]) -> dict[int, int]:
    """The most characters from the start to each place; places with no limit are left out.

    A way longer than there are places goes round a circle, and leaving circles out brings it to at most twice that.
    """
    length = {start: 0}
    frontier = {start}
    for count in range(1, 2 * len(steps) + 1):
        frontier = {after for state in frontier for after in steps[state]}
        if not frontier:
            break
        for state in frontier:
            length[state] = count
    return {state: count for state, count in length.items() if count <= len(steps)}
