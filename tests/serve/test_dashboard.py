"""The live page in a headless Chromium, the data behind it, and the trace."""

import concurrent.futures
import itertools
import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxkv import LLM
from jaxkv.cli.command import main
from tests.serve.stage import NAME, LiveServer, begun, wait_until

BODY = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


def load(server: LiveServer, num: int) -> Any:
    """Several requests that begin together, until all are over; four of them do not fit into the pool up to their end."""
    prompts = [[10 + (7 * index + i) % 100 for i in range(100)] for index in range(num)]
    return server.post("/v1/completions", {**BODY, "prompt": prompts, "max_tokens": 150}).json()


def expand(runs: list[int]) -> list[int]:
    return [value for value, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def test_the_state_is_that_of_the_pool(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm) as server:
        for _ in range(2):
            with begun(server, BODY), begun(server, {**BODY, "n": 2}):
                state = server.get("/dashboard/state").json()
            pages, stats = Counter(expand(state["pages"])), state["running"]
            assert sum(pages.values()) == tiny_llm.num_pages
            for index, each in enumerate(stats):
                assert 0 < pages[2 + index] <= each["num_pages"]
                assert each["prompt_len"] <= each["num_tokens"] <= each["max_total_len"]
        server.check_idle()
        idle = server.get("/dashboard/state").json()
        assert set(expand(idle["pages"])) == {0, 1} and idle["running"] == idle["waiting"] == []
        counts = Counter(expand(idle["pages"]))
        wait_until(lambda: server.service.engine.stats.pages_cached == counts[1])


def test_timelines_and_the_trace_tell_what_happened(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm) as server:
        server.get("/dashboard/state")  # somebody looks
        before = tiny_llm.stats().num_preemptions
        answer = load(server, 9)
        assert tiny_llm.stats().num_preemptions > before
        trace = server.get("/trace").json()
        lines = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"]
                 if event["name"] == "thread_name"}  # fmt: skip
        assert len(lines) == 9
        for tid, name in lines.items():
            spans = [
                event
                for event in trace["traceEvents"]
                if event["ph"] == "X" and (event["pid"], event["tid"]) == (2, tid)
            ]
            kinds = [span["name"] for span in spans]
            assert kinds[:2] == ["queued", "prefill"] and "decode" in kinds
            for one, following in itertools.pairwise(spans):
                assert one["ts"] + one["dur"] <= following["ts"] + 0.3, (one, following)  # rounded to 0.1 us
            (shown,) = server.get(f"/dashboard/requests/{name}").json()
            assert [span["kind"] for span in shown["spans"]] == kinds and shown["reason"] == "length"
            decoded = sum(span["num_tokens"] for span in shown["spans"] if span["kind"] == "decode")
            first = kinds.count("preempted") + 1  # each chunk that ends what is known samples a token
            assert decoded == 150 - first
        assert answer["usage"]["completion_tokens"] == 1350
        assert any(event["name"] == "preempted" for event in trace["traceEvents"])
        steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
        assert sum(step["args"]["decode_tokens"] for step in steps) <= 1350 and len(steps) > 10
        for path, status in (
            ("/dashboard/requests/nobody", 404),
            ("/trace?seconds=-1", 400),
            ("/trace?seconds=x", 400),
        ):
            assert server.get(path).status_code == status
        server.check_idle()


def test_nothing_is_recorded_when_nobody_looks(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.serve.watch.LINGER_S", 0.2)
    with LiveServer(tiny_llm) as server:
        assert tiny_llm._engine.recorder is None
        server.get("/dashboard/state")
        assert tiny_llm._engine.recorder is not None
        wait_until(lambda: tiny_llm._engine.recorder is None)


def test_the_command_writes_the_trace_of_a_running_server(
    tiny_llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXKV_API_KEY", raising=False)
    with LiveServer(tiny_llm, api_keys=("secret",)) as server:
        key, path = {"Authorization": "Bearer secret"}, tmp_path / "trace.json"
        server.get("/dashboard/state", headers=key)  # somebody looks
        server.post("/v1/completions", BODY, headers=key)
        wanted = server.get("/trace", headers=key).json()
        command = ["trace", "--url", f"{server.url}/", "--seconds", "0", "-o", str(path)]
        assert main([*command, "--api-key", "secret"]) == 0
        assert json.loads(path.read_text()) == wanted and len(wanted["traceEvents"]) > 5
        assert "https://ui.perfetto.dev" in capsys.readouterr().err
        monkeypatch.setenv("JAXKV_API_KEY", "wrong")
        assert main(command) == 2 and "answers 401" in capsys.readouterr().err
    assert main(command) == 1 and "refused" in capsys.readouterr().err
    for flags, told in (("--url localhost:1", "must begin with http"), ("--seconds -1", "--seconds -1")):
        assert main(["trace", *flags.split()]) == 2 and told in capsys.readouterr().err


def test_the_data_needs_a_key_where_there_are_keys(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm, api_keys=("secret",)) as server:
        assert server.get("/dashboard").status_code == 200
        for path in ("/dashboard/state", "/dashboard/requests/x", "/trace"):
            assert server.get(path).status_code == 401
        assert server.get("/dashboard/state", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_page_asks_nobody_else(tiny_llm: LLM) -> None:
    with LiveServer(tiny_llm) as server:
        page = server.get("/dashboard")
        assert page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text and "https://" not in page.text and " src=" not in page.text


def test_the_page_in_chromium(tiny_llm: LLM, tmp_path: Path) -> None:
    """What a person sees: cards, rows, the pool in colours, a request's timeline after a click; and no error."""
    how = "run: pip install 'jaxkv[browser]', and install Chromium (Debian: apt install chromium)"
    playwright = pytest.importorskip("playwright.sync_api", reason=f"there is no playwright; {how}")
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip(f"there is no Chromium; {how}")
    with LiveServer(tiny_llm) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        step = tiny_llm.step
        tiny_llm.step = lambda: (time.sleep(0.02), step())[1]  # type: ignore[method-assign]  (long enough to be seen)
        try:
            with playwright.sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                errors: list[str] = []
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
                page.goto(f"{server.url}/dashboard")
                wait_until(lambda: tiny_llm._engine.recorder is not None)  # or the first steps are not seen
                busy = pool.submit(load, server, 9)
                page.wait_for_selector("#running tr")
                page.wait_for_selector("#waiting tr")
                page.wait_for_selector("#running tr:nth-child(3)")
                page.click("#running tr:first-child")
                page.wait_for_selector("#timeline table")
                page.wait_for_timeout(1500)
                page.screenshot(path=str(tmp_path / "dashboard.png"))
                text = page.inner_text("#cards")
                assert "tokens / s" in text and "waiting" in text and "between tokens" in text
                colours = page.evaluate(
                    "(() => { const c = document.getElementById('pool'); const d = c.getContext('2d')"
                    ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
                    " for (let i = 0; i < d.length; i += 4) s.add(d.slice(i, i + 3).join()); return s.size; })()"
                )
                assert colours >= 4  # free or cached, and at least two requests
                assert "prefill" in page.inner_text("#timeline")
                busy.result()
                page.wait_for_selector("#running tr", state="detached")
                assert len(page.query_selector_all("#recent tr")) == 9
                browser.close()
                assert not errors, errors
        finally:
            tiny_llm.step = step  # type: ignore[method-assign]
        server.check_idle()
