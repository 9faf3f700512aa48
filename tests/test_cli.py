"""The command line: parsing, refusals, what is printed. The model is a fake that records what it was asked for."""

import argparse
import dataclasses
import inspect
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxkv import SamplingParams
from jaxkv.api import LLM, Stats
from jaxkv.cache_control import CacheControl
from jaxkv.cli import bench, options
from jaxkv.cli.command import main
from jaxkv.errors import CapacityError, EngineError, RequestError
from jaxkv.request import Completion, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from jaxkv.structured import Choice, Grammar, JsonSchema, Regex

STATS = Stats(
    num_requests=0, num_waiting=0, num_running=0, num_in_flight=0, pages_free=90, pages_cached=8, pages_used=2,
    tokens_held=20, utilisation=0.6, num_steps=12, num_prompt_tokens=7, num_hit_tokens=0, num_preemptions=0,
    num_cached_tokens=0, num_written_tokens=0, num_uncached_tokens=7, pages_retained=0, num_retained_evictions=0,
    pages_held=0, num_held_evictions=0, num_forced_tokens=0, pages_in_windows=0, num_left_windows=0, num_compiles=3,
    pool_bytes=4 * 2**20,
)  # fmt: skip


class FakeLLM:
    """Answers every prompt with its number; a chat prompt is the length of each message's content."""

    def __init__(self, *, has_template: bool = True) -> None:
        self.tokenizer = SimpleNamespace(chat_template=object() if has_template else None)
        self.load_arguments: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.params: SamplingParams | None = None
        self.caching: dict[str, Any] = {}
        self.conversations: list[list[dict[str, str]]] = []
        self.finish_reason = FinishReason.STOP
        self.pieces: Iterable[str] = ("Hel", "lo")
        self.num_closed = 0

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template")
        self.conversations.append(list(messages))
        return [len(message["content"]) for message in messages]

    def generate(self, prompts: list[Any], params: SamplingParams, **caching: Any) -> list[RequestOutput]:
        self.prompts, self.params, self.caching = prompts, params, caching
        return [self._output(number) for number in range(len(prompts))]

    def _output(self, number: int) -> RequestOutput:
        assert self.params is not None
        failed = self.finish_reason is FinishReason.ERROR
        completions = tuple(
            Completion(
                index=index, text=f"answer {number}.{index} é", token_ids=(5, 6), finish_reason=self.finish_reason,
                stop_reason=None, logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5),)), TokenLogprobs(6, -1.0, ())),
                error="no memory" if failed else None,
            )
            for index in range(self.params.n)
        )  # fmt: skip
        metrics = RequestMetrics(queue_s=0.1, ttft_s=0.25, e2e_s=0.5)
        return RequestOutput(
            request_id=f"request-{number}", prompt=None, prompt_token_ids=(1, 2, 3), outputs=completions,
            cached_tokens=0, cache_written_tokens=0, uncached_tokens=3, metrics=metrics,
        )  # fmt: skip

    def stream(self, prompt: list[int], params: SamplingParams, **caching: Any) -> Iterator[str]:
        self.params, self.caching = params, caching
        if sum(prompt) > 1000:
            raise RequestError(f"prompt_len={sum(prompt)} exceeds max_len=1000")
        return self._stream()

    def _stream(self) -> Iterator[str]:
        try:
            yield from self.pieces
        finally:
            self.num_closed += 1

    def stats(self) -> Stats:
        return STATS


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def load(model: str, **arguments: Any) -> FakeLLM:
        fake.load_arguments = {"model": model, **arguments}
        return fake

    monkeypatch.setattr(LLM, "load", load)
    return fake


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_every_sampling_field_has_a_flag() -> None:
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    assert [option.field for option in options.SAMPLING_OPTIONS] == [name for name in fields if name != "structured"]


