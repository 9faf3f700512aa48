"""Llama 2 and 3, SmolLM2; Mistral, whose tokens see a window of the last keys."""

from jaxkv.errors import CheckpointError
from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_biases, read_geometry, read_rope, read_window
from jaxkv.models.weight_names import decoder_weights


@from_hf("llama")
def llama_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` llama."""
    fields = read_geometry(config, max_len=2048)
    window = read_window(config, None)
    if config.flag("use_sliding_window", True) and window is not None and window < fields["max_len"]:
        raise CheckpointError(
            f"config field sliding_window={window} is below max_position_embeddings={fields['max_len']}: Llama has no "
            "windows; set model_type to mistral if the model does"
        )
    config.only("layer_types", ["full_attention"] * fields["num_layers"])
    return ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)], [None]),
        **read_biases(config, of_mlp=True),
    )


@from_hf("mistral")
def mistral_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` mistral."""
    fields = read_geometry(config, max_len=131072, num_kv_heads=8)
    config.only("layer_types", *_uniform_types(fields["num_layers"]))
    return ModelConfig(**fields, kinds=layer_kinds([read_rope(config, fields)], [read_window(config, 4096)]))


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
