"""From a JSON Schema to formulas: what each keyword says.

Drafts 4, 6, 7, 2019-09 and 2020-12; `$schema` decides where they differ, and a keyword of another draft is understood
where no draft contradicts (`definitions`, `dependencies`, `items` as a list, `exclusiveMinimum: true`).
"""

import dataclasses
from typing import Any

from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import InvalidSchema, RegexError, UnsupportedSchema
from jaxkv.grammar.regex import json_pattern
from jaxkv.grammar.schema import evaluated
from jaxkv.grammar.schema.constants import decimal, encodable, one_of
from jaxkv.grammar.schema.evaluated import NOTHING, Evaluated, Option
from jaxkv.grammar.schema.formats import format_automaton
from jaxkv.grammar.schema.formula import (
    ALL_TYPES,
    ARRAY,
    BOOLEAN,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    Formula,
    Pool,
)
from jaxkv.grammar.schema.resolve import Document, is_old

_TYPES = {"null": NULL, "boolean": BOOLEAN, "number": NUMBER, "string": STRING, "array": ARRAY, "object": OBJECT}
_IN_PLACE = (
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependencies",
    "$ref",
    "$dynamicRef",
)
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
            return _Keywords(self, schema).read(tracked)
        finally:
            self._open.pop()

    def refuse(self, schema: dict[str, Any], keyword: str, reason: str, mask: int = ALL_TYPES) -> Formula:
        """A keyword that cannot be enforced: an atom that raises when it is built, or nothing if it may be relaxed."""
        path = f"{self.document.path_of(schema)}/{keyword}"
        if not self.reading.strict:
            self.relaxed[f"{keyword}@{path}"] = None
            return self.pool.true
        return self.pool.atom("unsupported", mask, keyword, path, reason)


