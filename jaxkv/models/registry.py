"""The model families jaxkv runs, by the names that checkpoints give them."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.family import Family as Family
from jaxkv.models.gemma import GEMMA2, GEMMA3
from jaxkv.models.granite import GRANITE
from jaxkv.models.llama import LLAMA, MISTRAL
from jaxkv.models.mixtral import MIXTRAL
from jaxkv.models.olmo import OLMO2, OLMOE
from jaxkv.models.phi3 import PHI3
from jaxkv.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from jaxkv.models.smollm3 import SMOLLM3

# Filled by `register_family`, too.
FAMILIES = [
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, GRANITE, SMOLLM3, MIXTRAL, QWEN3_MOE, OLMOE,
]  # fmt: skip


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
