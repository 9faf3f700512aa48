"""How models write calls of tools: what surrounds them, and how they are read back.

A format is taken from the model's chat template, which shows the model calls of earlier turns in the same way.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from jaxkv.request import Completion, ToolCall
from jaxkv.structured import ToolCalls


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """One model family's way. A call is `{"name": NAME, ARGUMENTS: {...}}`, as `json.dumps` spaces it."""

    name: str
    trigger: str  # what says that calls follow; "": an output that begins with `{` is a call
    open: str  # between the trigger and the first call
    close: str  # after the last one
    separator: str | None  # between calls within one trigger; None: each has its own
    arguments: str  # "arguments" or "parameters"
    marks: tuple[str, ...] = ()  # in a chat template that writes calls like this

    def begin(self, tool: str) -> str:
        """The text of a call before its arguments; `}` follows them."""
        return f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "{self.arguments}": '


# In the order in which templates are asked.
FORMATS = (
    ToolFormat("mistral", "[TOOL_CALLS]", "[", "]", ", ", "arguments", ("[TOOL_CALLS]",)),
    ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>", None, "arguments", ("<tool_call>",)),  # and Qwen
    ToolFormat("llama3", "", "", "", None, "parameters", ("<|python_tag|>", '"parameters":')),
    # Of the model card; the template of the small models does not mention tools at all.
    ToolFormat("smollm2", "<tool_call>", "[", "]</tool_call>", ", ", "arguments"),
)
BY_NAME = {each.name: each for each in FORMATS}
PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call
SPECIAL_TEXTS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", PYTHON_TAG)  # may be tokens of their own, and special


def format_of(templates: Iterable[str]) -> str:
    """The name of the format that a model's chat templates show; "smollm2" if they show none."""
    text = "\n".join(templates)
    return next((each.name for each in FORMATS if any(mark in text for mark in each.marks)), "smollm2")


class TextBeforeCalls:
    """What of a growing output can be shown: the text before its calls of tools.

    Text is held back only while it may be the beginning of a call; the rest is known at the end.

    Args:
        form: with its format.
    """

    def __init__(self, form: ToolCalls) -> None:
        trigger = BY_NAME[form.format].trigger
        self._begins = (trigger,) if trigger else ("{", PYTHON_TAG)
        self._is_anywhere = bool(trigger)  # else a call is the whole output
        self._held: str | None = ""  # None: nothing more is shown
        self._num_shown = 0

    def feed(self, piece: str) -> str:
        """Takes text, special ones of `SPECIAL_TEXTS` included; returns what can be shown of it and of earlier pieces."""
        if self._held is None:
            return ""
        if self._num_shown and not self._is_anywhere:
            self._num_shown += len(piece)
            return piece
        text = self._held + piece
        end = self._end(text)
        is_call = end < len(text) and any(text.startswith(begin, end) for begin in self._begins)
        self._held = None if is_call else text[end:]
        self._num_shown += end
        return text[:end]

    def rest(self, whole: str) -> str:
        """What was not shown of all text that an output turned out to have beside its calls."""
        return whole[self._num_shown :]

    def _end(self, text: str) -> int:
        """Where a call begins, or may begin."""
        starts = range(len(text)) if self._is_anywhere else range(min(len(text), 1))
        may_begin = (
            start
            for start in starts
            if any(text.startswith(begin, start) or begin.startswith(text[start:]) for begin in self._begins)
        )
        return next(may_begin, len(text))


def text_beside_calls(completion: Completion) -> str:
    """What a client reads as the answer's text."""
    return (completion.content or "") if completion.tool_calls else completion.text


def read_calls(form: ToolCalls, text: str, id_seed: str) -> tuple[tuple[ToolCall, ...], str]:
    """The calls in a whole output, and the text around them.

    Args:
        form: with its format.
        text: special tokens included.
        id_seed: ids are made from it: nine letters and digits, which is what Mistral's templates ask for.
    """
    found = BY_NAME[form.format]
    values, content = _read_plain(text) if not found.trigger else _read_triggered(found, text)
    calls = [
        ToolCall(hashlib.sha256(f"{id_seed}/{i}".encode()).hexdigest()[:9], value["name"], value[found.arguments])
        for i, value in enumerate(values)
    ]
    return tuple(calls), content


def _read_plain(text: str) -> tuple[list[dict[str, Any]], str]:
    body = text.removeprefix(PYTHON_TAG)
    return ([json.loads(body)], "") if body.startswith("{") else ([], text)


def _read_triggered(found: ToolFormat, text: str) -> tuple[list[dict[str, Any]], str]:
    values: list[dict[str, Any]] = []
    around: list[str] = []
    while (at := text.find(found.trigger)) >= 0:
        around.append(text[:at])
        body = text[at + len(found.trigger) :].lstrip()
        value, end = json.JSONDecoder().raw_decode(body)
        values += value if isinstance(value, list) else [value]
        text = body[end:].removeprefix(found.close.removeprefix("]"))
    return values, "".join([*around, text])