class _Keywords:
    """The keywords of one schema object."""

    def __init__(self, reader: Reader, schema: dict[str, Any]) -> None:
        self.reader = reader
        self.pool = reader.pool
        self.schema = schema
        self.path = reader.document.path_of(schema)

    def read(self, tracked: bool) -> list[Option]:
        schema = self.schema
        if "$ref" in schema and self.reader.old_references:
            return self.reference("$ref", tracked)
        inner = tracked or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        options = [Option(self.pool.all(self.assertions()), self.own_evaluated())]
        for keyword in _IN_PLACE:
            if keyword in schema:
                options = evaluated.both(self.pool, options, self.in_place(keyword, inner))
        if "unevaluatedItems" in schema:
            rest = self.reader.schema(schema["unevaluatedItems"])
            options = [evaluated.close_items(self.pool, option, rest) for option in options]
        if "unevaluatedProperties" in schema:
            rest = self.reader.schema(schema["unevaluatedProperties"])
            options = [evaluated.close_properties(self.pool, option, rest) for option in options]
        if not tracked:
            return [Option(self.pool.any(option.formula for option in options), NOTHING)]
        return options

    # -- applicators to the same value

    def reference(self, keyword: str, tracked: bool) -> list[Option]:
        reference = self.schema[keyword]
        if not isinstance(reference, str):
            raise InvalidSchema(f"{keyword} at {self.path} must be a string")
        target = self.reader.document.resolve(reference, self.schema, keyword)
        if keyword == "$dynamicRef":
            target = self.dynamic(reference, target)
        if not tracked and isinstance(target, dict):
            return [Option(self.reader.in_place(target), NOTHING)]
        return self.reader.options(target, tracked=tracked)

    def dynamic(self, reference: str, target: Any) -> Any:
        name = reference.partition("#")[2]
        anchored = self.reader.document.dynamic.get(name, [])
        if not isinstance(target, dict) or target.get("$dynamicAnchor") != name or len(anchored) < 2:
            return target
        raise UnsupportedSchema("$dynamicRef", self.path, f"{name!r} has more than one dynamic anchor")

    def in_place(self, keyword: str, tracked: bool) -> list[Option]:
        pool, schema, reader = self.pool, self.schema, self.reader
        match keyword:
            case "$ref" | "$dynamicRef":
                return self.reference(keyword, tracked)
            case "allOf":
                options = [Option(pool.true, NOTHING)]
                for part in self.schemas(keyword):
                    options = evaluated.both(pool, options, reader.options(part, tracked=tracked))
                return options
            case "anyOf":
                return evaluated.any_of(pool, [reader.options(part, tracked=tracked) for part in self.schemas(keyword)])
            case "oneOf":
                return self.one_of(tracked)
            case "not":
                return [Option(pool.negate(self.plain(schema["not"])), NOTHING)]
            case "if":
                return self.conditional(tracked)
            case "dependentSchemas" | "dependencies":
                return self.dependent(keyword, tracked)
        return [Option(pool.true, NOTHING)]  # then, else: read with `if`

    def plain(self, schema: Any) -> Formula:
        """The formula of a schema for the same value, whatever it evaluates."""
        return self.reader.options(schema, tracked=False)[0].formula

    def schemas(self, keyword: str) -> list[Any]:
        parts = self.schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise InvalidSchema(f"{keyword} at {self.path} must be a non-empty list of schemas")
        return parts

    def one_of(self, tracked: bool) -> list[Option]:
        pool = self.pool
        branches = [self.reader.options(part, tracked=tracked) for part in self.schemas("oneOf")]
        whole = [pool.any(option.formula for option in options) for options in branches]
        if all(option.seen == NOTHING for options in branches for option in options):
            return [Option(pool.atom("one_of", *whole), NOTHING)]
        result = []
        for index, options in enumerate(branches):
            others = [pool.negate(other) for at, other in enumerate(whole) if at != index]
            result += [Option(pool.all([option.formula, *others]), option.seen) for option in options]
        return result

    def conditional(self, tracked: bool) -> list[Option]:
        pool, schema = self.pool, self.schema
        if "then" not in schema and "else" not in schema and not tracked:
            return [Option(pool.true, NOTHING)]
        condition = self.reader.options(schema["if"], tracked=tracked)
        refuted = pool.negate(pool.any(option.formula for option in condition))
        then = self.reader.options(schema.get("then", True), tracked=tracked)
        otherwise = self.reader.options(schema.get("else", True), tracked=tracked)
        return evaluated.both(pool, condition, then) + evaluated.both(pool, [Option(refuted, NOTHING)], otherwise)

    def dependent(self, keyword: str, tracked: bool) -> list[Option]:
        pool = self.pool
        options = [Option(pool.true, NOTHING)]
        for name, wanted in self.mapping(keyword).items():
            if isinstance(wanted, list):
                continue  # names only: an assertion
            present = pool.all([pool.type(OBJECT), self.present(name)])
            absent = Option(pool.negate(present), NOTHING)
            then = evaluated.both(pool, [Option(present, NOTHING)], self.reader.options(wanted, tracked=tracked))
            options = evaluated.both(pool, options, [absent, *then])
        return options

    # -- assertions

    def assertions(self) -> list[Formula]:
        """The formulas of all keywords that do not apply other schemas to the same value."""
        parts = []
        for keyword, value in self.schema.items():
            read = getattr(self, f"_{keyword}", None) if keyword in _ASSERTIONS else None
            if read is not None:
                parts.append(read(value))
            elif keyword == "$recursiveRef":
                parts.append(self.reader.refuse(self.schema, keyword, "only $ref and $dynamicRef are followed"))
            elif keyword in _DRAFT_3 and self.reader.draft_3:
                parts.append(
                    self.reader.refuse(self.schema, keyword, "only draft 3 has it; write it as later drafts do")
                )
        parts += self.array_items()
        if any(keyword in self.schema for keyword in ("properties", "patternProperties", "additionalProperties")):
            parts.append(self.properties())
        return parts

    def _type(self, value: Any) -> Formula:
        pool = self.pool
        options = []
        for name in value if isinstance(value, list) else [value]:
            if name == "integer":
                options.append(pool.all([pool.type(NUMBER), self.integer()]))
            elif isinstance(name, str) and name in _TYPES:
                options.append(pool.type(_TYPES[name]))
            elif name == "any" and self.reader.old_references:
                options.append(pool.true)
            else:
                raise InvalidSchema(f"type {name!r} at {self.path} is unknown")
        return pool.any(options)

    def integer(self) -> Formula:
        written = self.reader.written_integers
        return self.pool.atom("written", "integer") if written else self.pool.atom("multiple", decimal(1))

    def _const(self, value: Any) -> Formula:
        return one_of(self.pool, [value])

    def _enum(self, value: Any) -> Formula:
        if not isinstance(value, list):
            raise InvalidSchema(f"enum at {self.path} must be a list")
        return one_of(self.pool, value)

    def _pattern(self, value: Any) -> Formula:
        return self.pattern("pattern", value)

    def pattern(self, keyword: str, pattern: Any) -> Formula:
        try:
            return self.pool.atom("pattern", self.regex(keyword, pattern))
        except RegexError as error:
            return self.reader.refuse(self.schema, keyword, str(error), STRING)

    def regex(self, keyword: str, pattern: Any):
        if not isinstance(pattern, str):
            raise InvalidSchema(f"{keyword} at {self.path} must be a string")
        return json_pattern(pattern, self.reader.budget)

    def _format(self, value: Any) -> Formula:
        automaton = format_automaton(value) if self.reader.reading.formats and isinstance(value, str) else None
        if automaton is None:
            self.reader.annotations[f"format@{self.path}/format"] = None
            return self.pool.true
        return self.pool.atom("pattern", automaton)

    def _minLength(self, value: Any) -> Formula:
        return self.pool.atom("length", self.count("minLength", value), None)

    def _maxLength(self, value: Any) -> Formula:
        return self.pool.atom("length", 0, self.count("maxLength", value))

    def _minItems(self, value: Any) -> Formula:
        return self.pool.atom("count", self.count("minItems", value), None)

    def _maxItems(self, value: Any) -> Formula:
        return self.pool.atom("count", 0, self.count("maxItems", value))

    def _minProperties(self, value: Any) -> Formula:
        return self.pool.atom("size", self.count("minProperties", value), None)

    def _maxProperties(self, value: Any) -> Formula:
        return self.pool.atom("size", 0, self.count("maxProperties", value))

    def count(self, keyword: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise InvalidSchema(f"{keyword} at {self.path} must be a whole number, not {value!r}")
        return int(value)

    def number(self, keyword: str, value: Any):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidSchema(f"{keyword} at {self.path} must be a number, not {value!r}")
        return decimal(value)

    def _minimum(self, value: Any) -> Formula:
        relation = ">" if self.schema.get("exclusiveMinimum") is True else ">="
        return self.pool.atom("compare", relation, self.number("minimum", value))

    def _maximum(self, value: Any) -> Formula:
        relation = "<" if self.schema.get("exclusiveMaximum") is True else "<="
        return self.pool.atom("compare", relation, self.number("maximum", value))

    def _exclusiveMinimum(self, value: Any) -> Formula:
        return (
            self.pool.true
            if isinstance(value, bool)
            else self.pool.atom("compare", ">", self.number("exclusiveMinimum", value))
        )

    def _exclusiveMaximum(self, value: Any) -> Formula:
        return (
            self.pool.true
            if isinstance(value, bool)
            else self.pool.atom("compare", "<", self.number("exclusiveMaximum", value))
        )

    def _multipleOf(self, value: Any) -> Formula:
        divisor = self.number("multipleOf", value)
        if divisor <= 0:
            raise InvalidSchema(f"multipleOf at {self.path} must be more than 0, not {value!r}")
        return self.pool.atom("multiple", divisor)

    def _uniqueItems(self, value: Any) -> Formula:
        if value is not True:
            return self.pool.true
        return self.pool.atom("unique", f"{self.path}/uniqueItems")

    def _required(self, value: Any) -> Formula:
        if isinstance(value, bool) and self.reader.draft_3:  # read by the object around it
            return self.pool.true
        return self.pool.all(self.present(name) for name in self.names("required", value))

    def present(self, name: str) -> Formula:
        """An object has a property of this name, if the value is an object."""
        return self.pool.atom("required", name) if encodable(name) else self.pool.negate(self.pool.type(OBJECT))

    def names(self, keyword: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise InvalidSchema(f"{keyword} at {self.path} must be a list of names")
        return value

    def _propertyNames(self, value: Any) -> Formula:
        return self.pool.atom("names", self.reader.schema(value))

    def _dependentRequired(self, value: Any) -> Formula:
        pool = self.pool
        parts = []
        for name, wanted in self.mapping("dependentRequired").items():
            there = pool.all([pool.type(OBJECT), self.present(name)])
            parts.append(pool.any([pool.negate(there), pool.all([there, self._required(wanted)])]))
        return pool.all(parts)

    def _dependencies(self, value: Any) -> Formula:
        pool = self.pool
        parts = []
        for name, wanted in self.mapping("dependencies").items():
            if isinstance(wanted, list):
                there = pool.all([pool.type(OBJECT), self.present(name)])
                parts.append(pool.any([pool.negate(there), pool.all([there, self._required(wanted)])]))
        return pool.all(parts)

    def _contains(self, value: Any) -> Formula:
        low = self.count("minContains", self.schema.get("minContains", 1))
        high = self.schema.get("maxContains")
        high = None if high is None else self.count("maxContains", high)
        return self.pool.atom("contains", self.reader.schema(value), low, high, 0)

    # -- children

    def mapping(self, keyword: str) -> dict[str, Any]:
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise InvalidSchema(f"{keyword} at {self.path} must be an object")
        return value

    def array_items(self) -> list[Formula]:
        schema, read = self.schema, self.reader.schema
        first, rest = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        if first is None and rest is True:
            return []
        return [self.pool.atom("items", tuple(read(item) for item in first or ()), read(rest))]

    def properties(self) -> Formula:
        pool, read = self.pool, self.reader.schema
        listed = self.mapping("properties")
        names = tuple((name, read(value)) for name, value in listed.items() if encodable(name))
        patterns = []
        for pattern, value in self.mapping("patternProperties").items():
            try:
                patterns.append((self.regex("patternProperties", pattern), read(value)))
            except RegexError as error:
                return self.reader.refuse(self.schema, "patternProperties", str(error), OBJECT)
        rest = read(self.schema.get("additionalProperties", True))
        needed = []
        if self.reader.draft_3:
            needed = [n for n, part in listed.items() if isinstance(part, dict) and part.get("required") is True]
        return pool.all([pool.atom("properties", names, tuple(patterns), rest), *map(self.present, needed)])

    def own_evaluated(self) -> Evaluated:
        schema = self.schema
        items = schema.get("items")
        first = schema.get("prefixItems", items if isinstance(items, list) else [])
        patterns = []
        for pattern in self.mapping("patternProperties"):
            try:
                patterns.append(self.regex("patternProperties", pattern))
            except RegexError:
                return NOTHING  # refused where it is read
        contains = "contains" in schema and self.reader.contains_evaluates
        return Evaluated(
            names=frozenset(filter(encodable, self.mapping("properties"))),
            patterns=frozenset(patterns),
            all_properties="additionalProperties" in schema,
            first_items=len(first),
            all_items=isinstance(items, dict | bool) or ("additionalItems" in schema and isinstance(items, list)),
            containing=frozenset([self.reader.schema(schema["contains"])] if contains else []),
        )


_DRAFT_3 = frozenset(["divisibleBy", "disallow", "extends"])
_ASSERTIONS = frozenset(
    [
        "type",
        "const",
        "enum",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "uniqueItems",
        "required",
        "propertyNames",
        "dependentRequired",
        "dependencies",
        "contains",
    ]
)
