"""The model families jaxkv runs, by the names that checkpoints give them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.errors import CheckpointError
from jaxkv.models.kv_heads import copy_qkv, regroup_out
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.llama_config import llama_config
from jaxkv.models.llama_weights import llama_weights
from jaxkv.models.weights import WeightMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model file and what it takes to fill it."""

    name: str
    architectures: tuple[str, ...]  # values of config.json's `architectures`
    model_types: tuple[str, ...]  # values of config.json's `model_type`
    config_from_hf: Callable[[Mapping[str, Any]], LlamaConfig]
    module: Callable[..., nnx.Module]  # (cfg, dtype, per_layer=) -> module
    weight_map: Callable[[LlamaConfig], WeightMap]  # of the geometry as stored
    # (parameter as stored, copies) -> parameter, for those that change with `LlamaConfig.kv_copies`, by path
    copy_heads: Mapping[str, Callable[[jax.Array, int], jax.Array]] = dataclasses.field(hash=False)

    def build(self, cfg: LlamaConfig, dtype: np.dtype, *, per_layer: bool) -> nnx.Module:
        """The module with `jax.ShapeDtypeStruct`s for parameters: nothing is allocated."""
        return nnx.eval_shape(lambda: self.module(cfg, dtype, per_layer=per_layer))


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        model_types=("llama", "mistral"),
        config_from_hf=llama_config,
        module=Llama,
        weight_map=llama_weights,
        copy_heads={"layers/qkv": copy_qkv, "layers/qkv_bias": copy_qkv, "layers/out": regroup_out},
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """Finds the family that runs a Hugging Face config: by `architectures`, else by `model_type`.

    Raises:
        CheckpointError: no family does, or the weights are quantised in a way that jaxkv does not know.
    """
    architectures = config.get("architectures") or []
    family = next((family for family in FAMILIES for name in architectures if name in family.architectures), None)
    if family is None and not architectures:
        family = next((family for family in FAMILIES if config.get("model_type") in family.model_types), None)
    if family is None:
        known = ", ".join(name for family in FAMILIES for name in family.architectures)
        found = f"architectures={architectures}" if architectures else f"model_type={config.get('model_type')!r}"
        raise CheckpointError(f"{found} is not a model that jaxkv knows; it knows {known}")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(
            f"the weights are quantised (quantization_config.quant_method={method!r}), which is not supported; use the "
            "model's unquantised checkpoint, or a GGUF file of it"
        )
    return family
