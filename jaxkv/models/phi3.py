"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, a part of each head rotated, two sets of frequencies."""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig
from jaxkv.models.hf_geometry import layer_kinds, read_geometry, read_rope, read_window
from jaxkv.models.weight_names import Names, decoder_weights
from jaxkv.models.weights import WeightMap

_NAMES = Names(fused=True)


def phi3_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of `model_type` phi3.

    Raises:
        CheckpointError: a field is missing, impossible, or asks for arithmetic that jaxkv does not have.
    """
    # transformers takes a rope called yarn for what it calls longrope now: early checkpoints say so.
    scaling = {
        field: {**values[field], **dict.fromkeys({"type", "rope_type"} & set(values[field]), "longrope")}
        for field in ("rope_scaling", "rope_parameters")
        if isinstance(values.get(field), Mapping)
        and "yarn" in (values[field].get("rope_type"), values[field].get("type"))
    }
    config = HfConfig({**values, **scaling})
    config.only("model_type", "phi3")
    fields = read_geometry(config, max_len=4096, norm_eps=1e-5)
    config.only("attention_bias", False)
    for field in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's first code; transformers has neither
        config.only(field, 1)
    kinds = layer_kinds([read_rope(config, fields, is_partial=True)], [read_window(config, None)])
    cfg = ModelConfig(**fields, kinds=kinds)
    config.finish()
    return cfg


def phi3_weights(cfg: ModelConfig) -> WeightMap:
    """Queries, keys and values are the rows of one tensor, gates and ups those of another."""
    return decoder_weights(cfg, _NAMES)


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    config_from_hf=phi3_config,
    weight_map=phi3_weights,
)
