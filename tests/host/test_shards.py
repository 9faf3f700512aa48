"""Data shards on the host: where a sequence goes, whom it can push out, and that shards stay apart."""

import numpy as np
import pytest

from jaxkv.errors import CapacityError, ConfigError
from jaxkv.request import FinishReason
from jaxkv.shards import Shards
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop, run


def two_shards(**changes) -> Loop:
    """Two shards with two rows and ten pages of 4 tokens each."""
    return Loop(small_config(**({"num_shards": 2, "num_pages": 11} | changes)), depth=1)


def shard_of(loop: Loop, request_id: str, child: int = 0) -> int:
    return loop.config.shards.of(loop.scheduler._roster.sequences(request_id)[child].row)


def used(loop: Loop) -> list[int]:
    return [memory.counts.referenced for memory in loop.scheduler._roster.memories]


def test_rows_are_split_evenly():
    shards = Shards(2, 3)
    assert shards.num_rows == 6 and list(shards.rows_of(1)) == [3, 4, 5]
    assert shards.of(2) == 0 and shards.of(np.array([0, 3, 5])).tolist() == [0, 1, 1]
    assert shards.sums(np.array([5, 0, 3]), np.array([1, 10, 100])) == [10, 101]
    assert Shards(1, 3).sums(np.array([0, 2]), np.array([1, 10])) == [11]


def test_rows_that_cannot_be_split_are_refused():
    with pytest.raises(ConfigError, match=r"max_rows=5 .*data=2.*multiple of 2"):
        small_config(max_rows=5, num_shards=2)
    assert small_config(max_rows=4, num_shards=2, token_budget=2, chunk_align=1).shards == Shards(2, 2)


def test_sequences_go_where_most_pages_are_free_then_to_the_lowest_shard():
    loop = two_shards()
    for name, length in (("a", 12), ("b", 4), ("c", 4)):
        loop.add(make_request(name, make_prompt(length, ord(name)), max_tokens=20))
    loop.step()
    assert [shard_of(loop, name) for name in "abc"] == [0, 1, 1]
    assert used(loop) == [3, 2]
    loop.drain()
    loop.check_against_alone()


def test_a_longer_hit_counts_more_than_free_pages():
    loop = two_shards(num_pages=21)
    run(loop, make_request("first", make_prompt(17), max_tokens=1))
    loop.add(make_request("filler", make_prompt(20, 1), max_tokens=20))
    loop.step()
    assert shard_of(loop, "filler") == 0, "nothing reused, and all pages are free everywhere"
    loop.add(make_request("again", make_prompt(17), max_tokens=20))
    loop.step()
    assert shard_of(loop, "again") == 0 and loop.scheduler.stats().num_hit_tokens == 16
    loop.drain()
    loop.check_against_alone()


def test_a_hit_on_a_full_shard_does_not_hold_anybody_up():
    loop = two_shards(max_rows=2)
    loop.add(make_request("a", make_prompt(9), max_tokens=20))
    loop.step()
    loop.add(make_request("b", make_prompt(9), max_tokens=20))
    loop.step()
    assert [shard_of(loop, name) for name in "ab"] == [0, 1]
    assert loop.scheduler.stats().num_hit_tokens == 0
    loop.drain()
    loop.check_against_alone()


def test_equal_prompts_that_come_together_use_both_shards_before_one_waits():
    loop = two_shards()
    for name in "abc":
        loop.add(make_request(name, make_prompt(13), max_tokens=8))
    loop.step()
    assert [(chunk.row, chunk.start) for chunk in loop.plans[0].chunks] == [(0, 0), (2, 0)]
    loop.step()
    assert [(chunk.row, chunk.start) for chunk in loop.plans[1].chunks] == [(1, 12)], "shared one step later"
    loop.drain()
    loop.check_against_alone()


@pytest.mark.parametrize("depth", [1, 2])
def test_forks_stay_with_their_parent_as_long_as_it_has_rows(depth: int):
    loop = Loop(small_config(num_shards=2, max_rows=6, num_pages=31), depth=depth)
    loop.add(make_request("a", make_prompt(10), max_tokens=20, n=5))
    for _ in range(4):
        loop.step()
    assert [shard_of(loop, "a", child) for child in range(5)] == [0, 0, 0, 1, 1]
    copies = [copy for plan in loop.plans for copy in plan.page_copies]
    assert [copy.row for copy in copies] == [1, 2]
    loop.drain()
    loop.check_against_alone()


def test_the_budget_is_each_shards_own():
    loop = two_shards(token_budget=9, chunk_align=4)
    for name in "ab":
        loop.add(make_request(name, make_prompt(20, ord(name)), max_tokens=2))
    loop.step()
    assert [(chunk.row, len(chunk.token_ids)) for chunk in loop.plans[0].chunks] == [(0, 8), (2, 8)]
    loop.drain()
    loop.check_against_alone()


def test_victims_are_on_the_shard_that_lacks_pages():
    loop = two_shards(num_pages=9, prefix_cache=False)
    # Two long ones meet on shard 0; the one that ranks last of all is on shard 1 and has nothing to fear.
    loop.add(make_request("a", make_prompt(12, 1), max_tokens=20))
    loop.add(make_request("b", make_prompt(12, 2), max_tokens=6, priority=3))
    loop.step()
    loop.add(make_request("c", make_prompt(12, 3), max_tokens=20))
    loop.step()
    shards = {name: shard_of(loop, name) for name in "abc"}
    assert shards == {"a": 0, "b": 1, "c": 0}
    loop.drain()
    loop.check_against_alone()
    assert {name: loop.finished[name, 0].num_preemptions > 0 for name in "abc"} == {"a": False, "b": False, "c": True}


def test_a_victim_may_come_back_on_the_other_shard():
    loop = two_shards(num_pages=9, prefix_cache=False)
    loop.add(make_request("a", make_prompt(12, 1), max_tokens=20))
    loop.add(make_request("b", make_prompt(12, 2), max_tokens=3))
    loop.step()
    loop.add(make_request("c", make_prompt(12, 3), max_tokens=20, temperature=0.5, seed=3))
    loop.step()
    seen = set()
    while loop.scheduler.has_unfinished:
        if ("c", 0) not in loop.finished and loop.scheduler._roster.sequences("c")[0].is_placed:
            seen.add(shard_of(loop, "c"))
        loop.step()
    loop.drain()
    loop.check_against_alone()
    assert seen == {0, 1} and loop.finished["c", 0].num_preemptions == 1


def test_a_request_has_one_shards_pages_only():
    loop = two_shards(num_pages=6, max_rows=2)
    loop.add(make_request("hungry", make_prompt(6), max_tokens=50))
    loop.add(make_request("other", make_prompt(6, 1), max_tokens=5))
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["hungry", 0].reason is FinishReason.ERROR
    assert "21 tokens need 6 pages of 4, each of the pool's 2 data shards has 5" in str(
        loop.finished["hungry", 0].error
    )
    assert loop.finished["other", 0].reason is FinishReason.LENGTH
    with pytest.raises(CapacityError, match="6 pages of 4 tokens, each of the pool's 2 data shards has 5"):
        loop.add(make_request("big", make_prompt(20), max_tokens=1))


def test_a_storm_on_two_shards():
    loop = Loop(small_config(num_shards=2, num_pages=17, decode_steps=3), depth=2)
    run(
        loop,
        *[
            make_request(f"r{number}", make_prompt(3 + number % 7, number % 3), max_tokens=9 + number, n=1 + number % 2)
            for number in range(14)
        ],
    )
    assert used(loop) == [0, 0]
    assert all(memory.counts.cached for memory in loop.scheduler._roster.memories)
