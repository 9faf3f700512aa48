"""A nondeterministic automaton, built from its end to its start.

Every part is built in front of the state that follows it (`after`), so equal parts with equal continuations are one part,
and loops are closed with `epsilon` to a state that was made beforehand.
"""

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import TooLarge

FINAL = 1  # accepting, nothing follows


class Graph:
    """States with byte transitions, at most one a byte, and any number of epsilon transitions.

    State 0 is dead, state 1 (`FINAL`) accepts. `at_start` and `at_end` transitions are epsilon transitions that may only
    be taken before the first byte, or after the last one (`^` and `$`).
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.size = 2
        self.epsilons: dict[int, list[int]] = {}
        self.at_start: dict[int, list[int]] = {}
        self.at_end: dict[int, list[int]] = {}
        self.edges: list[tuple[int, int, int, int]] = []  # source, first byte, last byte, target
        self.parts: list[tuple[ByteAutomaton, np.ndarray]] = []  # an automaton, and where its states are
        self.regions: list[tuple[int, int]] = [(0, 0)]
        self._region_ids: dict[tuple[int, int], int] = {}
        self._embedded: dict[tuple[int, int], int] = {}
        self._literals: dict[tuple[bytes, int], int] = {}
        self._keep: list[ByteAutomaton] = []

    def new(self, count: int = 1) -> int:
        """A new state without transitions (the first of `count`)."""
        first = self.size
        self.size += count
        if self.size > self.budget.work:
            raise TooLarge(
                f"the grammar needs more than {self.budget.work} nondeterministic states; use the host matcher"
            )
        return first

    def edge(self, source: int, first: int, last: int, target: int) -> None:
        """A transition on the bytes `first`..`last`; they must not overlap another of the same source."""
        if target:
            self.edges.append((source, first, last, target))

    def epsilon(self, source: int, target: int) -> None:
        """A transition on no byte."""
        if target:
            self.epsilons.setdefault(source, []).append(target)

    def union(self, targets: list[int]) -> int:
        """A state from which one can go on as from each of the targets."""
        targets = [target for target in dict.fromkeys(targets) if target]
        if len(targets) < 2:
            return targets[0] if targets else 0
        state = self.new()
        self.epsilons[state] = targets
        return state

    def literal(self, text: bytes, after: int) -> int:
        """`text`, then `after`."""
        if not after:
            return 0
        key = (text, after)
        found = self._literals.get(key)
        if found is not None:
            return found
        state = after
        for position in range(len(text) - 1, -1, -1):
            tail = (text[position:], after)
            known = self._literals.get(tail)
            if known is None:
                known = self.new()
                self.edges.append((known, text[position], text[position], state))
                self._literals[tail] = known
            state = known
        return state

    def embed(self, automaton: ByteAutomaton, after: int) -> int:
        """A text of `automaton`, then `after`."""
        if not after or automaton.is_empty:
            return 0
        key = (id(automaton), after)
        found = self._embedded.get(key)
        if found is not None:
            return found
        count = automaton.num_states
        ends = np.flatnonzero(automaton.accepting)
        closed = ends[~automaton.next[ends].any(axis=1)]  # nothing can follow there: they are `after` itself
        where = np.zeros(count, np.int32)
        inner = np.ones(count, bool)
        inner[0] = False
        inner[closed] = False
        first = self.new(int(inner.sum()))
        where[inner] = first + np.arange(int(inner.sum()), dtype=np.int32)
        where[closed] = after
        for state in ends[inner[ends]]:
            self.epsilon(int(where[state]), after)
        self.parts.append((automaton, where))
        self._keep.append(automaton)
        start = int(where[automaton.start])
        self._embedded[key] = start
        return start

    def region(self, limits: tuple[int, int]) -> int:
        """The id of the counted region with these limits."""
        found = self._region_ids.get(limits)
        if found is None:
            found = self._region_ids[limits] = len(self.regions)
            self.regions.append(limits)
        return found
