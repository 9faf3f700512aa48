"""OpenAI's routes, with the unmodified client and with plain HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jaxkv import LLM, SamplingParams
from tests.serve.stage import NAME, LiveServer, stream

pytestmark = pytest.mark.usefixtures("idle")

PROMPT = "The quick brown fox jumps over"
CHAT = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_is_what_the_engine_makes(client: Any, server: LiveServer, tiny_llm: LLM) -> None:
    got = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0.8, seed=3)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    (alone,) = server.in_engine(lambda: tiny_llm.generate([PROMPT], params))
    assert got.choices[0].text == alone.outputs[0].text
    assert got.choices[0].finish_reason == "length"
    assert got.object == "text_completion" and got.model == NAME and got.id.startswith("cmpl-")
    assert got.usage.prompt_tokens == len(alone.prompt_token_ids) and got.usage.completion_tokens == 12
    assert got.usage.prompt_tokens_details.cached_tokens >= 0


def test_every_spelling_of_prompts(client: Any, tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenizer.encode(PROMPT)
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0).choices[0].text
    for prompt, num in ((ids, 1), ([PROMPT], 1), ([PROMPT, PROMPT], 2), ([ids, ids, ids], 3)):
        got = client.completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in got.choices] == [text] * num
        assert [choice.index for choice in got.choices] == list(range(num))
        assert got.usage.prompt_tokens == num * len(ids) and got.usage.completion_tokens == 6 * num


def test_the_second_time_comes_from_the_cache(client: Any) -> None:
    prompt = list(range(100, 133))
    told = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=1).usage.prompt_tokens_details for _ in range(2)
    ]
    assert [each.cached_tokens for each in told] == [0, 32]
    assert told[0].cache_write_tokens == 32


def test_a_stream_joins_to_the_whole(client: Any, server: LiveServer) -> None:
    body = {"model": NAME, "prompt": [PROMPT, "Once upon a time"], "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 2}
    whole = client.completions.create(**body)
    chunks = stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice.index]
        assert "".join(one["text"] for one in mine) == choice.text
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        joined = {key: [] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for one in mine:
            for key, values in (one["logprobs"] or {}).items():
                joined[key] += values
        assert joined["tokens"] == choice.logprobs.tokens and joined["text_offset"] == choice.logprobs.text_offset
        assert joined["token_logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_a_chat_streams_what_it_answers(client: Any, server: LiveServer, tiny_llm: LLM) -> None:
    body: dict[str, Any] = {
        "model": NAME, "messages": CHAT, "max_completion_tokens": 15, "seed": 7, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**body)
    choice = whole.choices[0]
    params = SamplingParams(max_tokens=15, seed=7)
    alone = server.in_engine(lambda: tiny_llm.chat(CHAT, params))[0].outputs[0]
    assert choice.message.content == alone.text and choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens == len(alone.token_ids)
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)
    text, entries, reasons = "", [], []
    for chunk in client.chat.completions.create(**body, stream=True):
        (one,) = chunk.choices
        text += one.delta.content or ""
        entries += one.logprobs.content if one.logprobs else []
        reasons.append(one.finish_reason)
    assert text == choice.message.content
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]
    assert reasons[-1] == choice.finish_reason and set(reasons[:-1]) == {None}


def test_several_answers_of_a_chat_stream_apart(client: Any) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 10, "seed": 1, "n": 3}
    whole = client.chat.completions.create(**body)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) == 3


def test_without_max_tokens_a_chat_may_fill_the_context(client: Any, tiny_llm: LLM) -> None:
    got = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert got.usage.total_tokens == tiny_llm.max_len and got.choices[0].finish_reason == "length"


def test_stop_strings(client: Any, server: LiveServer) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**body).choices[0].text
    stop = whole[10:13]
    got = client.completions.create(**body, stop=[stop, "never"]).choices[0]
    assert got.text == whole[: whole.index(stop)] and got.finish_reason == "stop"
    chunks = stream(server, "/v1/completions", {**body, "stop": stop, "logprobs": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == got.text
    same = client.completions.create(**body, stop=stop, logprobs=0)
    streamed = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {}).get("tokens", [])]
    assert streamed == same.choices[0].logprobs.tokens


def test_echo_scores_the_prompt(client: Any, server: LiveServer, tiny_llm: LLM) -> None:
    """As lm-evaluation-harness asks: token ids, one likeliest token, nothing generated."""
    ids = tiny_llm.tokenizer.encode(PROMPT)
    (alone,) = server.in_engine(lambda: tiny_llm.score([ids], top=1))
    assert alone.prompt_logprobs is not None
    got = client.completions.create(model=NAME, prompt=ids, max_tokens=0, echo=True, logprobs=1, temperature=0)
    logprobs = got.choices[0].logprobs
    assert got.choices[0].text == PROMPT and got.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([one.logprob for one in alone.prompt_logprobs[1:]], abs=1e-5)
    assert "".join(logprobs.tokens) == PROMPT
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(len(ids))]
    for name, top, entry in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert (name == max(top, key=top.get)) == (entry.token_id == entry.top[0][0])


def test_echo_goes_on_with_the_answer(client: Any, server: LiveServer) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    plain, echoed = client.completions.create(**body), client.completions.create(**body, echo=True, logprobs=0)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    tokens = echoed.choices[0].logprobs.tokens
    assert len(tokens) == echoed.usage.total_tokens
    chunks = stream(server, "/v1/completions", {**body, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + plain.choices[0].text
    named = client.completions.create(**body, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert all(token.startswith("token_id:") for token in named.choices[0].logprobs.tokens)


def test_sampling_fields_reach_the_sampler(client: Any) -> None:
    ids = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=0)
    chosen = ids.choices[0].logprobs.tokens[0]
    other = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=0, logit_bias={"100": 100.0}
    )
    assert len(set(other.choices[0].logprobs.tokens)) == 1 and other.choices[0].logprobs.tokens[0] != chosen
    only = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=6, logprobs=0,
        extra_body={"allowed_token_ids": [100, 101], "return_tokens_as_token_ids": True, "top_k": -1},
    )  # fmt: skip
    assert set(only.choices[0].logprobs.tokens) <= {"token_id:100", "token_id:101"}


def test_parts_and_marks_of_a_chat(client: Any) -> None:
    def ask(content: Any, **extra: Any) -> Any:
        messages = [{"role": "system", "content": content}, *CHAT]
        return client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=2, temperature=0, extra_body=extra
        )

    text = "Be kind. " * 8
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    salted = [ask(content, cache_salt="a").usage.prompt_tokens_details.cached_tokens for content in (text, marked)]
    assert salted[0] == 0 and salted[1] > 0
    assert ask(text, cache_salt="b", prompt_cache_key="k").usage.prompt_tokens_details.cached_tokens == 0
    assert ask(text, cache_salt="b", prompt_cache_retention="24h").usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "middle"),
        ({"best_of": 3}, "best_of", "send n"),
        ({"frobnicate": 1}, "frobnicate", "not a field"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"max_tokens": "many"}, "max_tokens", "integer"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"n": 1000}, "n", "128"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": 5}, "stop", "string"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias", "vocabulary"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop_token_ids": [9999999]}, "stop_token_ids", "vocabulary"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [9999999]}, "prompt", "vocabulary"),
        ({"prompt": [[1], "x"]}, "prompt", "valid"),
        ({"prompt": list(range(256))}, None, "max_len=256"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream_options": {"what": 1}}, "stream_options.what", "not permitted"),
        ({"cache_control": {"type": "lasting"}}, "cache_control", "ephemeral"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention", "24h"),
        ({"priority": 2**40}, "priority", "32 bits"),
        ({"timeout": 0}, "timeout", "greater"),
        ({"service_tier": "priority"}, "service_tier", "one tier"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_completion_is_refused_with_the_field(
    client: Any, server: LiveServer, change: dict[str, Any], param: str | None, words: str
) -> None:
    response = server.post("/v1/completions", {"model": NAME, "prompt": PROMPT, "max_tokens": 2, **change})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and error["type"] == "invalid_request_error" and words in error["message"], error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_a_chat_is_refused_with_the_field(server: LiveServer, change: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", {"model": NAME, "messages": CHAT, "max_tokens": 2, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_what_asks_for_nothing_is_let_through(server: LiveServer) -> None:
    neutral = {
        "store": False, "modalities": ["text"], "service_tier": "auto", "functions": None, "tools": None, "stop": [],
        "response_format": {"type": "text"}, "user": "someone", "logit_bias": None, "reasoning_effort": "none",
    }  # fmt: skip
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    messages = [*CHAT, answer, {"role": "user", "content": "And?"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 2, **neutral}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_unknown_models_routes_and_methods(client: Any, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here") as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert server.get("/v1/nothing").json()["error"]["message"]
    assert server.get("/v1/completions").status_code == 405
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt": NaN}', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9999]
)
def test_bodies_that_are_no_json_object(server: LiveServer, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
    assert response.status_code == 400 and response.json()["error"]["message"]
