"""A killed process leaves no broken entry behind."""

import os
import subprocess
import sys
from pathlib import Path

from jaxkv.compile_cache import drop_half_written


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def entry(folder: Path, name: str, mtime: float) -> Path:
    path = folder / f"{name}-cache"
    path.write_bytes(b"program")
    os.utime(path, (mtime, mtime))
    return path


def marker(folder: Path, pid: int, mtime: float) -> Path:
    path = folder / f"writing-{pid}"
    path.touch()
    os.utime(path, (mtime, mtime))
    return path


def test_entries_of_a_killed_process_go_and_older_ones_stay(tmp_path: Path) -> None:
    old, half = entry(tmp_path, "old", 100), entry(tmp_path, "half", 300)
    left = marker(tmp_path, dead_pid(), 200)
    drop_half_written(tmp_path)
    assert old.exists() and not half.exists() and not left.exists()


def test_a_living_process_is_left_alone(tmp_path: Path) -> None:
    fresh = entry(tmp_path, "fresh", 300)
    own = marker(tmp_path, os.getpid(), 200)
    drop_half_written(tmp_path)
    assert fresh.exists() and own.exists()
