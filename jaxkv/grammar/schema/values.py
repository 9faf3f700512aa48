"""Values: formulas as parts of a graph, one part for each type that a value can have."""

import dataclasses

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.chars import json_escape
from jaxkv.grammar.errors import UnsupportedSchema
from jaxkv.grammar.graph import Graph
from jaxkv.grammar.schema import strings
from jaxkv.grammar.schema.arrays import ArrayBuilder, ArrayPlan
from jaxkv.grammar.schema.domain import domain
from jaxkv.grammar.schema.emptiness import Emptiness
from jaxkv.grammar.schema.formula import ARRAY, FALSE, NULL, NUMBER, OBJECT, STRING, TRUE, TYPES, Formula, Pool
from jaxkv.grammar.schema.normal import Normaliser
from jaxkv.grammar.schema.objects import ObjectBuilder
from jaxkv.grammar.schema.unsupported import refuse

_WORDS = {NULL: b"null", TRUE: b"true", FALSE: b"false"}
_WHITESPACE = (0x09, 0x0A, 0x0D, 0x20)


@dataclasses.dataclass(frozen=True)
class Level:
    """How much of the freedom that a schema leaves is kept; less makes smaller automata.

    Args:
        any_order: objects with up to this many known properties have them in any order.
        between: properties with other names may come between the known ones, not only after them.
        free: how deep a value may be of which the schema says nothing.
        extra: the same, of a property that the schema does not list, in an object where it lists some.
        nested: how often a value may contain one under the same part of the schema, where the schema is recursive.
        states: limit of the automaton at this level.
        deep: how deep a value may be in all; below, there are only scalars.
        one_unique: arrays of different items of unlimited variety have at most one, as more cannot be told apart.
    """

    any_order: int
    between: bool
    free: int
    extra: int
    nested: int
    states: int
    deep: int = 1_000
    one_unique: bool = False


