"""Formulas of one type of value, without negation, and as a union of conjunctions."""

from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.schema.formula import ATOM_TYPE, Formula, Pool

_FLIPPED = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_MAX_CLAUSES = 512
_MAX_EFFORT = 10_000  # conjunctions looked at; a schema of 80 kB whose parts exclude each other takes some 2,000

Clause = frozenset[Formula]


class Exhausted(TooLarge):
    """A schema took too long: no other level helps."""


class Normaliser:
    """Rewrites formulas.

    Args:
        pool: where formulas are made.
        expand: from a `lazy` formula to what it stands for.
        is_empty: whether a restricted formula is known to hold for no value of its type.
    """

    def __init__(self, pool: Pool, expand, is_empty) -> None:
        self.pool = pool
        self.expand = expand
        self.is_empty = is_empty
        self._restricted: dict[tuple[Formula, int, bool], Formula] = {}
        self._effort = 0

    def spend(self, effort: int) -> None:
        """Counts conjunctions that were looked at.

        Raises:
            TooLarge: they are too many for this schema to be worth an automaton.
        """
        self._effort += effort
        if self._effort > _MAX_EFFORT:
            raise Exhausted("combinations of schemas take too long to tell apart; use the host matcher")

    def restrict(self, formula: Formula, of_type: int, negated: bool = False) -> Formula:
        """What the formula (or its negation) says of values of one type: `and` and `or` of that type's atoms."""
        key = (formula, of_type, negated)
        found = self._restricted.get(key)
        if found is None:
            found = self._restricted[key] = self._restrict(formula, of_type, negated)
        return found

    def _restrict(self, formula: Formula, of_type: int, negated: bool) -> Formula:
        pool, kind, args = self.pool, formula.kind, formula.args
        if kind == "lazy":
            return self.restrict(self.expand(formula), of_type, negated)
        if kind == "not":
            return self.restrict(args[0], of_type, not negated)
        if kind == "one_of":
            return self._one_of([self.restrict(part, of_type) for part in args], args, of_type, negated)
        if kind in ("and", "or"):
            parts = []
            absorbing = pool.false if (kind == "and") != negated else pool.true
            for part in args:
                parts.append(self.restrict(part, of_type, negated))
                if parts[-1] is absorbing:
                    return absorbing
            return pool.all(parts) if absorbing is pool.false else pool.any(parts)
        if kind == "type":
            holds = bool(args[0] & of_type) != negated
            return pool.true if holds else pool.false
        mask = args[0] if kind == "unsupported" else ATOM_TYPE[kind]
        if not mask & of_type:
            return pool.false if negated else pool.true
        return self._dual(formula) if negated else formula

    def _one_of(self, branches: list[Formula], parts: tuple[Formula, ...], of_type: int, negated: bool) -> Formula:
        """Exactly one of the branches, or not; only those that can hold together must be told apart."""
        pool = self.pool
        live = [index for index, branch in enumerate(branches) if branch is not pool.false]
        together = []
        for at, left in enumerate(live):
            for right in live[at + 1 :]:
                both = pool.all([branches[left], branches[right]])
                if both is not pool.false and not self.is_empty(both, of_type):
                    together.append((left, right, both))
        if negated:
            none = pool.all(self.restrict(parts[index], of_type, True) for index in live)
            return pool.any([none, *(both for _, _, both in together)])
        options = []
        for index in live:
            others = {left + right - index for left, right, _ in together if index in (left, right)}
            refuted = [self.restrict(parts[other], of_type, True) for other in sorted(others)]
            options.append(pool.all([branches[index], *refuted]))
        return pool.any(options)

    def _dual(self, atom: Formula) -> Formula:
        """The negation of an atom, for values of its type."""
        pool, args = self.pool, atom.args
        match atom.kind:
            case "pattern":
                return pool.atom("no_pattern", *args)
            case "no_pattern":
                return pool.atom("pattern", *args)
            case "multiple":
                return pool.atom("no_multiple", *args)
            case "no_multiple":
                return pool.atom("multiple", *args)
            case "compare" if args[0] == "!=":
                return pool.atom("numbers", (args[1],))
            case "compare":
                return pool.atom("compare", _FLIPPED[args[0]], args[1])
            case "numbers":
                return pool.all(pool.atom("compare", "!=", value) for value in args[0])
            case "written":
                return pool.atom("written", "other" if args[0] == "integer" else "integer")
            case "length" | "count" | "size":
                return self._outside(atom.kind, (), *args)
            case "contains":
                return self._outside("contains", (args[0],), args[1], args[2], args[3])
            case "unique":
                return pool.atom("repeated", *args)
            case "repeated":
                return pool.atom("unique", *args)
            case "items":
                return self._not_items(*args)
            case "required":
                return pool.atom("properties", ((args[0], pool.false),), (), pool.true)
            case "properties":
                return self._not_properties(*args)
            case "names":
                return pool.atom("exists_name", pool.negate(args[0]))
            case "exists_name":
                return pool.atom("names", pool.negate(args[0]))
            case "exists":
                names, patterns, meant, value = args
                rest = pool.negate(value)
                if meant is not None:
                    return pool.atom("properties", (), ((meant, rest),), pool.true)
                return pool.atom(
                    "properties", tuple((n, pool.true) for n in names), tuple((p, pool.true) for p in patterns), rest
                )
            case "unsupported":
                return atom
        raise AssertionError(atom.kind)

    def _outside(self, kind: str, before: tuple, low: int, high: int | None, *after) -> Formula:
        """A count that is not within limits."""
        options = []
        if low > 0:
            options.append(self.pool.atom(kind, *before, 0, low - 1, *after))
        if high is not None:
            options.append(self.pool.atom(kind, *before, high + 1, None, *after))
        return self.pool.any(options)

    def _not_items(self, first: tuple[Formula, ...], rest: Formula) -> Formula:
        pool = self.pool
        options = []
        for index, item in enumerate(first):
            if item is not pool.true:
                before = (pool.true,) * index
                wrong = pool.atom("items", (*before, pool.negate(item)), pool.true)
                options.append(pool.all([wrong, pool.atom("count", index + 1, None)]))
        if rest is not pool.true:
            options.append(pool.atom("contains", pool.negate(rest), 1, None, len(first)))
        return pool.any(options)

    def _not_properties(self, names: tuple, patterns: tuple, rest: Formula) -> Formula:
        pool = self.pool
        options = []
        for name, value in names:
            if value is not pool.true:
                wrong = pool.atom("properties", ((name, pool.negate(value)),), (), pool.true)
                options.append(pool.all([pool.atom("required", name), wrong]))
        for automaton, value in patterns:
            if value is not pool.true:
                options.append(pool.atom("exists", (), (), automaton, pool.negate(value)))
        if rest is not pool.true:
            others = (tuple(name for name, _ in names), tuple(automaton for automaton, _ in patterns))
            options.append(pool.atom("exists", *others, None, pool.negate(rest)))
        return pool.any(options)

    def clauses(self, formula: Formula, possible=lambda clause: True) -> list[Clause]:
        """A restricted formula as a union of conjunctions of atoms.

        Args:
            formula: what `restrict` gave.
            possible: False for a conjunction that no value fulfils; such are dropped.

        Raises:
            TooLarge: more than 512 conjunctions.
        """
        return self._absorb([clause for clause in self._clauses(formula, possible) if possible(clause)])

    def _clauses(self, formula: Formula, possible) -> list[Clause]:
        if formula.kind == "or":
            return self._absorb([clause for part in formula.args for clause in self._clauses(part, possible)])
        if formula.kind != "and":
            return [frozenset([formula])]
        atoms = frozenset(part for part in formula.args if part.kind != "or")
        result = [atoms]
        for part in sorted((part for part in formula.args if part.kind == "or"), key=lambda part: len(part.args)):
            options = self._clauses(part, possible)
            self.spend(len(result) * len(options) // 8)
            result = self._absorb([left | right for left in result for right in options])
            if len(result) > 4:
                result = [clause for clause in result if possible(clause)]
        return result

    def _absorb(self, clauses: list[Clause]) -> list[Clause]:
        """Without conjunctions that say more than another one of the union."""
        kept: list[Clause] = []
        if len(clauses) > 8 * _MAX_CLAUSES:
            raise TooLarge(
                f"a combination of schemas has more than {8 * _MAX_CLAUSES} alternatives; use the host matcher"
            )
        for clause in sorted(dict.fromkeys(clauses), key=len):
            if not any(other <= clause for other in kept):
                kept.append(clause)
        if len(kept) > _MAX_CLAUSES:
            raise TooLarge(f"a combination of schemas has more than {_MAX_CLAUSES} alternatives; use the host matcher")
        return kept
