"""Geometries of well-known models, as the fields of their Hugging Face config.json that shape the computation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import CheckpointError


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, max_len: int, theta: float, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": max_len, "rms_norm_eps": 1e-5,
        "rope_theta": theta, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


_3_1, _3_2 = {"rope_scaling": _llama3_rope(8.0)}, {"rope_scaling": _llama3_rope(32.0), "tie_word_embeddings": True}
_TIED = {"tie_word_embeddings": True}

KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096, 10000.0),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, 500000.0),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256, 131072, 500000.0, **_3_1),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, 131072, 500000.0, head_dim=64, **_3_2),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, 131072, 500000.0, head_dim=128, **_3_2),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 131072, 500000.0, **_3_1),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32768, 32768, 1000000.0)
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, 8192, 100000.0, **_TIED),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, 8192, 100000.0, **_TIED),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, 8192, 130000.0, **_TIED),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000, 2048, 10000.0),
}


def read_config(model: str) -> Mapping[str, Any]:
    """The config of a known name, of a config.json, or of a folder that holds one.

    Raises:
        CheckpointError: there is no such thing, or the file is no JSON object.
    """
    if model.lower() in KNOWN:
        return KNOWN[model.lower()]
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"model {model!r} is neither a config.json, nor a folder with one, nor a known name ({', '.join(KNOWN)})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return config
