"""Mixtral: Mistral with eight experts, of which a token takes two (arXiv:2401.04088)."""

import functools

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope, read_window
from jaxkv.models.weight_names import Names, decoder_weights

_NAMES = Names(experts="block_sparse_moe", expert_parts=("w1", "w3", "w2"))


@from_hf("mixtral")
def mixtral_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` mixtral."""
    fields = read_geometry(config, max_len=131072, num_kv_heads=8, norm_eps=1e-5)
    return ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields, base=1e6)], [read_window(config, None)]),
        experts=Experts(
            num=config.size("num_local_experts", config.get("num_experts", 8)),
            per_token=config.size("num_experts_per_tok", 2),
            normalise=True,
        ),
    )


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    config_from_hf=mixtral_config,
    weight_map=functools.partial(decoder_weights, names=_NAMES),
)
