"""Which properties and items a schema has evaluated, for `unevaluatedProperties` and `unevaluatedItems`.

What is evaluated depends on which alternatives hold, so a schema is read as options: formulas that exclude each other
wherever they evaluate different things.
"""

import dataclasses
import itertools
from typing import Any

from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.schema.formula import Formula, Pool

_MAX_OPTIONS = 256


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Children that are evaluated: named or matching, all; the first items, all, those that fulfil a formula (`contains`)."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[Any] = frozenset()
    all_properties: bool = False
    first_items: int = 0
    all_items: bool = False
    containing: frozenset[Formula] = frozenset()

    def __or__(self, other: "Evaluated") -> "Evaluated":
        return Evaluated(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.first_items, other.first_items),
            self.all_items or other.all_items,
            self.containing | other.containing,
        )


NOTHING = Evaluated()


@dataclasses.dataclass(frozen=True)
class Option:
    """A formula, and what is evaluated where it holds."""

    formula: Formula
    seen: Evaluated


def both(pool: Pool, left: list[Option], right: list[Option]) -> list[Option]:
    """The options of two schemas that must both hold."""
    if len(left) * len(right) > _MAX_OPTIONS:
        raise TooLarge(f"unevaluated properties or items depend on more than {_MAX_OPTIONS} combinations of schemas")
    return _merge(pool, [Option(pool.all([a.formula, b.formula]), a.seen | b.seen) for a in left for b in right])


def any_of(pool: Pool, branches: list[list[Option]]) -> list[Option]:
    """The options of schemas of which at least one must hold."""
    silent = [option.formula for options in branches for option in options if option.seen == NOTHING]
    telling = [options for options in branches if any(option.seen != NOTHING for option in options)]
    if not telling:
        return [Option(pool.any(silent), NOTHING)]
    if 2 ** len(telling) > _MAX_OPTIONS:
        raise TooLarge("unevaluated properties or items depend on too many alternatives of anyOf")
    choices = []
    for options in telling:
        refuted = pool.negate(pool.any(option.formula for option in options))
        choices.append([*options, Option(refuted, NOTHING)])
    whole = pool.any(option.formula for options in branches for option in options)
    result = []
    for chosen in itertools.product(*choices):
        seen = NOTHING
        for option in chosen:
            seen = seen | option.seen
        formula = pool.all([whole, *(option.formula for option in chosen)])
        result.append(Option(formula, seen))
        if len(result) > _MAX_OPTIONS:
            raise TooLarge("unevaluated properties or items depend on too many alternatives of anyOf")
    return _merge(pool, result)


def _merge(pool: Pool, options: list[Option]) -> list[Option]:
    """One option for each thing evaluated, without those that never hold."""
    by_seen: dict[Evaluated, list[Formula]] = {}
    for option in options:
        if option.formula is not pool.false:
            by_seen.setdefault(option.seen, []).append(option.formula)
    return [Option(pool.any(formulas), seen) for seen, formulas in by_seen.items()] or [Option(pool.false, NOTHING)]


def close_properties(pool: Pool, option: Option, rest: Formula) -> Option:
    """The option, with a formula for all properties that it has not evaluated."""
    seen = dataclasses.replace(option.seen, all_properties=True)
    if option.seen.all_properties or rest is pool.true:
        return Option(option.formula, seen)
    names = tuple((name, pool.true) for name in sorted(option.seen.names))
    patterns = tuple((automaton, pool.true) for automaton in sorted(option.seen.patterns, key=id))
    return Option(pool.all([option.formula, pool.atom("properties", names, patterns, rest)]), seen)


def close_items(pool: Pool, option: Option, rest: Formula) -> Option:
    """The option, with a formula for all items that it has not evaluated."""
    seen = dataclasses.replace(option.seen, all_items=True)
    if option.seen.all_items or rest is pool.true:
        return Option(option.formula, seen)
    first = (pool.true,) * option.seen.first_items
    containing = sorted(option.seen.containing, key=lambda formula: formula.number)
    return Option(pool.all([option.formula, pool.atom("items", first, pool.any([*containing, rest]))]), seen)
