"""config.json to geometry: what is read, and above all what is refused."""

from typing import Any

import numpy as np
import pytest

from jaxkv.errors import CheckpointError
from jaxkv.models.config import LayerKind, repeating
from jaxkv.models.llama import llama_config, mistral_config
from jaxkv.models.registry import find_family
from jaxkv.models.rope import Rope
from tests.checkpoint.tools import hf_config


def test_fields_of_a_config() -> None:
    cfg = llama_config(hf_config(head_dim=16, attention_bias=True, _name_or_path="x", transformers_version="4"))
    assert (cfg.num_layers, cfg.embed, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (3, 32, 4, 2, 16)
    assert (cfg.ffn, cfg.vocab_size, cfg.max_len, cfg.norm_eps) == (64, 96, 128, 1e-5)
    assert (cfg.tied, cfg.qkv_bias, cfg.out_bias, cfg.mlp_bias) == (True, True, True, False)


def test_silence_means_what_transformers_assumes() -> None:
    names = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta")
    config = {name: value for name, value in hf_config().items() if name not in names}
    cfg = llama_config(config)
    assert (cfg.num_kv_heads, cfg.norm_eps, cfg.max_len, cfg.tied) == (4, 1e-6, 2048, False)
    assert cfg.kinds == (LayerKind(rope=Rope(head_dim=8)),)
    mistral = mistral_config({**config, "model_type": "mistral", "sliding_window": None, "num_attention_heads": 8})
    assert (mistral.num_kv_heads, mistral.max_len) == (8, 131072)


def test_null_counts_as_absent() -> None:
    cfg = llama_config(hf_config(head_dim=None, rope_scaling=None, num_key_value_heads=None, pretraining_tp=None))
    assert (cfg.head_dim, cfg.num_kv_heads, cfg.kinds[0].rope) == (8, 4, Rope(head_dim=8))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = Rope(head_dim=8, base=5e5, kind="llama3", factor=8.0, original_max_len=64)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(head_dim=8, base=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(head_dim=8, base=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(head_dim=8, kind="linear", factor=2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, LLAMA3_ROPE),
        (
            {"rope_parameters": {"rope_type": "factors", "rope_theta": 5e5, "factors": [1, 1, 2, 8]}},
            Rope(head_dim=8, base=5e5, kind="factors", factors=(1.0, 1.0, 2.0, 8.0)),
        ),
    ],
)
def test_rope_of_transformers_4_and_5(fields: dict[str, Any], expected: Rope) -> None:
    config = hf_config()
    del config["rope_theta"]
    assert llama_config({**config, **fields}).kinds == (LayerKind(rope=expected),)


def test_explicit_factors_divide_frequencies() -> None:
    rope = Rope(head_dim=8, kind="factors", factors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(rope.inv_freq(), Rope(head_dim=8).inv_freq() / np.float32([1, 2, 4, 8]), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type='proportional' is not supported"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": "8k"}},
            "must be a whole number",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": ["a"] * 4}},
            r"short_factor=.* must be a list of numbers > 0",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True}}, "rope_scaling.finetuned=True"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "short_factor must be 4 numbers > 0, found 1",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 0.7}}, "attention_factor=0.7"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "must be 4 numbers > 0, found 1"),
        ({"clip_qkv": 8.0}, "does not know.*clip_qkv=8.0"),
        ({"sliding_window": 64}, "sliding_window=64 is below max_position_embeddings=128"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types=.* is not supported"),
        ({"attention_multiplier": 0.5}, "does not know.*attention_multiplier=0.5; delete"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a whole number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be a number > 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        ({"model_type": "qwen2"}, "model_type='qwen2' is not supported; supported: 'llama'"),
    ],
)
def test_refused_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        llama_config(hf_config(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 128},
        {"sliding_window": 16, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"hidden_act": "swish"},
        {"rope_interleaved": False, "some_new_switch": None, "moe_layers": []},
    ],
)
def test_settings_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    llama_config(hf_config(**fields))


def test_families_by_name() -> None:
    assert find_family({"architectures": ["MistralForCausalLM"]}).name == "mistral"
    assert find_family({"model_type": "llama"}).name == "llama"
    with pytest.raises(CheckpointError, match=r"\['GPT2LMHeadModel'\] is not .* LlamaForCausalLM, MistralForCausalLM"):
        find_family({"architectures": ["GPT2LMHeadModel"], "model_type": "llama"})
    with pytest.raises(CheckpointError, match="model_type=None"):
        find_family({})


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "mxfp4", "bitsandbytes", "compressed-tensors"])
def test_quantised_checkpoints_are_refused_by_name(method: str) -> None:
    with pytest.raises(CheckpointError, match=f"quant_method='{method}'.*use the model's unquantised checkpoint"):
        find_family({"model_type": "qwen3", "quantization_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types=.* is not supp"),
        ("qwen2", {"attention_bias": True}, "does not know.*attention_bias=True"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=.*must name one of .* for each layer"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is missing"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types=.*must name one of"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers='all' must be a whole number"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported"),
        ("phi3", {"lm_head_bias": True}, "does not know.*lm_head_bias=True"),
        ("gemma2", {"sliding_window_size": 512}, "sliding_window_size=512 is not supported"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, "shared_expert_intermediate"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"rope_parameters": {"chunked": {}, "x": 1}}, "rope_parameters.x=1"),
        ("phi3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers=.*must be 0 or 1 for each of 3 layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be a number > 0"),
        ("granite", {"shared_intermediate_size": 8}, "does not know.*shared_intermediate_size=8"),
        ("olmo2", {"clip_qkv": 8.0}, "does not know.*clip_qkv=8.0"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0 must be a whole number >= 1"),
    ],
)  # fmt: skip
def test_each_family_is_strict(model_type: str, fields: dict[str, Any], message: str) -> None:
    config = {**hf_config(), "architectures": None, "model_type": model_type, **fields}
    with pytest.raises(CheckpointError, match=message):
        find_family(config).config_from_hf(config)


def test_longrope_models_run_short_unless_they_are_asked_to_run_long() -> None:
    scaling = {"type": "su", "short_factor": [1, 1, 2, 2], "long_factor": [1, 2, 3, 4]}
    config = {**hf_config(), "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling}
    cfg = find_family(config).config_from_hf({**config, "original_max_position_embeddings": 32})
    for asked, max_len, factors in ((None, 32, (1, 1, 2, 2)), (32, 32, (1, 1, 2, 2)), (33, 128, (1, 2, 3, 4))):
        found = cfg.for_len(asked)
        assert found.kinds[0].rope is not None
        assert (found.max_len, found.kinds[0].rope.factors) == (max_len, factors)
        assert found.kinds[0].rope.attention_factor == pytest.approx((1 + np.log(4) / np.log(32)) ** 0.5)
    other = mistral_config({**hf_config(), "model_type": "mistral"})
    assert other.for_len(None) == other.for_len(64) == other


def test_layers_repeat_in_the_shortest_pattern() -> None:
    local, whole = LayerKind(rope=None, window=4), LayerKind(rope=None)
    assert repeating([local, local, whole, local, local]) == (local, local, whole)
    assert repeating([local, whole, whole]) == (local, whole, whole)
    assert repeating([whole]) == (whole,)
