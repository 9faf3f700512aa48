"""Objects: a conjunction of object atoms as a part of the graph.

Names that the schema knows come in its order, others after them or between. Names that it does not know are classes of
names (`patternProperties`, all others); as their number has no limit, a repeated one cannot be seen, so nothing may depend on how
many different ones there are.
"""

import dataclasses

from jaxkv.grammar import algebra
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.chars import json_escape
from jaxkv.grammar.errors import TooLarge, UnsupportedSchema
from jaxkv.grammar.literals import without
from jaxkv.grammar.schema.formula import STRING, Formula, Pool
from jaxkv.grammar.schema.normal import Clause
from jaxkv.grammar.schema.unsupported import refuse

_MAX_CLASSES = 64
_MAX_PLANS = 128


@dataclasses.dataclass(frozen=True)
class Group:
    """One `properties` atom: formulas by name, by pattern of the name, and for all others."""

    names: dict[str, Formula]
    patterns: tuple[tuple[ByteAutomaton, Formula], ...]
    rest: Formula

    def value(self, pool: Pool, name: bytes, text: str) -> Formula:
        """The formula of the property with this name (as text of a JSON string, and decoded)."""
        parts = [self.names[text]] if text in self.names else []
        parts += [formula for automaton, formula in self.patterns if automaton.matches(name)]
        return pool.all(parts) if parts else self.rest


@dataclasses.dataclass(frozen=True)
class Wanted:
    """An `exists` atom: some property with a name that is meant has a value that fulfils the formula."""

    names: frozenset[str]
    patterns: tuple[ByteAutomaton, ...]
    meant: ByteAutomaton | None
    formula: Formula

    def means(self, name: bytes, text: str) -> bool:
        """Whether a name is one of those meant."""
        if self.meant is not None:
            return self.meant.matches(name)
        return text not in self.names and not any(automaton.matches(name) for automaton in self.patterns)


@dataclasses.dataclass
class ObjectPlan:
    """What a conjunction of atoms says of an object.

    Attributes:
        named: formulas of the properties whose names it knows, in order.
        required: names that must be there.
        low, high: least and most properties.
        groups, allowed_names, wanted: what remains for other names.
    """

    named: dict[str, Formula]
    required: frozenset[str]
    low: int
    high: int | None
    groups: list[Group]
    allowed_names: list[Formula]
    wanted: list[Wanted]
    where: str = "#"


def plan_objects(pool: Pool, clause: Clause, is_empty, names_automaton) -> list[ObjectPlan]:
    """Gathers the atoms of a conjunction.

    Args:
        pool: makes formulas.
        clause: object atoms.
        is_empty: whether a formula holds for no value, as far as is known cheaply.
        names_automaton: from a formula to the contents of strings that fulfil it.

    Returns:
        One plan for each way in which known names can fulfil the `exists` atoms; those that no object fulfils are left out.
    """
    atoms = sorted(clause, key=lambda atom: atom.number)
    groups, allowed, required, wanted = [], [], [], []
    low, high = 0, None
    for atom in atoms:
        match atom.kind:
            case "properties":
                groups.append(Group(dict(atom.args[0]), atom.args[1], atom.args[2]))
            case "required":
                required.append(atom.args[0])
            case "size":
                low = max(low, atom.args[0])
                high = atom.args[1] if high is None else high if atom.args[1] is None else min(high, atom.args[1])
            case "names":
                allowed.append(atom.args[0])
            case "exists":
                names, patterns, meant, formula = atom.args
                wanted.append(Wanted(frozenset(names), patterns, meant, formula))
            case "exists_name":
                wanted.append(Wanted(frozenset(), (), names_automaton(atom.args[0]), pool.true))
            case "unsupported":
                refuse(atom)
    order = dict.fromkeys(name for group in groups for name in group.names)
    order |= dict.fromkeys(required)
    order |= dict.fromkeys(sorted(name for want in wanted for name in want.names))
    encoded = {name: json_escape(name) for name in order}
    named = {name: pool.all(group.value(pool, encoded[name], name) for group in groups) for name in order}
    if allowed:
        automata = [names_automaton(formula) for formula in allowed]
        named = {
            name: formula if all(automaton.matches(encoded[name]) for automaton in automata) else pool.false
            for name, formula in named.items()
        }
    plan = ObjectPlan(named, frozenset(required), low, high, groups, allowed, [])
    plans = [plan] if _possible(plan, is_empty) else []
    for want in wanted:
        plans = [split for plan in plans for split in _fulfil(pool, plan, want, encoded) if _possible(split, is_empty)]
        if len(plans) > _MAX_PLANS:
            raise TooLarge(f"a negated schema of objects has more than {_MAX_PLANS} alternatives; use the host matcher")
    return plans


