"""A nondeterministic automaton, built from its end to its start.

Every part is built in front of the state that follows it (`after`), so equal parts with equal continuations are one part,
and loops are closed with `epsilon` to a state that was made beforehand.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import TooLarge

FINAL = 1  # accepting, nothing follows


@dataclasses.dataclass(frozen=True, eq=False)
class _Shape:
    """How an automaton is embedded.

    Attributes:
        closed: its accepting states that nothing can follow: they are the continuation itself.
        inner: bool [N], all others but the dead one.
        place: int64 [N], which of the inner states each is.
        open_ends: the accepting ones of the inner states.
    """

    closed: np.ndarray
    inner: np.ndarray
    place: np.ndarray
    open_ends: list[int]

    @classmethod
    def of(cls, automaton: ByteAutomaton) -> "_Shape":
        goes_on = automaton.next.any(axis=1)
        inner = ~automaton.accepting | goes_on
        inner[0] = False
        place = np.cumsum(inner) - 1
        open_ends = place[automaton.accepting & goes_on].tolist()
        return cls(np.flatnonzero(automaton.accepting & ~goes_on), inner, place, open_ends)

    @property
    def num_inner(self) -> int:
        return int(self.inner.sum())


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
        self._literals: dict[tuple[int, int], int] = {}
        self._shapes: dict[int, _Shape] = {}

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
        for byte in reversed(text):
            key = (byte, after)
            known = self._literals.get(key)
            if known is None:
                known = self._literals[key] = self.new()
                self.edges.append((known, byte, byte, after))
            after = known
        return after

    def embed(self, automaton: ByteAutomaton, after: int) -> int:
        """A text of `automaton`, then `after`."""
        if not after or automaton.is_empty:
            return 0
        key = (id(automaton), after)
        found = self._embedded.get(key)
        if found is not None:
            return found
        shape = self._shapes.get(id(automaton))
        if shape is None:
            shape = self._shapes[id(automaton)] = _Shape.of(automaton)
        first = self.new(shape.num_inner)
        where = np.where(shape.inner, shape.place + first, 0).astype(np.int32)
        where[shape.closed] = after
        for place in shape.open_ends:
            self.epsilon(first + place, after)
        self.parts.append((automaton, where))
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
