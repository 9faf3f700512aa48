"""`jaxkv batch`: OpenAI's format, errors by line, and a run that is killed and goes on."""

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.errors import RequestError
from jaxkv.serve.batch import run_batch
from jaxkv.serve.batch_file import Answers, read_lines
from tests.serve.stage import load_tiny, wait_until


def ask(number: int, **body: Any) -> str:
    asked = {"prompt": f"Once upon {number}", "max_tokens": 24, "ignore_eos": True, **body}
    return json.dumps({"custom_id": f"ask-{number}", "method": "POST", "url": "/v1/completions", "body": asked})


def run(llm: LLM, source: Path, target: Path) -> list[dict[str, Any]]:
    with Answers(target) as answers:
        run_batch(llm, source, answers, names=("tiny",), lenient=False, progress=False)
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def test_each_line_gets_its_answer(tiny_llm: LLM, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "The dog"}], "max_tokens": 9, "temperature": 0}
    lines = [
        ask(1, seed=4),
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        ask(3, temperature=-1),
        "{not json",
        ask(1),
        "",
        json.dumps({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}),
        json.dumps({"custom_id": "y", "method": "POST", "url": "/v1/embeddings", "body": {}}),
        ask(9, stream=True),
        '{"custom_id": "\\ud800"}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    got = {answer["id"].split("_")[2]: answer for answer in run(tiny_llm, source, tmp_path / "out.jsonl")}
    assert sorted(got, key=int) == ["1", "2", "3", "4", "5", "7", "8", "9", "10"]
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=4)
    (alone,) = tiny_llm.generate(["Once upon 1"], params)
    first = got["1"]["response"]
    assert first["status_code"] == 200 and first["body"]["choices"][0]["text"] == alone.outputs[0].text
    assert got["1"]["custom_id"] == "ask-1" and got["1"]["error"] is None
    (alone,) = tiny_llm.chat(chat["messages"], SamplingParams(max_tokens=9, temperature=0))  # type: ignore[arg-type]
    assert got["2"]["response"]["body"]["choices"][0]["message"]["content"] == alone.outputs[0].text
    assert got["3"]["response"]["status_code"] == 400
    assert got["3"]["response"]["body"]["error"]["param"] == "temperature"
    for number, words in {
        "4": "not JSON", "5": "that of line 1", "7": "POST", "8": "/v1/embeddings", "9": "no streams", "10": "not JSON",
    }.items():  # fmt: skip
        assert got[number]["response"] is None and words in got[number]["error"]["message"], number


def test_an_output_of_other_requests_is_refused(tiny_llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(ask(1))
    run(tiny_llm, source, target)
    before = target.read_bytes()
    source.write_text(ask(2))
    with pytest.raises(RequestError, match="other requests"):
        run(tiny_llm, source, target)
    target.write_bytes(before + b"a text of mine\n")
    with pytest.raises(RequestError, match="no answer of a batch"):
        run(tiny_llm, source, target)
    target.write_bytes(before)
    with target.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="another process"):
            Answers(target)
    assert target.read_bytes() == before


def test_a_killed_run_goes_on(tiny_llm: LLM, tmp_path: Path) -> None:
    """`kill -9`, then the same command: nothing is asked again, nothing is lost, and the texts are those of a whole run."""
    load_tiny(tmp_path / "model")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(ask(number, prompt=f"{number} foxes", max_tokens=100 + number) for number in range(60)))
    sizes = ["--max-len", "256", "--max-rows", "4", "--num-pages", "120", "--page-size", "8", "--token-budget", "64"]
    command = [sys.executable, "-m", "jaxkv", "batch", str(source), "-o", str(target), "-m", str(tmp_path / "model")]
    command += [*sizes, "--decode-steps", "4", "--name", "tiny"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 5, seconds=300)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    killed = target.read_bytes()
    whole = killed[: killed.rfind(b"\n") + 1]
    num = whole.count(b"\n")
    assert 5 <= num < 60, "the run was over before it was killed"
    target.write_bytes(whole + b'{"id": "batch_req_')  # half a line, as a machine that lost power would leave
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{60 - num} answered" in done.stderr and f"{num} were answered before" in done.stderr
    assert target.read_bytes().startswith(whole)
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"ask-{number}" for number in range(60))
    wanted = run(tiny_llm, source, tmp_path / "whole.jsonl")
    text = lambda answer: (answer["custom_id"], answer["response"]["body"]["choices"][0]["text"])  # noqa: E731
    assert sorted(map(text, answers)) == sorted(map(text, wanted))
    assert len(list(read_lines(source))) == 60
