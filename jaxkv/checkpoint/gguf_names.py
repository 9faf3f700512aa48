"""Which tensors of a GGUF file are which of Hugging Face's, by the name maps of the `gguf` package."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import gguf
import numpy as np

from jaxkv.checkpoint.gguf_config import Architecture
from jaxkv.checkpoint.tensors import TensorInfo
from jaxkv.models.weights import WeightMap

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def hf_tensors(
    architecture: str, num_layers: int, weights: WeightMap, infos: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The file's tensors under Hugging Face's names; one expert's are a slice of the stack that the file holds.

    What is no tensor of the model keeps its name.

    Args:
        architecture: `general.architecture`.
        weights: what the model is made of.
        infos: by the file's names.
    """
    key = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, num_layers)
    found: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for hf_name in _wanted(weights, num_layers):
        expert = _EXPERT.search(hf_name)
        name = names.get_name(_EXPERT.sub(".experts.", hf_name), try_suffixes=(".weight", ".bias"))
        if name is None or name not in infos:
            continue
        used.add(name)
        found[hf_name] = infos[name] if expert is None else _slice(infos[name], int(expert[1]))
    return found | {name: info for name, info in infos.items() if name not in used}


def _wanted(weights: WeightMap, num_layers: int) -> Iterable[str]:
    parts = [part.name for parts in weights.params.values() for part in parts]
    for name in dict.fromkeys([*parts, *weights.copies]):
        yield from (name.format(layer=layer) for layer in range(num_layers if "{layer}" in name else 1))


def _slice(stack: TensorInfo, index: int) -> TensorInfo:
    """One of the tensors along the first axis."""
    num_bytes = stack.num_bytes // stack.shape[0]
    return dataclasses.replace(
        stack,
        name=f"{stack.name}[{index}]",
        shape=stack.shape[1:],
        offset=stack.offset + index * num_bytes,
        num_bytes=num_bytes,
    )


def restore(architecture: Architecture, name: str, tensor: np.ndarray, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Undoes what llama.cpp does to a tensor (Hugging Face name)."""
    if architecture.is_permuted and ".q_proj." in name:
        return _unpermute(tensor, num_heads)
    if architecture.is_permuted and ".k_proj." in name:
        return _unpermute(tensor, num_kv_heads)
    if architecture.norm_shift and name.endswith("norm.weight"):
        return tensor - np.float32(architecture.norm_shift)
    return tensor


def _unpermute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """From interleaved pairs, which llama.cpp rotates, back to rotate-half. `[num_heads * D, ...]`."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
