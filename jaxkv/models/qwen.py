"""Qwen2 and 2.5 (biases on queries, keys and values), Qwen3 (norms on queries and keys), Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_biases, read_geometry, read_rope, read_window, read_windows
from jaxkv.models.weight_names import decoder_weights


@from_hf("qwen2")
def qwen2_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` qwen2."""
    fields = read_geometry(config, max_len=32768, num_kv_heads=32)
    return ModelConfig(**fields, kinds=_kinds(config, fields), qkv_bias=True)


@from_hf("qwen3")
def qwen3_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` qwen3."""
    fields = read_geometry(config, max_len=32768, num_kv_heads=32, head_dim=128)
    biases = read_biases(config, of_mlp=False)
    return ModelConfig(**fields, **biases, kinds=_kinds(config, fields), qk_norm="head")


@from_hf("qwen3_moe")
def qwen3_moe_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` qwen3_moe."""
    fields = read_geometry(config, max_len=32768, num_kv_heads=4, ffn="moe_intermediate_size")
    config.get("intermediate_size", None)  # of layers without experts, which the next two lines refuse
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    config.only("use_qk_norm", True)  # in configs of the coder models; transformers does not read it
    window = read_window(config, 4096) if config.flag("use_sliding_window", False) else None
    config.get("sliding_window", None)
    config.get("max_window_layers", None)  # transformers reads it for dense models only
    experts = Experts(
        num=config.size("num_experts", config.get("num_local_experts", 128)),
        per_token=config.size("num_experts_per_tok", 8),
        normalise=config.flag("norm_topk_prob", False),
    )
    return ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)], [window]),
        experts=experts,
        **read_biases(config, of_mlp=False),
        qk_norm="head",
    )


def _kinds(config: HfConfig, fields: Mapping[str, Any]) -> Any:
    """Layers from `max_window_layers` on have a window, where `use_sliding_window` says so."""
    num = fields["num_layers"]
    has_window = config.flag("use_sliding_window", False)
    window = read_window(config, 4096) if has_window else None
    config.get("sliding_window", None)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise CheckpointError(f"config field max_window_layers={first!r} must be a whole number")
    types = ["sliding_attention" if window is not None and layer >= first else "full_attention" for layer in range(num)]
    return layer_kinds([read_rope(config, fields)] * num, read_windows(config, num, window, types))


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    config_from_hf=qwen2_config,
    weight_map=decoder_weights,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    config_from_hf=qwen3_config,
    weight_map=decoder_weights,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    config_from_hf=qwen3_moe_config,
    weight_map=decoder_weights,
)
