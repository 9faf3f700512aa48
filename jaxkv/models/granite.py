"""Granite 3: Llama with multipliers on embeddings, scores, residuals and logits."""

from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_biases, read_geometry, read_rope
from jaxkv.models.weight_names import decoder_weights


@from_hf("granite")
def granite_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` granite."""
    fields = read_geometry(config, max_len=2048)
    return ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)], [None]),
        **read_biases(config, of_mlp=True),
        embed_scale=config.number("embedding_multiplier", 1.0),
        query_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=config.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    config_from_hf=granite_config,
    weight_map=decoder_weights,
)
