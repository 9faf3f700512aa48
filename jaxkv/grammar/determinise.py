"""Subset construction where states are in doubt, and only there.

Nearly all states of a grammar are followed by one state a byte; those are copied as arrays. A set of states is made only
where epsilon transitions lead to several states with different continuations.
"""

import numpy as np

from jaxkv.grammar.automaton import NO_TICK, ByteAutomaton, Counters
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.hashing import number_rows
from jaxkv.grammar.minimise import minimise


class CounterConflict(TooLarge):
    """A text could be inside a counted string and in something else at once: the counts must become states."""


def byte_classes(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The coarsest classes that tell apart what any of the rows tells apart.

    Args:
        rows: int [256] each, a number for each byte.

    Returns:
        uint8 [256] class of each byte, and int32 [C] the first byte of each class.
    """
    columns = np.stack(rows, axis=1).astype(np.int32) if rows else np.zeros((256, 1), np.int32)
    byte_class, first = number_rows(columns)
    return byte_class.astype(np.uint8), first.astype(np.int32)


def determinise(graph: Graph, start: int) -> ByteAutomaton:
    """The minimal deterministic automaton of what leads from `start` to `FINAL`.

    Raises:
        TooLarge: more states than the graph's budget; `CounterConflict` if a counted string is not told apart in time.
    """
    return _Determiniser(graph).run(start)


class _Determiniser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.size = graph.size
        self._fill_table()
        self.has_bytes = np.any(self.table, axis=1)
        self.sets: dict[tuple[int, ...], int] = {}
        self.members: list[tuple[int, ...]] = []
        self.members_in_all = 0

    def _fill_table(self) -> None:
        """The byte transitions of all states as one array, before epsilon transitions are taken."""
        graph = self.graph
        automata = {id(automaton): automaton for automaton, _ in graph.parts}
        places: dict[int, list[np.ndarray]] = {key: [] for key in automata}
        for automaton, where in graph.parts:
            places[id(automaton)].append(where)
        rows = [automaton.byte_class for automaton in automata.values()]
        for first, last in {(first, last) for _, first, last, _ in graph.edges}:
            row = np.zeros(256, np.int32)
            row[first : last + 1] = 1
            rows.append(row)
        self.byte_class, first_bytes = byte_classes(rows)
        classes = len(first_bytes)
        self.table = np.zeros((graph.size, classes), np.int32)
        self.region = np.zeros(graph.size, np.int16)
        counted = any(automaton.counters is not None for automaton in automata.values())
        self.tick = np.zeros((graph.size, classes), np.int8) if counted else None
        columns = {key: automaton.byte_class[first_bytes] for key, automaton in automata.items()}
        for key, automaton in automata.items():
            where = np.stack(places[key])
            own = np.flatnonzero(automaton.next.any(axis=1))  # a closed end is the continuation, which has its own row
            rows_at = where[:, own]
            self.table[rows_at] = where[:, automaton.next[own][:, columns[key]]]
            if automaton.counters is not None:
                assert self.tick is not None
                self.tick[rows_at] = automaton.counters.tick[own][:, columns[key]]
                ids = [0] + [graph.region((int(low), int(high))) for low, high in automaton.counters.limits[1:]]
                self.region[rows_at] = np.array(ids, np.int16)[automaton.counters.region[own]]
        if graph.edges:
            edges = np.array(graph.edges, np.int32)
            spans = {
                (int(first), int(last)): np.unique(self.byte_class[first : last + 1])
                for first, last in np.unique(edges[:, 1:3], axis=0)
            }
            by_span: dict[tuple[int, int], list[int]] = {}
            for index, (_, first, last, _) in enumerate(graph.edges):
                by_span.setdefault((first, last), []).append(index)
            for span, indices in by_span.items():
                self.table[edges[indices, 0][:, None], spans[span][None, :]] = edges[indices, 3][:, None]

    def _closure(self, state: int, at_start: bool = False) -> tuple[int, ...]:
        """States one can be in without a further byte; `FINAL` among them if the text may end here."""
        graph = self.graph
        seen, stack = {state}, [state]
        while stack:
            at = stack.pop()
            targets = graph.epsilons.get(at, ())
            if at_start and at in graph.at_start:
                targets = [*targets, *graph.at_start[at]]
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        if graph.at_end and FINAL not in seen and self._may_end(seen, at_start):
            seen.add(FINAL)
        return tuple(sorted(s for s in seen if s == FINAL or self.has_bytes[s]))

    def _may_end(self, states: set[int], at_start: bool) -> bool:
        graph = self.graph
        seen, stack = set(states), list(states)
        while stack:
            at = stack.pop()
            targets = [*graph.epsilons.get(at, ()), *graph.at_end.get(at, ())]
            if at_start:
                targets += graph.at_start.get(at, ())
            for target in targets:
                if target == FINAL:
                    return True
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return False

    def _number(self, members: tuple[int, ...]) -> int:
        """The deterministic state of a set of states."""
        if len(members) < 2:
            return members[0] if members else 0
        known = self.sets.get(members)
        if known is None:
            if any(self.region[member] for member in members):
                raise CounterConflict("a counted string overlaps another alternative; use the host matcher")
            known = self.sets[members] = self.size + len(self.members)
            self.members.append(members)
            self.members_in_all += len(members)
            self.graph.budget.check(self.members_in_all // 4, "a union of alternatives")
        return known

    def _represent(self) -> np.ndarray:
        """int32 [states]: the deterministic state that stands for each state with its epsilon transitions."""
        represent = np.arange(self.size, dtype=np.int32)
        silent: np.ndarray = ~self.has_bytes
        silent[FINAL] = False
        represent[silent] = 0
        for state in {*self.graph.epsilons, *self.graph.at_end}:
            represent[state] = self._number(self._closure(state))
        return represent

    def _set_row(self, members: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
        """Transitions of a set, and their effects on the counter."""
        rows = self.table[list(members)]
        alive = rows > 0
        row = self.represent[rows.max(axis=0)]
        ticks = None
        if self.tick is not None:
            ticks = np.where(alive, self.tick[list(members)], NO_TICK).max(axis=0)
        cache: dict[bytes, int] = {}
        for column in np.flatnonzero(alive.sum(axis=0) > 1):
            targets = rows[:, column]
            key = targets.tobytes()
            found = cache.get(key)
            if found is None:
                distinct = set(self.represent[targets[targets > 0]].tolist()) - {0}
                found = cache[key] = next(iter(distinct)) if len(distinct) == 1 else self._merge(distinct)
            row[column] = found
            if ticks is not None:
                assert self.tick is not None
                effects = self.tick[list(members), column][alive[:, column]]
                if (effects != effects[0]).any():
                    raise CounterConflict("a counted string overlaps another alternative; use the host matcher")
        return row, ticks

    def _merge(self, numbers: set[int]) -> int:
        union: set[int] = set()
        for number in numbers:
            union.update(self.members[number - self.size] if number >= self.size else (number,))
        return self._number(tuple(sorted(union)))

    def run(self, start: int) -> ByteAutomaton:
        self.represent = self._represent()
        first = self._number(self._closure(start, at_start=True)) if start else 0
        table = self.represent[self.table]
        rows, ticks = [], []
        done = 0
        while done < len(self.members):
            row, tick = self._set_row(self.members[done])
            rows.append(row)
            ticks.append(tick)
            done += 1
        accepting = np.zeros(self.size + len(rows), bool)
        accepting[FINAL] = True
        for index, members in enumerate(self.members):
            accepting[self.size + index] = FINAL in members
        if rows:
            table = np.concatenate([table, np.stack(rows).astype(np.int32)])
        counters = None
        if self.tick is not None:
            region = np.concatenate([self.region, np.zeros(len(rows), np.int16)])
            tick = np.concatenate([self.tick, np.stack(ticks)]) if rows else self.tick
            counters = Counters(region, np.array(self.graph.regions, np.int32), tick)
        result = minimise(ByteAutomaton(self.byte_class, table, accepting, first, counters))
        self.graph.budget.check(result.num_states)
        return result
