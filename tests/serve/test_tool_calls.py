"""Calls of tools and triggered parts, several in one output, on a byte-level tokenizer through `LLM`."""

import json

import jsonschema
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.request import FinishReason
from jaxkv.structured import JsonSchema, Regex, Tag, ToolCalls, Triggered

NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
COLOUR = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}},
    "required": ["c"],
    "additionalProperties": False,
}
TOOLS = [{"name": "count", "parameters": NUMBER}, {"name": "paint", "parameters": COLOUR}]
SCHEMAS = {"count": NUMBER, "paint": COLOUR}


def params(form, seed: int, **more) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=150, temperature=1.5, seed=seed, structured=form) | more))


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "smollm2"])
def test_calls_in_every_format(tiny_llm: LLM, format: str) -> None:
    comma = {tiny_llm.tokenizer.encode(",", add_bos=False)[0]: 5.0}  # another call rather than an end, in lists
    asks = [
        params(ToolCalls(TOOLS, choice, format=format), seed, logit_bias=comma)
        for seed in range(3)
        for choice in ("required", "paint")
    ]
    numbers = []
    for output, ask in zip(tiny_llm.generate(["x"] * len(asks), asks, progress=False), asks, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason is FinishReason.TOOL_CALLS, completion
        calls = completion.tool_calls
        assert calls and not (completion.content or "").strip()
        for call in calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])
        assert isinstance(ask.structured, ToolCalls)
        if ask.structured.choice == "paint":
            assert [call.name for call in calls] == ["paint"]
        numbers.append(len(calls))
    assert tiny_llm.stats().num_forced_tokens > 0
    if format != "llama3":
        assert max(numbers) > 1, "several calls in one output"


def test_triggered_parts_between_free_text(tiny_llm: LLM) -> None:
    form = Triggered([Tag("<n>", JsonSchema(NUMBER), "</n>"), Tag("[", Regex("[a-c]{2,4}"), "]")], required=True)
    bias = {tiny_llm.tokenizer.encode(text, add_bos=False)[0]: 8.0 for text in ("<", "[")}
    asks = [params(form, seed, logit_bias=bias, max_tokens=120) for seed in range(6)]
    numbers = []
    for output in tiny_llm.generate(["x"] * len(asks), asks, progress=False):
        (completion,) = output.outputs
        if completion.parsed is None:  # ended in the middle of free text, or not at all
            assert completion.finish_reason is FinishReason.LENGTH
            continue
        numbers.append(len(completion.parsed))
        for value in completion.parsed:
            if isinstance(value, str):
                assert 2 <= len(value) <= 4 and not {*value} - {*"abc"}
            else:
                jsonschema.validate(json.loads(json.dumps(value)), NUMBER)
    assert numbers and max(numbers) > 1
