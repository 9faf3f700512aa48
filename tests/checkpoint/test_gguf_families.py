"""GGUF files of every architecture hold the same model as the Hugging Face folder they were made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv.checkpoint.gguf import GgufSource
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import model_config
from tests.checkpoint.gguf_files import write_gguf
from tests.checkpoint.tools import hf_config, load, params, random_tensors, write_hf

MOE = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh"}
FACTORS = {"short": [1.0, 2.0, 3.0], "long": [2.0, 4.0, 6.0]}
LONGROPE = {
    "type": "longrope", "short_factor": FACTORS["short"], "long_factor": FACTORS["long"], "attention_factor": 1.25,
}  # fmt: skip
GRANITE = {
    "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
GRANITE_KEYS = {"attention.scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 4.0}
# general.architecture, architectures, model_type, fields of config.json, keys of the file that say the same
CASES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "MistralForCausalLM", "mistral", {"sliding_window": 16}, {"attention.sliding_window": 16}),
    ("llama", "MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, EXPERT_KEYS),
    ("qwen2", "Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": False}, {}),
    ("qwen3", "Qwen3ForCausalLM", "qwen3", {"head_dim": 16}, {"attention.key_length": 16, "attention.value_length": 16}),
    (
        "qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe",
        {**MOE, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
        {**EXPERT_KEYS, "expert_feed_forward_length": 24},
    ),
    (
        "gemma2", "Gemma2ForCausalLM", "gemma2", GEMMA,
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    ("gemma3", "Gemma3ForCausalLM", "gemma3_text", {**GEMMA, "rope_theta": 1e6}, {"attention.sliding_window": 16}),
    (
        "phi3", "Phi3ForCausalLM", "phi3",
        {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": 6},
    ),
    ("olmo2", "Olmo2ForCausalLM", "olmo2", {}, {}),
    ("olmoe", "OlmoeForCausalLM", "olmoe", MOE, EXPERT_KEYS),
    ("granite", "GraniteForCausalLM", "granite", GRANITE, GRANITE_KEYS),
    ("smollm3", "SmolLM3ForCausalLM", "smollm3", {"attention_bias": True}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hf", "model_type", "fields", "keys"), CASES, ids=[case[2] for case in CASES])
def test_same_model(
    name: str, hf: str, model_type: str, fields: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    config = hf_config(architectures=[hf], model_type=model_type, **fields)
    tensors = random_tensors(config)
    folder = HfSource(write_hf(tmp_path / "hf", config, tensors))
    if name.startswith("gemma"):
        keys = {**keys, "attention.key_length": 8, "attention.value_length": 8}
    keys = {f"{name}.{key}": value for key, value in keys.items()}
    extra = {f"rope_factors_{which}.weight": np.float32(each) for which, each in FACTORS.items()}
    file = GgufSource(
        write_gguf(
            tmp_path / "m.gguf", config, tensors, architecture=name, keys=keys, extra=extra if name == "phi3" else None
        )
    )
    assert model_config(file) == model_config(folder)
    ours, expected = params(load(file)), params(load(folder))
    assert ours.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(ours[path], value, atol=1e-7 if "norm" in path else 0, rtol=0)
