"""What README.md shows is true: its commands parse, its Python runs, its table of fields is that of the code."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from jaxkv import SamplingParams
from jaxkv.cli.command import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("jaxkv ")])
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    build_parser().parse_args(words[1 : words.index(">")] if ">" in words else words[1:])


def test_scripts_are_there() -> None:
    scripts = {word for line in LINES for word in line.split()[:1] if "/" in word}
    assert scripts == {"./scripts/demo.sh", "./scripts/test.sh", "./scripts/lint.sh", "./scripts/prove.sh", ".ci/run"}
    assert all((ROOT / script).stat().st_mode & 0o100 for script in scripts)


def test_field_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", README, re.MULTILINE)
    fields = dataclasses.fields(SamplingParams)
    assert [name for name, _ in rows] == [field.name for field in fields]
    for (name, shown), field in zip(rows, fields, strict=True):
        if isinstance(field.default, (bool, int, float)):
            assert shown.split()[0] == str(field.default).lower(), name
        else:
            assert shown[0].isalpha(), name


@pytest.mark.slow
def test_tour_runs(smollm2_gguf_path: Path) -> None:
    tour = "".join(block for language, block in BLOCKS if language == "python")
    names: dict[str, object] = {}
    exec(compile(tour, "README.md", "exec"), names)
    assert names["llm"]
