"""The parts of a Hugging Face config.json that families share, read into fields of `ModelConfig`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.config import LayerKind, repeating
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.rope import Rope

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ATTENTION = ("full_attention", "sliding_attention")


def read_geometry(
    config: HfConfig,
    *,
    max_len: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    ffn: str = "intermediate_size",
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """Sizes, and what nearly all configs say in the same words.

    Args:
        max_len, num_kv_heads, head_dim, norm_eps, tied: what transformers assumes where a config is silent; None: as many
            KV heads as query heads, `hidden_size` over their number.
        ffn: the field with the width of an MLP.
        activation: the field with its activation, and what silence means.

    Raises:
        CheckpointError: a field is missing or impossible.
    """
    embed, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % kv_heads:
        raise CheckpointError(
            f"config field num_attention_heads={num_heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    dim = config.size("head_dim", head_dim or max(embed // num_heads, 1))
    if dim % 2:
        raise CheckpointError(f"config field head_dim={dim} must be even: rotary embedding turns pairs")
    config.only(activation[0], *_ACTIVATIONS)
    return {
        "num_layers": config.size("num_hidden_layers"),
        "embed": embed,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "ffn": config.size(ffn),
        "vocab_size": config.size("vocab_size"),
        "max_len": config.size("max_position_embeddings", max_len),
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "tied": config.flag("tie_word_embeddings", tied),
        "activation": _ACTIVATIONS[config.get(*activation)],
    }


def read_biases(config: HfConfig, *, of_mlp: bool) -> dict[str, Any]:
    """`attention_bias`, of all its projections; `of_mlp`: the family has `mlp_bias`, too."""
    bias = config.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": of_mlp and config.flag("mlp_bias", False)}


def read_windows(config: HfConfig, num_layers: int, window: int | None, default: Sequence[str]) -> list[int | None]:
    """The window of each layer, by `layer_types` or what stands for it where it is missing.

    Raises:
        CheckpointError: it names other kinds, or a window that the config does not have.
    """
    types = config.get("layer_types", list(default))
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_ATTENTION):
        raise CheckpointError(f"config field layer_types={types!r} must name one of {_ATTENTION} for each layer")
    if "sliding_attention" in types and window is None:
        raise CheckpointError("config field sliding_window is missing, but layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in types]


def read_window(config: HfConfig, default: int | None) -> int | None:
    """`sliding_window`: an explicit null means no window, silence the default."""
    if config.get("sliding_window", None) is None:
        return None if config.has("sliding_window") else default
    return config.size("sliding_window")


def layer_kinds(ropes: Sequence[Rope | None], windows: Sequence[int | None]) -> tuple[LayerKind, ...]:
    """Of each layer's rope and window."""
    return repeating([LayerKind(rope=rope, window=window) for rope, window in zip(ropes, windows, strict=True)])


def read_rope(
    config: HfConfig,
    geometry: Mapping[str, Any],
    *,
    base: float = 10000.0,
    is_partial: bool = False,
    other_names: Mapping[str, str] = {},
) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Args:
        geometry: from `read_geometry`.
        base: what silence means.
        is_partial: the family may rotate a part of a head only.
        other_names: what the family calls kinds otherwise.
    """
    base = config.number("rope_theta", base)
    scaling, parameters = config.table("rope_scaling"), config.table("rope_parameters")
    rope = HfConfig({**scaling, **parameters}, "rope_parameters." if parameters else "rope_scaling.")
    part = _partial_factor(config, rope, is_partial)
    original = _size_or_none(config, "original_max_position_embeddings")
    return make_rope(rope, geometry, base=base, part=part, original_max_len=original, other_names=other_names)


def _partial_factor(config: HfConfig, rope: HfConfig, is_partial: bool) -> float:
    if is_partial:
        return rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    config.only("partial_rotary_factor", 1, 1.0)
    rope.only("partial_rotary_factor", 1, 1.0)
    return 1.0


def make_rope(
    rope: HfConfig,
    geometry: Mapping[str, Any],
    *,
    base: float,
    part: float = 1.0,
    original_max_len: int | None = None,
    other_names: Mapping[str, str] = {},
) -> Rope:
    """One rope out of an object of parameters.

    Args:
        part: of a head that is rotated.
        original_max_len: what the config says outside of the object, which then counts.
        other_names: of kinds.

    Raises:
        CheckpointError: a kind or a field is not known, missing or impossible.
    """
    max_len, head_dim = geometry["max_len"], geometry["head_dim"]
    width = int(head_dim * part)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    kind = other_names.get(kind, kind)
    rope.get("type", None)
    found = _size_or_none(rope, "original_max_position_embeddings")  # may stand there for any kind
    original = original_max_len or found or max_len
    if kind not in _KINDS:
        raise rope.unsupported("rope_type", kind, *_KINDS)
    fields = _KINDS[kind](rope, width, max_len, original)
    made = Rope(
        head_dim=head_dim,
        base=rope.number("rope_theta", base),
        width=0 if width == head_dim else width,
        kind=_NAMES.get(kind, kind),
        **fields,
    )
    rope.finish()
    return made


def _size_or_none(config: HfConfig, name: str) -> int | None:
    return None if config.get(name, None) is None else config.size(name)


def _llama3(rope: HfConfig, width: int, max_len: int, original: int) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
        "original_max_len": original,
    }


def _yarn(rope: HfConfig, width: int, max_len: int, original: int) -> dict[str, Any]:
    factor = rope.number("factor", max_len / original)
    if rope.get("mscale", None) and rope.get("mscale_all_dim", None):
        mscale, mscale_all = rope.number("mscale"), rope.number("mscale_all_dim")
        scale = Rope.yarn_attention_factor(factor, mscale) / Rope.yarn_attention_factor(factor, mscale_all)
    else:
        scale = Rope.yarn_attention_factor(factor)
    return {
        "factor": factor,
        "original_max_len": original,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
        "attention_factor": rope.number("attention_factor", scale),
    }


def _longrope(rope: HfConfig, width: int, max_len: int, original: int) -> dict[str, Any]:
    factor = rope.number("factor", max_len / original)
    return {
        "factors": _factors(rope, "short_factor", width),
        "long_factors": _factors(rope, "long_factor", width),
        "original_max_len": original,
        "attention_factor": rope.number("attention_factor", Rope.longrope_attention_factor(factor, original)),
    }


def _factors(rope: HfConfig, field: str, width: int) -> tuple[float, ...]:
    values = rope.get(field)
    if not isinstance(values, list) or not all(isinstance(each, (int, float)) and each > 0 for each in values):
        raise CheckpointError(f"rope {field}={values!r} must be a list of numbers > 0")
    if len(values) != width // 2:
        raise CheckpointError(f"rope {field} must be {width // 2} numbers > 0, found {len(values)}")
    return tuple(float(each) for each in values)


# (object, rotated dims, max_len, tokens in training) -> fields of Rope; `factors` is GGUF's own
_KINDS: dict[str, Any] = {
    "default": lambda rope, width, max_len, original: {},
    "linear": lambda rope, width, max_len, original: {"factor": rope.number("factor")},
    "dynamic": lambda rope, width, max_len, original: {"factor": rope.number("factor"), "original_max_len": max_len},
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
    "factors": lambda rope, width, max_len, original: {"factors": _factors(rope, "factors", width)},
}
_NAMES = {"su": "longrope"}  # what Phi-3 called it at first
