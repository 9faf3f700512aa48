"""What GGUF files say about a model, in the words of Hugging Face's config.json.

Keys: llama.cpp's gguf-py (`gguf.constants`), what its `conversion` package writes, and what `src/models` assumes where a
file is silent.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv.errors import CheckpointError

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # float32 [W / 2]
_HARMLESS: tuple[str, ...] = (
    "vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
)  # fmt: skip
_REQUIRED = object()


class Keys:
    """The keys of an architecture; what nobody reads is an error."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        prefix = f"{architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._prefix, self._read = prefix, set[str](_HARMLESS)

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value; of a list of one number per layer that number, if all are the same."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"GGUF key {self._prefix}{key} is missing")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"GGUF key {self._prefix}{key}={value} differs between layers, which is not supported"
                )
            return value[0]
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Stored as float32: 9.999999747378752e-06 was 1e-05."""
        return float(str(np.float32(self.get(key, default))))

    def finish(self) -> None:
        """Refuses keys that nobody read and that are set."""
        left = {key: value for key, value in self._values.items() if key not in self._read and value}
        if left:
            keys = ", ".join(f"{self._prefix}{key}={value!r}" for key, value in sorted(left.items()))
            raise CheckpointError(
                f"GGUF keys that jaxkv does not know and that may change the model's arithmetic: {keys}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """What the config is made from."""

    keys: Keys
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by the file's names
    factors: Mapping[str, tuple[float, ...]]  # `ROPE_FACTORS` that are there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """How files of one `general.architecture` differ."""

    hf: str  # config.json's `architectures`
    model_type: str
    more: Callable[[File, dict[str, Any]], Mapping[str, Any]] = lambda file, made: {}  # further fields
    is_permuted: bool = False  # rows of Q and K are reordered, for llama.cpp rotates neighbouring pairs
    norm_shift: float = 0.0  # added to the weights of norms


def _llama(file: File, made: dict[str, Any]) -> dict[str, Any]:
    """Also Mistral and Mixtral, which llama.cpp does not tell apart."""
    fields = {"mlp_bias": "blk.0.ffn_gate.bias" in file.shapes}
    if file.keys.get("expert_count", 0):
        return {
            **_names("MixtralForCausalLM", "mixtral"),
            "num_local_experts": file.keys.get("expert_count"),
            "num_experts_per_tok": file.keys.get("expert_used_count"),
        }
    if file.keys.get("attention.sliding_window", 0):
        return {**_names("MistralForCausalLM", "mistral"), "sliding_window": file.keys.get("attention.sliding_window")}
    return {**fields, "attention_bias": made["attention_bias"]}


def _qwen3_moe(file: File, made: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(file),
        "norm_topk_prob": True,
        "moe_intermediate_size": file.keys.get("expert_feed_forward_length"),
    }


def _olmoe(file: File, made: dict[str, Any]) -> dict[str, Any]:
    return {**_experts(file), "norm_topk_prob": False}


def _experts(file: File) -> dict[str, Any]:
    return {"num_experts": file.keys.get("expert_count"), "num_experts_per_tok": file.keys.get("expert_used_count")}


def _gemma2(file: File, made: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(made, layers_of_27b=46),
        "sliding_window": file.keys.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.keys.get("attn_logit_softcapping", None),
        "final_logit_softcapping": file.keys.get("final_logit_softcapping", None),
    }


def _gemma3(file: File, made: dict[str, Any]) -> dict[str, Any]:
    window = file.keys.get("attention.sliding_window", 0)
    types = [
        "sliding_attention" if window and (layer + 1) % 6 else "full_attention"
        for layer in range(made["num_hidden_layers"])
    ]
    local = {"rope_type": "default", "rope_theta": file.keys.get("rope.freq_base_swa", 10000.0)}
    return {
        **_gemma(made, layers_of_27b=62),
        "sliding_window": window or None,
        "layer_types": types,
        "final_logit_softcapping": file.keys.get("final_logit_softcapping", None),
        "rope_parameters": {"full_attention": made["rope_parameters"], "sliding_attention": local},
    }


def _gemma(made: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """The scale of scores is not in the file; that of the 27B models is not the head dim's."""
    wide = made["num_hidden_layers"] == layers_of_27b
    scalar = made["hidden_size"] // made["num_attention_heads"] if wide else made["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None, "query_pre_attn_scalar": scalar}


def _phi3(file: File, made: dict[str, Any]) -> dict[str, Any]:
    keys, rope, original = (
        file.keys,
        dict(made["rope_parameters"]),
        file.keys.get("rope.scaling.original_context_length", None),
    )
    fields: dict[str, Any] = {"sliding_window": keys.get("attention.sliding_window", 0) or None}
    if original is not None:
        fields["original_max_position_embeddings"] = original
    if "rope_factors_long.weight" in file.factors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": list(file.factors["rope_factors_short.weight"]),
            "long_factor": list(file.factors["rope_factors_long.weight"]),
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        }
    rope["partial_rotary_factor"] = made.pop("partial_rotary_factor", 1.0)
    return {**fields, "rope_parameters": rope, "attention_bias": False}


