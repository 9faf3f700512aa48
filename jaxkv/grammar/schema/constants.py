"""`const` and `enum`: formulas of given values."""

from decimal import Context, Decimal
from typing import Any

from jaxkv.grammar.chars import json_escape
from jaxkv.grammar.literals import choice
from jaxkv.grammar.schema.formula import ARRAY, FALSE, NULL, NUMBER, OBJECT, STRING, TRUE, Formula, Pool


def decimal(value: int | float) -> Decimal:
    """The number that a JSON text stood for, as far as its float kept it."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


_EXACT = Context(prec=10_000)  # digits; Python reads integers of up to 4,300


def one_of(pool: Pool, values: list[Any]) -> Formula:
    """The value equals one of these, as JSON Schema compares: `1` is `1.0`, and `true` is not `1`."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    options = []
    if strings:
        texts = choice([json_escape(text) for text in dict.fromkeys(strings) if encodable(text)])
        options.append(pool.all([pool.type(STRING), pool.atom("pattern", texts)]))
    if numbers:
        decimals = tuple(sorted({decimal(value).normalize(_EXACT) for value in numbers}))
        options.append(pool.all([pool.type(NUMBER), pool.atom("numbers", decimals)]))
    for value in values:
        if value is None:
            options.append(pool.type(NULL))
        elif isinstance(value, bool):
            options.append(pool.type(TRUE if value else FALSE))
        elif isinstance(value, list):
            options.append(_array(pool, value))
        elif isinstance(value, dict):
            options.append(_object(pool, value))
    return pool.any(options)


def encodable(text: str) -> bool:
    """Whether UTF-8 can write it: lone surrogates, which JSON can escape, are in no text that is accepted."""
    return not any(0xD800 <= ord(char) < 0xE000 for char in text)


def _array(pool: Pool, value: list[Any]) -> Formula:
    items = tuple(one_of(pool, [item]) for item in value)
    return pool.all(
        [pool.type(ARRAY), pool.atom("items", items, pool.true), pool.atom("count", len(items), len(items))]
    )


def _object(pool: Pool, value: dict[str, Any]) -> Formula:
    if not all(map(encodable, value)):
        return pool.false
    names = tuple((name, one_of(pool, [item])) for name, item in value.items())
    required = [pool.atom("required", name) for name in value]
    return pool.all([pool.type(OBJECT), pool.atom("properties", names, (), pool.false), *required])
