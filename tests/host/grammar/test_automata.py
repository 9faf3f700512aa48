"""The algebra of automata, against sets of short texts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.grammar import algebra
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.determinise import determinise
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.hashing import number_rows
from jaxkv.grammar.literals import choice, without
from jaxkv.grammar.minimise import minimise

TEXTS = [bytes(text) for length in range(6) for text in itertools.product(b"ab", repeat=length)]


def language(automaton: ByteAutomaton) -> set[bytes]:
    return {text for text in TEXTS if automaton.matches(text)}


@st.composite
def tables(draw) -> ByteAutomaton:
    """Any deterministic automaton over a and b, neither trimmed nor minimal."""
    count = draw(st.integers(1, 5))
    states = st.integers(0, count)
    table = np.zeros((count + 1, 3), np.int32)
    for state in range(1, count + 1):
        table[state, 1:] = [draw(states), draw(states)]
    byte_class = np.zeros(256, np.uint8)
    byte_class[[0x61, 0x62]] = [1, 2]
    accepting = np.array([False, *(draw(st.booleans()) for _ in range(count))])
    return ByteAutomaton(byte_class, table, accepting, 1)


@given(tables())
@settings(deadline=None, max_examples=100)
def test_minimising_keeps_the_language_and_leaves_no_two_equal_states(automaton):
    small = minimise(automaton)
    assert language(small) == language(automaton)
    suffixes = {}
    for state in range(small.num_states):
        from_here = ByteAutomaton(small.byte_class, small.next, small.accepting, state)
        suffixes[frozenset(language(from_here))] = state
    assert len(suffixes) == small.num_states  # five states are told apart by texts of five bytes
    assert not language(ByteAutomaton(small.byte_class, small.next, small.accepting, 0))


@given(tables(), tables())
@settings(deadline=None, max_examples=100)
def test_products_are_set_operations(left, right):
    a, b = language(left), language(right)
    assert language(algebra.union(left, right)) == a | b
    assert language(algebra.intersection(left, right)) == a & b
    assert language(algebra.difference(left, right)) == a - b
    assert language(algebra.complement(left)) == set(TEXTS) - a
    assert algebra.complement(left).matches(b"\xff\x00z")


@given(tables(), tables())
@settings(deadline=None, max_examples=50)
def test_equivalence_and_de_morgan(left, right):
    either = algebra.union(left, right)
    neither = algebra.intersection(algebra.complement(left), algebra.complement(right))
    assert algebra.equivalent(algebra.complement(either), neither)
    assert algebra.equivalent(left, minimise(left))
    assert not algebra.equivalent(left, algebra.complement(left))


@given(st.lists(tables(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=50)
def test_a_graph_concatenates_and_unites(parts):
    parts = [minimise(part) for part in parts]
    graph = Graph(Budget())
    after = FINAL
    for part in reversed(parts):
        after = graph.embed(part, after)
    whole = determinise(graph, after)
    expected = {b""}
    for part in parts:
        expected = {left + right for left in expected for right in language(part) if len(left + right) <= 5}
    assert language(whole) == expected

    graph = Graph(Budget())
    united = determinise(graph, graph.union([graph.embed(part, FINAL) for part in parts]))
    assert language(united) == set().union(*map(language, parts))


@given(tables())
@settings(deadline=None, max_examples=50)
def test_a_loop_is_the_closure(part):
    part = minimise(part)
    graph = Graph(Budget())
    loop = graph.new()
    graph.epsilon(loop, FINAL)
    graph.epsilon(loop, graph.embed(part, loop))
    pieces = language(part) - {b""}
    expected = {b""}
    for _ in range(5):
        expected |= {left + right for left in expected for right in pieces if len(left + right) <= 5}
    assert language(determinise(graph, loop)) == expected


def test_a_choice_is_the_texts_and_nothing_else():
    texts = ["a", "ab", "foo", "foobar", "", "é"]
    automaton = choice(texts)
    assert all(automaton.matches(text) for text in texts)
    assert not any(automaton.matches(text) for text in ["b", "foob", "aba", "fo", b"\xc3"])
    assert choice([]).is_empty


def test_every_state_but_the_dead_one_can_be_completed():
    automaton = choice(["abc", "abd", "x"])
    assert automaton.next[0].sum() == 0 and not automaton.accepting[0]
    assert automaton.num_states == 5  # dead, before a, b and c or d, after all


def test_a_budget_is_kept():
    with pytest.raises(TooLarge, match="more than 8 states"):
        choice(["abcdefghijkl"], Budget(states=8))
    with pytest.raises(TooLarge, match="nondeterministic"):
        choice(["abcdefghijkl"], Budget(work=8))


@given(tables(), st.lists(st.sampled_from(TEXTS), max_size=6))
def test_without_some_texts_is_the_difference_from_their_choice(automaton: ByteAutomaton, texts: list[bytes]) -> None:
    made = without(automaton, texts)
    slow = algebra.difference(automaton, choice(texts))
    assert algebra.equivalent(made, slow) and made.num_states == slow.num_states


def test_rows_are_numbered_by_first_place_and_told_apart_by_any_bit() -> None:
    top, odd = np.uint64(1 << 63), np.uint64(1)
    rows = np.array([[0, 0], [top, top], [0, 0], [top, 0], [odd, 0], [0, odd], [top, top]], np.uint64)
    number, first = number_rows(rows)
    assert number.tolist() == [0, 1, 0, 2, 3, 4, 1] and first.tolist() == [0, 1, 3, 4, 5]
