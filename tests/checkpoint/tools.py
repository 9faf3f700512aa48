"""Tiny checkpoints on disk, and what a model makes of them."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.checkpoint.source import ModelSource
from jaxkv.models.registry import find_family
from jaxkv.sharding import make_mesh

SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "float64": "F64"}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A config.json of a tiny grouped-query Llama."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    } | changes  # fmt: skip


def random_tensors(config: Mapping[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    family = find_family(config)
    cfg = family.config_from_hf(config)
    tensors: dict[str, np.ndarray] = {}
    for path, parts in family.weight_map(cfg).params.items():
        for layer in range(cfg.num_layers) if path.startswith("layers/") else (0,):
            for part in parts:
                values = rng.standard_normal(part.shape, np.float32) * 0.2
                tensors[part.name.format(layer=layer)] = values.astype(dtype)
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        kind = SAFETENSORS_NAMES[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def load(source: ModelSource, *, dtype: Any = np.float32, tensor: int = 1, per_layer: bool = True) -> nnx.Module:
    family, cfg = model_config(source)
    return load_model(source, family, cfg, dtype=np.dtype(dtype), mesh=make_mesh(tensor), per_layer=per_layer)


def params(model: nnx.Module) -> dict[str, np.ndarray]:
    """Every parameter, one entry per layer, stacked or not."""
    found: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(leaf[...])
        if leaf.logical_axes[:1] == ("layers",):
            found |= {f"layers/{i}/{path[-1]}": each for i, each in enumerate(value)}
        else:
            found["/".join(map(str, path))] = value
    return found


def assert_same_params(one: nnx.Module, other: nnx.Module) -> None:
    """Bit for bit."""
    left, right = params(one), params(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].tobytes() == right[name].tobytes(), name


def full_attention(
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: tuple[()],
    *,
    scale: float,
    window: jax.Array | int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, tuple[()]]:
    """Causal attention of a whole sequence over itself: `q [T, H, D]`, `k`, `v [T, K, D]`; there is no pool."""
    num_tokens, num_heads, _ = q.shape
    k, v = (jnp.repeat(each, num_heads // k.shape[1], axis=1) for each in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    query, key = jnp.arange(num_tokens)[None, :, None], jnp.arange(num_tokens)[None, None, :]
    mask = (key <= query) & (key > query - (num_tokens if window is None else window))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", weights, v, precision="highest"), pool


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, state: Any, token_ids: jax.Array) -> jax.Array:
    model: Any = nnx.merge(graph, state)
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = model.hidden(token_ids, positions, (), full_attention)
    return model.logits(hidden)


def logits(model: nnx.Module, token_ids: Any) -> np.ndarray:
    """float32 `[T, V]` for a prompt."""
    graph, state = nnx.split(model)
    return np.asarray(_logits(graph, state, jnp.asarray(token_ids, jnp.int32)))


BF16 = np.dtype(ml_dtypes.bfloat16)
