"""Three numbers kept apart: read, written, the rest. Together they are the prompt, whatever happens on the way."""

import pytest

from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop, run


def usage(loop: Loop, name: str) -> tuple[int, int, int]:
    """Prompt tokens read, written, and the rest, as the output has them."""
    (last,) = [done for (request_id, _), done in loop.finished.items() if request_id == name and done.is_last]
    read, written = last.cached_tokens, last.cache_written_tokens
    return read, written, len(loop.requests[name].prompt_token_ids) - read - written


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 13])
def test_09_cold_and_warm(length: int, depth: int):
    loop = run(Loop(small_config(), depth=depth), make_request("cold", make_prompt(length), max_tokens=3))
    run(loop, make_request("warm", make_prompt(length), max_tokens=3))
    full, hit = length // 4 * 4, (length - 1) // 4 * 4
    assert usage(loop, "cold") == (0, full, length - full)
    assert usage(loop, "warm") == (hit, 0, length - hit), "the last page is computed again, and known already"


def test_a_longer_prompt_reads_the_old_part_and_writes_the_new():
    loop = run(Loop(small_config()), make_request("a", make_prompt(8), max_tokens=1))
    run(loop, make_request("b", make_prompt(18), max_tokens=1))
    assert usage(loop, "b") == (8, 8, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_03_scored_prompts_read_nothing_and_write_what_is_new(depth: int):
    loop = run(Loop(small_config(), depth=depth), make_request("plain", make_prompt(8), max_tokens=1))
    run(loop, make_request("scored", make_prompt(14), max_tokens=0, prompt_logprobs=0))
    assert usage(loop, "scored") == (0, 4, 10)


def test_08_generated_tokens_are_read_as_a_prompt_and_never_counted_as_written():
    loop = run(Loop(small_config()), make_request("turn 1", make_prompt(6), max_tokens=8))
    assert usage(loop, "turn 1") == (0, 4, 2), "the page that the prompt began and the output filled is no prompt page"
    dialogue = [*make_prompt(6), *loop.outputs()["turn 1", 0], *make_prompt(3, 2)]
    run(loop, make_request("turn 2", dialogue, max_tokens=1))
    assert usage(loop, "turn 2") == (12, 4, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_forks_count_their_prompt_once(depth: int):
    loop = run(Loop(small_config(), depth=depth), make_request("a", make_prompt(10), max_tokens=6, n=4))
    assert usage(loop, "a") == (0, 8, 2)
    run(loop, make_request("b", make_prompt(10), max_tokens=6, n=4))
    assert usage(loop, "b") == (8, 0, 2)
    stats = loop.scheduler.stats()
    assert (stats.num_cached_tokens, stats.num_written_tokens, stats.num_uncached_tokens) == (8, 8, 4)


def test_a_request_that_never_ran_is_not_counted():
    loop = Loop(small_config(max_rows=1))
    loop.add(make_request("runs", make_prompt(8), max_tokens=3))
    loop.add(make_request("waits", make_prompt(20, 1), max_tokens=3))
    loop.step()
    loop.scheduler.abort("waits")
    loop.drain()
    stats = loop.scheduler.stats()
    assert (stats.num_cached_tokens, stats.num_written_tokens, stats.num_uncached_tokens) == (0, 8, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_11_a_preemption_counts_nothing_twice(depth: int):
    loop = Loop(small_config(num_pages=9, max_rows=2), depth=depth)
    loop.add(make_request("first", make_prompt(12, 1), max_tokens=20))
    loop.step()
    loop.add(make_request("victim", make_prompt(12, 2), max_tokens=10))
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["victim", 0].num_preemptions >= 1, "the case needs a preemption"
    assert usage(loop, "victim") == (0, 12, 0)
    assert usage(loop, "first") == (0, 12, 0)


def preempt(loop: Loop, name: str, num_steps: int) -> int:
    """Takes a request's pages away after some steps; returns how many tokens it has written."""
    for _ in range(num_steps):
        loop.step()
    loop.scheduler._note_dispatched()
    seq = loop.scheduler._roster.sequences(name)[0]
    loop.scheduler._roster.preempt(seq)
    return seq.cache_written_tokens


def test_11_pages_that_were_lost_and_computed_again_count_once():
    loop = Loop(small_config(num_pages=11, max_rows=1, token_budget=5), depth=1)
    loop.add(make_request("slow", make_prompt(28), max_tokens=1))
    assert preempt(loop, "slow", num_steps=3) == 12
    loop.add(make_request("other", make_prompt(39, 1), max_tokens=1, priority=-5))
    loop.drain()
    loop.check_against_alone()
    assert usage(loop, "slow") == (0, 28, 0)


def test_11_a_page_that_prompt_and_output_share_is_not_read_after_a_preemption():
    loop = Loop(small_config(), depth=1)
    loop.add(make_request("a", make_prompt(10), max_tokens=10))
    assert preempt(loop, "a", num_steps=5) == 8
    loop.drain()
    loop.check_against_alone()
    assert [plan.chunks[0].start for plan in loop.plans if plan.chunks] == [0, 12], (
        "the case needs a hit beyond the prompt"
    )
    assert usage(loop, "a") == (0, 8, 2)


def test_after_a_preemption_what_others_computed_meanwhile_is_read():
    loop = Loop(small_config(num_pages=11, max_rows=2, token_budget=5), depth=1)
    loop.add(make_request("slow", make_prompt(28), max_tokens=1))
    num_settled = preempt(loop, "slow", num_steps=3)
    assert 0 < num_settled < 28
    loop.add(make_request("other", make_prompt(28), max_tokens=1, priority=-5))
    loop.drain()
    loop.check_against_alone()
    assert usage(loop, "other") == (num_settled, 28 - num_settled, 0)
    assert usage(loop, "slow") == (24 - num_settled, num_settled, 4)


def test_two_shards_that_compute_the_same_both_write_it():
    loop = Loop(small_config(num_shards=2, num_pages=11), depth=1)
    run(loop, *[make_request(name, make_prompt(13), max_tokens=2) for name in "abc"])
    assert [usage(loop, name) for name in "abc"] == [(0, 12, 1), (0, 12, 1), (12, 0, 1)], "each has pages of its own"


def test_what_someone_else_published_first_is_not_written():
    loop = Loop(small_config(max_bypass=0), depth=1)  # nobody waits for a prefix
    run(loop, *[make_request(name, make_prompt(9), max_tokens=2) for name in "ab"])
    assert [usage(loop, name) for name in "ab"] == [(0, 8, 1), (0, 0, 9)]


def test_without_a_cache_nothing_is_read_or_written():
    loop = run(Loop(small_config(prefix_cache=False)), make_request("a", make_prompt(13), max_tokens=2))
    assert usage(loop, "a") == (0, 0, 13)


def test_who_never_ran_read_and_wrote_nothing():
    loop = Loop(small_config(max_rows=1))
    loop.add(make_request("a", make_prompt(8), max_tokens=20))
    loop.step()
    loop.add(make_request("waits", make_prompt(13, 1), max_tokens=2))
    loop.scheduler.abort("waits")
    loop.drain()
    assert usage(loop, "waits") == (0, 0, 13)


def test_new_weights_end_what_a_running_prompt_writes():
    loop = Loop(small_config(token_budget=8, max_rows=1), depth=1)
    loop.add(make_request("a", make_prompt(22), max_tokens=1))
    loop.step()
    loop.step()
    loop.scheduler.clear_cache(b"new weights")
    loop.drain()
    assert usage(loop, "a") == (0, 8, 14)
