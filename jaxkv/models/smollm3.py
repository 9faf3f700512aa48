"""SmolLM3: Llama in which every fourth layer does not rotate queries and keys (arXiv:2501.18795)."""

from jaxkv.errors import CheckpointError
from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_biases, read_geometry, read_rope, read_window, read_windows
from jaxkv.models.weight_names import decoder_weights


@from_hf("smollm3")
def smollm3_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` smollm3."""
    fields = read_geometry(config, max_len=32768, num_kv_heads=4, tied=True)
    num, rope = fields["num_layers"], read_rope(config, fields, base=2e6)
    rotates = _rotates(config, num)
    window = read_window(config, None) if config.flag("use_sliding_window", False) else None
    config.get("sliding_window", None)
    config.get("max_window_layers", None)  # in published configs; transformers does not read it
    types = ["full_attention" if has_rope or window is None else "sliding_attention" for has_rope in rotates]
    windows = read_windows(config, num, window, types)
    return ModelConfig(
        **fields,
        kinds=layer_kinds([rope if has_rope else None for has_rope in rotates], windows),
        **read_biases(config, of_mlp=True),
    )


def _rotates(config: HfConfig, num_layers: int) -> list[bool]:
    """`no_rope_layers` says 1 for layers with rope."""
    interval = config.size("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(num_layers)])
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise CheckpointError(f"config field no_rope_layers={flags!r} must be 0 or 1 for each of {num_layers} layers")
    return [flag == 1 for flag in flags]


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    config_from_hf=smollm3_config,
    weight_map=decoder_weights,
)
