"""Keywords that say something of a value by themselves, and those that hand its parts to other schemas."""

from typing import Any

from jaxkv.grammar.errors import InvalidSchema, RegexError
from jaxkv.grammar.schema.constants import decimal, encodable, one_of
from jaxkv.grammar.schema.formats import format_automaton
from jaxkv.grammar.schema.formula import ARRAY, BOOLEAN, NULL, NUMBER, OBJECT, STRING, Formula
from jaxkv.grammar.schema.keywords import Keywords

_TYPES = {"null": NULL, "boolean": BOOLEAN, "number": NUMBER, "string": STRING, "array": ARRAY, "object": OBJECT}
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


class Assertions(Keywords):
    """Read by `assertions`; a method `_keyword` for each."""

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
