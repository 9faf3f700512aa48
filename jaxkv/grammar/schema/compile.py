"""JSON Schema to an automaton over bytes."""

import dataclasses
import json
import math
from typing import Any, Literal

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.determinise import CounterConflict, determinise
from jaxkv.grammar.errors import InvalidSchema, TooLarge, UnsupportedSchema
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.schema.emptiness import Emptiness
from jaxkv.grammar.schema.formula import Pool
from jaxkv.grammar.schema.normal import Exhausted, Normaliser
from jaxkv.grammar.schema.reader import Reader, Reading
from jaxkv.grammar.schema.values import Level, Values

# Tried in turn: small schemas keep all freedom, large ones a fixed order and flat free values.
LEVELS = (
    Level(any_order=4, between=True, free=4, extra=2, nested=4, states=500),
    Level(any_order=3, between=False, free=4, extra=1, nested=4, states=1_000),
    Level(any_order=0, between=False, free=5, extra=1, nested=4, states=3_000),
    Level(any_order=3, between=False, free=3, extra=1, nested=3, states=3_000),
    Level(any_order=0, between=False, free=3, extra=1, nested=3, states=6_000),
    Level(any_order=0, between=False, free=2, extra=1, nested=3, states=40_000),
)


# When no host matcher takes the schema either: flat free values, recursion hardly or not at all, few levels in all; and
# arrays whose items must differ have at most one where their values are too many to remember.
SHALLOW_LEVELS = (
    Level(any_order=0, between=False, free=3, extra=1, nested=3, states=8_000, one_unique=True),
    Level(any_order=0, between=False, free=1, extra=0, nested=2, states=40_000, one_unique=True),
    Level(any_order=0, between=False, free=1, extra=0, nested=1, states=40_000, one_unique=True),
    Level(any_order=0, between=False, free=1, extra=0, nested=1, states=8_000, deep=4, one_unique=True),
    Level(any_order=0, between=False, free=1, extra=0, nested=1, states=40_000, deep=3, one_unique=True),
)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledSchema:
    """The automaton of a schema, and how it was read.

    Attributes:
        automaton: the JSON texts that are valid, within `level`.
        level: how deep free and recursive values may be, and which orders of properties are accepted.
        relaxed: `keyword@path` of what is not enforced; empty if `strict`.
        restricted: `keyword@path` of what is enforced by allowing less than the schema does.
        annotations: `format@path` of formats that the standard lets be annotations and that have no automaton here.
    """

    automaton: ByteAutomaton
    level: Level
    relaxed: tuple[str, ...]
    restricted: tuple[str, ...]
    annotations: tuple[str, ...]


def compile_schema(
    schema: dict[str, Any] | bool | str,
    *,
    whitespace: Literal["compact", "flexible"] = "compact",
    additional: Literal["schema", "closed"] = "schema",
    strict: bool = True,
    formats: bool = True,
    shallow: bool = False,
    budget: Budget = DEFAULT_BUDGET,
) -> CompiledSchema:
    """The JSON texts that are valid under a schema.

    Strings are in canonical form (raw UTF-8, escaped only what must be), numbers as `decimals` says. No text of an
    invalid value is accepted; of valid values those are that keep to `CompiledSchema.level`.

    Args:
        schema: JSON Schema (drafts 4 to 2020-12), as an object, a boolean or JSON text.
        whitespace: none, or any amount between tokens.
        additional: what `additionalProperties` is where a schema lists properties and does not say: as the standard has it
            (anything goes), or nothing else goes, as in the strict mode of OpenAI's `json_schema`.
        strict: refuse what cannot be enforced; else leave it out and report it.
        formats: enforce string formats; else they are annotations.
        shallow: the host matcher has refused the schema: try `SHALLOW_LEVELS` instead, which say less of valid values.
        budget: limits of states.

    Raises:
        UnsupportedSchema: a keyword cannot be enforced; names it and its path.
        InvalidSchema: the schema is wrong.
        TooLarge: over the budget at every level.
    """
    own = _own_copy(schema)
    try:
        reader = _Prepared(own, Reading(additional == "closed", strict, formats), budget)
    except RecursionError:
        raise TooLarge("the schema is nested too deeply; use the host matcher") from None
    failure: TooLarge | None = None
    for level in SHALLOW_LEVELS if shallow else LEVELS:
        for counters in (True, False):
            try:
                return reader.compile(level, flexible=whitespace == "flexible", counters=counters)
            except Exhausted:
                raise
            except CounterConflict as error:
                failure = error
            except TooLarge as error:
                failure = error
                break
            except RecursionError:
                raise TooLarge("the schema is nested too deeply; use the host matcher") from None
    assert failure is not None
    raise failure


def _own_copy(schema: dict[str, Any] | bool | str) -> Any:
    """The schema as JSON makes it, with no object in two places."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except InvalidSchema:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise InvalidSchema("the schema is nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidSchema(f"the schema has the number {text}, which is not a finite one")
    return value


class _Prepared:
    """A schema that is read once, for all levels."""

    def __init__(self, schema: Any, reading: Reading, budget: Budget) -> None:
        self.budget = budget
        self.strict = reading.strict
        self.pool = Pool()
        self.reader = Reader(schema, self.pool, reading, budget)
        self.normaliser = Normaliser(self.pool, self.reader.expand, lambda *asked: self.emptiness.is_empty_anew(*asked))
        self.emptiness = Emptiness(self.pool, self.normaliser, budget)
        self.formula = self.reader.schema(schema)

    def compile(self, level: Level, *, flexible: bool, counters: bool) -> CompiledSchema:
        """The automaton at one level.

        Raises:
            TooLarge: over the budget or the level's limit.
        """
        # Sharing makes the deterministic automaton about as large as what it is made from: more ends the attempt early.
        limits = Budget(min(level.states, self.budget.states), min(2 * level.states, self.budget.work))
        values = Values(
            Graph(limits),
            self.pool,
            self.normaliser,
            self.emptiness,
            level,
            limits,
            flexible=flexible,
            counters=counters,
            relax_unique=None if self.strict else self.reader.relaxed,
        )
        start = values.space(values.value(self.formula, values.space(FINAL)))
        automaton = determinise(values.graph, start)
        if automaton.is_empty and values.restricted:
            keyword, path = next(iter(values.restricted)).split("@", 1)
            raise UnsupportedSchema(keyword, path, "items of unlimited variety would have to be remembered")
        reports = (self.reader.relaxed, values.restricted, self.reader.annotations)
        return CompiledSchema(automaton, level, *map(tuple, reports))
