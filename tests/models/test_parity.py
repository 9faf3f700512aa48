"""Logits against transformers itself, from checkpoints that transformers wrote."""

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.sharding import make_mesh
from tests.checkpoint.tools import full_attention, load, params
from tests.models.families import FIRST, VARIANTS, build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

PROMPT_LEN = 70
# Tokens of an engine, which choose the frequencies of longrope models.
MAX_LEN = {"phi3-longrope": 100, "phi3-longrope-long": 400}
PREFILL_BY_TOKEN = ("llama-rope-dynamic",)  # what transformers computes there depends on the length of the prompt


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def theirs_logits(model: Any, prompt: np.ndarray, *, by_token: bool) -> np.ndarray:
    """float32 [T, V], in one pass or token by token with a cache."""
    ids = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        if not by_token:
            return model(ids).logits[0].numpy()
        cache, out = None, []
        for position in range(len(prompt)):
            step = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            out.append(step.logits[0, 0].numpy())
    return np.stack(out)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, state: Any, token_ids: jax.Array) -> jax.Array:
    model: Any = nnx.merge(graph, state)
    hidden, _ = model.hidden(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), (), full_attention)
    return model.logits(hidden)


def ours(folder: Path, per_layer: bool, max_len: int, dtype: Any = np.float32) -> Any:
    """`logits(token_ids)` of the checkpoint in an engine for `max_len` tokens."""
    source = HfSource(folder)
    family, cfg = model_config(source)
    cfg = cfg.for_len(max_len)
    model = load_model(source, family, cfg, dtype=np.dtype(dtype), mesh=make_mesh(1), per_layer=per_layer)
    graph, state = nnx.split(model)
    return lambda token_ids: np.asarray(_logits(graph, state, jnp.asarray(token_ids, jnp.int32)))


@pytest.mark.parametrize(("name", "per_layer"), [(name, i % 2 == 0) for i, name in enumerate(VARIANTS)])
def test_logits_match_transformers(name: str, per_layer: bool, tmp_path: Path) -> None:
    theirs = build(name)
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(3, 96, PROMPT_LEN)
    expected = theirs_logits(theirs, tokens, by_token=name in PREFILL_BY_TOKEN)
    assert np.abs(expected).max() > 1  # otherwise 1e-4 would say nothing
    logits = ours(tmp_path, per_layer, MAX_LEN.get(name, 144))
    np.testing.assert_allclose(logits(tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FIRST.values())
def test_bfloat16_is_no_further_from_float32_than_transformers_is(name: str, tmp_path: Path) -> None:
    theirs = build(name)
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(3, 96, PROMPT_LEN)
    exact = theirs_logits(theirs, tokens, by_token=False)
    rounded = theirs_logits(theirs.to(torch.bfloat16).float(), tokens, by_token=False)  # bfloat16 weights only
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        all_rounded = theirs.to(torch.bfloat16)(ids).logits[0].float().numpy()
    limit = max(rms(all_rounded - exact), rms(rounded - exact))
    logits = ours(tmp_path, True, 144, jnp.bfloat16)(tokens)
    assert logits.dtype == np.float32
    assert 0 < rms(logits - exact) < 1.5 * limit  # NaN fails too


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def test_sharded_bf16_files_of_transformers(tmp_path: Path) -> None:
    theirs = build("llama-gqa-untied").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = params(load(HfSource(tmp_path), dtype="bfloat16"))
    expected = theirs.model.layers[1].mlp.down_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(loaded["layers/1/down"].astype(np.float32), expected)
