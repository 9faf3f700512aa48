"""JSON values in one spelling: what is equal as JSON becomes equal Python, and so equal text in a prompt.

A cached prefix is lost at the first byte that differs, so a tool must read the same whoever built it: dict or pydantic
model, tuple or list, enum or text, integer keys or their text. **Order is kept**: of tools, and of the properties of a
schema, because models read them in order and structured output is written in it. Numbers stay as they were given (1 and
1.0 are different text), for models were trained on what `json.dumps` writes.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from jaxkv.errors import RequestError


def plain(where: str, value: Any) -> Any:
    """Rebuilds a value out of exact JSON types: dict with text keys, list, str, int, float, bool, None.

    Args:
        where: what to call the value in errors.
        value: JSON as Python has it; tuples, enums with a text or number, and pydantic models (anything with
            `model_dump`; fields that are None are left out) count as what they stand for.

    Raises:
        RequestError: something in it has no JSON form.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)  # `str(x)` of an enum is its name
    if isinstance(value, int):
        return value if type(value) is int else int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{where} is {value}, which JSON cannot write; chat templates take JSON values only")
        return value if type(value) is float else float.__float__(value)
    if isinstance(value, Mapping):
        return _plain_dict(where, value)
    if isinstance(value, (list, tuple)):
        return [plain(f"{where}[{index}]", item) for index, item in enumerate(value)]
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return plain(where, dump(mode="json", by_alias=True, exclude_none=True))
    raise RequestError(f"{where} is {type(value).__name__}; chat templates take JSON values only")


def write_json(value: Any) -> str:
    """The text of a plain value: `json.dumps` with its usual separators and without escapes for non-ASCII letters."""
    return json.dumps(value, ensure_ascii=False)


def read_object(text: str) -> dict[str, Any] | None:
    """The object that a text spells; None if it spells none."""
    try:
        value = json.loads(text)
        return plain("", value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):  # `RequestError` (a number too large for a float) is a ValueError
        return None


def unordered(value: Any) -> Any:
    """A plain value's form in which the order of keys does not count: equal forms are equal JSON."""
    if isinstance(value, dict):
        return ("object", tuple(sorted((key, unordered(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("array", tuple(unordered(item) for item in value))
    return (type(value).__name__, json.dumps(value))


def _plain_dict(where: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = _key_text(where, key)
        if name in result:
            raise RequestError(f"{where} has the key {name!r} twice, as text and as {type(key).__name__}")
        result[name] = plain(f"{where}.{name}", item)
    return result


def _key_text(where: str, key: Any) -> str:
    """A key as `json.dumps` writes it."""
    if isinstance(key, (str, int, float)) or key is None:
        spelled = plain(f"{where}, key {key!r}", key)
        return spelled if isinstance(spelled, str) else json.dumps(spelled)
    raise RequestError(f"{where} has a key of type {type(key).__name__}; JSON keys are text")
