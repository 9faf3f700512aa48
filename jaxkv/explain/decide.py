"""Why two prompts part where they do: the parts of the requests are tried one after the other, then the texts are read.

A part (tools, template variables, ...) is to blame if the prompts agree for longer once both requests have the same one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv.chats.template_check import RewriteKind, name_rewrite
from jaxkv.errors import RequestError
from jaxkv.explain.ask import Ask
from jaxkv.explain.cause import Cause
from jaxkv.explain.history import compare_histories
from jaxkv.explain.layout import Layout
from jaxkv.explain.place import Render
from jaxkv.explain.report import Difference
from jaxkv.explain.texts import common_prefix
from jaxkv.explain.volatile import is_time
from jaxkv.explain.wording import compare_texts, in_other_order
from jaxkv.plain_json import unordered, write_json


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause, and what differs, in a few words."""

    cause: Cause
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two prompts that part."""

    a: Layout
    b: Layout
    at_a: int  # the first character that differs (or token, for prompts of token ids)
    at_b: int
    difference: Difference
    render: Render


_PARTS = ("rendered_at", "template", "variables", "documents", "tools", "add_generation_prompt")


def find_cause(pair: Pair) -> Finding:
    """The cause of a difference between tokens."""
    a, b = pair.a.ask, pair.b.ask
    if pair.a.text is None or pair.b.text is None:
        return Finding(Cause.PROMPT_CHANGED)
    if a.messages is None or b.messages is None:
        return _by_wording(pair) or Finding(Cause.PROMPT_CHANGED)
    part = next((name for name in _PARTS if _is_to_blame(pair, name)), None)
    if part is not None:
        return _blame(pair, part)
    if (found := _rewritten(pair, a, b)) is not None:
        return found
    history = compare_histories(a.messages, b.messages)
    if history is None:
        return Finding(Cause.TEMPLATE_OTHER)
    if history.cause is not None:
        return Finding(history.cause, history.detail)
    return _in_message(pair, history.index)


def _is_to_blame(pair: Pair, name: str) -> bool:
    ours, theirs = getattr(pair.a.ask, name), getattr(pair.b.ask, name)
    if _spelled(ours) == _spelled(theirs):
        return False
    assert pair.a.text is not None
    try:
        text = pair.render(dataclasses.replace(pair.b.ask, **{name: ours}))
    except RequestError:
        return False
    return common_prefix(pair.a.text, text) > pair.at_a


def _blame(pair: Pair, name: str) -> Finding:
    a, b = pair.a.ask, pair.b.ask
    match name:
        case "rendered_at":
            return Finding(Cause.TEMPLATE_DATE, f"{a.rendered_at} / {b.rendered_at}")
        case "template":
            return Finding(Cause.TEMPLATE_CHANGED)
        case "variables":
            return _blame_variables(a, b)
        case "documents":
            ours, theirs = list(a.documents or ()), list(b.documents or ())
            return Finding(Cause.ITEM_ORDER if _same_items(ours, theirs) else Cause.DOCUMENTS)
        case "tools":
            return _blame_tools(pair, list(a.tools or ()), list(b.tools or ()))
        case _:
            return Finding(Cause.GENERATION_PROMPT)


def _blame_variables(a: Ask, b: Ask) -> Finding:
    names = [name for name in {**a.variables, **b.variables} if a.variables.get(name) != b.variables.get(name)]
    values = [(a.variables.get(name), b.variables.get(name)) for name in names]
    detail = ", ".join(f"{name}: {x!r} / {y!r}" for name, (x, y) in zip(names, values, strict=True))
    if any(all(is_time(str(value)) for value in pair) for pair in values):
        return Finding(Cause.TEMPLATE_DATE, detail)
    return Finding(Cause.VARIABLES, detail)


def _blame_tools(pair: Pair, ours: list[Any], theirs: list[Any]) -> Finding:
    names = [[_name(tool) for tool in tools] for tools in (ours, theirs)]
    if _same_items(ours, theirs):
        forms = [[unordered(tool) for tool in tools] for tools in (ours, theirs)]
        if forms[0] != forms[1]:
            return Finding(Cause.TOOL_ORDER, f"{', '.join(names[0])} / {', '.join(names[1])}")
        index = next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if write_json(x) != write_json(y))
        return Finding(Cause.KEY_ORDER, f"in tool {names[0][index]}")
    if names[0] == names[1] and (found := _by_wording(pair)) is not None:
        return found
    gone, new = ([name for name in one if name not in other] for one, other in (names, names[::-1]))
    if gone or new:
        said = [f"{what} {', '.join(each)}" for what, each in (("without", gone), ("with", new)) if each]
        return Finding(Cause.TOOLS_CHANGED, "now " + ", ".join(said))
    changed = [name for name, x, y in zip(names[0], ours, theirs, strict=False) if unordered(x) != unordered(y)]
    return Finding(Cause.TOOLS_CHANGED, f"in {', '.join(changed[:3])}")


_REWRITES = {
    RewriteKind.TOOLS: Cause.TEMPLATE_MOVES,
    RewriteKind.SYSTEM: Cause.TEMPLATE_MOVES,
    RewriteKind.REASONING: Cause.TEMPLATE_REASONING,
}


def _rewritten(pair: Pair, a: Ask, b: Ask) -> Finding | None:
    """The template, if one chat is the beginning of the other and still the texts part."""
    assert a.messages is not None and b.messages is not None
    first, second = sorted((a, b), key=lambda ask: len(ask.messages or ()))
    assert first.messages is not None and second.messages is not None
    if write_json(list(first.messages)) != write_json(list(second.messages[: len(first.messages)])):
        return None

    def render(messages: Sequence[Any], *, tools: Any, add_generation_prompt: bool) -> str:
        changed = dataclasses.replace(
            second, messages=tuple(messages), tools=tools, add_generation_prompt=add_generation_prompt
        )
        return pair.render(changed)

    rewrite = name_rewrite(render, first.messages, second.messages, second.tools)
    return Finding(_REWRITES.get(rewrite.kind, Cause.TEMPLATE_OTHER), f"it {rewrite.what}")


def _in_message(pair: Pair, index: int) -> Finding:
    """The messages with this index are the first that differ, and stand in the same place of both chats."""
    a, b = pair.a.ask.messages, pair.b.ask.messages
    assert a is not None and b is not None
    found = _by_wording(pair)
    is_last = index == len(b) - 1
    # What changes at the end of a chat costs nothing, unless the same text follows it.
    if found is not None and not (is_last and index == len(a) - 1 and not _same_after(pair)):
        return found
    if is_last:
        return Finding(Cause.NEW_TURN)
    return Finding(Cause.SYSTEM_CHANGED if b[index]["role"] in ("system", "developer") else Cause.MESSAGE_CHANGED)


def _by_wording(pair: Pair) -> Finding | None:
    """What the texts around the difference tell."""
    assert pair.a.text is not None and pair.b.text is not None
    texts = _fields(pair)
    found = compare_texts(pair.a.text, pair.b.text, pair.at_a, pair.at_b, *texts)
    return None if found is None else Finding(*found)


def _fields(pair: Pair) -> tuple[str, str]:
    """The texts in which the difference lies: of a message, else the whole prompts."""
    assert pair.a.text is not None and pair.b.text is not None
    values = [_field(each.ask, side.place) for each, side in ((pair.a, pair.difference.a), (pair.b, pair.difference.b))]
    return (pair.a.text, pair.b.text) if None in values else (values[0] or "", values[1] or "")


def _field(ask: Ask, place: Any) -> str | None:
    """All that a message (or tool) says, one text under the other."""
    if place.kind not in ("message", "tool") or place.index is None:
        return None
    items = ask.messages if place.kind == "message" else ask.tools
    return None if items is None else "\n".join(_strings(items[place.index]))


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _same_after(pair: Pair) -> bool:
    """Whether the messages that hold the difference end with the same 32 characters or more after it."""
    a, b = _fields(pair)
    at = common_prefix(a, b)
    return len(a) - at > 32 and len(b) - at > 32 and a[-32:] == b[-32:]


def _same_items(ours: list[Any], theirs: list[Any]) -> bool:
    return in_other_order([unordered(item) for item in ours], [unordered(item) for item in theirs])


def _spelled(value: Any) -> str:
    return write_json(value) if isinstance(value, (dict, tuple, list)) else repr(value)


def _name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(inner.get("name", "?")) if isinstance(inner, dict) else "?"
