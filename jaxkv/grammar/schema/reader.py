"""From a JSON Schema to formulas: what each keyword says.

Drafts 4, 6, 7, 2019-09 and 2020-12; `$schema` decides where they differ, and a keyword of another draft is understood
where no draft contradicts (`definitions`, `dependencies`, `items` as a list, `exclusiveMinimum: true`).
"""

import dataclasses
from typing import Any

from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import InvalidSchema, UnsupportedSchema
from jaxkv.grammar.schema import evaluated
from jaxkv.grammar.schema.applicators import Applicators
from jaxkv.grammar.schema.evaluated import NOTHING, Option
from jaxkv.grammar.schema.formula import (
    ALL_TYPES,
    Formula,
    Pool,
)
from jaxkv.grammar.schema.resolve import Document, is_old

# Only say how a schema is organised or read by people.
_SILENT = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$defs",
        "definitions",
        "$comment",
        "$vocabulary",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a schema is to be understood.

    Args:
        closed: objects that list properties have no others unless they say so themselves.
        strict: raise for what cannot be enforced; else leave it out and report it.
        formats: enforce the formats that have an automaton; else all are annotations.
    """

    closed: bool = False
    strict: bool = True
    formats: bool = True


class Reader:
    """Reads the schemas of one document, each when it is needed.

    Attributes:
        relaxed: `keyword@path` of what was left out because it cannot be enforced.
        annotations: `format@path` of formats that are annotations.
    """

    def __init__(self, root: Any, pool: Pool, reading: Reading, budget: Budget) -> None:
        self.pool = pool
        self.reading = reading
        self.budget = budget
        self.relaxed: dict[str, None] = {}
        self.annotations: dict[str, None] = {}
        draft = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.document = Document(root, draft)
        self.old_references = is_old(draft)
        self.draft_3 = "draft-03" in draft
        self.written_integers = self.draft_3 or "draft-04" in draft  # there `1.0` is no integer
        self.contains_evaluates = "2019-09" not in draft
        self._schemas: dict[int, dict[str, Any]] = {}
        self._read: dict[tuple[int, bool], Formula] = {}
        self._open: list[int] = []

    def schema(self, schema: Any) -> Formula:
        """The formula of a schema for another value than the one around it; read when it is asked for."""
        if isinstance(schema, bool):
            return self.pool.true if schema else self.pool.false
        if not isinstance(schema, dict):
            raise InvalidSchema(f"a schema must be an object or a boolean, not {schema!r}")
        if not any(key not in _SILENT for key in schema):
            return self.pool.true
        self._schemas[id(schema)] = schema
        return self.pool.atom("lazy", id(schema))

    def expand(self, formula: Formula) -> Formula:
        """What a `lazy` formula stands for."""
        key = formula.args[0]
        return self._whole(self._schemas[key], root=True)

    def in_place(self, schema: dict[str, Any]) -> Formula:
        """The formula of a schema for the same value."""
        return self._whole(schema, root=False)

    def _whole(self, schema: dict[str, Any], *, root: bool) -> Formula:
        found = self._read.get((id(schema), root))
        if found is None:
            closing = root and self.reading.closed and self._closable(schema)
            options = self.options(schema, tracked=closing)
            if closing:
                options = [evaluated.close_properties(self.pool, option, self.pool.false) for option in options]
            found = self._read[id(schema), root] = self.pool.any(option.formula for option in options)
        return found

    def _closable(self, schema: dict[str, Any]) -> bool:
        """Whether it lists properties, itself or in its parts, and does not speak of others."""
        lists = False
        stack, seen = [schema], set()
        while stack:
            part = stack.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if "additionalProperties" in part or "unevaluatedProperties" in part or "patternProperties" in part:
                return False
            lists = lists or "properties" in part
            for key in ("allOf", "anyOf", "oneOf"):
                stack += part.get(key, []) if isinstance(part.get(key), list) else []
            stack += [part[key] for key in ("then", "else") if key in part]
            if "$ref" in part:
                stack.append(self.document.resolve(part["$ref"], part))
        return lists

    def options(self, schema: Any, *, tracked: bool) -> list[Option]:
        """The schema as alternatives that are told apart by what they evaluate.

        Args:
            schema: an object or a boolean.
            tracked: whether `unevaluatedProperties` or `unevaluatedItems` outside needs what is evaluated; if not there is
                one alternative.
        """
        if isinstance(schema, bool):
            return [Option(self.pool.true if schema else self.pool.false, NOTHING)]
        if not isinstance(schema, dict):
            raise InvalidSchema(f"a schema must be an object or a boolean, not {schema!r}")
        if self._open.count(id(schema)):
            raise UnsupportedSchema(
                "$ref", self.document.path_of(schema), "it refers to itself without going into the value"
            )
        self._open.append(id(schema))
        try:
            return Applicators(self, schema).read(tracked)
        finally:
            self._open.pop()

    def refuse(self, schema: dict[str, Any], keyword: str, reason: str, mask: int = ALL_TYPES) -> Formula:
        """A keyword that cannot be enforced: an atom that raises when it is built, or nothing if it may be relaxed."""
        path = f"{self.document.path_of(schema)}/{keyword}"
        if not self.reading.strict:
            self.relaxed[f"{keyword}@{path}"] = None
            return self.pool.true
        return self.pool.atom("unsupported", mask, keyword, path, reason)
