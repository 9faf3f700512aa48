"""Writes what llama.cpp's `conversion` package writes: stacks experts, reorders rows of Q and K, adds one to norms."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

PERMUTED = ("llama", "granite", "smollm3")
_ADD = {str: "add_string", float: "add_float32", bool: "add_bool", list: "add_array", int: "add_uint32"}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Hugging Face tensors, matrices in `kind` and vectors in float32; `extra` ones under their own names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (keys or {}).items():
        getattr(writer, _ADD[type(value)])(key, value)
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        target = names.get_name(re.sub(r"experts\.\d+", "experts", name), try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        stacks.setdefault(target, []).append(_converted(architecture, name, tensor.astype(np.float32), config))
    for target, parts in stacks.items():
        rows = np.stack(parts) if "_exps" in target else parts[0]
        if rows.ndim == 1:
            writer.add_tensor(target, rows)
        else:
            writer.add_tensor(target, gguf.quantize(rows, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(architecture: str, name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    if architecture in PERMUTED and (found := re.search(r"\.([qk])_proj", name)):
        # llama.cpp's own formula (convert_hf_to_gguf.py, LlamaModel.permute)
        return tensor.reshape(heads[found[1]], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else tensor
