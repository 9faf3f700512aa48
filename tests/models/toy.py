"""A family of one's own: attention and MLP side by side, all weights under other names, tanh for a gate."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.families import (
    Decoder,
    DecoderLayer,
    Family,
    HfConfig,
    ModelConfig,
    WeightMap,
    from_hf,
    layer_kinds,
    linear,
    read_geometry,
    read_rope,
    read_window,
    whole,
)


# Geometry: what a config.json of the family says.
@from_hf("toy")  # fields that nobody reads are errors
def toy_config(config: HfConfig) -> ModelConfig:
    fields = read_geometry(config, max_len=256)
    return ModelConfig(**fields, kinds=layer_kinds([read_rope(config, fields)], [read_window(config, None)]))


# Forward: what differs from `DecoderLayer` and `Decoder`. Unused parameters are not made.
class ToyLayer(DecoderLayer):
    def __init__(self, cfg: ModelConfig, dtype: jnp.dtype, stack: tuple[int, ...] = ()):
        super().__init__(cfg, dtype, stack)
        del self.mlp_norm

    def __call__(self, x: jax.Array, pool: Any, layer: Any, phases: Any, window: Any, attend: Any) -> Any:
        normed = self.norm(x, self.attn_norm)
        attended, pool = self.attention(normed, pool, layer, phases, window, attend)
        return x + attended + self.mlp(normed), pool

    def mlp(self, x: jax.Array) -> jax.Array:
        gate_up = linear(x, self.gate_up[...])
        return linear(jnp.tanh(gate_up[:, 0]) * gate_up[:, 1], self.down[...])


class Toy(Decoder):
    Layer = ToyLayer


# Weight map: where the parameters are in a checkpoint; q, k and v of each KV head lie together there.
def toy_weights(cfg: ModelConfig) -> WeightMap:
    e, f, k, d = cfg.embed, cfg.ffn, cfg.num_kv_heads, cfg.head_dim
    heads, block = cfg.num_heads * d, "blocks.{layer}."
    return WeightMap(
        params={
            "embed": whole("words", cfg.vocab_size, e),
            "head": whole("out_words", cfg.vocab_size, e),
            "final_norm": whole("last_norm", e),
            "layers/attn_norm": whole(block + "norm", e),
            "layers/qkv": whole(block + "qkv", heads + 2 * k * d, e, view=(k, heads // (k * d) + 2, d, e)),
            "layers/out": whole(block + "out", e, heads),
            "layers/gate_up": whole(block + "gate_up", 2 * f, e, view=(2, f, e)),
            "layers/down": whole(block + "down", e, f),
        }
    )


TOY = Family(
    name="toy",
    architectures=("ToyForCausalLM",),
    model_types=("toy",),
    config_from_hf=toy_config,
    weight_map=toy_weights,
    module=Toy,
)