def _fulfil(pool: Pool, plan: ObjectPlan, want: Wanted, encoded: dict[str, bytes]) -> list[ObjectPlan]:
    """The ways to fulfil an `exists`: by each known name, or by one that is not known."""
    result = [dataclasses.replace(plan, wanted=[*plan.wanted, want])]
    for name in plan.named:
        if want.means(encoded[name], name):
            named = plan.named | {name: pool.all([plan.named[name], want.formula])}
            result.append(dataclasses.replace(plan, named=named, required=plan.required | {name}))
    return result


def _possible(plan: ObjectPlan, is_empty) -> bool:
    if plan.high is not None and max(plan.low, len(plan.required)) > plan.high:
        return False
    return not any(is_empty(plan.named[name]) for name in plan.required)


@dataclasses.dataclass(frozen=True)
class NameClass:
    """Names that the schema does not know and treats alike.

    Attributes:
        names: their JSON string contents.
        formula: of their values.
        wanted: which `exists` of the plan mean them.
    """

    names: ByteAutomaton
    formula: Formula
    wanted: frozenset[int]


def name_classes(values, plan: ObjectPlan) -> list[NameClass]:
    """The classes of names that are not in the plan's `named`; `values` is an `Emptiness`."""
    pool, budget = values.pool, values.budget
    everything = values.names(pool.type(STRING))
    for formula in plan.allowed_names:
        everything = algebra.intersection(everything, values.names(formula), budget)
    known = [json_escape(name) for name in plan.named]
    if known:
        everything = without(everything, known)
    patterns = [automaton for group in plan.groups for automaton, _ in group.patterns]
    patterns += [automaton for want in plan.wanted for automaton in want.patterns]
    patterns += [want.meant for want in plan.wanted if want.meant is not None]
    cells: list[tuple[ByteAutomaton, frozenset[ByteAutomaton]]] = [(everything, frozenset())]
    for automaton in dict.fromkeys(patterns):
        split = []
        for names, matching in cells:
            split.append((algebra.intersection(names, automaton, budget), matching | {automaton}))
            split.append((algebra.difference(names, automaton, budget), matching))
        cells = [cell for cell in split if not cell[0].is_empty]
        if len(cells) > _MAX_CLASSES:
            raise TooLarge(f"patternProperties divide names into more than {_MAX_CLASSES} classes")
    by_value: dict[tuple[Formula, frozenset[int]], ByteAutomaton] = {}
    for names, matching in cells:
        if names.is_empty:
            continue
        parts = []
        for group in plan.groups:
            own = [formula for automaton, formula in group.patterns if automaton in matching]
            parts += own or [group.rest]
        meant = frozenset(index for index, want in enumerate(plan.wanted) if _means(want, matching))
        formula = pool.all(parts)
        if not values.is_empty(formula):
            key = (formula, meant)
            by_value[key] = algebra.union(by_value[key], names, budget) if key in by_value else names
    return [NameClass(names, formula, meant) for (formula, meant), names in by_value.items()]


def _means(want: Wanted, matching: frozenset[ByteAutomaton]) -> bool:
    if want.meant is not None:
        return want.meant in matching
    return not any(automaton in matching for automaton in want.patterns)


@dataclasses.dataclass(frozen=True)
class _Place:
    """After some properties: the next name in order (or, in any order, those that were there), their number (capped),
    `exists` not fulfilled yet."""

    seen: int
    count: int
    pending: frozenset[int]


