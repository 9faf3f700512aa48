"""`response_format`, `tools` and `tool_choice`: what they ask of the engine, and how it comes back through both APIs."""

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from jaxkv.serve import forms
from jaxkv.serve.errors import ApiError
from jaxkv.serve.forms import read_form
from tests.serve.stage import NAME, LiveServer

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["fox", "dog"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
CHAT: list[Any] = [{"role": "user", "content": "The quick brown fox"}]

enforced = pytest.mark.skipif(forms.structured is None, reason="this version has no structured output")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ((None, None, "auto", None), "tool_choice"),
        ((None, None, None, True), "parallel_tool_calls"),
        (({"type": "xml"}, None, None, None), "response_format.type"),
        (({}, None, None, None), "response_format.type"),
        ((FORMAT, TOOLS, "auto", None), "response_format"),
        pytest.param(({"type": "json_schema"}, None, None, None), "response_format.json_schema", marks=enforced),
        pytest.param((None, TOOLS, "sometimes", None), "tool_choice", marks=enforced),
        pytest.param((None, TOOLS, {"type": "function"}, None), "tool_choice", marks=enforced),
    ],
)
def test_what_contradicts_itself_is_refused(asked: tuple[Any, Any, Any, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_form(*asked)
    assert caught.value.param == param and caught.value.status == 400


@pytest.mark.skipif(forms.structured is not None, reason="structured output is there")
def test_without_structured_output_it_is_refused(server: LiveServer) -> None:
    body = {"model": NAME, "messages": CHAT, "max_tokens": 2}
    for field, value in (("response_format", FORMAT), ("tools", TOOLS)):
        error = server.post("/v1/chat/completions", {**body, field: value}).json()["error"]
        assert error["param"] == field and "structured output" in error["message"]
    assert server.post("/v1/chat/completions", {**body, "tools": TOOLS, "tool_choice": "none"}).status_code == 200


@enforced
def test_an_answer_fits_its_schema(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 60, "response_format": FORMAT, "seed": 3}
        answer: Any = client.chat.completions.create(**asked).choices[0]
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        assert answer.finish_reason == "stop"
        chunks: Any = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    server.check_idle()


@enforced
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_openais_client_gets_calls(server: LiveServer, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {
            "model": NAME, "messages": CHAT, "max_tokens": 100, "tools": TOOLS, "tool_choice": choice, "seed": 5,
            "parallel_tool_calls": False,
        }  # fmt: skip
        answer: Any = client.chat.completions.create(**asked).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "look" and answer.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        (streamed,) = [delta.delta.tool_calls for delta in deltas if delta.delta.tool_calls]
        assert streamed[0].function.arguments == call.function.arguments and streamed[0].function.name == "look"
        assert not any(delta.delta.content for delta in deltas) and deltas[-1].finish_reason == "tool_calls"
        history = [*CHAT, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        assert client.chat.completions.create(model=NAME, messages=history, max_tokens=2).choices
    server.check_idle()


@enforced
def test_anthropics_client_gets_calls(server: LiveServer) -> None:
    tools: Any = [{"name": "look", "description": "Looks", "input_schema": SCHEMA}]
    asked: Any = {
        "model": NAME, "messages": CHAT, "max_tokens": 100, "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"seed": 5},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole: Any = client.messages.create(**asked)
        (block,) = whole.content
        assert block.type == "tool_use" and block.name == "look" and whole.stop_reason == "tool_use"
        jsonschema.validate(block.input, SCHEMA)
        with client.messages.stream(**asked) as stream:
            streamed: Any = stream.get_final_message()
        assert streamed.content[0].input == block.input and streamed.stop_reason == "tool_use"
    server.check_idle()
