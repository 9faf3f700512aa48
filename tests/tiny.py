"""Tiny random models for device tests."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.models.config import LayerKind, ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.rope import Rope


def config(**changes) -> ModelConfig:
    fields = dict(
        num_layers=2, embed=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=48, vocab_size=97, max_len=512,
        norm_eps=1e-5, kinds=(LayerKind(rope=Rope(head_dim=8)),), tied=True,
    )  # fmt: skip
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def model(cfg: ModelConfig, *, seed: int = 0, per_layer: bool = True, dtype=jnp.float32) -> Decoder:
    """Random weights, scaled so that logits spread widely; equal for per_layer and stacked layers."""
    rng = np.random.default_rng(seed)
    flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(cfg, dtype, per_layer=True))))
    values = {path: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3 for path, leaf in flat}
    module = nnx.eval_shape(lambda: Decoder(cfg, dtype, per_layer=per_layer))
    graph, state = nnx.split(module)

    def pick(path: tuple) -> np.ndarray:
        if per_layer or path[0] != "layers":
            return values[path]
        return np.stack([values[("layers", i, *path[1:])] for i in range(cfg.num_layers)])

    leaves = [jnp.asarray(pick(path), dtype) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
