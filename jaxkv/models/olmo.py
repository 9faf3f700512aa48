"""OLMo 2 (norms after attention and MLP only) and OLMoE (64 experts); both norm queries and keys over all heads."""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope
from jaxkv.models.weight_names import Names, decoder_weights
from jaxkv.models.weights import WeightMap

_OLMO2_NAMES = Names(norms={"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"})


def olmo2_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` olmo2.

    Raises:
        CheckpointError: a field is missing, impossible, or asks for arithmetic that jaxkv does not have.
    """
    config = HfConfig(values)
    config.only("model_type", "olmo2")
    cfg = ModelConfig(**_fields(config, max_len=2048), pre_norm=False, post_norm=True)
    config.finish()
    return cfg


def olmoe_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` olmoe; errors as `olmo2_config`."""
    config = HfConfig(values)
    config.only("model_type", "olmoe")
    fields = _fields(config, max_len=4096)
    cfg = ModelConfig(
        **fields,
        experts=Experts(
            num=config.size("num_experts", 64),
            per_token=config.size("num_experts_per_tok", 8),
            normalise=config.flag("norm_topk_prob", False),
        ),
        qkv_clip=None if config.get("clip_qkv", None) is None else config.number("clip_qkv"),
    )
    config.finish()
    return cfg


def _fields(config: HfConfig, max_len: int) -> dict[str, Any]:
    fields = read_geometry(config, max_len=max_len, norm_eps=1e-5)
    bias = config.flag("attention_bias", False)
    kinds = layer_kinds([read_rope(config, fields)], [None])
    return {**fields, "kinds": kinds, "qkv_bias": bias, "out_bias": bias, "qk_norm": "width"}


def olmo2_weights(cfg: ModelConfig) -> WeightMap:
    """Norms are named after what they follow."""
    return decoder_weights(cfg, _OLMO2_NAMES)


OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    config_from_hf=olmo2_config,
    weight_map=olmo2_weights,
)
OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    config_from_hf=olmoe_config,
    weight_map=decoder_weights,
)
