"""Text before calls of tools streams as it comes; what the official clients make of a stream is what comes unstreamed."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from jaxkv import LLM, SamplingParams
from tests.checkpoint.tools import hf_config, random_tensors, write_hf
from tests.serve.stage import NAME, LiveServer
from tests.tokenizer import tiny

CALL = "<tool_call>"
CHAT: list[Any] = [{"role": "user", "content": "The quick brown fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model for which the beginning of a call is a special token, so that it can be made likely."""
    folder: Path = tmp_path_factory.mktemp("calling") / "model"
    backend = tiny.backend("byte_level")
    backend.add_special_tokens([CALL])
    config = hf_config(vocab_size=backend.get_vocab_size(), num_hidden_layers=1, max_position_embeddings=512)
    write_hf(folder, config, random_tensors(config))
    tiny.write("byte_level", folder)
    backend.save(str(folder / "tokenizer.json"))
    llm = LLM.load(folder, max_len=256, max_rows=2, num_pages=64, page_size=8, token_budget=64, decode_steps=2)
    with LiveServer(llm) as server:
        yield server


@pytest.fixture
def likely(calling: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls begin often. Anthropic's API has no field for it."""
    token, prepare = calling.service.tokenizer.vocabulary.token_id(CALL), calling.service.prepare

    def biased(prompt: Any, params: SamplingParams, *rest: Any) -> Any:
        return prepare(prompt, dataclasses.replace(params, temperature=1.5, logit_bias={token: 4.0}), *rest)

    monkeypatch.setattr(calling.service, "prepare", biased)


@pytest.mark.usefixtures("likely")
def test_openais_client(calling: LiveServer) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    num_called = num_early = 0
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(8):
            body: Any = {"model": NAME, "messages": CHAT, "max_tokens": 80, "tools": tools, "seed": seed}
            whole: Any = client.chat.completions.create(**body).choices[0]
            with client.chat.completions.stream(**body) as stream:
                chunks = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
                final: Any = stream.current_completion_snapshot.choices[0]
            assert (final.message.content or None) == (whole.message.content or None)
            assert final.finish_reason == whole.finish_reason
            calls, wanted = final.message.tool_calls or [], whole.message.tool_calls or []
            assert [call.function.arguments for call in calls] == [call.function.arguments for call in wanted]
            num_called += bool(calls)
            num_early += bool(calls) and sum(bool(delta.content) for delta in chunks) > 2
    assert num_called and num_early, "a call after text that came in pieces"
    calling.check_idle()


@pytest.mark.usefixtures("likely")
def test_anthropics_client(calling: LiveServer) -> None:
    num_called = 0
    with anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0) as client:
        for seed in range(8):
            tools: Any = [{"name": "look", "input_schema": SCHEMA}]
            body: Any = {
                "model": NAME, "messages": CHAT, "max_tokens": 80, "tools": tools, "extra_body": {"seed": seed},
            }  # fmt: skip
            whole: Any = client.messages.create(**body)
            with client.messages.stream(**body) as stream:
                events = list(stream)
                final: Any = stream.get_final_message()
            assert _blocks(final) == _blocks(whole) and final.stop_reason == whole.stop_reason
            num_text = sum(event.type == "text" for event in events)
            num_called += final.stop_reason == "tool_use" and final.content[0].type == "text" and num_text > 2
            (start,) = [event.message.usage for event in events if event.type == "message_start"]
            assert start.cache_read_input_tokens == final.usage.cache_read_input_tokens
            assert start.input_tokens == final.usage.input_tokens > 0
    assert num_called, "a call after text that came in pieces"
    calling.check_idle()


def _blocks(message: Any) -> list[Any]:
    return [block.text if block.type == "text" else (block.name, json.dumps(block.input)) for block in message.content]
