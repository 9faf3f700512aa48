"""Logits against transformers itself, from checkpoints that transformers wrote."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv.checkpoint.hf import HfSource
from tests.checkpoint.tools import load, logits, params

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gqa-untied": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "wide-heads": {"head_dim": 16},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "both-biases-mqa": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None},
}


def build(changes: dict[str, Any]) -> Any:
    """A random model; norms and biases are random too, which transformers would set to one and zero."""
    fields = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    } | changes  # fmt: skip
    model_type = fields.pop("model_type", "llama")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                value += torch.randn_like(value) * 0.3
    return model.eval()


@pytest.mark.parametrize(("name", "per_layer"), [(name, i % 2 == 0) for i, name in enumerate(VARIANTS)])
def test_logits_match_transformers(name: str, per_layer: bool, tmp_path: Path) -> None:
    theirs = build(VARIANTS[name])
    theirs.save_pretrained(tmp_path)
    prompt = np.random.default_rng(1).integers(0, 99, 70)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(prompt)[None]).logits[0].numpy()
    assert np.abs(expected).max() > 1  # otherwise 1e-4 would say nothing
    loaded = load(HfSource(tmp_path), per_layer=per_layer)
    np.testing.assert_allclose(logits(loaded, prompt), expected, atol=1e-4, rtol=0)


def test_sharded_bf16_files_of_transformers(tmp_path: Path) -> None:
    theirs = build({}).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = params(load(HfSource(tmp_path), dtype="bfloat16"))
    expected = theirs.model.layers[1].mlp.down_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(loaded["layers/1/down"].astype(np.float32), expected)
