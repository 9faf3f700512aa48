"""Explanations against a running engine: what is cached now, what was evicted, and that looking changes nothing."""

import pytest

from jaxkv.errors import RequestError
from jaxkv.explain import Cause, Explanation, explain_live, parse_ask
from jaxkv.intake import Intake
from tests.fake_model import VOCAB, make_prompt, make_request, small_config
from tests.fake_runner import Loop, run

PROMPT = make_prompt(23)
INTAKE = Intake(vocab_size=VOCAB, eos_ids=())


def ask(loop: Loop, request: object, previous: object = None) -> Explanation:
    before = [(memory.counts, list(memory._cache._page_of)) for memory in loop.scheduler._roster.memories]
    found = explain_live(request, previous, scheduler=loop.scheduler, intake=INTAKE)
    loop.scheduler.check()
    assert before == [(memory.counts, list(memory._cache._page_of)) for memory in loop.scheduler._roster.memories]
    return found


def test_before_and_after() -> None:
    loop = Loop(small_config())
    cold = ask(loop, PROMPT)
    assert (cold.cause, cold.cached_now.num_pages) == (Cause.NOT_CACHED, 0)
    assert cold.detail == "the key of page 0 (tokens 0 to 3) is unknown"
    run(loop, make_request("first", PROMPT, max_tokens=2))
    warm = ask(loop, {"prompt": PROMPT})
    assert (warm.cause, warm.cached_now.num_pages, warm.cached_now.num_tokens) == (Cause.CACHED, 5, 20)
    longer = ask(loop, [*PROMPT, *make_prompt(9, start=3)])
    assert longer.cause is Cause.NOT_CACHED and longer.cached_now.num_pages == 5
    run(loop, make_request("second", PROMPT, max_tokens=2))
    assert loop.finished["second", 0].cached_tokens == warm.cached_now.num_tokens


def test_salt_and_scores() -> None:
    loop = run(Loop(small_config()), make_request("first", PROMPT, max_tokens=2, salt="x"))
    assert ask(loop, {"prompt": PROMPT, "cache_salt": "x"}).cause is Cause.CACHED
    assert ask(loop, {"prompt": PROMPT}).cause is Cause.NOT_CACHED
    assert ask(loop, {"prompt": PROMPT}, {"prompt": PROMPT, "cache_salt": "x"}).cause is Cause.SALT
    scored = ask(loop, {"prompt": PROMPT, "cache_salt": "x", "prompt_logprobs": 1})
    assert (scored.cause, scored.cached_now.num_pages) == (Cause.SCORED, 0)


def test_evicted() -> None:
    loop = run(Loop(small_config(num_pages=10)), make_request("first", PROMPT, max_tokens=2))
    assert ask(loop, PROMPT, PROMPT).cause is Cause.EQUAL
    run(loop, make_request("other", make_prompt(30, start=5), max_tokens=2))
    found = ask(loop, PROMPT, PROMPT)
    assert found.cause is Cause.EVICTED
    assert found.pages_kept == 5 and found.cached_now.num_pages < 5


def test_short_and_off() -> None:
    loop = Loop(small_config(prefix_cache=False))
    found = explain_live(PROMPT, PROMPT, scheduler=loop.scheduler, intake=INTAKE)
    assert "prefix_cache=True" in found.notes[-1]
    assert ask(Loop(small_config()), [1, 2]).cause is Cause.BELOW_PAGE


def test_data_shards() -> None:
    loop = Loop(small_config(num_shards=2))
    run(loop, make_request("first", PROMPT, max_tokens=2))
    assert ask(loop, PROMPT).cause is Cause.CACHED


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("text", "no tokenizer"),
        ([99], "outside the vocabulary"),
        ({"prompt": [1], "prompt_logprobs": 99}, "prompt_logprobs=99"),
    ],
)
def test_refusals(request_: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ask(Loop(small_config()), request_)


def test_marks_do_not_change_the_prompt() -> None:
    """They say what to keep, not what the model reads."""
    bare = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [bare[0] | mark, {"role": "user", "content": [bare[1]["content"][0] | mark]}]
    plain, kept = (
        parse_ask({"messages": bare, "tools": [tool]}),
        parse_ask({"messages": marked, "tools": [tool | mark]}),
    )
    assert (plain.messages, plain.tools) == (kept.messages, kept.tools)
