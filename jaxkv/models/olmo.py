"""OLMo 2 (norms after attention and MLP only) and OLMoE (64 experts); both norm queries and keys over all heads."""

import functools
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_biases, read_geometry, read_rope
from jaxkv.models.weight_names import Names, decoder_weights

_OLMO2_NAMES = Names(norms={"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"})


@from_hf("olmo2")
def olmo2_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` olmo2."""
    return ModelConfig(**_fields(config, max_len=2048), pre_norm=False, post_norm=True)


@from_hf("olmoe")
def olmoe_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` olmoe."""
    fields = _fields(config, max_len=4096)
    return ModelConfig(
        **fields,
        experts=Experts(
            num=config.size("num_experts", 64),
            per_token=config.size("num_experts_per_tok", 8),
            normalise=config.flag("norm_topk_prob", False),
        ),
        qkv_clip=None if config.get("clip_qkv", None) is None else config.number("clip_qkv"),
    )


def _fields(config: HfConfig, max_len: int) -> dict[str, Any]:
    fields = read_geometry(config, max_len=max_len, norm_eps=1e-5)
    kinds = layer_kinds([read_rope(config, fields)], [None])
    return {**fields, **read_biases(config, of_mlp=False), "kinds": kinds, "qk_norm": "width"}


OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    config_from_hf=olmo2_config,
    weight_map=functools.partial(decoder_weights, names=_OLMO2_NAMES),
)
OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    config_from_hf=olmoe_config,
    weight_map=decoder_weights,
)
