"""Geometries of well-known models, as the fields of their Hugging Face config.json that shape the computation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.registry import FAMILIES

_ARCHITECTURES = {family.model_types[0]: family.architectures[0] for family in FAMILIES}


def _model(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, max_len: int, theta: float,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [_ARCHITECTURES[model_type]], "model_type": model_type, "num_hidden_layers": layers,
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": max_len, "rms_norm_eps": 1e-5,
        "rope_theta": theta, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


_TIED, _EPS = {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-6}
_3_1, _3_2 = {"rope_scaling": _llama3_rope(8.0)}, {"rope_scaling": _llama3_rope(32.0), **_TIED}
_GEMMA = {**_TIED, **_EPS, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA_2 = {**_GEMMA, "sliding_window": 4096}
_GEMMA_3 = {**_GEMMA, "sliding_window": 512, "rope_local_base_freq": 10000.0}
_GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0, "attention_multiplier": 0.0078125
}  # fmt: skip
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

# model_type, layers, hidden, query and KV heads, ffn, vocabulary, max_len, base of rope
KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _model("llama", 32, 4096, 32, 32, 11008, 32000, 4096, 10000.0),
    "llama-3-8b": _model("llama", 32, 4096, 32, 8, 14336, 128256, 8192, 500000.0),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14336, 128256, 131072, 500000.0, **_3_1),
    "llama-3.2-1b": _model("llama", 16, 2048, 32, 8, 8192, 128256, 131072, 500000.0, head_dim=64, **_3_2),
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128256, 131072, 500000.0, head_dim=128, **_3_2),
    "llama-3.3-70b": _model("llama", 80, 8192, 64, 8, 28672, 128256, 131072, 500000.0, **_3_1),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32768, 32768, 1000000.0, sliding_window=None),
    "mistral-7b-v0.1": _model("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, 10000.0, sliding_window=4096),
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, 1e6, **_EPS),
    "qwen3-8b": _model("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, 1e6, head_dim=128, **_EPS),
    "qwen3-30b-a3b": _model("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, 1e6, head_dim=128, **_EPS, **_QWEN3_MOE),
    "gemma-2-2b": _model("gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, 10000.0, **_GEMMA_2),
    "gemma-2-9b": _model("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, 10000.0, **_GEMMA_2),
    "gemma-3-270m": _model("gemma3_text", 18, 640, 4, 1, 2048, 262144, 32768, 1e6, **_GEMMA_3),
    "gemma-3-1b": _model("gemma3_text", 26, 1152, 4, 1, 6912, 262144, 32768, 1e6, **_GEMMA_3),
    "phi-3-mini-4k": _model("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, 10000.0, sliding_window=2047),
    "olmo-2-7b": _model("olmo2", 32, 4096, 32, 32, 11008, 100352, 4096, 5e5, **_EPS),
    "olmoe-1b-7b": _model("olmoe", 16, 2048, 16, 16, 1024, 50304, 4096, 10000.0, **_OLMOE),
    "granite-3.1-8b": _model("granite", 40, 4096, 32, 8, 12800, 49155, 131072, 1e7, **_GRANITE, **_TIED),
    "smollm3-3b": _model("smollm3", 36, 2048, 16, 4, 11008, 128256, 65536, 5e6, **_EPS, **_TIED),
    "mixtral-8x7b": _model("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, 1e6, **_MIXTRAL),
    "smollm2-135m": _model("llama", 30, 576, 9, 3, 1536, 49152, 8192, 100000.0, **_TIED),
    "smollm2-360m": _model("llama", 32, 960, 15, 5, 2560, 49152, 8192, 100000.0, **_TIED),
    "smollm2-1.7b": _model("llama", 24, 2048, 32, 32, 8192, 49152, 8192, 130000.0, **_TIED),
    "tinyllama-1.1b": _model("llama", 22, 2048, 32, 4, 5632, 32000, 2048, 10000.0),
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
