"""Formulas of one type as plans and automata, and whether they hold for any value at all.

That a formula holds for no value is found where it takes little: kinds of scalars by their automata, arrays and objects by what
must be in them, to some depth. "Not empty" means "not known to be".
"""

from jaxkv.grammar import algebra, decimals
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import TooLarge, UnsupportedSchema
from jaxkv.grammar.schema import strings
from jaxkv.grammar.schema.arrays import ArrayPlan, plan_array
from jaxkv.grammar.schema.formula import ARRAY, NUMBER, OBJECT, STRING, TYPES, Formula, Pool
from jaxkv.grammar.schema.normal import Clause, Exhausted, Normaliser
from jaxkv.grammar.schema.objects import NameClass, ObjectPlan, name_classes, plan_objects
from jaxkv.grammar.schema.unsupported import refuse

_DEPTH = 4  # values inside values that are looked into


class Emptiness:
    """Takes formulas apart, and remembers what it found.

    Args:
        pool: makes formulas.
        normaliser: restricts them to types.
        budget: limits of each automaton on the way.
    """

    def __init__(self, pool: Pool, normaliser: Normaliser, budget: Budget) -> None:
        self.pool = pool
        self.normaliser = normaliser
        self.budget = budget
        self.quoted: dict[ByteAutomaton, ByteAutomaton] = {}
        self._numbers: dict[Formula, ByteAutomaton] = {}
        self._strings: dict[tuple[Formula, bool], list[ByteAutomaton]] = {}
        self._contents: dict[Formula, ByteAutomaton] = {}
        self._empty: set[Formula] = set()
        self._looked: dict[Formula, int] = {}  # not known to be empty, from how far down that was looked at
        self._arrays: dict[tuple[Formula, int], list[ArrayPlan]] = {}
        self._objects: dict[tuple[Formula, int], list[ObjectPlan]] = {}
        self._classes: dict[int, tuple[ObjectPlan, list[NameClass]]] = {}
        self._depth = 0
        self._active: set[Formula] = set()
        self._anew: set[Formula] = set()

    def is_empty(self, formula: Formula) -> bool:
        """Whether it is known that no value fulfils a formula."""
        if formula is self.pool.true:
            return False
        if formula in self._empty:
            return True
        if self._depth >= _DEPTH or self._depth >= self._looked.get(formula, _DEPTH) or formula in self._active:
            return False
        self._depth += 1
        self._active.add(formula)
        try:
            found = all(self.is_empty_of(self.normaliser.restrict(formula, of_type), of_type) for of_type in TYPES)
        except Exhausted:
            raise
        except (UnsupportedSchema, TooLarge):
            found = False  # it is raised again where the formula is built
        finally:
            self._depth -= 1
            self._active.discard(formula)
        if found:
            self._empty.add(formula)
        else:
            self._looked[formula] = self._depth
        return found

    def is_empty_anew(self, local: Formula, of_type: int) -> bool:
        """`is_empty_of`, looking as far down as from the top, whatever is being looked into."""
        if local in self._anew:
            return False
        depth, self._depth = self._depth, 0
        self._anew.add(local)
        try:
            return self.is_empty_of(local, of_type)
        except Exhausted:
            raise
        except (UnsupportedSchema, TooLarge):
            return False
        finally:
            self._anew.discard(local)
            self._depth = depth

    def is_empty_of(self, local: Formula, of_type: int) -> bool:
        """The same of a formula that `restrict` gave for one type."""
        if local is self.pool.false or local is self.pool.true:
            return local is self.pool.false
        if of_type == NUMBER:
            return self.numbers(local).is_empty
        if of_type == STRING:
            return all(automaton.is_empty for automaton in self.string_parts(local, counters=True))
        if of_type == ARRAY:
            return not self.array_plans(local)
        if of_type == OBJECT:
            return not self.object_plans(local)
        for clause in self.normaliser.clauses(local):  # null, true, false: only atoms that refuse are left
            for atom in clause:
                refuse(atom)
            return False
        return True

    def numbers(self, local: Formula) -> ByteAutomaton:
        """The numbers that a formula of number atoms allows."""
        found = self._numbers.get(local)
        if found is None:
            found = self._numbers[local] = self._make_numbers(local)
        return found

    def _make_numbers(self, local: Formula) -> ByteAutomaton:
        match local.kind:
            case "and" | "or":
                combine = algebra.intersection if local.kind == "and" else algebra.union
                result = None
                for part in local.args:
                    result = self.numbers(part) if result is None else combine(result, self.numbers(part), self.budget)
                if result is None:
                    return decimals.number() if local.kind == "and" else algebra.empty()
                return result
            case "compare":
                return decimals.compared(*local.args)
            case "multiple":
                return decimals.multiple(local.args[0])
            case "no_multiple":
                return decimals.multiple(local.args[0], negated=True)
            case "written":
                return decimals.written_integer() if local.args[0] == "integer" else decimals.written_otherwise()
            case "numbers":
                return decimals.equal_any(local.args[0])
        refuse(local)

    def names(self, formula: Formula) -> ByteAutomaton:
        """The contents of strings that fulfil a formula, counted by states."""
        found = self._contents.get(formula)
        if found is None:
            result = algebra.empty()
            for clause in self.normaliser.clauses(self.normaliser.restrict(formula, STRING)):
                contents, low, high = self._gather(clause)
                if low or high is not None:
                    contents = strings.expanded(contents, low, high, self.budget)
                result = algebra.union(result, contents, self.budget)
            found = self._contents[formula] = result
        return found

    def string_parts(self, local: Formula, *, counters: bool) -> list[ByteAutomaton]:
        """JSON strings, with their quotes, that a formula of string atoms allows, as a union of automata."""
        key = (local, counters)
        found = self._strings.get(key)
        if found is None:
            found = self._strings[key] = self._make_strings(local, counters)
        return found

    def _make_strings(self, local: Formula, counters: bool) -> list[ByteAutomaton]:
        plain = algebra.empty()
        result = []
        for clause in self.normaliser.clauses(local):
            contents, low, high = self._gather(clause)
            if contents.is_empty:
                continue
            if not low and high is None:
                plain = contents if plain.is_empty else algebra.union(plain, contents, self.budget)
            elif counters:
                result.append(strings.counted(contents, low, high, self.budget))
            else:
                result.append(strings.quoted(strings.expanded(contents, low, high, self.budget)))
        if not plain.is_empty:
            if plain not in self.quoted:
                self.quoted[plain] = strings.quoted(plain)
            result.append(self.quoted[plain])
        return [automaton for automaton in result if not automaton.is_empty]

    def _gather(self, clause: Clause) -> tuple[ByteAutomaton, int, int | None]:
        """Contents without their length, least and most characters."""
        low, high, contents = 0, None, None
        for atom in sorted(clause, key=lambda atom: atom.number):
            if atom.kind == "unsupported":
                refuse(atom)
            if atom.kind == "length":
                low = max(low, atom.args[0])
                high = atom.args[1] if high is None else high if atom.args[1] is None else min(high, atom.args[1])
                continue
            own = strings.content(atom, self.budget)
            contents = own if contents is None else algebra.intersection(contents, own, self.budget)
        return strings.any_content() if contents is None else contents, low, high

    def array_plans(self, local: Formula) -> list[ArrayPlan]:
        """What a formula of array atoms says, as a union of plans."""
        key = (local, self._depth)
        found = self._arrays.get(key)
        if found is None:
            plans = [plan_array(self.pool, clause, self.is_empty) for clause in self.normaliser.clauses(local)]
            found = self._arrays[key] = [plan for plan in plans if plan is not None]
        return found

    def object_plans(self, local: Formula) -> list[ObjectPlan]:
        """What a formula of object atoms says, as a union of plans."""
        key = (local, self._depth)
        found = self._objects.get(key)
        if found is None:
            plans: dict[Clause, list[ObjectPlan]] = {}

            def possible(clause: Clause) -> bool:
                if clause not in plans:
                    self.normaliser.spend(1 + len(clause) // 8)
                    plans[clause] = plan_objects(self.pool, clause, self.is_empty, self.names)
                return bool(plans[clause])

            clauses = self.normaliser.clauses(local, possible)
            found = self._objects[key] = [plan for clause in clauses for plan in plans[clause]]
        return found

    def name_classes(self, plan: ObjectPlan) -> list[NameClass]:
        """The classes of names that a plan does not know."""
        found = self._classes.get(id(plan))
        if found is None:
            found = self._classes[id(plan)] = (plan, name_classes(self, plan))
        return found[1]
