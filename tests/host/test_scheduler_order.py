"""Who of those that wait gets in, and where: cached prefixes first, keys together, nobody computes a prefix twice."""

import pytest

from jaxkv.cache.homes import MAX_HOMES, Homes
from jaxkv.request import FinishReason
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop, run
from tests.host.test_shards import shard_of, two_shards


def admitted_after(loop: Loop, *requests) -> list[str]:
    before = len(loop.admitted)
    run(loop, *requests)
    return loop.admitted[before:]


def question(name: str, task: int, number: int, **fields):
    """A request of one of several tasks: 12 tokens that the task's requests have in common, 3 of its own."""
    return make_request(name, [*make_prompt(12, task), *make_prompt(3, 20 + number)], max_tokens=1, **fields)


def test_of_equals_the_longest_cached_prefix_gets_in_first():
    loop = run(Loop(small_config(max_rows=1)), make_request("warm", make_prompt(12), max_tokens=1))
    asked = [
        make_request("none", make_prompt(12, 1), max_tokens=1),
        make_request("short", make_prompt(5), max_tokens=1),
        make_request("long", make_prompt(11), max_tokens=1),
        make_request("other", make_prompt(12, 2), max_tokens=1),
    ]
    assert admitted_after(loop, *asked) == ["long", "short", "none", "other"]


def test_who_scores_its_prompt_reuses_nothing_and_does_not_overtake_for_it():
    loop = run(Loop(small_config(max_rows=1)), make_request("warm", make_prompt(12), max_tokens=1))
    scored = make_request("scored", make_prompt(12), max_tokens=0, prompt_logprobs=0)
    order = admitted_after(loop, make_request("first", make_prompt(12, 1), max_tokens=1), scored)
    assert order == ["first", "scored"]


def test_in_a_small_pool_interleaved_tasks_are_done_one_after_the_other():
    """Six pages hold one task: in order of arrival nothing would ever be found."""
    asked = [question(f"{task}{number}", task, number) for number in range(3) for task in range(3)]
    loop = Loop(small_config(num_pages=7, max_rows=1))
    order = admitted_after(loop, *asked)
    assert order == [f"{task}{number}" for task in range(3) for number in range(3)]
    assert loop.scheduler.stats().num_cached_tokens == 3 * 2 * 12, "each task is computed once"
    fair = run(Loop(small_config(num_pages=7, max_rows=1, max_bypass=0)), *asked)
    assert fair.admitted == [request.request_id for request in asked] and fair.scheduler.stats().num_cached_tokens == 0


@pytest.mark.parametrize("max_bypass", [1, 3])
def test_13_a_stream_of_hits_does_not_starve_the_one_that_misses(max_bypass: int):
    loop = run(
        Loop(small_config(max_rows=1, max_bypass=max_bypass)), make_request("warm", make_prompt(12), max_tokens=1)
    )
    hits = [question(f"hit {number}", 0, number) for number in range(6)]
    order = admitted_after(loop, make_request("miss", make_prompt(12, 5), max_tokens=1), *hits)
    assert order.index("miss") == max_bypass


def test_priority_goes_before_what_is_cached():
    loop = run(Loop(small_config(max_rows=1)), make_request("warm", make_prompt(12), max_tokens=1))
    order = admitted_after(
        loop, question("hit", 0, 1), make_request("urgent", make_prompt(9, 1), priority=-1, max_tokens=1)
    )
    assert order == ["urgent", "hit"]


# --- prompt_cache_key ------------------------------------------------------------------------------------------------


def lonely(name: str, start: int, **fields):
    """A request that shares nothing with others."""
    return make_request(name, make_prompt(6, start), max_tokens=1, **fields)


def test_requests_of_one_key_run_next_to_each_other():
    asked = [lonely(f"{key}{number}", 3 * number + at, key=key) for number in range(3) for at, key in enumerate("xyz")]
    loop = run(Loop(small_config(max_rows=1)), *asked)
    assert loop.admitted == [f"{key}{number}" for key in "xyz" for number in range(3)]
    without = [lonely(request.request_id, at) for at, request in enumerate(asked)]
    loop = run(Loop(small_config(max_rows=1)), *without)
    assert loop.admitted == [request.request_id for request in without]


def test_a_key_means_nothing_under_another_salt():
    asked = [lonely("a", 0, key="k", salt="x"), lonely("b", 1, key="j", salt="y"), lonely("c", 2, key="k", salt="y")]
    assert run(Loop(small_config(max_rows=1)), *asked).admitted == ["a", "b", "c"]


