"""Gemma 2 (capped scores and logits) and the text models of Gemma 3 (two ropes, norms on queries and keys).

Both alternate layers with a window and without, and have norms before and after attention and MLP.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.family import Family
from jaxkv.models.hf_config import HfConfig, from_hf
from jaxkv.models.hf_geometry import (
    layer_kinds,
    make_rope,
    read_biases,
    read_geometry,
    read_rope,
    read_window,
    read_windows,
)
from jaxkv.models.rope import Rope
from jaxkv.models.weight_names import Names, decoder_weights

_NAMES = Names(
    norms={
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)


@from_hf("gemma2")
def gemma2_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` gemma2."""
    fields = _fields(config, max_len=8192)
    windows = _windows(config, fields["num_layers"], period=2)
    config.only("sliding_window_size", read_window(config, 4096))  # of the 9B models; transformers does not read it
    return ModelConfig(
        **fields,
        kinds=layer_kinds([read_rope(config, fields)] * len(windows), windows),
        soft_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


@from_hf("gemma3_text")
def gemma3_config(config: HfConfig) -> ModelConfig:
    """Reads a config of `model_type` gemma3_text."""
    fields = _fields(config, max_len=131072)
    config.only("attn_logit_softcapping")
    windows = _windows(config, fields["num_layers"], config.size("sliding_window_pattern", 6))
    whole, local = _ropes(config, fields)
    return ModelConfig(
        **fields,
        kinds=layer_kinds([whole if window is None else local for window in windows], windows),
        qk_norm="head",
        logit_cap=_cap(config, "final_logit_softcapping", None),
    )


def _fields(config: HfConfig, max_len: int) -> dict[str, Any]:
    """What both have; the scale of scores is not the head dim's, that of embeddings is the width's."""
    fields = read_geometry(
        config, max_len=max_len, num_kv_heads=4, head_dim=256, tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )  # fmt: skip
    config.get("hidden_act", None)  # an older name, which transformers reads no more
    config.only("use_bidirectional_attention", False)
    return {
        **fields,
        **read_biases(config, of_mlp=False),
        "post_norm": True,
        "norm_plus_one": True,
        "query_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "embed_scale": fields["embed"] ** 0.5,
    }


def _cap(config: HfConfig, field: str, default: float | None) -> float | None:
    """A cap; an explicit null means none."""
    if config.get(field, None) is None:
        return None if config.has(field) else default
    return config.number(field)


def _windows(config: HfConfig, num_layers: int, period: int) -> Sequence[int | None]:
    """All layers but each `period`-th have a window."""
    types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    return read_windows(config, num_layers, read_window(config, 4096), types)


def _ropes(config: HfConfig, fields: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Of layers without a window, and with one; only the former are stretched."""
    bases = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    scaling, parameters = config.table("rope_scaling"), config.table("rope_parameters")
    names = ("full_attention", "sliding_attention")
    both = HfConfig(parameters, "rope_parameters.")
    objects = [both.table(name) for name in names]
    both.finish()
    objects[0] = {**scaling, **objects[0]}
    prefixes = ["rope_scaling." if scaling else f"rope_parameters.{names[0]}.", f"rope_parameters.{names[1]}."]
    whole, local = (
        make_rope(HfConfig(values, prefix), fields, base=base)
        for values, prefix, base in zip(objects, prefixes, bases, strict=True)
    )
    return whole, local


GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    config_from_hf=gemma2_config,
    weight_map=functools.partial(decoder_weights, names=_NAMES),
)
GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    config_from_hf=gemma3_config,
    weight_map=functools.partial(decoder_weights, names=_NAMES),
)
