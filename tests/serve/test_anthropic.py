"""Anthropic's routes, with the unmodified client and with plain HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.serve.anthropic_messages import chat_messages
from tests.serve.stage import NAME, LiveServer

pytestmark = pytest.mark.usefixtures("idle")

CHAT: list[Any] = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def greedy(**changes: Any) -> dict[str, Any]:
    """Arguments of the client, which does not name the temperature any more."""
    return {"model": NAME, "messages": CHAT, "max_tokens": 12, "extra_body": {"temperature": 0}, **changes}


def test_a_message_is_what_the_engine_answers(client: Any, server: LiveServer, tiny_llm: LLM) -> None:
    got = client.messages.create(**greedy(system="Be kind."))
    chat = [{"role": "system", "content": "Be kind."}, *CHAT]
    (alone,) = server.in_engine(lambda: tiny_llm.chat(chat, SamplingParams(max_tokens=12, temperature=0)))
    assert [block.text for block in got.content] == [alone.outputs[0].text]
    assert (got.role, got.type, got.model, got.stop_reason) == ("assistant", "message", NAME, "max_tokens")
    usage = got.usage
    assert usage.output_tokens == 12
    num = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert num == len(alone.prompt_token_ids)


def test_usage_says_what_the_cache_did(client: Any) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "Count to ten and back. " * 6, "cache_control": mark}]
    asked = greedy(system=system, max_tokens=1, extra_body={"cache_salt": "usage"})
    first, again = (client.messages.create(**asked).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens > 0
    assert again.cache_read_input_tokens > 0 and again.cache_creation_input_tokens == 0
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().usage
    assert streamed.cache_read_input_tokens == again.cache_read_input_tokens
    assert streamed.input_tokens == again.input_tokens


def test_a_stream_joins_to_the_whole(client: Any) -> None:
    whole = client.messages.create(**greedy(max_tokens=20))
    with client.messages.stream(**greedy(max_tokens=20)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == 20
    kinds = [event.type for event in client.messages.create(**greedy(), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(client: Any) -> None:
    whole = client.messages.create(**greedy(max_tokens=40)).content[0].text
    stop = whole[8:11]
    got = client.messages.create(**greedy(max_tokens=40, stop_sequences=[stop]))
    assert got.content[0].text == whole[: whole.index(stop)]
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)


def test_tokens_are_counted_as_they_are_used(client: Any) -> None:
    usage = client.messages.create(**greedy(system="Be kind.")).usage
    num = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert client.messages.count_tokens(model=NAME, messages=CHAT, system="Be kind.").input_tokens == num


def test_blocks_become_what_templates_read() -> None:
    mark = {"type": "ephemeral"}
    chat = chat_messages(
        [{"type": "text", "text": "S", "cache_control": mark}],
        [
            ("user", "q"),
            (
                "assistant",
                [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
                ],
            ),
            (
                "user",
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "more", "cache_control": mark},
                ],
            ),
        ],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert chat == [
        {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": mark}]},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [call],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "5"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "more", "cache_control": mark}]},
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "So"}]}, "last message"),
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -3}, "top_k"),
        ({"colour": "red"}, "colour"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"cache_control": {"type": "x"}}, "cache_control"),
        ({"stop_sequences": [""]}, "stop"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_refusals_have_anthropics_shape(server: LiveServer, change: dict[str, Any], words: str) -> None:
    response = server.post("/v1/messages", {"model": NAME, "messages": CHAT, "max_tokens": 12, **change})
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"], body


def test_other_models_are_not_found(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**greedy(model="claude"))
