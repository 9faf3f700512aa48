"""What GGUF files of `general.architecture = llama` say, in Hugging Face's words.

Names and keys: llama.cpp's gguf-py (`gguf.constants`) and `convert_hf_to_gguf.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.errors import CheckpointError

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # float32 [D / 2]: divisors of the rotary frequencies

# Keys read by `config`, and keys that change no arithmetic.
_READ = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
)
_HARMLESS = ("vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout")


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; names that are not known come back as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def restore(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Undoes what llama.cpp does to a tensor (Hugging Face name): it reorders the rows of Q and K."""
    if ".q_proj." in name:
        return _unpermute(tensor, config["num_attention_heads"])
    if ".k_proj." in name:
        return _unpermute(tensor, config["num_key_value_heads"])
    return tensor


def _unpermute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """From interleaved pairs, which llama.cpp rotates, back to rotate-half. `[num_heads * D, ...]`."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The model's config.json.

    Args:
        metadata: of the file.
        shapes: of the tensors, by Hugging Face name.
        rope_factors: the tensor `ROPE_FACTORS` if there is one.

    Raises:
        CheckpointError: a key is missing, or unknown and set.
    """
    values = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    left = {key: value for key, value in values.items() if key not in _READ + _HARMLESS and value}
    if left:
        keys = ", ".join(f"llama.{key}={value!r}" for key, value in sorted(left.items()))
        raise CheckpointError(f"GGUF keys that jaxkv does not know and that may change the model's arithmetic: {keys}")
    embed, num_heads = _get(values, "embedding_length"), _get(values, "attention.head_count")
    head_dim = _get(values, "attention.key_length", embed // num_heads)
    if _get(values, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"GGUF key llama.attention.value_length={values['attention.value_length']} differs from the key length "
            f"{head_dim}, which is not supported"
        )
    if "model.embed_tokens.weight" not in shapes:
        raise CheckpointError("GGUF tensor token_embd.weight is missing")
    made = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _get(values, "block_count"),
        "hidden_size": embed,
        "intermediate_size": _get(values, "feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _get(values, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "max_position_embeddings": _get(values, "context_length"),
        # stored as float32: 9.999999747378752e-06 was 1e-05
        "rms_norm_eps": float(str(np.float32(_get(values, "attention.layer_norm_rms_epsilon")))),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "rope_parameters": _rope(values, rope_factors),
    }
    if (window := _get(values, "attention.sliding_window", 0)) != 0:
        made["sliding_window"] = window
    if (rotated := _get(values, "rope.dimension_count", head_dim)) != head_dim:
        made["partial_rotary_factor"] = rotated / head_dim
    return made


def _rope(values: Mapping[str, Any], factors: np.ndarray | None) -> dict[str, Any]:
    """`rope_parameters`. Without a type, llama.cpp takes a factor for linear scaling."""
    base = {"rope_theta": float(_get(values, "rope.freq_base", 10000.0))}
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
    kind = values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise CheckpointError(f"GGUF key rope.scaling.type={kind!r} is not supported; supported: 'none', 'linear'")
    is_scaled = kind not in ("none", "linear") or (kind == "linear" and factor != 1.0)
    if factors is not None and (factors != 1).any():
        if is_scaled:
            raise CheckpointError(f"GGUF tensor {ROPE_FACTORS} with rope.scaling.type={kind!r} is not supported")
        return {**base, "rope_type": "factors", "factors": [float(each) for each in factors]}
    return {**base, "rope_type": kind, "factor": float(factor)} if is_scaled else {**base, "rope_type": "default"}


_REQUIRED = object()


def _get(values: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """A number; a list of one number per layer if all are the same."""
    value = values.get(key, default)
    if value is _REQUIRED:
        raise CheckpointError(f"GGUF key llama.{key} is missing")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise CheckpointError(f"GGUF key llama.{key}={value} differs between layers, which is not supported")
        return value[0]
    return value
