"""Llama 2 and 3, SmolLM2; Mistral, whose tokens see a window of the last keys."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope, read_window
from jaxkv.models.weight_names import decoder_weights


def llama_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` llama.

    Raises:
        CheckpointError: a field is missing, impossible, or asks for arithmetic that jaxkv does not have.
    """
    config = HfConfig(values)
    config.only("model_type", "llama")
    fields = read_geometry(config, max_len=2048)
    window = read_window(config, None)
    if config.flag("use_sliding_window", True) and window is not None and window < fields["max_len"]:
        raise CheckpointError(
            f"config field sliding_window={window} is below max_position_embeddings={fields['max_len']}: Llama has no "
            "windows; set model_type to mistral if the model does"
        )
    config.only("layer_types", ["full_attention"] * fields["num_layers"])
    bias = config.flag("attention_bias", False)
    cfg = ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)], [None]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
    config.finish()
    return cfg


def mistral_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` mistral; errors as `llama_config`."""
    config = HfConfig(values)
    config.only("model_type", "mistral")
    fields = read_geometry(config, max_len=131072, num_kv_heads=8)
    config.only("layer_types", *_uniform_types(fields["num_layers"]))
    cfg = ModelConfig(**fields, kinds=layer_kinds([read_rope(config, fields)], [read_window(config, 4096)]))
    config.finish()
    return cfg


def _uniform_types(num_layers: int) -> list[list[str]]:
    return [[kind] * num_layers for kind in ("full_attention", "sliding_attention")]


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    config_from_hf=llama_config,
    weight_map=decoder_weights,
)
MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    config_from_hf=mistral_config,
    weight_map=decoder_weights,
)
