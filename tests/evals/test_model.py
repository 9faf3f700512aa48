"""`--model jaxkv` of lm-evaluation-harness: on a tiny model against plain scoring, on SmolLM2 against Hugging Face."""

# The harness' decorators hide what its functions and classes take.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from jaxkv import LLM, SamplingParams
from jaxkv.errors import ConfigError, RequestError
from jaxkv.evals.generation import read_gen_kwargs
from jaxkv.evals.model import JaxkvLM
from tests.evals.tasks import exercises, questions
from tests.serve.stage import load_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(llm: LLM) -> JaxkvLM:
    return get_model("jaxkv")(llm, max_gen_toks=8)


def ask(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def plain_score(llm: LLM, token_ids: list[int], start: int) -> tuple[float, bool]:
    """The slow way: the whole prompt is scored, and nothing is reused."""
    llm.clear_prefix_cache()
    (output,) = llm.score([token_ids], top=1)
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs[start:] if entry is not None]
    return sum(entry.logprob for entry in entries), all(entry.top[0][0] == entry.token_id for entry in entries)


def test_log_likelihoods_are_those_of_plain_scoring(llm: LLM, model: JaxkvLM) -> None:
    context = "The quick brown fox jumps over the lazy dog. " * 2
    pairs = [
        (context, " and"),
        (context, " then it sleeps"),
        ("", "A fox"),
        (context[:30], " x"),
        (context, " and then"),
    ]
    llm.clear_prefix_cache()
    before = llm.stats().num_hit_tokens
    got = model.loglikelihood(ask("loglikelihood", *pairs), disable_tqdm=True)
    assert llm.stats().num_hit_tokens - before >= 2 * (len(model.tok_encode(context)) // 8 - 1) * 8, (
        "the context is shared"
    )
    for (before_it, text), (score, is_greedy) in zip(pairs, got, strict=True):
        whole = model.tok_encode(before_it + text) if before_it else [model.prefix_token_id, *model.tok_encode(text)]
        start = len(model.tok_encode(before_it.rstrip())) if before_it else 1  # spaces go with what follows
        expected, flag = plain_score(llm, whole, start)
        assert score == pytest.approx(expected, abs=1e-4) and is_greedy == flag


def test_a_greedy_continuation_is_known_as_one(llm: LLM, model: JaxkvLM) -> None:
    prompt = model.tok_encode("The quick brown")
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    best = list(output.outputs[0].token_ids)
    other = [*best[:-1], (best[-1] + 1) % llm.tokenizer.vocab_size]
    got = model._loglikelihood_tokens([(None, prompt, best), (None, prompt, other)], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in got] == [True, False] and got[0][0] > got[1][0]


def test_long_texts_are_scored_in_windows(llm: LLM, model: JaxkvLM) -> None:
    """Each token counts once, with as much before it as there is room for."""
    text = "".join(f"{number} foxes jump. " for number in range(60))
    ids = [model.prefix_token_id, *model.tok_encode(text)]
    assert len(ids) > llm.max_len
    (got,) = model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), disable_tqdm=True)
    size, expected = model.max_length, 0.0
    expected += plain_score(llm, ids[: size + 1], 1)[0]
    done = size + 1
    while done < len(ids):
        end = min(done + size, len(ids))
        expected += plain_score(llm, ids[end - size - 1 : end], size + 1 - (end - done))[0]
        done = end
    assert got == pytest.approx(expected, abs=1e-2)
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", ("",)), disable_tqdm=True) == [0]


def test_answers_end_where_the_task_says(llm: LLM, model: JaxkvLM) -> None:
    (plain,) = llm.generate(["The fox"], SamplingParams(max_tokens=8, temperature=0))
    text = plain.outputs[0].text
    asked = [
        ("The fox", {}),
        ("The fox", {"until": [text[2:4]], "do_sample": False}),
        ("x " * 300, {"max_gen_toks": 3}),
    ]
    got = model.generate_until(ask("generate_until", *asked), disable_tqdm=True)
    assert got[0] == text and got[1] == text[: text.index(text[2:4])]
    room = model.tok_encode("x " * 300)[-(llm.max_len - 3) :]
    assert got[2] == llm.generate([room], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].text


def test_what_a_task_says_about_sampling() -> None:
    assert read_gen_kwargs({"until": "\n"}, 7) == SamplingParams(max_tokens=7, stop=("\n",), temperature=0)
    asked = {"until": ["a", ""], "max_gen_toks": 3, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert read_gen_kwargs(asked, 7) == SamplingParams(max_tokens=3, stop=("a",), temperature=0.5, top_p=0.9)
    assert read_gen_kwargs({"do_sample": True}, 7).temperature == 1.0
    with pytest.raises(RequestError, match="num_beams"):
        read_gen_kwargs({"num_beams": 4}, 7)


def test_what_is_not_supported_is_refused(llm: LLM, model: JaxkvLM) -> None:
    for arguments in ({"batch_size": 8}, {"device": "cuda"}, {"max_len": 3}):
        with pytest.raises(ConfigError):
            JaxkvLM(llm, **arguments)
    with pytest.raises(RequestError, match="continuation of 256 tokens"):
        model._loglikelihood_tokens([(None, [5], [6] * 256)])


def test_there_are_enough_documents() -> None:
    assert len(questions()) + len(exercises()) >= 200


@pytest.mark.parity
@pytest.mark.exhaustive
def test_the_harness_says_the_same_of_hugging_face(smollm2_gguf_path: Path) -> None:
    """SmolLM2 in float32, natively, over HTTP and in transformers."""
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name)
    script = Path(__file__).parents[2] / "scripts" / "bench_evals.py"
    command = [sys.executable, str(script), "--http", "--questions", "40", "--exercises", "21"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["accuracy"]["jaxkv"] == told["accuracy"]["hf"] == told["accuracy"]["http"]
    for which in ("against_hf", "http_against_jaxkv"):
        each = told[which]
        assert each["num_scores"] == 160 and each["num_texts"] == 21
        assert each["max_diff"] < 1e-3 and each["num_other_greedy"] == each["num_other_texts"] == 0
