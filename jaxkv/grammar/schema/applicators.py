"""Keywords that apply other schemas to the same value, and what all of them together evaluate."""

from typing import Any

from jaxkv.grammar.errors import InvalidSchema, RegexError, UnsupportedSchema
from jaxkv.grammar.schema import evaluated
from jaxkv.grammar.schema.assertions import Assertions
from jaxkv.grammar.schema.constants import encodable
from jaxkv.grammar.schema.evaluated import NOTHING, Evaluated, Option
from jaxkv.grammar.schema.formula import OBJECT, Formula
from jaxkv.grammar.schema.keywords import Keywords

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


class Applicators(Keywords):
    """A whole schema object, as alternatives."""

    def read(self, tracked: bool) -> list[Option]:
        schema = self.schema
        if "$ref" in schema and self.reader.old_references:
            return self.reference("$ref", tracked)
        inner = tracked or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        options = [Option(self.pool.all(Assertions(self.reader, schema).assertions()), self.own_evaluated())]
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
