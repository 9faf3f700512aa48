"""A server in a thread of this process, over a tiny random model: real sockets, real clients, seconds to start."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from jaxkv import LLM
from jaxkv.serve.app import make_app
from jaxkv.serve.limits import ServeConfig
from jaxkv.serve.service import Service
from tests.checkpoint.tools import hf_config, random_tensors, write_hf
from tests.tokenizer import tiny

NAME = "tiny"

Result = TypeVar("Result")


def load_tiny(folder: Path, **changes: Any) -> LLM:
    """A random model of two layers with a byte-level tokenizer and a chat template."""
    config = hf_config(
        vocab_size=tiny.backend("byte_level").get_vocab_size(), num_hidden_layers=2, max_position_embeddings=512
    )
    write_hf(folder, config, random_tensors(config))
    tiny.write("byte_level", folder)
    settings = dict(
        max_len=256, max_rows=4, num_pages=120, page_size=8, token_budget=64, decode_steps=4, progress=False
    )
    return LLM.load(folder, **(settings | changes))


class LiveServer:
    """A running server.

    Attributes:
        url: where it listens.
        service: what it serves, to look at.
    """

    def __init__(self, llm: LLM, **config: Any) -> None:
        self.service = Service(llm, ServeConfig(**({"names": (NAME,)} | config)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        settings = uvicorn.Config(
            make_app(self.service), log_config=None, access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])

    def in_engine(self, work: Callable[[], Result]) -> Result:
        """Runs what uses the `LLM` where that is allowed."""
        return asyncio.run_coroutine_threadsafe(self.service.engine.call(work), self._loop).result()

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def metric(self, name: str) -> float:
        """The value of a metric that has no labels but the model's."""
        return read_metric(self.get("/metrics").text, name)

    def check_idle(self) -> None:
        """Every page comes back (behaviour 6), and no sequence is counted as inside."""
        stats = lambda: self.service.engine.stats  # noqa: E731
        wait_until(lambda: not self.service.engine._active and not self.service.metrics._progress)
        wait_until(lambda: stats().num_requests == 0 and stats().num_in_flight == 0)
        assert stats().pages_used == 0
        assert stats().pages_free + stats().pages_cached == self.service.llm.num_pages
        wait_until(lambda: self.service.gate.num_inside == 0)


def read_metric(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def wait_until(holds: Any, seconds: float = 30) -> None:
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "never came true"
        time.sleep(0.01)


def sse(lines: Iterator[str]) -> list[Any]:
    """The data of an event stream, its last [DONE] left out but checked."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    return [json.loads(each) for each in data[:-1]]


def stream(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    """All chunks of one of OpenAI's streams."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return sse(response.iter_lines())


@contextlib.contextmanager
def begun(server: LiveServer, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """A stream of completions that has shown its first chunk; leaving hangs up."""
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield lines
