"""The device check runs from end to end at toy sizes, so that it does not fail first where minutes are dear."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    script = Path(__file__).parent.parent / "scripts" / "device_check.py"
    done = subprocess.run([sys.executable, str(script), "--tiny", "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert all(each.get("equal") for each in result["parity"])
    assert [each["rows"] for each in result["engine"]] == [1, 3]
    for part in ("decode_attention", "engine"):
        assert all(value > 0 for each in result[part] for value in each.values() if isinstance(value, float))
    assert result["prefill_attention"]["flop_s"] > 0 and result["limits"]["copy_bytes_s"] > 0
