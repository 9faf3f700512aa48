"""Rotary frequencies and phases against transformers, up to position 128k."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.hf_config import HfConfig
from jaxkv.models.hf_geometry import read_rope
from jaxkv.models.rope import Rope, rotate

parity = pytest.mark.parity
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {
    "rope_type": "longrope", "short_factor": np.linspace(1, 3, 48).tolist(), "long_factor": np.linspace(1, 60, 48).tolist(),
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-mscale": YARN
    | {"mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 0.9},
    "llama3": LLAMA3,
    "longrope": LONG,
    "longrope-factors": LONG | {"attention_factor": 1.3, "factor": 16.0},
}


def init_functions() -> Any:
    """By kind of rope: frequencies and the factor of cosines and sines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        return pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS


def both(parameters: dict[str, Any], base: float, max_len: int = 131072) -> tuple[Any, Rope]:
    transformers = pytest.importorskip("transformers")
    values = {"rope_theta": base, **parameters}
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=max_len,
        rope_parameters=dict(values),
    )
    fields = {"head_dim": 128, "max_len": max_len}
    return config, read_rope(HfConfig({"rope_parameters": values}), fields, is_partial=True)


@parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_phases(kind: str, base: float) -> None:
    functions = init_functions()
    config, rope = both(KINDS[kind], base)
    for seq_len in (64, 131072):
        freq, factor = functions[KINDS[kind]["rope_type"]](config, "cpu", seq_len=seq_len)
        here = rope.for_len(seq_len)
        np.testing.assert_allclose(here.inv_freq(), freq.numpy(), rtol=3e-7)
        assert here.attention_factor == pytest.approx(factor)
        positions = np.array([0, 1, 100, 4095, 8192, 40000, 131071], np.int32)
        cos, sin = here.phases(jnp.asarray(positions))
        angle = positions[:, None].astype(np.float64) * here.inv_freq().astype(np.float64)
        # The angle itself is rounded to float32: half a unit in the last place of 131071 is 0.004.
        np.testing.assert_allclose(np.asarray(cos)[:, 0], np.cos(angle) * factor, atol=0.006 * factor)
        np.testing.assert_allclose(np.asarray(sin)[:, 0], np.sin(angle) * factor, atol=0.006 * factor)


@parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [1, 4096, 4097, 5000, 16000])
def test_dynamic_turns_each_token_as_the_last_of_its_sequence(length: int) -> None:
    functions = init_functions()
    config, rope = both(KINDS["dynamic"], 10000.0, max_len=4096)
    freq, _ = functions["dynamic"](config, "cpu", seq_len=length)
    cos, _ = rope.phases(jnp.asarray([length - 1], jnp.int32))
    np.testing.assert_allclose(np.asarray(cos)[0, 0], np.cos((length - 1) * freq.numpy().astype(np.float64)), atol=0.01)


def test_positions_beyond_what_bfloat16_and_float16_tell_apart() -> None:
    cos, sin = Rope(head_dim=128, base=5e5).phases(jnp.asarray([131070, 131071], jnp.int32))
    turned = np.arctan2(np.asarray(sin)[1, 0, 0], np.asarray(cos)[1, 0, 0]) - np.arctan2(
        np.asarray(sin)[0, 0, 0], np.asarray(cos)[0, 0, 0]
    )
    assert turned % (2 * np.pi) == pytest.approx(1.0, abs=1e-3)


def test_a_part_of_a_head_is_rotated() -> None:
    x = jnp.ones((2, 1, 8), jnp.float32)
    out = np.asarray(rotate(x, Rope(head_dim=8, width=4).phases(jnp.asarray([0, 3], jnp.int32))))
    np.testing.assert_array_equal(out[:, :, 4:], 1)
    np.testing.assert_array_equal(out[0], 1)
    assert abs(out[1, 0, 0] - (np.cos(3) - np.sin(3))) < 1e-6
