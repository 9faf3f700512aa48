"""Weights in int8: the products against dequantised weights, whole models and engines against float ones made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.api import LLM
from jaxkv.catalog import open_model
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.checkpoint.orbax import save_checkpoint
from jaxkv.convert import convert
from jaxkv.errors import CheckpointError, ConfigError
from jaxkv.models.config import Experts
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.layers import PerLayer, linear
from jaxkv.models.moe import mixture
from jaxkv.models.quant import Quantised, dequantise, is_quantised, quantise, shardings
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.sharding import make_mesh
from tests.checkpoint.tools import hf_config, logits, random_tensors, write_hf
from tests.models.families import BASE, VARIANTS

RNG = np.random.default_rng(0)
PROMPT = np.arange(20) * 3 % 96


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


# --- one matrix -------------------------------------------------------------------------------------------------------


def test_rounds_to_the_nearest_multiple_of_each_channels_scale() -> None:
    weight = np.array(normal(6, 5, 3, 7)) * np.logspace(-3, 3, 6)[:, None, None, None].astype(np.float32)
    weight[2] = 0
    made = quantise(jnp.asarray(weight))
    values, scale = np.asarray(made.values), np.asarray(made.scale)
    assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, weight.shape[:-1])
    steps = scale[..., None]
    np.testing.assert_allclose(scale, np.where(weight.any(-1), np.abs(weight).max(-1) / 127, 1), rtol=1e-6)
    assert (np.abs(values).max(-1) == np.where(weight.any(-1), 127, 0)).all()
    found = np.asarray(dequantise(made))
    np.testing.assert_array_equal(found, values * steps)
    assert (np.abs(found - weight) <= steps * 0.5001).all()


def per_layer(weights: list[Quantised], layer: int) -> Quantised:
    return jax.tree.map(lambda *arrays: PerLayer(list(arrays), jnp.int32(layer)), *weights)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4, 5, 24), (32, 24)])
def test_products_equal_those_of_dequantised_weights(shape: tuple[int, ...], dtype: Any) -> None:
    """Stacked and per layer, into the activations' dtype and into float32."""
    weights = [quantise(normal(*shape)) for _ in range(3)]
    x = normal(9, shape[-1], dtype=dtype)
    expected = linear(x.astype(jnp.float32), dequantise(weights[1]))
    rtol, atol = (1e-5, 1e-5) if dtype == np.float32 else (0.02, 0.05)
    for weight in (weights[1], per_layer(weights, 1)):
        found = jax.jit(linear)(x, weight)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=rtol, atol=atol)
    found = linear(x, weights[1], jnp.dtype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)  # int8 is exact in bfloat16


def test_experts_equal_those_of_dequantised_weights() -> None:
    gate_up, down = quantise(normal(5, 2, 12, 8)), quantise(normal(5, 8, 12))
    x, router, experts = normal(7, 8), normal(5, 8), Experts(num=5, per_token=2, normalise=True)
    expected = mixture(x, router, dequantise(gate_up), dequantise(down), experts, jax.nn.silu)
    np.testing.assert_allclose(mixture(x, router, gate_up, down, experts, jax.nn.silu), expected, rtol=1e-5, atol=1e-5)


# --- one model --------------------------------------------------------------------------------------------------------


