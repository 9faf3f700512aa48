"""What the keywords of a schema object have in common: where it stands, and values of the right shape."""

from typing import TYPE_CHECKING, Any

from jaxkv.grammar.errors import InvalidSchema
from jaxkv.grammar.regex import json_pattern
from jaxkv.grammar.schema.constants import decimal, encodable
from jaxkv.grammar.schema.formula import OBJECT, Formula

if TYPE_CHECKING:
    from jaxkv.grammar.schema.reader import Reader


class Keywords:
    """The keywords of one schema object.

    Args:
        reader: of the document.
        schema: the object.
    """

    def __init__(self, reader: "Reader", schema: dict[str, Any]) -> None:
        self.reader = reader
        self.pool = reader.pool
        self.schema = schema
        self.path = reader.document.path_of(schema)

    def mapping(self, keyword: str) -> dict[str, Any]:
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise InvalidSchema(f"{keyword} at {self.path} must be an object")
        return value

    def schemas(self, keyword: str) -> list[Any]:
        parts = self.schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise InvalidSchema(f"{keyword} at {self.path} must be a non-empty list of schemas")
        return parts

    def names(self, keyword: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise InvalidSchema(f"{keyword} at {self.path} must be a list of names")
        return value

    def count(self, keyword: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise InvalidSchema(f"{keyword} at {self.path} must be a whole number, not {value!r}")
        return int(value)

    def number(self, keyword: str, value: Any):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidSchema(f"{keyword} at {self.path} must be a number, not {value!r}")
        return decimal(value)

    def regex(self, keyword: str, pattern: Any):
        if not isinstance(pattern, str):
            raise InvalidSchema(f"{keyword} at {self.path} must be a string")
        return json_pattern(pattern, self.reader.budget)

    def present(self, name: str) -> Formula:
        """An object has a property of this name, if the value is an object."""
        return self.pool.atom("required", name) if encodable(name) else self.pool.negate(self.pool.type(OBJECT))
