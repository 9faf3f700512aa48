"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, a part of each head rotated, two sets of frequencies."""

import functools

from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope, read_window
from jaxkv.models.weight_names import Names, decoder_weights

_NAMES = Names(fused=True)


@from_hf("phi3")
def phi3_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` phi3."""
    fields = read_geometry(config, max_len=4096, norm_eps=1e-5)
    config.only("attention_bias", False)
    for field in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's first code; transformers has neither
        config.only(field, 1)
    # Early checkpoints, and transformers with them, say yarn for what is called longrope now.
    rope = read_rope(config, fields, is_partial=True, other_names={"yarn": "longrope"})
    return ModelConfig(**fields, kinds=layer_kinds([rope], [read_window(config, None)]))


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    config_from_hf=phi3_config,
    weight_map=functools.partial(decoder_weights, names=_NAMES),
)
