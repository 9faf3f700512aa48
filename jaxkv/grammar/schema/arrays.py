"""Arrays: a conjunction of array atoms as a part of the graph."""

import dataclasses

from jaxkv.grammar.errors import UnsupportedSchema
from jaxkv.grammar.schema.formula import Formula, Pool
from jaxkv.grammar.schema.normal import Clause
from jaxkv.grammar.schema.unsupported import refuse


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """What a conjunction of atoms says of an array.

    Attributes:
        first: formulas of the first items; `rest` that of all others.
        low, high: least and most items.
        contains: (formula, least, most, from which index) of items that must be there.
        unique: where `uniqueItems` stands, if it does and matters.
    """

    first: tuple[Formula, ...]
    rest: Formula
    low: int
    high: int | None
    contains: tuple[tuple[Formula, int, int | None, int], ...]
    unique: str | None

    def item(self, pool: Pool, index: int) -> Formula:
        """The formula of one item."""
        return self.first[index] if index < len(self.first) else self.rest


def plan_array(pool: Pool, clause: Clause, is_empty) -> ArrayPlan | None:
    """Gathers the atoms of a conjunction; None if no array fulfils it.

    Args:
        pool: makes formulas.
        clause: array atoms.
        is_empty: whether a formula holds for no value, as far as is known cheaply.
    """
    atoms = sorted(clause, key=lambda atom: atom.number)
    low, high, unique, contains, items = 0, None, None, [], []
    for atom in atoms:
        match atom.kind:
            case "count":
                low = max(low, atom.args[0])
                high = _least(high, atom.args[1])
            case "contains":
                contains.append(atom.args)
                low = max(low, atom.args[3] + atom.args[1] if atom.args[1] else 0)
            case "items":
                items.append(atom.args)
            case "unique" | "repeated":
                unique = unique or (atom.kind, atom.args[0])
            case "unsupported":
                refuse(atom)
    length = max((len(first) for first, _ in items), default=0)
    if high is not None:
        length = min(length, high)
    first = tuple(pool.all(own[index] if index < len(own) else rest for own, rest in items) for index in range(length))
    rest = pool.all(rest for _, rest in items)
    for index in range(length):
        if is_empty(first[index]):  # no item can stand there
            high, first = _least(high, index), first[:index]
            break
    if (high is None or high > len(first)) and is_empty(rest):
        high = _least(high, len(first))
    if high is not None and low > high:
        return None
    if unique is not None and unique[0] == "repeated":
        raise UnsupportedSchema("uniqueItems", unique[1], "its negation has no finite automaton")
    if high is not None and high <= 1:
        unique = None
    needed = [args for args in contains if args[1] > 0 or args[2] is not None]
    return ArrayPlan(first, rest, low, high, tuple(needed), None if unique is None else unique[1])


def _least(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left, right)


@dataclasses.dataclass(frozen=True)
class _Place:
    """After some items: how many (capped), how many fulfil each `contains` (capped), and which values were used (`unique`)."""

    index: int
    counts: tuple[int, ...]
    used: frozenset[int] = frozenset()


class ArrayBuilder:
    """Writes the arrays of a plan.

    Args:
        values: writes items (`value`), brackets and commas.
        plan: what to write.
        domain: all values that items can have, as formulas, where `unique` is to be enforced.
    """

    def __init__(self, values, plan: ArrayPlan, domain: list[Formula]) -> None:
        self.values = values
        self.graph = values.graph
        self.pool = values.pool
        self.plan = plan
        self.domain = domain
        starts: list[int] = [start + 1 for _, _, _, start in plan.contains]
        self.cap: int = max(len(plan.first), plan.low, plan.high or 0, *starts, 0)
        self.after_item: dict[_Place, int] = {}
        self.todo: list[_Place] = []

    def build(self, after: int) -> int:
        """A state from which an array and then `after` is read."""
        close = self.values.mark(b"]", after)
        start = _Place(0, (0,) * len(self.plan.contains))
        first = self.items(start)
        if self.complete(start):
            first = self.graph.union([first, close])
        opened = self.values.mark(b"[", first)
        while self.todo:
            place = self.todo.pop()
            state = self.after_item[place]
            more = self.values.mark(b",", self.items(place))
            self.graph.epsilon(state, more)
            if self.complete(place):
                self.graph.epsilon(state, close)
        return opened

    def complete(self, place: _Place) -> bool:
        enough = all(count >= low for count, (_, low, _, _) in zip(place.counts, self.plan.contains, strict=True))
        return place.index >= self.plan.low and enough

    def state(self, place: _Place) -> int:
        """The state after an item."""
        found = self.after_item.get(place)
        if found is None:
            found = self.after_item[place] = self.graph.new()
            self.todo.append(place)
        return found

    def items(self, place: _Place) -> int:
        """A state from which one more item is read."""
        plan = self.plan
        if plan.high is not None and place.index >= plan.high:
            return 0
        options = [(plan.item(self.pool, place.index), place.counts)]
        for at, (wanted, low, high, start) in enumerate(plan.contains):
            if place.index >= start:
                options = [split for option in options for split in self.split(option, at, wanted, low, high)]
        index = min(place.index + 1, self.cap)
        starts = []
        for formula, counts in options:
            if plan.unique is None:
                starts.append(self.values.value(formula, self.state(_Place(index, counts))))
                continue
            for number, value in enumerate(self.domain):
                if number not in place.used:
                    both = self.pool.all([formula, value])
                    if not self.values.is_empty(both):
                        starts.append(self.values.value(both, self.state(_Place(index, counts, place.used | {number}))))
        return self.graph.union(starts)

    def split(self, option, at: int, wanted: Formula, low: int, high: int | None):
        """An item that fulfils a `contains`, or one that does not or whose count does not matter."""
        formula, counts = option
        count = counts[at]
        if high is None and count >= low:
            return [option]
        found = (self.pool.all([formula, wanted]), (*counts[:at], count + 1, *counts[at + 1 :]))
        if high is None:
            return [found, option]
        other = (self.pool.all([formula, self.pool.negate(wanted)]), counts)
        return [found, other] if count < high else [other]
