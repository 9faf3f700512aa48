"""`scripts/structured_proof.py` at a small size: random schemas, hot sampling, preemption, overlap, free rows, any budget."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_finished_output_is_valid() -> None:
    command = [sys.executable, "scripts/structured_proof.py", "--num", "100", "--sequences", "1000", "--seed", "7"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == report["cut_off"] == report["pages_used"] == 0
    assert report["device"] + report.get("host", 0) == 100 and report["finished"] >= report["device"]
    assert report["preemptions"] > 0 and report["free"] == 25