class ObjectBuilder:
    """Writes the objects of a plan.

    Args:
        values: writes values, braces, colons and commas, and knows the order that is asked for.
        plan: what to write.
    """

    def __init__(self, values, plan: ObjectPlan) -> None:
        self.values = values
        self.graph = values.graph
        self.pool = values.pool
        self.plan = plan
        usable = {name: formula for name, formula in plan.named.items() if not values.is_empty(formula)}
        self.names = list(usable)
        self.formulas = list(usable.values())
        self.impossible = not plan.required <= usable.keys()
        self.required = [name in plan.required for name in self.names]
        self.classes = values.emptiness.name_classes(plan)
        self.any_order = len(self.names) <= values.level.any_order
        self.between = values.level.between or not self.names
        low = plan.low
        if low >= 2 and self.classes and low > sum(self.required) + 1:
            raise UnsupportedSchema(
                "minProperties", plan.where, "how many different names of its own choice an object has is not known"
            )
        self.cap = low if plan.high is None else plan.high
        self.after_property: dict[_Place, int] = {}
        self.todo: list[_Place] = []

    def build(self, after: int) -> int:
        """A state from which an object and then `after` is read."""
        if self.impossible:
            return 0
        close = self.values.mark(b"}", after)
        start = _Place(0, 0, frozenset(range(len(self.plan.wanted))))
        first = self.properties(start)
        if self.complete(start):
            first = self.graph.union([first, close])
        opened = self.values.mark(b"{", first)
        while self.todo:
            place = self.todo.pop()
            state = self.after_property[place]
            self.graph.epsilon(state, self.values.mark(b",", self.properties(place)))
            if self.complete(place):
                self.graph.epsilon(state, close)
        return opened

    def missing(self, place: _Place) -> list[int]:
        """Known names that can still come."""
        if self.any_order:
            return [index for index in range(len(self.names)) if not place.seen >> index & 1]
        return list(range(place.seen, len(self.names)))

    def complete(self, place: _Place) -> bool:
        if place.count < self.plan.low or place.pending:
            return False
        return not any(self.required[index] for index in self.missing(place))

    def state(self, place: _Place) -> int:
        """The state after a property."""
        found = self.after_property.get(place)
        if found is None:
            found = self.after_property[place] = self.graph.new()
            self.todo.append(place)
        return found

    def properties(self, place: _Place) -> int:
        """A state from which one more property is read."""
        if self.plan.high is not None and place.count >= self.plan.high:
            return 0
        count = min(place.count + 1, self.cap)
        starts = []
        for index in self.missing(place):
            seen = place.seen | 1 << index if self.any_order else index + 1
            after = self.state(_Place(seen, count, place.pending))
            value = self.values.value(self.formulas[index], after)
            starts.append(self.values.key(self.names[index], value))
            if self.required[index] and not self.any_order:
                break
        if self.between or not any(self.required[index] for index in self.missing(place)):
            starts += self.others(place, count)
        return self.graph.union(starts)

    def others(self, place: _Place, count: int) -> list[int]:
        """States from which a property with a name that is not known is read."""
        last = (1 << len(self.names)) - 1 if self.any_order else len(self.names)
        seen = place.seen if self.between else last
        starts = []
        for names in self.classes:
            # A repeated name replaces the value that fulfilled an `exists`: the later ones must fulfil it as well.
            done = [self.plan.wanted[index].formula for index in names.wanted - place.pending]
            formula = self.pool.all([names.formula, *done])
            starts.append(self.other(names, formula, _Place(seen, count, place.pending)))
            for index in names.wanted & place.pending:
                fulfilled = self.pool.all([formula, self.plan.wanted[index].formula])
                starts.append(self.other(names, fulfilled, _Place(seen, count, place.pending - {index})))
        return starts

    def other(self, names: NameClass, formula: Formula, place: _Place) -> int:
        if self.values.is_empty(formula):
            return 0
        write = self.values.extra_value if self.plan.named else self.values.value
        return self.values.open_key(names.names, write(formula, self.state(place)))