def test_a_cached_prefix_counts_more_than_a_key():
    loop = run(Loop(small_config(max_rows=1)), make_request("warm", make_prompt(9, 4), max_tokens=1))
    run(loop, lonely("first", 0, key="k"))
    order = admitted_after(loop, lonely("same key", 1, key="k"), make_request("hit", make_prompt(9, 4), max_tokens=1))
    assert order == ["hit", "same key"]


def test_requests_of_one_key_stay_on_one_shard():
    loop = two_shards(max_rows=8, num_pages=41)
    loop.add(make_request("k0", make_prompt(6), max_tokens=30, key="k"))
    loop.step()
    for number in range(1, 4):  # all on shard 0, though shard 1 is empty
        loop.add(make_request(f"k{number}", make_prompt(6, number), max_tokens=30, key="k"))
        loop.step()
    loop.add(make_request("other", make_prompt(6, 7), max_tokens=30, key="j"))
    loop.step()
    assert [shard_of(loop, f"k{number}") for number in range(4)] == [0, 0, 0, 0] and shard_of(loop, "other") == 1
    loop.add(make_request("k4", make_prompt(6, 4), max_tokens=30, key="k"))
    loop.step()
    assert shard_of(loop, "k4") == 1, "home has no row left; it does not wait for one"
    loop.drain()
    loop.check_against_alone()


def test_more_to_reuse_counts_more_than_home():
    loop = two_shards(max_rows=4, num_pages=41)
    loop.add(make_request("k0", make_prompt(6), max_tokens=30, key="k"))
    loop.add(make_request("there", make_prompt(9, 1), max_tokens=30))
    loop.step()
    loop.step()
    loop.add(make_request("k1", make_prompt(9, 1), max_tokens=30, key="k"))
    loop.step()
    assert shard_of(loop, "there") == 1 == shard_of(loop, "k1")
    loop.drain()


def test_homes_are_bounded():
    homes = Homes()
    for number in range(MAX_HOMES + 5):
        homes.note(("", f"k{number}"), number % 2)
        homes.note(("", "k0"), 1)
    assert len(homes) == MAX_HOMES and homes.of(("", "k0")) == 1
    assert homes.of(("", "k1")) is None and homes.of(None) is None


# --- a prefix that is being computed ---------------------------------------------------------------------------------


def test_who_needs_what_another_shard_computes_waits_if_its_own_has_a_prompt_to_work_on():
    loop = two_shards(max_rows=4, num_pages=21, token_budget=16)
    loop.add(make_request("busy", make_prompt(40, 1), max_tokens=1))
    loop.step()
    loop.add(make_request("a", make_prompt(33), max_tokens=1))
    loop.step()
    loop.add(make_request("b", [*make_prompt(32), 7], max_tokens=1))
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["b", 0].cached_tokens == 32
    assert loop.runner.num_computed == 40 + 33 + 1


def test_three_prompts_on_two_shards_that_both_work_on_something_else():
    loop = two_shards(max_rows=8, num_pages=41, token_budget=24)
    for at, name in enumerate("xy"):
        loop.add(make_request(name, make_prompt(40, 5 + at), max_tokens=1))
    loop.step()
    for name in "abc":
        loop.add(make_request(name, [*make_prompt(32), ord(name) % 50], max_tokens=1))
    loop.drain()
    loop.check_against_alone()
    assert loop.runner.num_computed == 2 * 40 + 33 + 2, "nobody computes it twice"


def test_waiting_ends_when_the_one_that_computes_is_gone():
    loop = Loop(small_config(token_budget=8, max_rows=2), depth=1)
    loop.add(make_request("a", make_prompt(33), max_tokens=1))
    loop.step()
    loop.add(make_request("b", make_prompt(33), max_tokens=1))
    loop.step()
    loop.scheduler.abort("a")
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["b", 0].reason is FinishReason.LENGTH
    assert 0 < loop.finished["b", 0].cached_tokens < 32


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_tree_of_prompts_is_computed_once_for_each_shard_at_most(num_shards: int, depth: int):
    loop = Loop(small_config(num_shards=num_shards, max_rows=8, num_pages=101, token_budget=32), depth=depth)
    root = make_prompt(16)
    leaves = [[*root, *make_prompt(8, 1 + at % 3), *make_prompt(5, 10 + at)] for at in range(9)]
    run(loop, *[make_request(f"leaf {at}", leaf, max_tokens=1) for at, leaf in enumerate(leaves)])
    once = 16 + 3 * 8 + 9 * 5
    assert once <= loop.runner.num_computed <= once + (num_shards - 1) * (16 + 3 * 8)
