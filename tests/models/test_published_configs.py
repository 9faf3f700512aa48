"""Configs as their makers published them, and every field of transformers' own, one by one."""

import warnings
from typing import Any

import pytest

from jaxkv.errors import CheckpointError
from jaxkv.models.config import ModelConfig
from jaxkv.models.hf_config import _HARMLESS, _HARMLESS_PREFIXES
from jaxkv.models.registry import FAMILIES, find_family

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

# Fields of published models that transformers does not read, beside the sizes that make them a config.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "full_attn_mod": 1,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": LONGROPE,
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5e6, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 128256,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "Qwen3-Coder-30B-A3B-Instruct": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5472,
        "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
        "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 152064,
    },
}  # fmt: skip


def read(config: dict[str, Any]) -> ModelConfig:
    return find_family(config).config_from_hf(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = PUBLISHED[name]
    cfg = read(config)
    assert (cfg.num_layers, cfg.embed) == (config["num_hidden_layers"], config["hidden_size"])
    assert (cfg.num_heads, cfg.num_kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])


def test_what_published_configs_say_of_their_layers() -> None:
    phi, smol = read(PUBLISHED["Phi-4-mini-instruct"]), read(PUBLISHED["SmolLM3-3B"])
    rope = phi.ropes[0]
    assert rope is not None and (rope.kind, rope.width, rope.factor) == ("longrope", 96, 1.0)
    assert rope.attention_factor == pytest.approx(1.190238)  # sqrt(1 + log 32 / log 4096)
    assert [rope is None for rope in smol.ropes[:8]] == [False, False, False, True] * 2
    assert read(PUBLISHED["gemma-2-9b"]).windows[:4] == (4096, None, 4096, None)
    assert read(PUBLISHED["gemma-3-1b-it"]).windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert set(read(PUBLISHED["Qwen2.5-7B-Instruct"]).windows) == {None}


# --- against the config classes of transformers ------------------------------------------------------------------------

MODEL_TYPES = [model_type for family in FAMILIES for model_type in family.model_types]
SIZES = (
    "model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
    "moe_intermediate_size",
)  # fmt: skip
# Fields that may say nothing, because another one decides in transformers' default config.
SILENT = {
    "sliding_window": "use_sliding_window is false", "use_sliding_window": "layer_types names no window",
    "max_window_layers": "layer_types is there", "no_rope_layer_interval": "no_rope_layers is there",
    "original_max_position_embeddings": "the rope is not scaled", "intermediate_size": "every layer has experts",
}  # fmt: skip


def defaults(model_type: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        return {**transformers.AutoConfig.for_model(model_type).to_dict(), "model_type": model_type}


@pytest.mark.parity
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_silence_means_what_transformers_assumes(model_type: str) -> None:
    full = defaults(model_type)
    assert read({field: full[field] for field in SIZES if field in full}) == read(full)


@pytest.mark.parity
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_field_is_silent(model_type: str) -> None:
    """A changed field changes the geometry, or is refused, or is known to be harmless."""
    full = defaults(model_type)
    cfg, silent = read(full), []
    for field, value in full.items():
        if field in _HARMLESS or field.startswith(_HARMLESS_PREFIXES):
            continue
        for other in changes(value):
            try:
                if read({**full, field: other}) == cfg:
                    silent.append(field)
            except CheckpointError:
                pass
    assert set(silent) <= set(SILENT)


def changes(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2, value + 1]
    if isinstance(value, str):
        return [other for other in ("gelu", "gelu_pytorch_tanh", "silu") if other != value]
    if isinstance(value, list):
        whole = ["full_attention"] * len(value), ["sliding_attention"] * len(value), [1] * len(value), value[:-1] or [0]
        return [other for other in whole if other != value]
    if isinstance(value, dict):
        return [{**value, "factor": 3.0}, {**value, "rope_type": "linear"}]
    return [3, 0.5, True, "x", ["sliding_attention"]]
