"""Counted strings: the counter against counting by states."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.chars import json_escape
from jaxkv.grammar.regex import json_pattern
from jaxkv.grammar.schema import strings

PATTERNS = ["", "^[a-b]*$", "^a+b?$", "^(ab)*$", "^x?(abc)+$", "a", "^(a|bb)*$", "^a{3}|b*$", "^$|^a{9,}$", "\\n|n$"]
TEXTS = st.text(alphabet='ab"\\é😀\nn', max_size=16)


@functools.cache
def automata(pattern: str, low: int, high: int | None) -> tuple[ByteAutomaton, ByteAutomaton, ByteAutomaton]:
    contents = json_pattern(pattern)
    by_states = strings.quoted(strings.expanded(contents, low, high, Budget()))
    return contents, by_states, strings.counted(contents, low, high, Budget())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("low", "high"), [(0, 9), (3, 12), (10, None)])
@given(
    texts=st.lists(
        TEXTS | st.sampled_from(["a" * 9, "ab" * 5, "a" * 12, "xabcabcabc", "b" * 10, "b" * 9]),
        min_size=20,
        max_size=30,
    )
)
@settings(deadline=None, max_examples=4)
def test_the_counter_counts_what_states_count(pattern, low, high, texts):
    contents, by_states, counted = automata(pattern, low, high)
    for text in texts:
        encoded = b'"' + json_escape(text) + b'"'
        expected = contents.matches(json_escape(text)) and low <= len(text) and (high is None or len(text) <= high)
        assert by_states.matches(encoded) == expected, text
        assert counted.matches(encoded) == expected, text


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("low", "high"), [(0, 9), (3, 12), (10, None)])
def test_no_text_that_is_alive_is_a_dead_end(pattern, low, high):
    automaton = automata(pattern, low, high)[2]
    top = 24 if high is None else high + 1
    alive = places(automaton, top)
    stranded = alive - completable(automaton, alive)
    assert {
        place for place in stranded if high is not None or place[1] < top - 4
    } == set()  # above `top` nothing is looked at


def places(automaton: ByteAutomaton, top: int) -> set[tuple[int, int]]:
    """All states with all counters up to `top` that texts lead to."""
    found = {(automaton.start, 0)} if automaton.start else set()
    stack = list(found)
    while stack:
        state, counter = stack.pop()
        for byte in automaton.class_bytes:
            place = automaton.step(state, counter, int(byte))
            if place[0] and place[1] <= top and place not in found:
                found.add(place)
                stack.append(place)
    return found


def completable(automaton: ByteAutomaton, alive: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those from which some text leads to acceptance without leaving `alive`."""
    before: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place in alive:
        for byte in automaton.class_bytes:
            before.setdefault(automaton.step(*place, int(byte)), []).append(place)
    found = {place for place in alive if automaton.accepting[place[0]]}
    stack = list(found)
    while stack:
        for place in before.get(stack.pop(), ()):
            if place not in found:
                found.add(place)
                stack.append(place)
    return found


def test_a_pattern_that_a_counter_could_strand_is_counted_by_states():
    assert strings.counted(json_pattern("^(abc)*$"), 0, 10, Budget()).counters is None
    assert strings.counted(json_pattern("^[a-z]*$"), 0, 10, Budget()).counters is not None
    assert strings.counted(json_pattern("^a{3}$"), 5, 20, Budget()).is_empty