def exhaustively(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def variant(name: str) -> dict[str, Any]:
    return {"model_type": "llama", **BASE, **VARIANTS[name]}


def load(
    source: Any, *, quant: str | None = "int8", tensor: int = 1, per_layer: bool = True, dtype: str = "float32"
) -> Any:
    family, cfg = model_config(source)
    return load_model(
        source, family, copy_kv_heads(cfg, tensor), dtype=jnp.dtype(dtype), mesh=make_mesh(tensor), per_layer=per_layer,
        quant=quant,
    )  # fmt: skip


def change(model: nnx.Module, function: Callable[[Any], Any]) -> Any:
    """The model with `function` of each `Quantised` in its place."""
    graph, state = nnx.split(model)
    leaves = nnx.to_flat_state(state)
    return nnx.merge(
        graph,
        nnx.from_flat_state(
            [(path, leaf.replace(function(leaf.get_value())) if is_quantised(leaf) else leaf) for path, leaf in leaves]
        ),
    )


@pytest.mark.parametrize(
    "name", ["llama-gqa-tied", "mixtral", *exhaustively("gemma2", "qwen2", "olmo2-mha-bias", "granite-biases")]
)
def test_models_equal_dequantised_ones(name: str, tmp_path: Path) -> None:
    """Families of all kinds: biases, norms over all heads, caps, experts; stacked on two devices, and per layer on one."""
    config = variant(name)
    source = HfSource(write_hf(tmp_path, config, random_tensors(config)))
    model = load(source)
    expected = logits(change(model, dequantise), PROMPT)
    np.testing.assert_allclose(logits(model, PROMPT), expected, rtol=1e-5, atol=1e-5)
    split = logits(load(source, tensor=2, per_layer=False), PROMPT)
    np.testing.assert_allclose(split, expected, rtol=1e-5, atol=2e-5)
    error = np.abs(expected - (exact := logits(load(source, quant=None), PROMPT))).mean() / exact.std()
    print(f"{name}: int8 changes logits by {error:.2%} of their standard deviation")
    assert 0 < error < 0.1


@pytest.mark.parametrize(("tied", "per_layer"), [(True, True), (False, False)])
def test_matrices_are_quantised_and_nothing_else(tied: bool, per_layer: bool, tmp_path: Path) -> None:
    """Each lies where its float self would, split over four devices with KV heads copied; the same numbers as on one."""
    config = hf_config(tie_word_embeddings=tied, num_attention_heads=8, attention_bias=True)
    source = HfSource(write_hf(tmp_path, config, random_tensors(config)))
    model = load(source, tensor=4, per_layer=per_layer, dtype="bfloat16")
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    assert {path[-1] for path, leaf in leaves.items() if is_quantised(leaf)} == {
        "qkv", "out", "gate_up", "down", *(() if tied else ("head",))
    }  # fmt: skip
    for path, leaf in leaves.items():
        for array, where in zip(jax.tree.leaves(leaf), shardings(leaf, make_mesh(4)), strict=True):
            assert array.sharding.is_equivalent_to(where, array.ndim), path
        if not is_quantised(leaf):
            assert leaf.dtype == jnp.bfloat16, path
    one = dict(nnx.to_flat_state(nnx.state(load(source, per_layer=per_layer, dtype="bfloat16"))))
    for path, leaf in leaves.items():
        if path[-1] in ("gate_up", "down", "head"):
            for mine, other in zip(jax.tree.leaves(leaf), jax.tree.leaves(one[path]), strict=True):
                np.testing.assert_array_equal(mine, other)


def test_checkpoints_hold_weights_as_they_are(tmp_path: Path) -> None:
    """Saving a quantised model is refused; quantising what was saved gives what quantising its source gives."""
    config = hf_config()
    source = HfSource(write_hf(tmp_path / "hf", config, random_tensors(config)))
    with pytest.raises(CheckpointError, match=r"layers/down is quantised.*loaded without quant"):
        save_checkpoint(tmp_path / "out", load(source), config=config, generation_config=None, digest="d")
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "hf", tmp_path / "out", dtype="float32")
    again: Any = open_model(tmp_path / "out")
    np.testing.assert_array_equal(logits(load(again), PROMPT), logits(load(source), PROMPT))


# --- one engine -------------------------------------------------------------------------------------------------------

PROMPTS = [RNG.integers(3, 96, length).tolist() for length in (29, 5)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True)


def generate(folder: Path, edit: Callable[[LLM], None] = lambda llm: None, **settings: Any) -> list[RequestOutput]:
    llm = LLM.load(folder, dtype="float32", max_len=64, max_rows=1, num_pages=32, token_budget=32, **settings)
    edit(llm)
    assert llm.quant == settings.get("quant")
    return llm.generate(PROMPTS, PARAMS, progress=False)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        mine, theirs = ([top.logprob for top in out.outputs[0].logprobs or ()] for out in (got, wanted))
        assert len(mine) == 24
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa-untied", *exhaustively("gemma3", "mixtral", "qwen3")])
def test_engines(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A quantised engine over two devices, and on demand on one, against a float one with its weights dequantised."""
    config = variant(name)
    folder = write_hf(tmp_path, config, random_tensors(config))

    def dequantised(llm: LLM) -> None:
        model = change(load(HfSource(folder)), dequantise)
        llm._engine.runner._take_params(model)

    expected = generate(folder, dequantised)
    for tensor in (2, 1) if request.node.get_closest_marker("exhaustive") else (2,):
        assert_same(generate(folder, quant="int8", tensor=tensor), expected)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, hf_config(), random_tensors(hf_config()))
    with pytest.raises(ConfigError, match="quant='int4' is not supported; jaxkv quantises weights to int8"):
        LLM.load(folder, quant="int4")
