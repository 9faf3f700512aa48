"""GGUF files of every architecture hold the same model as the Hugging Face folder they were made from.

The writer here does what llama.cpp's `conversion` package does: stacks experts, reorders rows of Q and K, adds one to norms.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxkv.checkpoint.gguf import GgufSource
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import model_config
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


def write(
    path: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], keys: Mapping[str, Any]
) -> None:
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in keys.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{name}.{key}", value)
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for hf_name, tensor in tensors.items():
        target = names.get_name(re.sub(r"experts\.\d+", "experts", hf_name), try_suffixes=(".weight", ".bias"))
        assert target is not None, hf_name
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        if name in ("llama", "granite", "smollm3") and (found := re.search(r"\.([qk])_proj", hf_name)):
            halves = tensor.reshape(heads[found[1]], 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if name.startswith("gemma") and hf_name.endswith("norm.weight"):
            tensor = tensor + 1
        stacks.setdefault(target, []).append(tensor)
    for target, parts in stacks.items():
        writer.add_tensor(target, np.stack(parts) if "_exps" in target else parts[0])
    if name == "phi3":
        for which, factors in FACTORS.items():
            writer.add_tensor(f"rope_factors_{which}.weight", np.float32(factors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("name", "hf", "model_type", "fields", "keys"), CASES, ids=[case[2] for case in CASES])
def test_same_model(
    name: str, hf: str, model_type: str, fields: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    config = hf_config(architectures=[hf], model_type=model_type, **fields)
    tensors = random_tensors(config)
    folder = HfSource(write_hf(tmp_path / "hf", config, tensors))
    if name.startswith("gemma"):
        keys = {**keys, "attention.key_length": 8, "attention.value_length": 8}
    write(tmp_path / "m.gguf", name, config, tensors, keys)
    file = GgufSource(tmp_path / "m.gguf")
    assert model_config(file) == model_config(folder)
    ours, expected = params(load(file)), params(load(folder))
    assert ours.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(ours[path], value, atol=1e-7 if "norm" in path else 0, rtol=0)
