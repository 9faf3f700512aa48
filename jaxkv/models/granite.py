"""Granite 3: Llama with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope
from jaxkv.models.weight_names import decoder_weights


def granite_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` granite.

    Raises:
        CheckpointError: a field is missing, impossible, or asks for arithmetic that jaxkv does not have.
    """
    config = HfConfig(values)
    config.only("model_type", "granite")
    fields = read_geometry(config, max_len=2048)
    bias = config.flag("attention_bias", False)
    cfg = ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)], [None]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        embed_scale=config.number("embedding_multiplier", 1.0),
        query_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=config.number("logits_scaling", 1.0),
    )
    config.finish()
    return cfg


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    config_from_hf=granite_config,
    weight_map=decoder_weights,
)
