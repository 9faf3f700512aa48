"""Tiny random models of every family and its odd switches, as transformers writes them."""

from typing import Any

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
}  # fmt: skip
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {"head_dim": 16, "num_key_value_heads": 1, "query_pre_attn_scalar": 24}
QWEN3 = {"model_type": "qwen3", "head_dim": 16}
PHI3 = {"model_type": "phi3", "hidden_size": 64}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_experts": 8}
WINDOW, WIDE_WINDOW = 9, 500  # the prompts are of up to 70 tokens

# name -> what differs from `BASE`; the first one of a family goes through all schedules
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {"tie_word_embeddings": True},
    "llama-gqa-untied": {},
    "llama-mqa": {"num_key_value_heads": 1},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-wide-heads": {"head_dim": 16},
    "llama-rope-llama3": {"rope_parameters": LLAMA3},
    "llama-rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "llama-rope-yarn": {"rope_parameters": YARN},
    "llama-rope-yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    "llama-rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-both-biases-mqa": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "mistral-wide-window": {"model_type": "mistral", "sliding_window": WIDE_WINDOW},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**QWEN3},
    "qwen3-bias-mqa-tied": {**QWEN3, "attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {**GEMMA, "model_type": "gemma2", "sliding_window": WINDOW, "num_hidden_layers": 3},
    "gemma2-wide-window-no-caps": {
        **GEMMA, "model_type": "gemma2", "sliding_window": WIDE_WINDOW, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "gemma3": {**GEMMA, "model_type": "gemma3_text", "sliding_window": WINDOW, "num_hidden_layers": 7},
    "gemma3-linear-rope": {
        **GEMMA, "model_type": "gemma3_text", "sliding_window": WIDE_WINDOW, "sliding_window_pattern": 2,
        "rope_parameters": GEMMA3_LINEAR, "attention_bias": True,
    },
    "phi3": {**PHI3},
    "phi3-partial": {**PHI3, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}, "sliding_window": WINDOW},
    "phi3-longrope": {
        **PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": 100, "max_position_embeddings": 400,
        "tie_word_embeddings": True,
    },
    "phi3-longrope-long": {
        **PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40, "max_position_embeddings": 400,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2-mha-bias": {"model_type": "olmo2", "num_key_value_heads": 4, "attention_bias": True},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.11,
        "residual_multiplier": 0.22, "logits_scaling": 0.25, "tie_word_embeddings": True,
    },
    # Scores that are not scaled (what silence means) make softmax so steep that float32 is no longer within 1e-4 of the
    # truth: over 64 tokens jaxkv was 1.1e-4 above float64 where transformers was 0.7e-4 below; 4e-5 each when scaled.
    "granite-biases": {
        "model_type": "granite", "attention_bias": True, "mlp_bias": True, "logits_scaling": 0.5,
        "attention_multiplier": 0.35,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5},
    "smollm3-windows": {
        "model_type": "smollm3", "use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [0, 1],
        "tie_word_embeddings": False,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 6, "sliding_window": WINDOW},
    "qwen3-moe": {**QWEN3, **MOE, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3-moe-not-normalised": {**QWEN3, **MOE, "model_type": "qwen3_moe", "tie_word_embeddings": True},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "olmoe-clip-normalised": {
        "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.8, "norm_topk_prob": True,
    },
}  # fmt: skip
FIRST = {name.split("-")[0] if not name.startswith("qwen3-moe") else "qwen3-moe": name for name in reversed(VARIANTS)}

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(name: str) -> Any:
    """A random model of transformers; norms and biases are random too, which it would set to one and zero."""
    import torch
    import transformers

    torch.set_num_threads(1)  # of models this small, two threads take ten times the CPU time that one takes
    fields = {**BASE, "model_type": "llama"} | VARIANTS[name]
    if name == "llama-rope-dynamic":
        fields["max_position_embeddings"] = 48
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if "norm" in parameter or parameter.endswith("bias"):
                value += torch.randn_like(value) * 0.3
            if "gate.weight" in parameter or "experts" in parameter:  # transformers leaves routers at zero
                value.copy_(torch.randn_like(value) * 0.3)
    return model.eval()
