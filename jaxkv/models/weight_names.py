"""Where the parameters of `models.decoder` lie in Hugging Face checkpoints, which mostly use the same names.

Axis letters: E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary, X experts.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxkv.models.config import ModelConfig
from jaxkv.models.weights import Part, WeightMap, whole

LAYER = "model.layers.{layer}."
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """How a family's names differ; below `model.layers.{layer}.`."""

    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: PRE_NORMS)  # parameter -> module
    fused: bool = False  # one qkv_proj, one gate_up_proj
    experts: str = "mlp"  # the module of router and experts
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ignored: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # of transformers before 4.32


def decoder_weights(cfg: ModelConfig, names: Names = Names()) -> WeightMap:
    """The weight map of a `Decoder`, stacked or per-layer."""
    e, v, h = cfg.embed, cfg.vocab_size, cfg.num_heads * cfg.head_dim
    attn = LAYER + "self_attn."
    params = {
        "embed": whole("model.embed_tokens.weight", v, e),
        "final_norm": whole("model.norm.weight", e),
        "layers/qkv": _qkv(cfg, attn, "weight", (e,), names.fused),
        "layers/out": whole(attn + "o_proj.weight", e, h),
        **{f"layers/{param}": whole(f"{LAYER}{module}.weight", e) for param, module in names.norms.items()},
        **_qk_norms(cfg, attn),
        **(_experts(cfg, names) if cfg.experts else _mlp(cfg, LAYER + "mlp.", names.fused)),
    }
    if not cfg.tied:
        params["head"] = whole("lm_head.weight", v, e)
    if cfg.qkv_bias:
        params["layers/qkv_bias"] = _qkv(cfg, attn, "bias", (), names.fused)
    if cfg.out_bias:
        params["layers/out_bias"] = whole(attn + "o_proj.bias", e)
    return WeightMap(
        params=params,
        ignored=names.ignored,
        copies={"lm_head.weight": "model.embed_tokens.weight"} if cfg.tied else {},
    )


def _qkv(cfg: ModelConfig, prefix: str, kind: str, inner: tuple[int, ...], fused: bool) -> tuple[Part, ...]:
    """`[K, G + 2, D, *inner]`: for each KV head its G query heads, its key and its value."""
    k, d = cfg.num_kv_heads, cfg.head_dim
    g = cfg.num_heads // k
    views = {"q": (k, g, d, *inner), "k": (k, d, *inner), "v": (k, d, *inner)}
    where = {"q": np.index_exp[:, 0:g], "k": np.index_exp[:, g], "v": np.index_exp[:, g + 1]}
    rows = {"q": k * g * d, "k": k * d, "v": k * d}
    if not fused:
        return tuple(
            Part(name=f"{prefix}{n}_proj.{kind}", shape=(rows[n], *inner), view=views[n], where=where[n]) for n in "qkv"
        )
    begin = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}
    shape = (sum(rows.values()), *inner)
    return tuple(
        Part(
            name=f"{prefix}qkv_proj.{kind}", shape=shape, rows=(begin[n], begin[n] + rows[n]), view=views[n],
            where=where[n],
        )
        for n in "qkv"
    )  # fmt: skip


def _qk_norms(cfg: ModelConfig, attn: str) -> dict[str, tuple[Part, ...]]:
    if cfg.qk_norm == "none":
        return {}
    k, d = cfg.num_kv_heads, cfg.head_dim
    g = cfg.num_heads // k
    wide = cfg.qk_norm == "width"
    return {
        "layers/q_norm": whole(attn + "q_norm.weight", k * g * d if wide else d, view=(k, g, d) if wide else (d,)),
        "layers/k_norm": whole(attn + "k_norm.weight", k * d if wide else d, view=(k, d) if wide else (d,)),
    }


def _mlp(cfg: ModelConfig, prefix: str, fused: bool) -> dict[str, tuple[Part, ...]]:
    e, f = cfg.embed, cfg.ffn
    params = {
        "layers/gate_up": _gate_up(prefix, "weight", (f, e), fused),
        "layers/down": whole(prefix + "down_proj.weight", e, f),
    }
    if cfg.mlp_bias:
        params["layers/gate_up_bias"] = _gate_up(prefix, "bias", (f,), fused)
        params["layers/down_bias"] = whole(prefix + "down_proj.bias", e)
    return params


def _gate_up(prefix: str, kind: str, shape: tuple[int, ...], fused: bool) -> tuple[Part, ...]:
    """`[2, F, ...]`: gate, then up."""
    if fused:
        rows, *inner = shape
        return whole(f"{prefix}gate_up_proj.{kind}", 2 * rows, *inner, view=(2, rows, *inner))
    return tuple(
        Part(name=f"{prefix}{name}_proj.{kind}", shape=shape, view=shape, where=(index,))
        for index, name in enumerate(("gate", "up"))
    )


def _experts(cfg: ModelConfig, names: Names) -> dict[str, tuple[Part, ...]]:
    """`router [X, E]`, `gate_up [X, 2, F, E]`, `down [X, E, F]`."""
    assert cfg.experts is not None
    num, e, f = cfg.experts.num, cfg.embed, cfg.ffn
    prefix, (gate, up, down) = f"{LAYER}{names.experts}.", names.expert_parts

    def part(expert: int, name: str, shape: tuple[int, ...], where: tuple[int, ...]) -> Part:
        return Part(name=f"{prefix}experts.{expert}.{name}.weight", shape=shape, view=shape, where=where)

    return {
        "layers/router": whole(prefix + "gate.weight", num, e),
        "layers/gate_up": tuple(part(x, name, (f, e), (x, i)) for x in range(num) for i, name in enumerate((gate, up))),
        "layers/down": tuple(part(x, down, (e, f), (x,)) for x in range(num)),
    }
