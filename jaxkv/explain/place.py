"""Which message, and which character of it, a character of a rendered chat comes from.

Templates trim, escape, move and repeat what they are given, so nothing is searched for in the text. Instead one thing at
a time is replaced by a mark and the chat is rendered again: what changes is where that thing stands.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.explain.ask import Ask
from jaxkv.explain.texts import common_prefix, common_suffix

Render = Callable[[Ask], str]
_FIXED_KEYS = ("role", "type", "id", "tool_call_id")  # templates choose by them, or check them
_PART_NAMES = {"messages": "message", "tools": "tool", "documents": "document"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a character of a prompt comes from."""

    kind: str  # "message", "tool", "document", "template" (text of the template itself) or "prompt"
    path: str  # "messages[0].content", "tools[2].function.name", "before messages[1]", "prompt"
    index: int | None = None  # of the message, tool or document (for a template's text: of what comes after it)
    role: str | None = None  # of the message, or name of the tool
    character: int | None = None  # counted from 0, in the field that `path` names; None in a template's text


def find_place(ask: Ask, text: str, character: int, render: Render) -> Place:
    """The place of a character of a prompt.

    Args:
        ask: the request.
        text: its prompt.
        character: index into it; its length is the place after the end.
        render: makes the prompt of a request; raises `RequestError` where the template refuses it.
    """
    if ask.messages is None:
        return Place("prompt", "prompt", character=character)
    regions = [
        (region, part, index)
        for part in _PART_NAMES
        for index in range(len(getattr(ask, part) or ()))
        if (region := _item_region(ask, part, index, text, render)) is not None
    ]
    hit = _smallest([(region, (part, index)) for region, part, index in regions], character)
    if hit is None:
        return _between(ask, regions, character, len(text))
    _, (part, index) = hit
    return _inside(ask, part, index, text, character, render)


def _inside(ask: Ask, part: str, index: int, text: str, character: int, render: Render) -> Place:
    item = getattr(ask, part)[index]
    name = item.get("role") if part == "messages" else _tool_name(item)
    here = functools.partial(Place, _PART_NAMES[part], index=index, role=name)
    leaves = [
        (region, keys)
        for keys in _leaves(item)
        if (region := _region(text, render, _replaced(ask, part, index, _with(item, keys, _mark)))) is not None
    ]
    hit = _smallest(leaves, character)
    if hit is None:
        return here(f"{part}[{index}]")
    (start, end), keys = hit
    value = functools.reduce(lambda inner, key: inner[key], keys, item)
    offset = max(str(value).find(text[start:end]), 0)  # templates trim
    path = f"{part}[{index}]" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return here(path, character=min(offset + character - start, len(str(value))))


def _between(ask: Ask, regions: list[tuple[tuple[int, int], str, int]], character: int, length: int) -> Place:
    """A place in the template's own text, named by what comes after it."""
    if character >= length:
        return Place("template", "the end of the prompt")
    after = [(region[0], part, index) for region, part, index in regions if region[0] > character]
    if not after:
        return Place("template", "after the last message")
    _, part, index = min(after)
    item = getattr(ask, part)[index]
    role = item.get("role") if part == "messages" else _tool_name(item)
    return Place("template", f"before {part}[{index}]", index=index, role=role)


def _smallest(regions: list[tuple[tuple[int, int], Any]], character: int) -> tuple[tuple[int, int], Any] | None:
    """The smallest region that holds a character; one that ends at it, if none does (the other text is longer there)."""
    for beyond in (0, 1):
        hits = [region for region in regions if region[0][0] <= character < region[0][1] + beyond]
        if hits:
            return min(hits, key=lambda hit: hit[0][1] - hit[0][0])
    return None


def _item_region(ask: Ask, part: str, index: int, text: str, render: Render) -> tuple[int, int] | None:
    """Where an item stands. A tool is first replaced as a whole, with its keys, which some templates refuse."""
    item = getattr(ask, part)[index]
    if part != "messages":
        whole = _region(text, render, _replaced(ask, part, index, {_mark(""): _mark("")}))
        if whole is not None:
            return whole
    return _region(text, render, _replaced(ask, part, index, _marked(item)))


def _region(text: str, render: Render, other: Ask) -> tuple[int, int] | None:
    """The part of `text` that is not in the prompt of `other`; None if there is no difference, or no prompt."""
    try:
        changed = render(other)
    except RequestError:
        return None
    if changed == text:
        return None
    start = common_prefix(text, changed)
    return start, len(text) - common_suffix(text, changed, min(len(text), len(changed)) - start)


def _replaced(ask: Ask, part: str, index: int, item: Any) -> Ask:
    items = list(getattr(ask, part))
    items[index] = item
    return dataclasses.replace(ask, **{part: tuple(items)})


def _mark(value: Any) -> str:
    """A character that begins and ends neither the value nor anything around it."""
    text = str(value)
    return next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)


def _marked(value: Any) -> Any:
    """A value whose texts are all marks."""
    if isinstance(value, dict):
        return {key: item if key in _FIXED_KEYS else _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return _mark(value) if isinstance(value, str) else value


def _leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each text of a value."""
    if isinstance(value, str):
        yield keys
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _FIXED_KEYS:
                yield from _leaves(item, (*keys, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*keys, index))


def _with(value: Any, keys: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a value with the part that `keys` lead to changed."""
    if not keys:
        return change(value)
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[keys[0]] = _with(copy[keys[0]], keys[1:], change)
    return copy


def _tool_name(item: Any) -> str | None:
    inner = item.get("function", item) if isinstance(item, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None
