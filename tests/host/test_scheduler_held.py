"""Requests whose grammar is still being compiled: their prompts are computed meanwhile, and nothing is sampled."""

import pytest

from jaxkv.request import FinishReason
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop


def add_held(loop: Loop, request_id: str = "held", length: int = 30, **params) -> None:
    loop.add(make_request(request_id, make_prompt(length), max_tokens=5, **params), held=True)


def run_dry(loop: Loop) -> None:
    while loop.step() is not None or loop.results:
        pass


def test_the_prompt_is_computed_while_the_grammar_is_compiled() -> None:
    loop = Loop(small_config(token_budget=8))
    add_held(loop)
    run_dry(loop)
    stats = loop.scheduler.stats()
    assert loop.runner.num_computed == 28, "its full pages"
    assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.pages_cached) == (0, 0, 0, 7)
    assert loop.scheduler.has_unfinished and not loop.streamed

    loop.release()
    plan = loop.dispatch()
    assert plan is not None and [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(28, 2)]
    loop.drain()
    loop.check_against_alone()
    done = loop.finished["held", 0]
    assert (done.cached_tokens, done.cache_written_tokens, done.num_preemptions) == (0, 28, 0), (
        "it computed them itself"
    )
    assert loop.admitted == ["held"]


def test_a_grammar_that_comes_first_loses_no_page() -> None:
    loop = Loop(small_config(token_budget=10))
    add_held(loop)
    loop.dispatch()
    loop.dispatch()  # 20 of 30 tokens, in five pages
    loop.release()
    loop.drain()
    loop.check_against_alone()
    assert loop.runner.num_computed == 30 + 5 - 1


def test_without_a_cache_there_is_nothing_to_compute_ahead() -> None:
    loop = Loop(small_config(prefix_cache=False))
    add_held(loop)
    assert loop.dispatch() is None
    loop.release()
    loop.drain()
    loop.check_against_alone()


@pytest.mark.parametrize("length", [4, 30])
def test_what_is_cached_or_shorter_than_a_page_needs_no_step(length: int) -> None:
    loop = Loop(small_config())
    loop.add(make_request("before", make_prompt(30), max_tokens=1))
    loop.drain()
    add_held(loop, length=length)
    assert loop.dispatch() is None and loop.scheduler.stats().num_waiting == 0
    loop.release()
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["held", 0].cached_tokens == (length - 1) // 4 * 4


def test_chunks_are_whole_tiles() -> None:
    """The fake runner asserts it; what is less than one is left to the end."""
    loop = Loop(small_config(chunk_align=16, token_budget=32))
    add_held(loop, length=39)
    run_dry(loop)
    assert loop.runner.num_computed == 32
    loop.release()
    loop.drain()
    loop.check_against_alone()


def test_nothing_computed_ahead_is_lost_to_more_of_it() -> None:
    loop = Loop(small_config(token_budget=32))  # 40 pages: each needs 8
    for number in range(12):
        loop.add(make_request(str(number), make_prompt(30, start=number), max_tokens=5), held=True)
    run_dry(loop)
    assert loop.runner.num_computed == 2 * 28, "as many as half of the pages hold"
    loop.drain()
    loop.check_against_alone()
    assert loop.runner.num_computed == 12 * (30 + 5 - 1)


def test_one_that_is_refused_or_aborted_leaves_nothing() -> None:
    loop = Loop(small_config(token_budget=8))
    for name in ["refused", "aborted", "released"]:
        add_held(loop, name)
    loop.dispatch()
    loop.scheduler.finish("refused", 0, reason=FinishReason.ERROR, error="no text fulfils it")
    loop.scheduler.abort("aborted")
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["released", 0].reason is FinishReason.LENGTH and not loop.finished["refused", 0].token_ids.size
    assert loop.scheduler.stats().pages_used == 0


def test_scores_of_the_prompt_come_once() -> None:
    loop = Loop(small_config(token_budget=8))
    add_held(loop, prompt_logprobs=0, n=2)
    run_dry(loop)
    assert len(loop.scores["held"]) == 28
    loop.drain()
    loop.check_against_alone()
    assert len(loop.scores["held"]) == 29 and len(loop.finished) == 2
