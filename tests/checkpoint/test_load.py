"""Loading onto meshes, stacked and per_layer, and the progress bar."""

import io
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.catalog import open_model
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.convert import convert
from jaxkv.errors import CheckpointError, ConfigError
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.progress import Progress
from jaxkv.sharding import make_mesh, named
from tests.checkpoint.tools import assert_same_params, hf_config, load, logits, random_tensors, write_hf


@pytest.fixture
def source(tmp_path: Path) -> HfSource:
    config = hf_config(num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    return HfSource(write_hf(tmp_path, config, random_tensors(config)))


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_parameter_lands_in_its_sharding(source: HfSource, tensor: int, per_layer: bool) -> None:
    model = load(source, tensor=tensor, per_layer=per_layer, dtype="bfloat16")
    mesh = make_mesh(tensor)
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        value: Any = leaf[...]
        assert value.sharding.is_equivalent_to(named(mesh, leaf.logical_axes), value.ndim), path
        assert value.dtype == np.dtype("bfloat16")
    assert_same_params(model, load(source, dtype="bfloat16"))


def test_stacked_unrolled_and_sharded_models_compute_the_same(source: HfSource) -> None:
    prompt = np.arange(20) * 3 % 96
    expected = logits(load(source), prompt)
    np.testing.assert_allclose(logits(load(source, per_layer=False), prompt), expected, atol=1e-5)
    np.testing.assert_allclose(logits(load(source, per_layer=False, tensor=4), prompt), expected, atol=1e-5)


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("from_orbax", [False, True])
def test_kv_heads_are_copied_to_shards_that_would_have_none(tmp_path: Path, from_orbax: bool, per_layer: bool) -> None:
    """From any format, into a model that computes the same."""
    config = hf_config(num_attention_heads=8, num_key_value_heads=2, head_dim=8, attention_bias=True)
    folder = write_hf(tmp_path / "hf", config, random_tensors(config))
    source, prompt = HfSource(folder), np.arange(20) * 3 % 96
    expected = logits(load(source), prompt)
    family, cfg = model_config(source)
    if from_orbax:
        convert(folder, tmp_path / "orbax", dtype="float32")
        source = open_model(tmp_path / "orbax")
    mesh = make_mesh(8)
    copied = load_model(
        source, family, copy_kv_heads(cfg, 8), dtype=np.dtype(np.float32), mesh=mesh, per_layer=per_layer
    )
    for path, leaf in nnx.to_flat_state(nnx.state(copied)):
        assert leaf[...].sharding.is_equivalent_to(named(mesh, leaf.logical_axes), leaf[...].ndim), path
        if path[-1] == "qkv":
            assert leaf[...].shape[-4:] == (8, 1 + 2, 8, 32)
    np.testing.assert_allclose(logits(copied, prompt), expected, atol=1e-5)


def test_loading_writes_stacks_in_place(source: HfSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack exists once: each layer goes into the memory that the zeros had."""
    from jaxkv.checkpoint import load as module

    pointers: dict[tuple[int, ...], set[int]] = {}
    put_layer = module._put_layer

    def spy(stack: jax.Array, layer: jax.Array, index: np.int32) -> jax.Array:
        shape = stack.shape
        pointers.setdefault(shape, set()).add(stack.unsafe_buffer_pointer())
        made = put_layer(stack, layer, index)
        assert stack.is_deleted()
        pointers[shape].add(made.unsafe_buffer_pointer())
        return made

    monkeypatch.setattr(module, "_put_layer", spy)
    load(source, per_layer=False)
    assert pointers[3, 2, 64, 32] and len(pointers[3, 2, 64, 32]) == 1  # gate_up: the one of its shape


def test_a_mesh_that_does_not_divide_the_model(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path, hf_config(), random_tensors(hf_config())))
    with pytest.raises(
        ConfigError, match=r"tensor=4 does not divide the axis kv_heads=2 of layers/qkv; .* divisor of 2"
    ):
        load(source, tensor=4)


def test_config_errors_name_the_source(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path, hf_config(hidden_act="relu"), {}))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: config field hidden_act='relu'"):
        model_config(source)


def test_progress_is_shown_when_asked_for(source: HfSource, capsys: pytest.CaptureFixture[str]) -> None:
    family, cfg = model_config(source)
    arguments: dict[str, Any] = {"dtype": np.dtype(np.float32), "mesh": make_mesh(1), "per_layer": True}
    load_model(source, family, cfg, **arguments)
    assert capsys.readouterr().err == ""  # no terminal
    load_model(source, family, cfg, **arguments, progress=True)
    assert f"loading {source.location.name} [########################] 100%" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar() -> None:
    file = Terminal()
    with Progress("counting", total=4, unit="things", file=file) as progress:
        progress.advance(1)
        progress.advance(2)
    assert file.getvalue().startswith("\rcounting [######                  ]  25%  1 things of 4 things  0.0 s")
    assert "[##################      ]  75%  3 things of 4 things" in file.getvalue()
    assert file.getvalue().endswith("\n")


def test_progress_in_bytes_and_without_total() -> None:
    file = Terminal()
    with Progress("x", total=3_000_000_000, unit="B", file=file) as progress:
        progress.advance(1_500_000_000)
    assert "50%  1.50 GB of 3.00 GB" in file.getvalue()
    with Progress("x", total=0, file=file):
        pass


def test_progress_is_silent_elsewhere() -> None:
    file = io.StringIO()
    with Progress("x", total=3, file=file) as progress:
        progress.advance(3)
    assert file.getvalue() == ""
