"""The whole chain on real weights: SmolLM2-135M-Instruct in float32."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxkv import LLM, CacheControl, SamplingParams
from jaxkv.errors import RequestError
from jaxkv.request import FinishReason
from jaxkv.structured import JsonSchema, Regex

pytestmark = pytest.mark.slow

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def llm(smollm2_gguf_path) -> LLM:
    return LLM.load("smollm2", dtype="float32", max_len=1024, max_rows=4, num_pages=300, progress=False, warm_up=True)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM):
    yield
    stats = llm.stats()
    assert stats.pages_used == 0
    assert stats.pages_free + stats.pages_cached == llm.num_pages


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 64, "temperature": 0.0, "ignore_eos": True} | changes))


def test_greedy_tokens_equal_hugging_face_and_nothing_compiles(llm: LLM) -> None:
    before = llm.stats().num_compiles
    outs = llm.generate([case["prompt_ids"] for case in CASES], greedy(skip_special_tokens=False))
    for out, case in zip(outs, CASES, strict=True):
        assert list(out.outputs[0].token_ids) == case["greedy_ids"], case["prompt"]
        assert out.outputs[0].text == case["text"]
    assert llm.stats().num_compiles == before


def test_a_warm_cache_changes_nothing_and_is_reported(llm: LLM) -> None:
    longest = max(CASES, key=lambda case: len(case["prompt_ids"]))
    llm.clear_prefix_cache()
    for cached in (0, (len(longest["prompt_ids"]) - 1) // llm.page_size * llm.page_size):
        (out,) = llm.generate([longest["prompt_ids"]], greedy(max_tokens=8))
        assert list(out.outputs[0].token_ids) == longest["greedy_ids"][:8]
        assert out.cached_tokens == cached


def used(out) -> tuple[int, int, int]:
    """Tokens read, written, and the rest."""
    assert out.cached_tokens + out.cache_written_tokens + out.uncached_tokens == len(out.prompt_token_ids)
    return out.cached_tokens, out.cache_written_tokens, out.uncached_tokens


def test_what_is_read_and_written_adds_up_and_what_is_kept_is_counted(llm: LLM) -> None:
    llm.clear_prefix_cache()
    prompt, before = list(range(100, 150)), llm.stats()
    control = CacheControl(breakpoints=[20, 40], ttl="5m")
    (cold,) = llm.generate([prompt], greedy(max_tokens=4), cache_control=control)
    assert used(cold) == (0, 48, 2)
    assert llm.stats().pages_retained == 2, "40 tokens are two whole pages"
    first, second = llm.generate([prompt, prompt], greedy(max_tokens=4), cache_control=[control, None])
    assert used(first) == used(second) == (48, 0, 2) and first.outputs[0].text == cold.outputs[0].text
    (other,) = llm.generate([prompt], greedy(max_tokens=4), cache_salt="tenant", prompt_cache_retention="24h")
    assert used(other) == (0, 48, 2) and llm.stats().pages_retained == 2 + 3
    after = llm.stats()
    assert after.num_cached_tokens - before.num_cached_tokens == 96
    assert after.num_written_tokens - before.num_written_tokens == 96
    assert after.num_uncached_tokens - before.num_uncached_tokens == 8


def test_marks_in_a_chat_keep_its_beginning_and_change_no_token(llm: LLM) -> None:
    llm.clear_prefix_cache()
    system = {"role": "system", "content": "You are a terse librarian. " * 8}
    question = {"role": "user", "content": "Which book is oldest?"}
    (plain,) = llm.chat([system, question], greedy(max_tokens=8))
    marked = {**system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    (kept,) = llm.chat([marked, question], greedy(max_tokens=8), prompt_cache_key="library")
    assert kept.prompt_token_ids == plain.prompt_token_ids and kept.outputs[0].text == plain.outputs[0].text
    assert 0 < llm.stats().pages_retained < len(plain.prompt_token_ids) // llm.page_size
    with pytest.raises(RequestError, match="5 cache breakpoints; the limit is 4"):
        llm.chat([marked] * 5, greedy())
    with pytest.raises(RequestError, match=r"breakpoints=\[60\] must lie within the prompt of 50 tokens"):
        llm.generate([list(range(100, 150))], greedy(), cache_control=CacheControl(breakpoints=[60]))
    pieces = llm.stream("Once upon a time", greedy(max_tokens=2), cache_control=CacheControl(ttl=1))
    assert "".join(pieces) and pieces.output is not None and pieces.output.cache_written_tokens == 0


def test_pieces_of_a_stream_join_to_the_text(llm: LLM) -> None:
    params = greedy(max_tokens=24, stop=("wavelength",))
    (out,) = llm.generate("Light has colours because", params)
    assert "".join(llm.stream("Light has colours because", params)) == out.outputs[0].text


def test_a_closed_stream_frees_its_pages(llm: LLM) -> None:
    pieces = llm.stream("Once upon a time", greedy(max_tokens=200))
    next(pieces)
    pieces.close()


def test_interleaved_streams_keep_apart(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    wanted = [out.outputs[0].text for out in llm.generate(prompts, greedy(max_tokens=12))]
    streams = [llm.stream(prompt, greedy(max_tokens=12)) for prompt in prompts]
    texts = ["", ""]
    for _ in range(12):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)] == wanted


def test_chat_uses_the_template_and_stops_at_the_end_of_turn(llm: LLM) -> None:
    (out,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=64, temperature=0)
    )
    assert "Paris" in out.outputs[0].text
    assert out.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in out.outputs[0].text


def test_children_differ_and_come_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=5)
    first, again = (llm.generate("My favourite animal is", params)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({c.token_ids for c in first.outputs}) == 3


def test_score_gives_the_prompts_own_logprobs(llm: LLM) -> None:
    (likely, unlikely) = llm.score(["The capital of France is Paris", "The capital of France is zebra"])
    assert likely.prompt_logprobs is not None and unlikely.prompt_logprobs is not None
    assert likely.prompt_logprobs[0] is None
    assert likely.prompt_logprobs[-1].logprob > unlikely.prompt_logprobs[-1].logprob + 5
    assert likely.outputs[0].token_ids == ()


def test_bfloat16_scores_texts_as_float32_does(llm: LLM) -> None:
    """Teacher-forced: greedy tokens part after a few steps in bf16, log-probabilities of given tokens stay close."""
    rough = LLM.load("smollm2", dtype="bfloat16", max_len=256, max_rows=2, num_pages=40, progress=False)
    prompts = [case["prompt_ids"] + case["greedy_ids"] for case in CASES[:3]]
    for exact, other in zip(llm.score(prompts), rough.score(prompts), strict=True):
        assert exact.prompt_logprobs is not None and other.prompt_logprobs is not None
        gaps = [
            abs(a.logprob - b.logprob)
            for a, b in zip(exact.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        ]
        assert sum(gaps) / len(gaps) < 0.1
        assert max(gaps) < 1.0


def test_a_structure_that_is_refused_raises_and_leaves_nothing(llm: LLM) -> None:
    some = [
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=4, structured=JsonSchema({"type": "string", "not": {}})),
    ]
    for _ in range(2):
        with pytest.raises(RequestError, match="no text fulfils it"):
            llm.generate(["One", "Two"], some)
    with pytest.raises(RequestError, match="no text fulfils it"):
        llm.stream("Two", some[1])
    stats = llm.stats()
    assert (stats.num_requests, stats.pages_used) == (0, 0)


def test_time_that_is_up_waits_for_no_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = llm._engine._grammars
    assert grammars is not None
    monkeypatch.setattr(grammars, "submit", lambda *_: concurrent.futures.Future())
    (output,) = llm.generate("One", SamplingParams(structured=Regex("a+")), timeout_s=0.2)
    assert output.outputs[0].finish_reason is FinishReason.ABORT and not output.outputs[0].token_ids


def test_refused_requests_leave_the_neighbours_alone(llm: LLM) -> None:
    with pytest.raises(RequestError, match="49152"):
        llm.generate(["fine", [1, 2, 49152]], greedy())
    with pytest.raises(RequestError, match="max_len=1024"):
        llm.generate([[5] * 1024], greedy())
    assert llm.generate("The capital of France is", greedy(max_tokens=1))[0].outputs[0].text == " Paris"


def test_a_second_start_compiles_nothing(smollm2_gguf_path, tmp_path) -> None:
    script = """
