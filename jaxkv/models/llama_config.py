"""The geometry of Llama-shaped models out of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.layers import Rope
from jaxkv.models.llama import LlamaConfig

# What transformers assumes where a config is silent, by `model_type`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}


def llama_config(values: Mapping[str, Any]) -> LlamaConfig:
    """Reads a config of `model_type` llama or mistral.

    Raises:
        CheckpointError: a field is missing, impossible, or asks for arithmetic that jaxkv does not have.
    """
    config = HfConfig(values)
    model_type = config.get("model_type", "llama")
    if model_type not in _DEFAULTS:
        raise config.unsupported("model_type", model_type, *_DEFAULTS)
    defaults = _DEFAULTS[model_type]
    embed, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", defaults["num_key_value_heads"] or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config field num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = config.size("head_dim", max(embed // num_heads, 1))
    if head_dim % 2:
        raise CheckpointError(f"config field head_dim={head_dim} must be even: rotary embedding turns pairs")
    max_len = config.size("max_position_embeddings", defaults["max_position_embeddings"])
    # An explicit null means no window; silence means the default of the model type.
    _check_window(config, values.get("sliding_window", defaults["sliding_window"]), max_len)
    config.only("hidden_act", "silu", "swish")
    config.only("partial_rotary_factor", 1, 1.0)
    config.only("pretraining_tp", 1)
    config.only("layer_types", ["full_attention"] * config.size("num_hidden_layers"))
    cfg = LlamaConfig(
        num_layers=config.size("num_hidden_layers"),
        embed=embed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_len=max_len,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim, max_len),
        tied=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    config.finish()
    return cfg


def _check_window(config: HfConfig, window: Any, max_len: int) -> None:
    config.get("sliding_window", None)
    used = config.flag("use_sliding_window", True)
    if used and window is not None and window < max_len:
        raise CheckpointError(
            f"config field sliding_window={window} is below max_position_embeddings={max_len}: attention over a "
            "sliding window is not supported by this family yet"
        )


def _rope(config: HfConfig, head_dim: int, max_len: int) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    The extra kind `factors` comes from GGUF files: `factors` holds D / 2 divisors of the frequencies.
    """
    legacy_base = config.number("rope_theta", 10000.0)
    scaling = config.get("rope_scaling", {})
    parameters = config.get("rope_parameters", {})
    rope = HfConfig({**scaling, **parameters}, "rope_parameters." if parameters else "rope_scaling.")
    base = rope.number("rope_theta", legacy_base)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type", None)
    rope.only("partial_rotary_factor", 1, 1.0)
    if kind == "default":
        made = Rope(head_dim=head_dim, base=base)
    elif kind == "linear":
        made = Rope(head_dim=head_dim, base=base, kind=kind, factor=rope.number("factor"))
    elif kind == "llama3":
        made = Rope(
            head_dim=head_dim,
            base=base,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_len=rope.size("original_max_position_embeddings", max_len),
        )
    elif kind == "factors":
        factors = tuple(float(factor) for factor in rope.get("factors"))
        if len(factors) != head_dim // 2 or min(factors) <= 0:
            raise CheckpointError(f"rope factors must be {head_dim // 2} numbers > 0, found {len(factors)}")
        made = Rope(head_dim=head_dim, base=base, kind=kind, factors=factors)
    else:
        raise rope.unsupported("rope_type", kind, "default", "linear", "llama3")
    rope.get("original_max_position_embeddings", None)  # may stand there for any kind
    rope.finish()
    return made
