"""How one list of messages became another: cut, reordered, inserted into, or edited in place."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.chats.template_check import without_reasoning
from jaxkv.explain.cause import Cause
from jaxkv.plain_json import unordered, write_json

Message = Mapping[str, Any]
_NOT_SHOWN = ("cache_control",)  # says what to keep, not what the model reads


@dataclasses.dataclass(frozen=True)
class History:
    """What happened to a chat."""

    index: int  # the first message that differs
    cause: Cause | None = None  # None: that message was edited
    detail: str = ""


def compare_histories(a: Sequence[Message], b: Sequence[Message]) -> History | None:
    """What happened to the messages of `a` on their way to `b`; None if one is the beginning of the other."""
    ours, theirs = ([write_json(_shown(message)) for message in messages] for messages in (a, b))
    index = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
    if index is None:
        return None
    if sorted(ours) == sorted(theirs):
        return History(index, Cause.MESSAGE_ORDER, f"from messages[{index}] on")
    if (moved := _moved(ours, theirs, index)) is not None:
        num_gone, num_new = moved
        if num_gone > num_new:
            instead = f", {num_new} in their place" if num_new else ""
            return History(index, Cause.HISTORY_CUT, f"{num_gone} messages from messages[{index}] on{instead}")
        return History(index, Cause.MESSAGE_INSERTED, f"{num_new - num_gone} at messages[{index}]")
    return _compare_messages(_shown(a[index]), _shown(b[index]), index)


def _compare_messages(x: dict[str, Any], y: dict[str, Any], index: int) -> History:
    if unordered(x) == unordered(y):
        if {**x} == {**y} and [*x] != [*y] and all(write_json(x[key]) == write_json(y[key]) for key in x):
            return History(index)  # the order of role and content is never shown
        return History(index, Cause.KEY_ORDER, f"in messages[{index}]")
    if x["role"] != y["role"] and x.get("content") == y.get("content"):
        return History(index, Cause.ROLE, f"messages[{index}]: {x['role']!r} / {y['role']!r}")
    if without_reasoning([x]) == without_reasoning([y]):
        return History(index, Cause.REASONING_DROPPED, f"in messages[{index}]")
    return History(index)


def _moved(ours: list[str], theirs: list[str], index: int) -> tuple[int, int] | None:
    """How many messages from `index` on went, and how many came in their place, before the rest goes on as it was.

    None where as many came as went: these were edited.
    """
    for num_gone in range(len(ours) - index):
        rest = ours[index + num_gone :]
        for start in range(index, len(theirs) - len(rest) + 1):
            if theirs[start : start + len(rest)] == rest:
                return (num_gone, start - index) if start - index != num_gone else None
    return None


def _shown(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in _NOT_SHOWN and value is not None}