import jax
from jaxkv import LLM, SamplingParams
misses = []
jax.monitoring.register_event_listener(lambda event, **_: misses.append(event) if "cache_misses" in event else None)
llm = LLM.load("smollm2", max_len=256, max_rows=2, num_pages=64, progress=False)
llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0))
# Programs of steps come from a cache of our own, which jax hears nothing of: they must not even be traced.
print(len(misses), sum(llm._engine.runner.num_traces[name] for name in ("mixed", "decode")))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment["JAXKV_CACHE_DIR"] = str(tmp_path)
    first, second = (
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    )
    assert int(first[0]) > 0 and first[1] == "2"
    assert second == ["0", "0"]


def test_a_chat_session_says_what_one_prompt_says_and_finds_what_was_promised(llm: LLM) -> None:
    """Turns, parallel forks, a cut: tokens equal those of the whole conversation sent at once to an empty cache."""
    llm.clear_prefix_cache()
    system = {"role": "system", "content": "You are a terse librarian. Answer in one sentence."}
    params = SamplingParams(max_tokens=24, temperature=0.0)
    asked, outputs = [], []
    with llm.session([system]) as session:
        for question in ("Which book is oldest?", "And the newest?"):
            promised = session.report()
            outputs.append(session.chat(question, params))
            asked.append([*session.messages[:-1]])
            assert outputs[-1].cached_tokens == promised.kept_tokens
        forks = [session.fork() for _ in range(3)]
        turns = [
            fork.start(f"Name {count} authors.", params)
            for fork, count in zip(forks, ("two", "six", "ten"), strict=True)
        ]
        promised = session.report()
        assert promised.kept_tokens > 64 and promised.shared_pages == promised.kept_tokens // llm.page_size
        for fork, turn in zip(forks, turns, strict=True):
            outputs.append(turn.result())
            assert outputs[-1].cached_tokens >= promised.kept_tokens, "more where forks begin alike"
            asked.append(fork.messages[:-1])
            fork.close()
        cut = session.replace_tail([{"role": "user", "content": "Be brief."}], turns=1)
        assert 0 < cut.kept_tokens < promised.kept_tokens
        outputs.append(session.chat("Who wrote it?", params))
        assert outputs[-1].cached_tokens == cut.kept_tokens
        asked.append(session.messages[:-1])
        streamed = session.stream("Why?", params)
        text = "".join(streamed)
        assert session.messages[-1] == {"role": "assistant", "content": text}
    assert llm.stats().pages_held == 0
    for messages, output in zip(asked, outputs, strict=True):
        llm.clear_prefix_cache()
        (alone,) = llm.chat(messages, params)
        assert alone.prompt_token_ids == output.prompt_token_ids and alone.cached_tokens == 0
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
