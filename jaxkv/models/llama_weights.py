"""Where Llama's parameters lie in a Hugging Face checkpoint.

Axis letters: E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary.
"""

import numpy as np

from jaxkv.models.llama import LlamaConfig
from jaxkv.models.weights import Part, WeightMap, whole


def llama_weights(cfg: LlamaConfig) -> WeightMap:
    """The weight map of `models.llama.Llama`, stacked or per-layer."""
    e, f, v, h = cfg.embed, cfg.ffn, cfg.vocab_size, cfg.num_heads * cfg.head_dim
    attn, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
    params = {
        "embed": whole("model.embed_tokens.weight", v, e),
        "final_norm": whole("model.norm.weight", e),
        "layers/attn_norm": whole("model.layers.{layer}.input_layernorm.weight", e),
        "layers/qkv": _qkv(cfg, attn, "weight", (e,)),
        "layers/out": whole(attn + "o_proj.weight", e, h, view=(e, cfg.num_kv_heads, h // cfg.num_kv_heads)),
        "layers/mlp_norm": whole("model.layers.{layer}.post_attention_layernorm.weight", e),
        "layers/gate_up": _gate_up(mlp, "weight", (f, e)),
        "layers/down": whole(mlp + "down_proj.weight", e, f),
    }
    if not cfg.tied:
        params["head"] = whole("lm_head.weight", v, e)
    if cfg.attention_bias:
        params["layers/qkv_bias"] = _qkv(cfg, attn, "bias", ())
        params["layers/out_bias"] = whole(attn + "o_proj.bias", e)
    if cfg.mlp_bias:
        params["layers/gate_up_bias"] = _gate_up(mlp, "bias", (f,))
        params["layers/down_bias"] = whole(mlp + "down_proj.bias", e)
    return WeightMap(
        params=params,
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # written by transformers before 4.32
        copies={"lm_head.weight": "model.embed_tokens.weight"} if cfg.tied else {},
    )


def _qkv(cfg: LlamaConfig, prefix: str, kind: str, inner: tuple[int, ...]) -> tuple[Part, ...]:
    """`[K, G + 2, D, *inner]`: for each KV head its G query heads, its key and its value."""
    k, d = cfg.num_kv_heads, cfg.head_dim
    g = cfg.num_heads // k
    return (
        Part(
            name=f"{prefix}q_proj.{kind}",
            shape=(k * g * d, *inner),
            view=(k, g, d, *inner),
            where=(slice(None), slice(0, g)),
        ),
        Part(name=f"{prefix}k_proj.{kind}", shape=(k * d, *inner), view=(k, d, *inner), where=np.index_exp[:, g]),
        Part(name=f"{prefix}v_proj.{kind}", shape=(k * d, *inner), view=(k, d, *inner), where=np.index_exp[:, g + 1]),
    )


def _gate_up(prefix: str, kind: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """`[2, F, ...]`: gate, then up."""
    return tuple(
        Part(name=f"{prefix}{name}_proj.{kind}", shape=shape, view=shape, where=(index,))
        for index, name in enumerate(("gate", "up"))
    )
