"""JSON Schema to an automaton over bytes."""

import dataclasses
import json
from typing import Any, Literal

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.determinise import CounterConflict, determinise
from jaxkv.grammar.errors import InvalidSchema, TooLarge
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.schema.emptiness import Emptiness
from jaxkv.grammar.schema.formula import Pool
from jaxkv.grammar.schema.normal import Normaliser
from jaxkv.grammar.schema.reader import Reader, Reading
from jaxkv.grammar.schema.values import Level, Values

# Tried in turn: small schemas keep all freedom, large ones a fixed order and flat free values.
LEVELS = (
    Level(any_order=3, between=True, free=4, nested=5, states=3_000),
    Level(any_order=0, between=True, free=3, nested=4, states=6_000),
    Level(any_order=0, between=False, free=2, nested=3, states=40_000),
)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledSchema:
    """The automaton of a schema, and how it was read.

    Attributes:
        automaton: the JSON texts that are valid, within `level`.
        level: how deep free and recursive values may be, and which orders of properties are accepted.
        relaxed: `keyword@path` of what is not enforced; empty if `strict`.
        annotations: `format@path` of formats that the standard lets be annotations and that have no automaton here.
    """

    automaton: ByteAutomaton
    level: Level
    relaxed: tuple[str, ...]
    annotations: tuple[str, ...]


def compile_schema(
    schema: dict[str, Any] | bool | str,
    *,
    whitespace: Literal["compact", "flexible"] = "compact",
    additional: Literal["schema", "closed"] = "schema",
    strict: bool = True,
    formats: bool = True,
    budget: Budget = Budget(),
) -> CompiledSchema:
    """The JSON texts that are valid under a schema.

    Strings are in canonical form (raw UTF-8, escaped only what must be), numbers as `decimals` says. No text of an invalid value is
    accepted; of valid values those are that keep to `CompiledSchema.level`.

    Args:
        schema: JSON Schema (drafts 4 to 2020-12), as an object, a boolean or JSON text.
        whitespace: none, or any amount between tokens.
        additional: what `additionalProperties` is where a schema lists properties and does not say: as the standard has it
            (anything goes), or nothing else goes, as in the strict mode of OpenAI's `json_schema`.
        strict: refuse what cannot be enforced; else leave it out and report it.
        formats: enforce string formats; else they are annotations.
        budget: limits of states.

    Raises:
        UnsupportedSchema: a keyword cannot be enforced; names it and its path.
        InvalidSchema: the schema is wrong.
        TooLarge: over the budget at every level.
    """
    schema = _own_copy(schema)
    failure: TooLarge | None = None
    for level in LEVELS:
        limits = Budget(min(level.states, budget.states), min(4 * level.states, budget.work))
        for counters in (True, False):
            try:
                return _compile(schema, Reading(additional == "closed", strict, formats), level, limits, whitespace, counters)
            except CounterConflict as error:
                failure = error
            except (TooLarge, RecursionError) as error:
                failure = error if isinstance(error, TooLarge) else TooLarge("the schema is nested too deeply")
                break
    assert failure is not None
    raise failure


def _own_copy(schema: dict[str, Any] | bool | str) -> Any:
    """The schema as JSON makes it, with no object in two places."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from None


def _compile(schema: Any, reading: Reading, level: Level, budget: Budget, whitespace: str, counters: bool) -> CompiledSchema:
    pool = Pool()
    reader = Reader(schema, pool, reading, budget, lambda formula: emptiness.is_empty(formula))
    normaliser = Normaliser(pool, reader.expand)
    emptiness = Emptiness(pool, normaliser, budget)
    relaxed = None if reading.strict else reader.relaxed
    flexible = whitespace == "flexible"
    graph = Graph(budget)
    values = Values(
        graph, pool, normaliser, emptiness, level, budget, flexible=flexible, counters=counters, relax_unique=relaxed
    )
    automaton = determinise(graph, values.space(values.value(reader.schema(schema), values.space(FINAL))))
    return CompiledSchema(automaton, level, tuple(reader.relaxed), tuple(reader.annotations))
