"""What keeps a busy server alive: limits, keys, deadlines, clients that leave, one bad request among good ones."""

import concurrent.futures
import logging
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.structured import JsonSchema
from tests.serve.stage import NAME, LiveServer, begun, stream, wait_until

LONG = {"model": NAME, "prompt": "Once upon", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 3}


def test_a_full_queue_is_told_when_to_come_back(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm, max_queue=1) as server:
        slow = _Slowed(server)
        streams = [begun(server, LONG) for _ in range(4)]
        lines = [each.__enter__() for each in streams]
        waiter = threading.Thread(target=lambda: server.post("/v1/completions", SHORT))
        waiter.start()
        wait_until(lambda: server.service.gate.num_inside == 5)
        refused = server.post("/v1/completions", SHORT)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (
            server.post(
                "/v1/messages", {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            ).json()["error"]["type"]
            == "rate_limit_error"
        )
        assert server.post("/v1/completions", {**SHORT, "n": 6}).status_code == 400  # never has room
        slow.stop()
        for each, rest in zip(streams, lines, strict=True):
            assert sum("[DONE]" in line for line in rest) == 1
            each.__exit__(None, None, None)
        waiter.join()
        assert server.post("/v1/completions", SHORT).status_code == 200
        server.check_idle()


class _Slowed:
    """Gives each step of a server some time, so that requests are there long enough to be looked at."""

    def __init__(self, server: LiveServer, seconds: float = 0.05) -> None:
        self._llm, self._step = server.service.llm, server.service.llm.step
        self.num_steps = 0

        def step() -> None:
            time.sleep(seconds)
            self.num_steps += 1
            self._step()

        self._llm.step = step  # type: ignore[method-assign]

    def stop(self) -> None:
        self._llm.step = self._step  # type: ignore[method-assign]


@pytest.fixture
def slowed(server: LiveServer) -> Any:
    slow = _Slowed(server)
    yield slow
    slow.stop()
    server.check_idle()


def test_a_burst_shares_its_steps(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others of a burst are being made, the first one waits; so they take the steps that the engine alone takes."""
    bodies = [{**SHORT, "prompt": [50 + index] * 5, "cache_salt": str(index)} for index in range(4)]

    def count(work: Any) -> int:
        before = server.in_engine(tiny_llm.stats).num_steps
        work()
        return server.in_engine(tiny_llm.stats).num_steps - before

    with LiveServer(tiny_llm) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        wanted = count(lambda: server.in_engine(lambda: tiny_llm.generate([each["prompt"] for each in bodies], params)))
        server.in_engine(tiny_llm.clear_prefix_cache)
        begun, released, prepare = threading.Semaphore(0), threading.Event(), server.service.prepare

        def slowly(prompt: Any, *rest: Any) -> Any:
            begun.release()
            if prompt != bodies[0]["prompt"]:
                assert released.wait(30)
            return prepare(prompt, *rest)

        def burst() -> None:
            others = [pool.submit(server.post, "/v1/completions", body) for body in bodies[1:]]
            for _ in others:
                assert begun.acquire(timeout=30)
            first = pool.submit(server.post, "/v1/completions", bodies[0])
            wait_until(lambda: len(server.service.engine._active) == 1)
            assert server.service.llm.stats().num_steps == num_before
            released.set()
            assert all(each.result().status_code == 200 for each in [first, *others])

        monkeypatch.setattr(server.service, "prepare", slowly)
        num_before = tiny_llm.stats().num_steps
        assert count(burst) == wanted
        server.check_idle()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_hanging_up_frees_the_pages_within_a_step(server: LiveServer, slowed: _Slowed, is_streamed: bool) -> None:
    body = {**LONG, "n": 2}
    if is_streamed:
        with begun(server, body):
            pass
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.6))
    wait_until(lambda: server.service.gate.num_inside == 0)  # the server knows
    num = slowed.num_steps
    wait_until(lambda: not server.service.llm.is_busy)
    assert slowed.num_steps - num <= 3  # the one that ran, the one in flight, and one that only reads it
    wait_until(lambda: server.service.metrics.endings["abort"] >= 2)  # told after the step


def test_a_deadline_ends_with_the_partial_text(server: LiveServer, slowed: _Slowed) -> None:
    whole = server.post("/v1/completions", {**LONG, "max_tokens": 40}).json()["choices"][0]["text"]
    choice = server.post("/v1/completions", {**LONG, "timeout": 0.4}).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["text"] and len(choice["text"]) < 200 and choice["text"][:40] == whole[: len(choice["text"][:40])]
    chunks = stream(server, "/v1/completions", {**LONG, "timeout": 0.4})
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    message = {"model": NAME, "max_tokens": 200, "messages": [{"role": "user", "content": "x"}], "timeout": 0.2}
    late = server.post("/v1/messages", message)
    assert late.status_code == 504 and late.json()["error"]["type"] == "timeout_error"


def test_keys(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm, api_keys=("first key", "zweiter schlüssel")) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"x-api-key": "first  key"},
            {"Authorization": "first key"},
        ):
            refused = server.post("/v1/completions", SHORT, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key", headers
            refused = server.post("/v1/messages", {}, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/models", "/tokenizer_info"):
            assert server.get(path).status_code == 401
        assert server.get("/v1/models", headers={"x-api-key": "first key"}).status_code == 200
        assert server.get("/v1/models", headers={b"x-api-key": "zweiter schlüssel".encode()}).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert server.get(path).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first key") as client:
            assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices


def test_bodies_are_bounded(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm, max_body_bytes=1000) as server:
        large = {**SHORT, "prompt": "x" * 2000}
        told = server.post("/v1/completions", large)
        assert told.status_code == 413 and told.json()["error"]["code"] == "request_too_large"
        unsaid = httpx.post(f"{server.url}/v1/messages", content=iter([b"x" * 600] * 3), timeout=60)
        assert unsaid.status_code == 413 and unsaid.json()["error"]["type"] == "request_too_large"
        assert server.post("/v1/completions", SHORT).status_code == 200


def test_lenient_leaves_out_what_is_not_served(tiny_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(tiny_llm, lenient=True) as server, caplog.at_level(logging.WARNING, "jaxkv"):
        assert server.post("/v1/completions", {**SHORT, "suffix": "x", "frobnicate": 1}).status_code == 200
        assert server.post("/v1/completions", {**SHORT, "temperature": -1}).status_code == 400
    assert "suffix is not supported" in caplog.text and "frobnicate is not a field" in caplog.text


@pytest.mark.parametrize("is_shown", [False, True])
def test_prompts_are_logged_only_if_asked(tiny_llm: LLM, caplog: pytest.LogCaptureFixture, is_shown: bool) -> None:
    secret = "zebra crossing"
    with LiveServer(tiny_llm, log_prompts=is_shown) as server:
        for name in (None, "jaxkv", "uvicorn"):  # whatever a command line in another test has set
            caplog.set_level(logging.DEBUG, name)
        assert server.post("/v1/completions", {**SHORT, "prompt": secret, "user": "ann"}).status_code == 200
        chat = [{"role": "user", "content": secret}]
        assert server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 2}).status_code == 200
        assert server.post("/v1/completions", {**SHORT, "prompt": {"x": secret}}).status_code == 400
        server.service.llm.prepare, original = _broken, server.service.llm.prepare  # type: ignore[method-assign]
        try:
            assert server.post("/v1/completions", {**SHORT, "prompt": secret}).status_code == 500
        finally:
            server.service.llm.prepare = original  # type: ignore[method-assign]
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("jaxkv", "uvicorn")))
    assert (secret in ours) == is_shown
    assert "for user 'ann'" in ours and "in _broken" in ours


def _broken(prompt: str, *_: object, **__: object) -> Any:
    raise ValueError(f"cannot do {prompt}")


def test_grammars_that_compile_for_long_keep_nobody_else_waiting(server: LiveServer, monkeypatch) -> None:
    """Forty requests wait for one grammar: more than there are threads to wait in."""
    grammars = server.service.llm._engine._grammars
    assert grammars is not None
    ready, submit = concurrent.futures.Future(), grammars.submit
    ready_later = submit(JsonSchema({"const": "yes"}))

    def slow(form: Any, *args: Any) -> Any:
        return ready if isinstance(form, JsonSchema) else submit(form, *args)

    monkeypatch.setattr(grammars, "submit", slow)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "x"}, "strict": True}}
    waiting = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "response_format": schema}
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        held = [pool.submit(server.post, "/v1/chat/completions", waiting) for _ in range(40)]
        assert server.post("/v1/completions", SHORT).status_code == 200
        refused = server.post("/v1/completions", {**SHORT, "prompt": [10**6]})
        assert refused.status_code == 400 and not any(one.done() for one in held)
        ready.set_result(ready_later.result())
        answers = [one.result() for one in held]
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert sum(answer.status_code == 200 for answer in answers) > 20
    assert all("yes" in answer.text for answer in answers if answer.status_code == 200)
    server.check_idle()


def test_a_bad_request_touches_no_other(server: LiveServer) -> None:
    wanted = server.post("/v1/completions", {**LONG, "max_tokens": 60}).json()["choices"][0]["text"]
    bad: list[Any] = [
        {**SHORT, "prompt": [10**6]}, {**SHORT, "prompt": [1] * 5000}, {"prompt": 5}, {**SHORT, "n": 0},
        {**SHORT, "prompt": ["fine", ""], "logit_bias": {"77777": 1}}, {**SHORT, "cache_salt": 5},
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 60}) for _ in range(4)]
        refused = [pool.submit(server.post, "/v1/completions", body) for body in bad * 3]
        assert {one.result().status_code for one in refused} == {400}
        assert [one.result().json()["choices"][0]["text"] for one in good] == [wanted] * 4
    server.check_idle()


def test_a_failed_step_ends_its_requests_and_no_more(server: LiveServer) -> None:
    llm = server.service.llm
    original = llm._engine.runner.dispatch
    llm._engine.runner.dispatch = _broken  # type: ignore[method-assign]
    try:
        failed = server.post("/v1/completions", SHORT)
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        chunks = httpx.post(f"{server.url}/v1/completions", json={**SHORT, "stream": True}, timeout=60).text
        assert '"error"' in chunks and chunks.endswith("data: [DONE]\n\n")
    finally:
        llm._engine.runner.dispatch = original  # type: ignore[method-assign]
    assert server.post("/v1/completions", SHORT).status_code == 200
    server.check_idle()
