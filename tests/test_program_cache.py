"""Executables kept between processes: found again, made anew when damaged or when anything changed."""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.device import program_cache
from jaxkv.device.program_cache import MAX_ENGINES, ProgramCache
from jaxkv.errors import ConfigError


def make_cache(root: Path, *facts: object) -> ProgramCache:
    return ProgramCache(root, jax.devices()[:1], *facts)


class Counted:
    """A program that counts how often it is traced; donates its first argument."""

    def __init__(self, factor: float = 2.0):
        self.num_traces = 0

        def run(pool: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            self.num_traces += 1
            return pool.at[0].add(1.0), x * factor

        self.jitted = jax.jit(run, donate_argnums=0)


def call(cache: ProgramCache, counted: Counted, size: int = 3) -> np.ndarray:
    pool = jnp.zeros(1000)
    before = pool.unsafe_buffer_pointer()
    pool, out = cache.program("double", counted.jitted, num_fixed=1)(pool, np.arange(size, dtype=np.float32))
    assert pool.unsafe_buffer_pointer() == before, "donation survives"
    assert pool[0] == 1
    return np.asarray(out)


def test_second_process_does_not_trace(tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    np.testing.assert_array_equal(call(make_cache(tmp_path, "engine"), first), [0, 2, 4])
    np.testing.assert_array_equal(call(make_cache(tmp_path, "engine"), second), [0, 2, 4])
    assert (first.num_traces, second.num_traces) == (1, 0)


def test_one_program_a_shape(tmp_path: Path) -> None:
    cache, counted = make_cache(tmp_path), Counted()
    program = cache.program("double", counted.jitted, num_fixed=1)
    for size in (3, 5, 3, 5):
        assert program(jnp.zeros(10), np.ones(size, np.float32))[1].shape == (size,)
    assert counted.num_traces == 2 and len(list(cache.folder.iterdir())) == 2


def test_other_facts_other_programs(tmp_path: Path) -> None:
    call(make_cache(tmp_path, "factor 2"), Counted(2.0))
    np.testing.assert_array_equal(call(make_cache(tmp_path, "factor 3"), Counted(3.0)), [0, 3, 6])


def test_changed_source_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "__file__", str(tmp_path / "jaxkv" / "device" / "program_cache.py"))
    source = tmp_path / "kernels_pallas" / "op" / "tuned.py"
    source.parent.mkdir(parents=True)
    seen = set()
    for text in ("TILE = 1", "TILE = 2", "TILE = 1"):
        source.write_text(text)
        seen.add(repr(program_cache._surroundings.__wrapped__()))
    assert len(seen) == 2


def test_changed_settings_of_jax_other_programs(tmp_path: Path) -> None:
    """Also within a process; drawing reads this one, and it changes the numbers drawn."""
    call(make_cache(tmp_path), Counted())
    before = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_threefry_partitionable", not before)
    try:
        call(make_cache(tmp_path), other := Counted())
    finally:
        jax.config.update("jax_threefry_partitionable", before)
    with jax.log_compiles():
        call(make_cache(tmp_path), logged := Counted())
    assert (other.num_traces, logged.num_traces) == (1, 0)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "programs"
    make_cache(root)
    root.chmod(0o770)
    with pytest.raises(ConfigError, match="chmod go-w"):
        make_cache(root)


def test_a_folder_that_vanishes_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts at the same time drops the oldest, too."""
    for number in range(MAX_ENGINES + 1):
        (tmp_path / f"{number}").mkdir()
    is_dir, others = Path.is_dir, iter([tmp_path / "3"])

    def is_dir_for_now(path: Path) -> bool:
        answer = is_dir(path)
        for gone in others:
            gone.rmdir()
        return answer or path == tmp_path / "3"

    monkeypatch.setattr(Path, "is_dir", is_dir_for_now)
    make_cache(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == MAX_ENGINES


@pytest.mark.parametrize("data", [b"", b"garbage", None])
def test_damaged_entry_is_made_anew(tmp_path: Path, data: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(tmp_path)
    call(cache, Counted())
    (entry,) = cache.folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2] if data is None else data)
    counted = Counted()
    np.testing.assert_array_equal(call(make_cache(tmp_path), counted), [0, 2, 4])
    assert counted.num_traces == 1 and "unreadable program" in caplog.text
    call(make_cache(tmp_path), again := Counted())
    assert again.num_traces == 0


def test_a_full_disk_costs_only_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_cache.os, "replace", full)
    cache = make_cache(tmp_path)
    np.testing.assert_array_equal(call(cache, Counted()), [0, 2, 4])
    assert not list(cache.folder.iterdir())


def test_oldest_engines_go(tmp_path: Path) -> None:
    folders = []
    for number in range(MAX_ENGINES + 3):
        folders.append(make_cache(tmp_path, number).folder)
        os.utime(folders[-1], (time.time() - 1000 + number,) * 2)
    make_cache(tmp_path, "new")
    assert not any(folder.exists() for folder in folders[:4]) and folders[-1].exists()
    assert len(list(tmp_path.iterdir())) == MAX_ENGINES
