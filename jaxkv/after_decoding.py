"""What a whole structured output says: its value, or the calls of tools in it."""

import json
import logging
from collections.abc import Callable
from typing import Any

from jaxkv.structured import Choice, Form, JsonObject, JsonSchema, Tag, ToolCalls, Triggered
from jaxkv.tool_formats import read_calls

log = logging.getLogger(__name__)


def after_decoding(form: Form | None, text: str, raw_text: Callable[[], str], id_seed: str) -> dict[str, Any]:
    """Fields of `Completion` that follow from the text of a whole output.

    Args:
        form: what was asked for.
        text: as decoded, without the end token.
        raw_text: the same with special tokens.
        id_seed: for the ids of tool calls.
    """
    match form:
        case ToolCalls():
            calls, content = read_calls(form, raw_text(), id_seed)
            return {"tool_calls": calls, "content": content} if calls else {}
        case JsonSchema() | JsonObject() | Choice():
            return {"parsed": read_value(form, text)}
        case Triggered():
            values = [read_value(tag.content, part) for tag, part in find_parts(form, text)]
            is_single = form.required and not form.repeat
            return {"parsed": (values[0] if values else None) if is_single else values}
    return {}


def read_value(form: Form, text: str) -> Any:
    """The value that a text of a form spells: JSON, or an object of the pydantic model; the text itself otherwise."""
    if not isinstance(form, (JsonSchema, JsonObject)):
        return text
    value = json.loads(text)
    if isinstance(form, JsonSchema) and form.model is not None:
        try:
            return form.model.model_validate(value)  # pyright: ignore[reportAttributeAccessIssue]
        except ValueError as error:  # validators that a schema cannot express
            log.warning("the output fits the schema of %s, but not the model: %s", form.model.__name__, error)
            return None
    return value


def find_parts(form: Triggered, text: str) -> list[tuple[Tag, str]]:
    """The constrained parts of a text, in order."""
    parts: list[tuple[Tag, str]] = []
    start = 0
    while True:
        found = [(at, tag) for tag in form.tags if (at := text.find(tag.begin, start)) >= 0]
        if not found:
            return parts
        at, tag = min(found, key=lambda pair: pair[0])
        begin = at + len(tag.begin)
        end = _end_of(tag, text, begin)
        parts.append((tag, text[begin:end]))
        start = end + len(tag.end or "")


def _end_of(tag: Tag, text: str, begin: int) -> int:
    """Where a tag's content ends: JSON says so itself, anything else ends at the tag's end."""
    if tag.end is None:
        return len(text)
    if isinstance(tag.content, (JsonSchema, JsonObject)):
        _, length = json.JSONDecoder().raw_decode(text[begin:].lstrip())
        begin += len(text[begin:]) - len(text[begin:].lstrip()) + length
    return max(text.find(tag.end, begin), begin)