def test_every_form_on_the_command_line(tmp_path: Path) -> None:
    schema, lark, gbnf = (tmp_path / name for name in ("s.json", "g.lark", "g.gbnf"))
    schema.write_text('{"type": "integer"}')
    lark.write_text('start: "a"')
    gbnf.write_text('root ::= "a"')
    forms = [
        (["--json-schema", str(schema)], JsonSchema({"type": "integer"})),
        (["--regex", "a+"], Regex("a+")),
        (["--choice", "yes", "--choice", "no"], Choice(["yes", "no"])),
        (["--grammar", str(lark)], Grammar('start: "a"')),
        (["--grammar", str(gbnf)], Grammar('root ::= "a"', "gbnf")),
    ]
    parser = argparse.ArgumentParser()
    options.add_sampling_options(parser)
    for flags, form in forms:
        assert options.sampling_params(parser.parse_args(flags)).structured == form
    for flags in (["--regex", "a", "--choice", "b"], ["--regex", ""], ["--json-schema", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            parser.parse_args(flags)


def test_every_load_argument_has_a_flag() -> None:
    arguments = set(inspect.signature(LLM.load).parameters) - {"model", "progress", "seed"}
    assert {option.field for option in options.LOAD_OPTIONS} == arguments


def test_every_cache_argument_has_a_flag() -> None:
    for method in (LLM.generate, LLM.stream):
        arguments = {name for name in inspect.signature(method).parameters if "cache" in name}
        fields = {option.field for option in options.CACHE_OPTIONS}
        assert fields - {"cache_ttl", "cache_breakpoints"} == arguments - {"cache_control"}


@pytest.mark.parametrize(
    ("flags", "caching"),
    [
        ("", {}),
        (
            "--cache-salt tenant --prompt-cache-key docs --prompt-cache-retention 24h",
            {"cache_salt": "tenant", "prompt_cache_key": "docs", "prompt_cache_retention": "24h"},
        ),
        ("--cache-ttl 1h", {"cache_control": CacheControl(ttl="1h")}),
        ("--cache-ttl 90 --cache-breakpoints 16,64", {"cache_control": CacheControl(ttl=90.0, breakpoints=(16, 64))}),
    ],
)
def test_cache_flags_reach_the_requests(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, flags: str, caching: dict[str, Any]
) -> None:
    assert main(["generate", "-m", "x", *flags.split(), "hi"]) == 0
    assert llm.caching == caching
    if "breakpoints" not in flags:
        llm.caching = {}
        type_in(monkeypatch, "hi")
        assert main(["chat", "-m", "x", *flags.split()]) == 0
        assert llm.caching == caching


@pytest.mark.parametrize(
    ("flags", "params"),
    [
        ([], SamplingParams(max_tokens=256)),
        (["--max-tokens", "3", "--min-tokens", "2"], SamplingParams(max_tokens=3, min_tokens=2)),
        (
            ["--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1"],
            SamplingParams(max_tokens=256, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1),
        ),
        (
            ["--repetition-penalty", "1.5", "--frequency-penalty", "-1", "--presence-penalty", "0.5"],
            SamplingParams(max_tokens=256, repetition_penalty=1.5, frequency_penalty=-1.0, presence_penalty=0.5),
        ),
        (
            ["--logit-bias", "4:-1.5", "--logit-bias", "7:2"],
            SamplingParams(max_tokens=256, logit_bias={4: -1.5, 7: 2.0}),
        ),
        (
            ["--allowed-token-ids", "1,2", "--stop-token-ids", "3"],
            SamplingParams(max_tokens=256, allowed_token_ids=(1, 2), stop_token_ids=(3,)),
        ),
        (
            ["--stop", "a", "--stop", "b c", "--bad-words", "x"],
            SamplingParams(max_tokens=256, stop=("a", "b c"), bad_words=("x",)),
        ),
        (
            ["--ignore-eos", "--include-stop-str-in-output", "--no-skip-special-tokens"],
            SamplingParams(max_tokens=256, ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False),
        ),
        (
            ["--seed", "0", "--n", "3", "--logprobs", "0", "--prompt-logprobs", "2"],
            SamplingParams(max_tokens=256, seed=0, n=3, logprobs=0, prompt_logprobs=2),
        ),
    ],
)
def test_flags_become_sampling_params(llm: FakeLLM, flags: list[str], params: SamplingParams) -> None:
    assert main(["generate", "-m", "x", *flags, "--", "hi"]) == 0
    assert llm.params == params


def test_model_flags_reach_load_and_absent_ones_do_not(llm: FakeLLM) -> None:
    assert main(["generate", "-m", "some/model", "hi"]) == 0
    assert llm.load_arguments == {"model": "some/model"}
    flags = (
        "--dtype bfloat16 --max-len 512 --max-rows 4 --page-size 8 --num-pages 64 --token-budget 128 --decode-steps 2 "
        "--no-prefix-cache --eviction cost --no-overlap --tensor 2 --data 2 --warm-up"
    )
    assert main(["generate", "-m", "x", *flags.split(), "hi"]) == 0
    assert llm.load_arguments == {
        "model": "x", "dtype": "bfloat16", "max_len": 512, "max_rows": 4, "page_size": 8, "num_pages": 64,
        "token_budget": 128, "decode_steps": 2, "prefix_cache": False, "eviction": "cost", "overlap": False,
        "tensor": 2, "data": 2, "warm_up": True,
    }  # fmt: skip


# --- help and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["convert"], ["bench"], ["bench", "kv-cache"]])
def test_help_needs_neither_jax_nor_numpy(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from jaxkv.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'numpy', 'flax', 'tokenizers'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *command, "--help"], capture_output=True, text=True, check=True
    )
    *help_lines, heavy = result.stdout.splitlines()
    assert heavy == "[]"
    assert help_lines[0].startswith(" ".join(["usage: jaxkv", *command]))


def test_module_and_version() -> None:
    result = subprocess.run([sys.executable, "-m", "jaxkv", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == "jaxkv 0.1.0\n"


def test_llm_is_there_when_asked_for() -> None:
    import jaxkv

    assert jaxkv.LLM is LLM
    assert "LLM" in dir(jaxkv)
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        _ = jaxkv.LMM


@pytest.mark.parametrize(
    "command",
    [
        "generate hi",  # no model
        "generate -m x --chat --raw hi",
        "generate -m x --temp 1 hi",  # abbreviations would change meaning with every new flag
        "generate -m x --logit-bias 3 hi",
        "generate -m x --stop-token-ids 1,b hi",
        "generate -m x --top-k many hi",
        "chat -m x --n 2",
        "chat -m x --cache-ttl 5m --cache-breakpoints 16",
        "generate -m x --cache-ttl 5m --cache-breakpoints 16,end hi",
        "convert only-one",
        "bench",
        "bench latency -m x --num-requests 3",
        "bench latency -m x --repeats 0",
        "bench throughput -m x --compare vllm",
        "bench prefix -m x --no-prefix-cache",
        "bench kv-cache -m x --decode-steps 4",
        "nonsense",
    ],
)
def test_malformed_commands(command: str, llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err
    assert not llm.load_arguments


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1", "hi"], "temperature=-1.0 must be >= 0"),
        (["--max-tokens", "0", "hi"], "max_tokens=0 generates nothing"),
        (["--raw", "--system", "be brief", "hi"], "--system needs the chat template"),
        (["--cache-ttl", "2d", "hi"], "ttl='2d' must be one of 5m, 1h, 24h, or seconds > 0"),
        (["--cache-ttl", "5m", "--cache-breakpoints", "1,2,3,4,5", "hi"], "5 cache breakpoints; the limit is 4"),
        (["--cache-breakpoints", "16", "hi"], "--cache-breakpoints needs --cache-ttl"),
        (["--prompt-cache-retention", "1h", "hi"], "prompt_cache_retention='1h' must be one of in_memory, 24h"),
        (
            ["--cache-ttl", "5m", "--prompt-cache-retention", "24h", "hi"],
            "prompt_cache_retention='24h' and cache_control",
        ),
    ],
)
def test_refused_before_the_model_is_loaded(
    flags: list[str], message: str, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", "x", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"jaxkv: error: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not llm.load_arguments


def test_errors_of_the_engine_are_one_line(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise CapacityError("7 pages are too few")

    monkeypatch.setattr(llm, "generate", refuse)
    assert main(["generate", "-m", "x", "hi"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: 7 pages are too few\n"


def test_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "no-such-model", "hi"]) == 2
    assert capsys.readouterr().err.startswith("jaxkv: error: model 'no-such-model'")


def test_ctrl_c_while_generating(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "generate", interrupt)
    assert main(["generate", "-m", "x", "hi"]) == 130


def test_reader_that_left_gets_no_traceback() -> None:
    program = (
        "import sys\n"
        "from jaxkv.cli import command, generate\n"
        "generate.run = lambda args: [print('x' * 100) for _ in range(10_000)] and 0\n"
        "sys.exit(command.main(['generate', '-m', 'x', 'hi']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


# --- generate --------------------------------------------------------------------------------------------------------


def test_one_text(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", "hi"]) == 0
    assert capsys.readouterr().out == "answer 0.0 é\n"
    assert llm.conversations == [[{"role": "user", "content": "hi"}]]
    assert llm.prompts == [[2]]


def test_several_texts_have_headings(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", "hi", "you", "--n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "=== hi", "--- 1 of 2", "answer 0.0 é", "--- 2 of 2", "answer 0.1 é",
        "=== you", "--- 1 of 2", "answer 1.0 é", "--- 2 of 2", "answer 1.1 é",
    ]  # fmt: skip


def test_system_message(llm: FakeLLM) -> None:
    assert main(["generate", "-m", "x", "--system", "be brief", "hi"]) == 0
    assert llm.conversations == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]]


@pytest.mark.parametrize(
    ("has_template", "flags", "prompt"), [(True, [], [2]), (True, ["--raw"], "hi"), (False, [], "hi")]
)
def test_template_is_used_where_there_is_one(
    llm: FakeLLM, has_template: bool, flags: list[str], prompt: object
) -> None:
    llm.tokenizer.chat_template = object() if has_template else None
    assert main(["generate", "-m", "x", *flags, "hi"]) == 0
    assert llm.prompts == [prompt]


def test_chat_without_template_is_refused(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.tokenizer.chat_template = None
    assert main(["generate", "-m", "x", "--chat", "hi"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_json_has_everything_on_one_line_each(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", "--json", "hi", "two\nlines"]) == 0
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert "é" in captured.out
    assert first == {
        "request_id": "request-0",
        "prompt": "hi",
        "prompt_token_ids": [1, 2, 3],
        "outputs": [
            {
                "index": 0,
                "text": "answer 0.0 é",
                "token_ids": [5, 6],
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": [
                    {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]},
                    {"token_id": 6, "logprob": -1.0, "top": []},
                ],
                "error": None,
                "parsed": None,
                "tool_calls": [],
                "content": None,
            }
        ],
        "cached_tokens": 0,
        "cache_written_tokens": 0,
        "uncached_tokens": 3,
        "prompt_logprobs": None,
        "metrics": {"queue_s": 0.1, "ttft_s": 0.25, "e2e_s": 0.5, "num_preemptions": 0},
    }
    assert second["prompt"] == "two\nlines"


def test_stats_go_to_stderr(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", "--stats", "hi", "you"]) == 0
    captured = capsys.readouterr()
    assert "prompt" not in captured.out
    lines = {line[:18].strip(): line[18:].strip() for line in captured.err.splitlines()}
    assert lines["prompt tokens"] == "6 (0 from the prefix cache)"
    assert lines["output tokens"].startswith("4 in ")
    assert lines["first token after"] == "0.250 s (mean)"
    assert lines["pages"] == "2 used, 8 cached, 90 free of 100"
    assert lines["page pool"] == "4 MiB"
    assert lines["steps"] == "12, 0 preemptions, 3 programs built"


def test_failed_completion_fails_the_command(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.finish_reason = FinishReason.ERROR
    assert main(["generate", "-m", "x", "hi"]) == 1
    assert capsys.readouterr().err == "jaxkv: error: a completion failed: no memory\n"


def test_standard_input_is_one_prompt(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "two\nlines\n")
    assert main(["generate", "-m", "x", "--raw"]) == 0
    assert llm.prompts == ["two\nlines\n"]


def test_terminal_without_prompt_is_told(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate", "-m", "x"]) == 2
    assert "no prompt: give one" in capsys.readouterr().err


def test_prompt_files(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo é\r\n", encoding="utf-8")
    assert main(["generate", "-m", "x", "--raw", "zero", "--prompt-file", str(plain)]) == 0
    assert llm.prompts == ["zero", "one", "two é"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('"a\\nb"\n[1, 2]\n{"prompt": "c", "id": 7}\n', encoding="utf-8")
    assert main(["generate", "-m", "x", "--raw", "--prompt-file", str(lines)]) == 0
    assert llm.prompts == ["a\nb", [1, 2], "c"]
    assert main(["generate", "-m", "x", "--prompt-file", str(lines)]) == 0
    assert llm.prompts == [[3], [1, 2], [1]]  # token ids are a finished prompt, without template
    type_in(monkeypatch, "x\ny\n")
    assert main(["generate", "-m", "x", "--raw", "--prompt-file", "-"]) == 0
    assert llm.prompts == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n\n", "empty.txt holds no prompt"),
        ("latin.txt", b"caf\xe9\n", "latin.txt is not UTF-8 text"),
        ("bad.jsonl", b'"ok"\n{"text": 1}\n', "bad.jsonl:2 must be a string"),
        ("bad.jsonl", b'"ok"\nhello\n', "bad.jsonl:2 is not JSON"),
        ("bad.jsonl", b'[1, "a"]\n', "bad.jsonl:1 must be a string"),
    ],
)
def test_bad_prompt_files(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str], tmp_path: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["generate", "-m", "x", "--prompt-file", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert not llm.load_arguments


def test_missing_prompt_file(llm: FakeLLM, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["generate", "-m", "x", "--prompt-file", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "hi\n\nagain\n/reset\nnew\n/exit\nnever\n")
    assert main(["chat", "-m", "x", "--system", "S"]) == 0
    assert capsys.readouterr().out == "Hello\n" * 3
    system, answer = {"role": "system", "content": "S"}, {"role": "assistant", "content": "Hello"}
    first, second, third = ({"role": "user", "content": text} for text in ("hi", "again", "new"))
    assert llm.conversations == [[system, first], [system, first, answer, second], [system, third]]
    assert llm.params == SamplingParams(max_tokens=1024)
    assert llm.num_closed == 3


def test_chat_ends_with_its_input(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "hi")
    assert main(["chat", "-m", "x"]) == 0
    assert len(llm.conversations) == 1


def test_chat_refusal_and_typing_error_leave_the_conversation(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, f"{'x' * 2000}\n/rset\nhi\n")
    assert main(["chat", "-m", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert "exceeds max_len=1000" in captured.err
    assert "unknown command /rset" in captured.err
    assert llm.conversations[-1] == [{"role": "user", "content": "hi"}]


def test_ctrl_c_stops_the_answer_only(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Iterator[str]:
        yield "one "
        signal.raise_signal(signal.SIGINT)
        yield "two "
        yield "three"

    before = signal.getsignal(signal.SIGINT)
    llm.pieces = interrupted()
    type_in(monkeypatch, "count\n/exit\n")
    assert main(["chat", "-m", "x"]) == 0
    assert capsys.readouterr().out == "one two  [stopped]\n"
    assert llm.num_closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_failed_answer_leaves_the_conversation(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> Iterator[str]:
        yield "Hel"
        llm.pieces = ("Hello",)
        raise EngineError("the device failed: out of memory")

    llm.pieces = failing()
    type_in(monkeypatch, "hi\nagain\n")
    assert main(["chat", "-m", "x"]) == 0
    assert "the device failed: out of memory" in capsys.readouterr().err
    assert llm.conversations[-1] == [{"role": "user", "content": "again"}]


def test_chat_needs_a_template(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.tokenizer.chat_template = None
    assert main(["chat", "-m", "x"]) == 2
    assert "use `jaxkv generate`" in capsys.readouterr().err


# --- convert and bench -----------------------------------------------------------------------------------------------


def test_convert_passes_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("jaxkv.convert.convert", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert main(["convert", "in.gguf", "out", "--dtype", "bfloat16"]) == 0
    assert main(["convert", "in.gguf", "out"]) == 0
    assert calls == [(("in.gguf", "out"), {"dtype": "bfloat16"}), (("in.gguf", "out"), {"dtype": "auto"})]


@pytest.mark.parametrize("benchmark", bench.BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_bench_passes_its_flags(benchmark: bench.Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[argparse.Namespace, dict[str, Any]]] = []
    monkeypatch.setattr("jaxkv.bench.run.run", lambda args, load: calls.append((args, load)) or 0)
    command = ["bench", benchmark.name, "-m", "x", "--json", "--seed", "3", "--max-rows", "2"]
    for engine in benchmark.compare:
        command += ["--compare", engine]
    assert main(command) == 0
    ((args, load),) = calls
    assert args.benchmark == benchmark.name
    assert {flag.name: getattr(args, flag.name) for flag in benchmark.flags} == {
        flag.name: flag.default for flag in benchmark.flags
    }
    assert getattr(args, "compare", []) == list(benchmark.compare)
    assert load == {"model": "x", "seed": 3, "max_rows": 2}
