"""SmolLM2-135M out of its GGUF file, against Hugging Face transformers in float32.

Expected values: transformers 5.24, torch 2.13, the GGUF's weights dequantised to float32 exactly, greedy.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.catalog import open_model
from jaxkv.checkpoint.orbax import OrbaxSource
from jaxkv.convert import convert
from jaxkv.tokenizer import load_tokenizer
from tests.checkpoint.tools import assert_same_params, load, logits

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
TOP_5 = [  # of the first four steps: id -> log-probability
    {7042: -0.25807, 260: -2.74075, 4528: -4.38436, 2250: -4.61987, 1315: -4.67781},
    {30: -0.38013, 28: -1.6585, 284: -2.99539, 365: -4.45164, 1270: -4.50598},
    {198: -1.00935, 378: -2.43566, 7042: -2.60306, 2: -2.93381, 669: -3.19559},
    {198: -0.87927, 29: -2.21687, 26: -2.45978, 504: -3.08313, 38634: -3.64662},
]


def test_logits_and_greedy_ids_of_transformers(smollm2_gguf_path: Path) -> None:
    """One pass over prompt and answer: greedy decoding gives these ids if each one is the best after those before."""
    model = load(open_model(smollm2_gguf_path), per_layer=False)
    last = logits(model, PROMPT + GREEDY)[len(PROMPT) - 1 : -1]
    assert last.argmax(axis=-1).tolist() == GREEDY
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(last)))
    for step, expected in enumerate(TOP_5):
        np.testing.assert_allclose(logprobs[step, list(expected)], list(expected.values()), atol=1e-4)


def test_a_converted_checkpoint_is_the_same_model(smollm2_gguf_path: Path, tmp_path: Path) -> None:
    """Weights bit for bit, tokenizer, chat template and end ids."""
    source = open_model(smollm2_gguf_path)
    folder = convert(smollm2_gguf_path, tmp_path / "out")
    converted = OrbaxSource(folder)
    assert converted.auto_dtype == "bfloat16"
    assert_same_params(load(converted, dtype="bfloat16"), load(source, dtype="bfloat16"))
    assert source.tokenizer_source is not None and converted.tokenizer_source is not None
    theirs, ours = load_tokenizer(source.tokenizer_source), load_tokenizer(converted.tokenizer_source)
    messages = [{"role": "user", "content": "Wie geht's? 12 ½ 🙂"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert ours.eos_ids == theirs.eos_ids == frozenset({2})