class Values:
    """Writes values in front of what follows them.

    Args:
        graph: where they are written.
        pool: makes formulas.
        normaliser: takes formulas apart.
        emptiness: whether formulas hold for no value.
        level: how much freedom is kept.
        budget: limits of each automaton on the way.
        flexible: whitespace may stand between all tokens; else none does.
        counters: long strings are counted by the counter; else by states.
    """

    def __init__(
        self,
        graph: Graph,
        pool: Pool,
        normaliser: Normaliser,
        emptiness: Emptiness,
        level: Level,
        budget: Budget,
        *,
        flexible: bool,
        counters: bool,
        relax_unique: dict[str, None] | None,
    ) -> None:
        self.graph = graph
        self.pool = pool
        self.normaliser = normaliser
        self.emptiness = emptiness
        self.is_empty = emptiness.is_empty
        self.level = level
        self.budget = budget
        self.flexible = flexible
        self.counters = counters
        self.relax_unique = relax_unique
        self._values: dict[tuple[Formula, int], int] = {}
        self._spaces: dict[int, int] = {}
        self._marks: dict[tuple[bytes, int], int] = {}
        self._open: dict[Formula, int] = {}  # formulas of the values around, and how often
        self._depth = 0
        self.restricted: dict[str, None] = {}  # `keyword@path` of what is kept by allowing less than the schema does

    # -- tokens

    def space(self, after: int) -> int:
        """Whitespace as the policy allows, then `after`."""
        if not self.flexible or not after:
            return after
        found = self._spaces.get(after)
        if found is None:
            found = self._spaces[after] = self.graph.new()
            for byte in _WHITESPACE:
                self.graph.edge(found, byte, byte, found)
            self.graph.epsilon(found, after)
        return found

    def mark(self, text: bytes, after: int) -> int:
        """A bracket, brace, comma or colon with whitespace around it as allowed, then `after`."""
        if not after:
            return 0
        if not self.flexible:
            return self.graph.literal(text, after)
        opening = text in (b"{", b"[")
        inner = (
            self.graph.literal(text, self.space(after)) if text not in (b"}", b"]") else self.graph.literal(text, after)
        )
        return inner if opening else self.space(inner)

    def key(self, name: str, value: int) -> int:
        """A property with a given name."""
        return self.graph.literal(b'"' + json_escape(name) + b'"', self.mark(b":", value)) if value else 0

    def open_key(self, names: ByteAutomaton, value: int) -> int:
        """A property with one of some names."""
        return self.graph.embed(self._quoted(names), self.mark(b":", value)) if value else 0

    def _quoted(self, contents: ByteAutomaton) -> ByteAutomaton:
        found = self.emptiness.quoted.get(contents)
        if found is None:
            found = self.emptiness.quoted[contents] = strings.quoted(contents)
        return found

    def names(self, formula: Formula) -> ByteAutomaton:
        """Contents of the strings that fulfil a formula."""
        return self.emptiness.names(formula)

    # -- values

    def value(self, formula: Formula, after: int) -> int:
        """A state from which a value that fulfils the formula, and then `after`, is read; 0 if there is none."""
        if not after:
            return 0
        key = (formula, after)
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = self._nested(formula, after)
        return found

    def extra_value(self, formula: Formula, after: int) -> int:
        """`value` for a property that is not listed where others are: less deep if the schema says nothing of it."""
        if formula is not self.pool.true:
            return self.value(formula, after)
        depth = self._open.get(formula, 0)
        self._open[formula] = max(depth, self.level.free - self.level.extra)
        try:
            return self.value(formula, after)
        finally:
            self._open[formula] = depth

    def _nested(self, formula: Formula, after: int) -> int:
        depth = self._open.get(formula, 0)
        most = self.level.free if formula is self.pool.true else self.level.nested
        if depth >= most or self._depth >= self.level.deep:
            return self.graph.union(self._scalars(formula, after))
        self._open[formula] = depth + 1
        self._depth += 1
        try:
            starts = self._scalars(formula, after)
            starts += self._arrays(self.normaliser.restrict(formula, ARRAY), after)
            starts += self._objects(self.normaliser.restrict(formula, OBJECT), after)
        finally:
            self._open[formula] = depth
            self._depth -= 1
        return self.graph.union(starts)

    def _scalars(self, formula: Formula, after: int) -> list[int]:
        starts = []
        for of_type in TYPES:
            if of_type in (ARRAY, OBJECT):
                continue
            local = self.normaliser.restrict(formula, of_type)
            if local is self.pool.false:
                continue
            if of_type == NUMBER:
                starts.append(self.graph.embed(self.emptiness.numbers(local), after))
            elif of_type == STRING:
                starts += self._strings(local, after)
            elif local.kind == "unsupported":
                refuse(local)
            elif not self.emptiness.is_empty_of(local, of_type):
                starts.append(self.graph.literal(_WORDS[of_type], after))
        return [start for start in starts if start]

    def _strings(self, local: Formula, after: int) -> list[int]:
        return [
            self.graph.embed(automaton, after)
            for automaton in self.emptiness.string_parts(local, counters=self.counters)
        ]

    def _arrays(self, local: Formula, after: int) -> list[int]:
        starts = []
        for plan in self.emptiness.array_plans(local):
            plan, values = self._unique(plan)
            if plan.high is not None and plan.low > plan.high:
                continue
            starts.append(ArrayBuilder(self, plan, values).build(after))
        return starts

    def _unique(self, plan: ArrayPlan) -> tuple[ArrayPlan, list[Formula]]:
        """The plan with the values that its items can have, if they must differ."""
        if plan.unique is None:
            return plan, []
        items = self.pool.any([*plan.first, *([plan.rest] if plan.high is None or plan.high > len(plan.first) else [])])
        values = domain(self.pool, self.normaliser, items)
        if values is not None:
            return plan, values
        name = f"uniqueItems@{plan.unique}"
        if self.relax_unique is not None:
            self.relax_unique[name] = None
            return dataclasses.replace(plan, unique=None), []
        if not self.level.one_unique:
            raise UnsupportedSchema(
                "uniqueItems", plan.unique, "items of unlimited variety would have to be remembered"
            )
        self.restricted[name] = None
        return dataclasses.replace(plan, high=1, unique=None), []

    def _objects(self, local: Formula, after: int) -> list[int]:
        return [ObjectBuilder(self, plan).build(after) for plan in self.emptiness.object_plans(local)]