def _granite(file: File, made: dict[str, Any]) -> dict[str, Any]:
    names = {
        "attention": "attention_multiplier",
        "embedding": "embedding_multiplier",
        "residual": "residual_multiplier",
    }
    keys = {"attention": "attention.scale", "embedding": "embedding_scale", "residual": "residual_scale"}
    found = {names[name]: file.keys.number(key) for name, key in keys.items() if file.keys.has(key)}
    found.setdefault("attention_multiplier", made["head_dim"] ** -0.5)
    return {**found, "logits_scaling": file.keys.number("logit_scale"), **_llama(file, made)}


def _smollm3(file: File, made: dict[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4, "attention_bias": made["attention_bias"]}


def _names(hf: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [hf], "model_type": model_type}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(hf="LlamaForCausalLM", model_type="llama", more=_llama, is_permuted=True),
    "qwen2": Architecture(hf="Qwen2ForCausalLM", model_type="qwen2", more=lambda file, made: {"attention_bias": None}),
    "qwen3": Architecture(hf="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": Architecture(hf="Qwen3MoeForCausalLM", model_type="qwen3_moe", more=_qwen3_moe),
    "gemma2": Architecture(hf="Gemma2ForCausalLM", model_type="gemma2", more=_gemma2, norm_shift=1.0),
    "gemma3": Architecture(hf="Gemma3ForCausalLM", model_type="gemma3_text", more=_gemma3, norm_shift=1.0),
    "phi3": Architecture(hf="Phi3ForCausalLM", model_type="phi3", more=_phi3),
    "olmo2": Architecture(hf="Olmo2ForCausalLM", model_type="olmo2"),
    "olmoe": Architecture(hf="OlmoeForCausalLM", model_type="olmoe", more=_olmoe),
    "granite": Architecture(hf="GraniteForCausalLM", model_type="granite", more=_granite, is_permuted=True),
    "smollm3": Architecture(hf="SmolLM3ForCausalLM", model_type="smollm3", more=_smollm3, is_permuted=True),
}


def gguf_config(
    name: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, tuple[float, ...]],
) -> dict[str, Any]:
    """The model's config.json.

    Args:
        name: `general.architecture`.
        metadata: of the file.
        shapes: of the tensors, by the file's names.
        factors: of rotary frequencies: those tensors of `ROPE_FACTORS` that are there.

    Raises:
        CheckpointError: a key is missing, or unknown and set.
    """
    architecture, keys = ARCHITECTURES[name], Keys(name, metadata)
    file = File(keys=keys, shapes=shapes, factors=factors)
    embed, num_heads = keys.get("embedding_length"), keys.get("attention.head_count")
    head_dim = keys.get("attention.key_length", embed // num_heads)
    if (value_dim := keys.get("attention.value_length", head_dim)) != head_dim:
        raise CheckpointError(
            f"GGUF key {name}.attention.value_length={value_dim} differs from the key length {head_dim}, which is not "
            "supported"
        )
    if "token_embd.weight" not in shapes:
        raise CheckpointError("GGUF tensor token_embd.weight is missing")
    made = {
        **_names(architecture.hf, architecture.model_type),
        "num_hidden_layers": keys.get("block_count"),
        "hidden_size": embed,
        "intermediate_size": keys.get(
            "feed_forward_length", None if keys.has("expert_feed_forward_length") else _REQUIRED
        ),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "rope_parameters": _rope(keys, factors.get("rope_freqs.weight")),
    }
    if (rotated := keys.get("rope.dimension_count", head_dim)) != head_dim:
        made["partial_rotary_factor"] = rotated / head_dim
    made |= architecture.more(file, made)
    keys.finish()
    return {
        field: value for field, value in made.items() if value is not None or field.endswith(("softcapping", "window"))
    }


def _rope(keys: Keys, factors: tuple[float, ...] | None) -> dict[str, Any]:
    """`rope_parameters`. Without a type, llama.cpp takes a factor for linear scaling."""
    base = {"rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    factor = keys.get("rope.scaling.factor", None) or keys.get("rope.scale_linear", None) or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "longrope", "yarn"):
        raise CheckpointError(f"GGUF key rope.scaling.type={kind!r} is not supported; supported: none, linear, yarn")
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if factors is not None and any(each != 1 for each in factors):
        if is_scaled:
            raise CheckpointError(f"GGUF tensor rope_freqs.weight with rope.scaling.type={kind!r} is not supported")
        return {**base, "rope_type": "factors", "factors": list(factors)}
    if not is_scaled:
        return {**base, "rope_type": "default"}
    made = {**base, "rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        made |= {"original_max_position_embeddings": keys.get("rope.scaling.original_context_length")}
        for field, key in (("attention_factor", "attn"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            key = f"rope.scaling.yarn_{key}{'_factor' if key == 'attn' else ''}"
            if keys.has(key):
                made[field] = keys.number(key)
    return made
