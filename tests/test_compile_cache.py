"""A killed process leaves no broken entry behind."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxkv.device import compile_cache
from jaxkv.device.compile_cache import drop_half_written, use_compilation_cache


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
    parent = marker(tmp_path, os.getppid(), 200)
    drop_half_written(tmp_path)
    assert fresh.exists() and parent.exists()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_killed_process_may_have_had_our_id(is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, own = entry(tmp_path, "written", 300), marker(tmp_path, os.getpid(), 200)
    monkeypatch.setattr(compile_cache, "_markers", {own} if is_ours else set())
    drop_half_written(tmp_path)
    assert written.exists() == own.exists() == is_ours


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert not use_compilation_cache(tmp_path / "file" / "xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "JAXKV_CACHE_DIR" in caplog.text
