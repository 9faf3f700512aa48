"""jaxkv's own checkpoints: save, load elsewhere, and the ways writing can go wrong."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxkv.checkpoint import orbax
from jaxkv.checkpoint.atomic import new_folder
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import model_config
from jaxkv.checkpoint.orbax import OrbaxSource, save_checkpoint
from jaxkv.errors import CheckpointError
from tests.checkpoint.tools import BF16, assert_same_params, hf_config, load, params, random_tensors, write_hf

CONFIG = hf_config(num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True)


@pytest.fixture
def source(tmp_path: Path) -> HfSource:
    return HfSource(write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG)))


def save(target: Path, model: nnx.Module, **changes: Any) -> OrbaxSource:
    arguments: dict[str, Any] = {"config": CONFIG, "generation_config": {"eos_token_id": [2]}, "digest": "d"}
    save_checkpoint(target, model, **(arguments | changes))
    return OrbaxSource(target)


@pytest.mark.parametrize("saved", [(1, True), (4, True), (2, False)])
@pytest.mark.parametrize("loaded", [(1, False), (4, False), (2, True)])
def test_any_mesh_and_layout_to_any_other(
    saved: tuple[int, bool], loaded: tuple[int, bool], source: HfSource, tmp_path: Path
) -> None:
    model = load(source, tensor=saved[0], per_layer=saved[1])
    checkpoint = save(tmp_path / "out", model)
    assert model_config(checkpoint) == model_config(source)
    again = load(checkpoint, tensor=loaded[0], per_layer=loaded[1])
    assert_same_params(again, model)
    for path, leaf in nnx.to_flat_state(nnx.state(again)):
        if "kv_heads" in leaf.logical_axes:
            value: Any = leaf[...]
            assert len(value.sharding.device_set) == loaded[0], path


def test_eight_devices(tmp_path: Path) -> None:
    config = hf_config(num_attention_heads=8, num_key_value_heads=8)
    model = load(HfSource(write_hf(tmp_path / "hf", config, random_tensors(config))), tensor=8, per_layer=False)
    checkpoint = save(tmp_path / "out", model, config=config)
    assert_same_params(load(checkpoint, tensor=8, per_layer=False), model)
    assert_same_params(load(checkpoint), model)


@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_another_dtype(stored: str, wanted: str, source: HfSource, tmp_path: Path) -> None:
    model = load(source, dtype=stored)
    checkpoint = save(tmp_path / "out", model)
    assert checkpoint.auto_dtype == np.dtype(stored)
    found, expected = params(load(checkpoint, dtype=wanted)), params(model)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value.astype(np.dtype(wanted)), err_msg=name)


def test_what_else_the_checkpoint_says(source: HfSource, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "out", load(source, dtype=BF16))
    assert (checkpoint.digest, checkpoint.auto_dtype, checkpoint.tokenizer_source) == ("d", BF16, None)
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    other = save(
        tmp_path / "other", load(source), generation_config=None,
        save_tokenizer=lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    )  # fmt: skip
    assert (other.generation_config, other.tokenizer_source) == (None, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "other", "out"]


def test_weights_that_do_not_fit_the_config(source: HfSource, tmp_path: Path) -> None:
    save(tmp_path / "out", load(source))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "attention_bias": False, "intermediate_size": 32}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load(OrbaxSource(tmp_path / "out"))
    text = str(error.value)
    assert "missing: layers/3/attn_norm" in text
    assert "unexpected: layers/0/out_bias, layers/0/qkv_bias" in text
    assert "wrong shape: layers/0/down is (32, 64), not (32, 32)" in text


def test_damaged_checkpoints(source: HfSource, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    checkpoint = save(folder, load(source))
    largest = max((path for path in folder.glob("params/**/*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"out/params: .* cannot be read, the files are damaged or cut off"):
        load(checkpoint)
    (folder / "params" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"out/params: its directory cannot be read"):
        load(checkpoint)
    (folder / "jaxkv.json").write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="format 9 is not known, this jaxkv reads 2; convert"):
        OrbaxSource(folder)


def test_an_existing_folder_stays(source: HfSource, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already; delete it or choose another name"):
        save(tmp_path / "out", load(source))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_error_leaves_nothing(source: HfSource, tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        assert folder.parent == tmp_path and (folder / "config.json").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*bytes are free now; nothing was left behind"):
        save(tmp_path / "out", load(source), save_tokenizer=fails)
    context = new_folder(tmp_path / "out")
    (context.__enter__() / "x").write_text("x")
    interrupt = KeyboardInterrupt()
    assert not context.__exit__(KeyboardInterrupt, interrupt, None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_too_little_space_is_seen_before_writing(
    source: HfSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(orbax.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"the weights take \d+ bytes, but the disk has 1000 bytes free"):
        save(tmp_path / "out", load(source))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_leftover_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "params").mkdir(parents=True)
    (partial / "params" / "x").write_text("old")
    (partial / "config.json").write_text("old")
    with new_folder(tmp_path / "out") as folder:
        assert folder == partial
        assert list(folder.iterdir()) == []
        (folder / "y").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "y").read_text() == "new"


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "mine").write_text("x")
        second = new_folder(tmp_path / "out")
        with pytest.raises(CheckpointError, match=r"out is being written by another process \(it holds .*partial"):
            second.__enter__()
        assert (folder / "mine").exists()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock went with the block
    os.close(descriptor)


def test_something_appeared_at_the_target_meanwhile(tmp_path: Path) -> None:
    context = new_folder(tmp_path / "out")
    context.__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("x")
    with pytest.raises(CheckpointError, match="out cannot be written: Directory not empty"):
        context.__exit__(None, None, None)
    assert (tmp_path / "out" / "theirs").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    from jaxkv.convert import convert
    from jaxkv.errors import CheckpointError

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # Python ignores the signal: writes fail with EFBIG
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except CheckpointError as error:
        print(error)
"""


def test_a_write_that_fails_in_the_middle(source: HfSource, tmp_path: Path) -> None:
    """A real failing write inside TensorStore: no file may grow beyond 20 kB."""
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(source.location), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "out: writing failed (File too large)" in done.stdout, done.stdout + done.stderr
    assert "nothing was left behind" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
