"""`jaxkv plan` without compilers: what is refused, what is printed, what is drawn."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.capacity import plan, plot, text, topology
from jaxkv.capacity.compiled import StepFacts
from jaxkv.capacity.known import KNOWN, read_config
from jaxkv.capacity.plan import Question, Report, make_plan, mesh_sizes
from jaxkv.capacity.report import Advice, Budget, bounds
from jaxkv.capacity.topology import parse_topology
from jaxkv.cli.command import main
from jaxkv.errors import CheckpointError, ConfigError
from tests.capacity.test_report import layout

GIB = 2**30
STEP = StepFacts(
    program="decode", num_tokens=16, vocab_size=128256, pool_bytes=8 * GIB, layer_pool_bytes=GIB // 4, argument_bytes=10 * GIB,
    alias_bytes=8 * GIB, temp_bytes=2**20, output_bytes=8 * GIB, moved_bytes=2 * GIB, pool_is_aliased=True,
    collectives={"all-reduce": 2}, pool_sized={"custom-call[aliased]": 1}, copied_argument_bytes=0, pool_scatters=0,
    has_layer_loop=True, attention="tpu", compile_s=1.5,
)  # fmt: skip


def question(**changes: Any) -> Question:
    fields: dict[str, Any] = {
        "model": "llama-3.1-8b", "config": KNOWN["llama-3.1-8b"], "topology": parse_topology("v6e:2x4"),
    } | changes  # fmt: skip
    return Question(**fields)


@pytest.fixture
def report() -> Report:
    one = layout(tensor=8)
    return Report(
        model="llama-3.1-8b", topology="v6e:2x4", device_kind="TPU v6 lite", num_devices=8, tensor=8, data=1,
        dtype="bfloat16", quant="int8", kv_dtype="bfloat16", page_size=16, max_len=8192, max_rows=256,
        budget=Budget(usable=31 * GIB, weights=2 * GIB, state=2**20, temp=2**20, page=262144), num_pages=100_000,
        num_tokens=1_600_000, missing_bytes=0, rows_at=(), steps=(STEP,), complaints={"decode": ()}, min_bytes=2.0,
        moved_bytes=2.5, bounds=tuple(bounds(one, parse_topology("v6e:2x4").chip, [1, 256], 1024)), advice=(), notes=(),
    )  # fmt: skip


def test_the_mesh_is_as_wide_as_the_kv_heads_allow() -> None:
    cfg = layout().cfg
    assert mesh_sizes(question(), cfg) == (8, 1)
    assert mesh_sizes(question(topology=parse_topology("v6e:4x4")), cfg) == (8, 2)
    assert mesh_sizes(question(data=4), cfg) == (2, 4)
    assert mesh_sizes(question(tensor=4), cfg) == (4, 2)
    with pytest.raises(ConfigError, match="tensor=8 x data=2 needs 16 devices, v6e:2x4 has 8"):
        mesh_sizes(question(tensor=8, data=2), cfg)


def test_what_does_not_fit_needs_no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "check_compiler", lambda chip: None)
    found = make_plan(question(config=KNOWN["llama-3.3-70b"], model="llama-3.3-70b", tensor=4))
    assert not found.fits and found.steps == ()
    printed = text.render(found)
    assert "DOES NOT FIT: the weights need" in printed and "--tensor 8" in printed


def test_a_long_row_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "check_compiler", lambda chip: None)
    found = make_plan(question(topology=parse_topology("v6e:1x1"), max_len=131072))
    assert found.missing_bytes > GIB
    assert "weights and one row of 131,072 tokens" in text.render(found)
    assert found.advice[0].setting.startswith("--max-len ")


def test_prints(report: Report) -> None:
    printed = text.render(report)
    for said in (
        "tensor=8 data=1",
        "bfloat16 with matrices in int8",
        "1,600,000 tokens in all",
        "2 all-reduce",
        "copy none of it",
        "1.25 x the least",
    ):
        assert said in printed
    bad = dataclasses.replace(report, complaints={"decode": ("it copies",)}, notes=("rows halved",))
    assert "decode: it copies" in text.render(bad) and "rows halved" in text.render(bad)


def test_draws(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot(report, str(tmp_path / "bound.png"))
    assert (tmp_path / "bound.png").read_bytes().startswith(b"\x89PNG")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, report: Report) -> list[Question]:
    """Questions that reached the planner, which answers with `report`."""
    questions: list[Question] = []

    def answer(question: Question) -> Report:
        questions.append(question)
        fits = question.topology.name != "v5e:1x1"
        return dataclasses.replace(
            report,
            missing_bytes=0 if fits else GIB,
            moved_bytes=2.5 if fits else float("nan"),
            advice=(Advice("--tensor 2", "fits"),),
        )

    monkeypatch.setattr(plan, "make_plan", answer)
    monkeypatch.setattr(topology, "prepare_environment", lambda: None)
    return questions


def test_command(asked: list[Question], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-len", "4096", "--max-rows", "8", "--page-size", "32", "--tensor", "4", "--data", "2",
             "--lengths", "10,20", "--context-len", "77", "--dtype", "float32", "--kv-dtype", "float8_e4m3fn",
             "--quant", "int8"]  # fmt: skip
    assert main(["plan", "llama-3.1-8b", "--topology", "v6e:2x4", *flags]) == 0
    (got,) = asked
    assert (got.max_len, got.max_rows, got.page_size, got.tensor, got.data) == (4096, 8, 32, 4, 2)
    assert (got.lengths, got.context_len, got.dtype, got.kv_dtype) == ((10, 20), 77, "float32", "float8_e4m3fn")
    assert got.quant == "int8"
    assert "tokens in all" in capsys.readouterr().out


def test_json_and_exit_status(asked: list[Question], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--topology", "v5e:1x1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["moved_bytes"] is None and found["budget"]["num_pages"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt-9", "--topology", "v6e:2x4"], "nor a known name (llama-2-7b"),
        (["llama-3.1-8b", "--topology", "v6e-8"], "is not CHIP:AxB"),
        (["llama-3.1-8b", "--topology", "v6e:2x4", "--quant", "int4"], "quant='int4' is not supported"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_configs_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["smollm2-135m"]))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == read_config("SmolLM2-135M")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_config(str(tmp_path))
