"""A pool narrower than the activations: rounds K and V, and changes nothing else."""

from pathlib import Path

import numpy as np
import pytest

from jaxkv.api import LLM
from jaxkv.request import SamplingParams
from tests.checkpoint.tools import hf_config, random_tensors, write_hf

SETTINGS = dict(max_len=64, max_rows=2, page_size=8, num_pages=24, token_budget=64, decode_steps=4, dtype="float32")
PROMPT = [5, 6, 7, 20, 31, 4] * 5


@pytest.mark.parametrize(("kv_dtype", "most"), [("bfloat16", 0.02), ("float8_e4m3fn", 0.3)])
def test_scores_are_those_of_rounded_keys_and_values(tmp_path: Path, kv_dtype: str, most: float) -> None:
    config = hf_config()
    folder = write_hf(tmp_path, config, random_tensors(config))
    scores = []
    for settings in ({}, {"kv_dtype": kv_dtype}):
        llm = LLM.load(folder, **SETTINGS, **settings)
        (output,) = llm.score([PROMPT])
        scores.append(np.array([each.logprob for each in output.prompt_logprobs or () if each is not None]))
        assert llm.dtype == "float32" and llm.kv_dtype == settings.get("kv_dtype", "float32")
    difference = np.abs(scores[0] - scores[1]).max()
    assert 1e-6 < difference < most


def test_a_reused_prefix_gives_the_same_tokens(tmp_path: Path) -> None:
    config = hf_config()
    llm = LLM.load(write_hf(tmp_path, config, random_tensors(config)), **SETTINGS, kv_dtype="float8_e4m3fn")
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    cold, warm = (llm.generate([PROMPT], params)[0] for _ in range(2))
    assert warm.cached_tokens == 24 and warm.outputs[0].token_ids == cold.outputs[0].token_ids
