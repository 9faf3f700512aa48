"""`response_format`, `tools` and `tool_choice`: what they ask of the engine, and how it comes back through both APIs."""

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

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


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ((None, None, "auto", None), "tool_choice"),
        ((None, None, None, True), "parallel_tool_calls"),
        (({"type": "xml"}, None, None, None), "response_format.type"),
        (({}, None, None, None), "response_format.type"),
        ((FORMAT, TOOLS, "auto", None), "response_format"),
        (({"type": "json_schema"}, None, None, None), "response_format.json_schema"),
        ((None, TOOLS, "sometimes", None), "tool_choice"),
        ((None, TOOLS, {"type": "function"}, None), "tool_choice"),
    ],
)
def test_what_contradicts_itself_is_refused(asked: tuple[Any, Any, Any, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_form(*asked)
    assert caught.value.param == param and caught.value.status == 400


def test_tool_choice_none_shows_no_tools(server: LiveServer) -> None:
    body = {"model": NAME, "messages": CHAT, "max_tokens": 2}
    plain = server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    unused = server.post("/v1/chat/completions", {**body, "tools": TOOLS, "tool_choice": "none"}).json()
    assert unused["usage"]["prompt_tokens"] == plain


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "x:y"}}}}, None),
        ({"response_format": FORMAT, "max_tokens": 3}, "max_tokens"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, None),
    ],
)
def test_what_cannot_be_enforced_is_refused(server: LiveServer, changes: dict[str, Any], param: str | None) -> None:
    def counted() -> list[str]:
        names = ("jaxkv:prompt_tokens_total", "jaxkv:request_success_total", "jaxkv:e2e_request_latency_seconds_count")
        return [line for line in server.get("/metrics").text.splitlines() if line.startswith(names)]

    before = counted()
    body = {"model": NAME, "messages": CHAT, "max_tokens": 60, **changes}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400, refused.text
    assert param is None or param in refused.json()["error"]["message"]
    server.check_idle()
    assert counted() == before, "what was refused did not run"


def test_an_answer_fits_its_schema(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 60, "response_format": FORMAT, "seed": 3}
        answer: Any = client.chat.completions.create(**asked).choices[0]
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        assert answer.finish_reason == "stop"
        chunks: Any = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    server.check_idle()


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
