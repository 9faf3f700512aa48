"""A family of one's own runs like any other."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.errors import CheckpointError, ConfigError
from jaxkv.families import register_family, unregister_family
from jaxkv.models.registry import FAMILIES, find_family
from tests.checkpoint.tools import write_hf
from tests.models.toy import TOY, toy_config, toy_weights

CONFIG = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "vocab_size": 60, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 7, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def registered() -> Iterator[None]:
    register_family(TOY)
    yield
    unregister_family("toy")


def tensors() -> dict[str, np.ndarray]:
    rng, cfg = np.random.default_rng(0), toy_config(CONFIG)
    parts = [part for parts in toy_weights(cfg).params.values() for part in parts]
    names = {part.name.format(layer=i): part.shape for part in parts for i in range(cfg.num_layers)}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.4 for name, shape in names.items()}


def logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The toy in numpy and float64: of the last token, [V]."""
    weights = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    x, length = weights["words"][tokens], len(tokens)
    norm = lambda x, w: w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)  # noqa: E731
    angle = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, 8, 2) / 8)
    turn = np.exp(1j * angle)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., :4] + 1j * x[..., 4:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = (distance >= 0) & (distance < 7)
    for layer in range(2):
        block = {name.split(".")[2]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        h = norm(x, block["norm"])
        qkv = (h @ block["qkv"].T).reshape(length, 2, 4, 8)
        q, k, v = rotate(qkv[:, :, :2].reshape(length, 4, 8)), rotate(qkv[:, :, 2]), qkv[:, :, 3]
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, 1)) / np.sqrt(8)
        scores = np.exp(np.where(seen, scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), np.repeat(v, 2, 1))
        gate, up = np.split(h @ block["gate_up"].T, 2, -1)
        x = x + attended.reshape(length, -1) @ block["out"].T + (np.tanh(gate) * up) @ block["down"].T
    return norm(x[-1], weights["last_norm"]) @ weights["out_words"].T


def test_it_generates_what_its_arithmetic_says(registered: None, tmp_path: Path) -> None:
    weights, prompt = tensors(), [5, 9, 2, 33, 41, 7, 7, 18, 29, 3, 50]
    folder = write_hf(tmp_path / "toy", CONFIG, weights)
    sizes: dict[str, Any] = dict(max_len=32, max_rows=1, page_size=4, num_pages=12, token_budget=32)
    llm = LLM.load(folder, dtype="float32", progress=False, **sizes)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)
    (out,) = llm.generate([prompt], params, progress=False)
    tokens = list(prompt)
    assert out.outputs[0].logprobs is not None
    for token, found in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True):
        expected = logits(weights, tokens)
        assert token == expected.argmax()
        assert abs(found.logprob - (expected.max() - np.log(np.exp(expected).sum()))) < 1e-4
        tokens.append(token)


def test_the_toy_is_short() -> None:
    assert len((Path(__file__).parent / "toy.py").read_text().splitlines()) < 150


def test_what_is_taken_or_unknown_is_refused(registered: None) -> None:
    assert find_family(CONFIG).name == "toy"
    assert FAMILIES[-1].revision, "programs on disk are named after the source"
    with pytest.raises(ConfigError, match="family 'toy': ToyForCausalLM, toy is taken by family 'toy'"):
        register_family(TOY)
    with pytest.raises(ConfigError, match="LlamaForCausalLM is taken by family 'llama'"):
        register_family(dataclasses.replace(TOY, name="x", architectures=("LlamaForCausalLM",), model_types=()))
    with pytest.raises(ConfigError, match="no family 'llama' was registered"):
        unregister_family("llama")


def test_before_it_is_registered() -> None:
    with pytest.raises(CheckpointError, match=r"'ToyForCausalLM'.*is not a model that jaxkv knows"):
        find_family(CONFIG)
