"""How models write calls of tools: what surrounds them, and how they are read back.

A format is taken from the model's chat template, which shows the model calls of earlier turns in the same way.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from jaxkv.request import ToolCall
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
