"""The model families jaxkv runs, by the names that checkpoints give them."""

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import CheckpointError, ConfigError
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
_NUM_OWN = len(FAMILIES)
_OWN_CODE = ("jaxkv", "flax", "jax", "abc", "typing")  # whose changes count anyway, or never matter


def register_family(family: Family) -> None:
    """Makes checkpoints of a model family of your own loadable; `jaxkv.families` has what one is made of.

    Args:
        family: its `revision` is derived from the source of its module and functions if it is empty.

    Raises:
        ConfigError: another family has its name, or one of its architectures or model types; or its source cannot be
            read and `revision` is empty.
    """
    for other in FAMILIES:
        same = {family.name} & {other.name} | set(family.architectures) & set(other.architectures)
        same |= set(family.model_types) & set(other.model_types)
        if same:
            raise ConfigError(f"family {family.name!r}: {', '.join(sorted(same))} is taken by family {other.name!r}")
    FAMILIES.append(family if family.revision else dataclasses.replace(family, revision=_source_digest(family)))


def unregister_family(name: str) -> None:
    """Takes back `register_family`.

    Raises:
        ConfigError: no family was registered under this name.
    """
    found = [family for family in FAMILIES[_NUM_OWN:] if family.name == name]
    if not found:
        raise ConfigError(f"no family {name!r} was registered")
    FAMILIES.remove(found[0])


def _source_digest(family: Family) -> str:
    """Of the files that a family's code is in; programs compiled from older ones are then not found on disk."""
    bases = getattr(family.module, "__mro__", (family.module,))
    layers = getattr(getattr(family.module, "Layer", None), "__mro__", ())
    code = [*bases, *layers, family.config_from_hf, family.weight_map]
    names = {each.__module__ for each in code} - {"builtins"}
    try:
        files = sorted({inspect.getfile(sys.modules[name]) for name in names if name.split(".")[0] not in _OWN_CODE})
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]
    except (KeyError, OSError, TypeError) as error:
        raise ConfigError(
            f"family {family.name!r}: its source cannot be read ({error}); set Family.revision to a text that changes "
            "with it"
        ) from error


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
