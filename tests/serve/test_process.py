"""`jaxkv serve` as a process of its own, with SmolLM2: the unmodified clients, signals, a restart."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.serve.stage import read_metric, wait_until

pytestmark = pytest.mark.slow

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


class ServerProcess:
    """A server on a free port.

    Attributes:
        url: where it listens.
        process: to send signals to.
    """

    def __init__(self, *arguments: str) -> None:
        sizes = ["--max-len", "512", "--max-rows", "4", "--num-pages", "200", "--dtype", "float32"]
        command = [sys.executable, "-m", "jaxkv", "serve", "smollm2", "--port", "0", *sizes, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+)", line)
        assert found, self.process.communicate()[1]
        self.url = found[1]

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def metric(self, name: str) -> float:
        return read_metric(httpx.get(f"{self.url}/metrics", timeout=60).text, name)


@pytest.fixture(scope="module")
def server(smollm2_gguf_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server
        wait_until(lambda: server.metric("jaxkv:pages_used") == 0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_completions_are_hugging_faces(client: Any) -> None:
    for case in CASES[:3]:
        body = dict(model="smollm2", prompt=case["prompt_ids"], max_tokens=24, temperature=0, logprobs=0)
        extra = {"ignore_eos": True, "skip_special_tokens": False, "return_tokens_as_token_ids": True}
        got = client.completions.create(**body, extra_body=extra).choices[0]
        assert got.logprobs.tokens == [f"token_id:{token}" for token in case["greedy_ids"][:24]]
        streamed = "".join(
            chunk.choices[0].text for chunk in client.completions.create(**body, extra_body=extra, stream=True)
        )
        assert streamed == got.text and case["text"].startswith(got.text)


def test_a_chat_answers_alike_through_both_apis(client: Any, server: ServerProcess) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=CHAT, max_tokens=40, temperature=0).choices[0]
    assert "Paris" in answer.message.content and answer.finish_reason == "stop"
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as other:
        body: Any = dict(model="smollm2", messages=CHAT, max_tokens=40, extra_body={"temperature": 0})
        whole = other.messages.create(**body)
        with other.messages.stream(**body) as stream:
            streamed = "".join(stream.text_stream)
    assert whole.content[0].text == answer.message.content == streamed and whole.stop_reason == "end_turn"
    assert whole.usage.cache_read_input_tokens > 0


def test_an_address_in_use_is_told(server: ServerProcess, smollm2_gguf_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "jaxkv", "serve", "smollm2", "--port", port, "--max-len", "64", "--num-pages", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "in use" in done.stderr, done.stderr


def test_sigterm_lets_requests_end_and_refuses_new_ones(smollm2_gguf_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    with ServerProcess() as server:
        with (
            httpx.Client(base_url=server.url, timeout=300) as other,
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response,
        ):
            assert other.get("/health").status_code == 200
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/health").status_code == 503)
            refused = other.post("/v1/completions", json=body)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            data = [line for line in (first, *lines) if line.startswith("data: ")]
            assert data[-1] == "data: [DONE]"
            assert json.loads(data[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
        assert "shutting down" in server.process.stderr.read()


def test_a_second_sigterm_ends_requests_with_what_they_have(smollm2_gguf_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True, "stream": True, "temperature": 0}
    with ServerProcess() as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            data = [line for line in (first, *lines) if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(60) == 0


def test_a_killed_server_starts_again_with_its_programs(
    smollm2_gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path))
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    texts, num_compiles = [], []
    for _ in range(2):
        with ServerProcess() as server:
            texts.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"]
            )
            num_compiles.append(server.metric("jaxkv:engine_compiles_total"))
            server.process.kill()
            server.process.wait(60)
    assert texts[0] == texts[1]
    assert num_compiles[0] - num_compiles[1] >= 2  # a chunk's and a decode step's program came from the disk
