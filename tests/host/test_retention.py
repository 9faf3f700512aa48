"""Pages that callers asked to keep, seen from outside: what survives a flood of other prompts, and for how long."""

import pytest

from jaxkv.errors import RequestError
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop, run

PREFIX = make_prompt(16)  # four pages


def small_pool(**changes) -> Loop:
    """Twelve pages of four tokens."""
    return Loop(small_config(num_pages=13, max_rows=1, **changes))


def flood(loop: Loop, num: int = 4) -> None:
    """Other prompts, each of eight pages."""
    for _ in range(num):
        number = len(loop.requests)
        run(loop, make_request(f"flood {number}", make_prompt(31, number + 1), max_tokens=1))


def cached_of(loop: Loop, prompt: list[int], salt: str = "") -> int:
    """Sends a prompt; returns how many of its tokens were cached."""
    name = f"asks {len(loop.requests)}"
    run(loop, make_request(name, prompt, max_tokens=1, salt=salt))
    return loop.finished[name, 0].cached_tokens


@pytest.mark.parametrize("eviction", ["lru", "cost", "adaptive"])
def test_kept_pages_survive_a_flood_until_their_deadline(eviction: str):
    loop = small_pool(eviction=eviction)
    run(loop, make_request("a", [*PREFIX, 1, 2, 3], max_tokens=1, marks=((16, 60.0),)))
    flood(loop)
    loop.now_s = 59.0
    assert cached_of(loop, [*PREFIX, 9]) == 16
    loop.now_s = 118.0
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 16, "each use sets the deadline anew, also by those who do not ask"
    loop.now_s = 178.1
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 0
    assert loop.scheduler.stats().num_retained_evictions == 0


@pytest.mark.parametrize("eviction", ["lru", "cost", "adaptive"])
@pytest.mark.parametrize("marks", [(), ((8, 5.0),)])
def test_a_time_that_is_over_does_no_harm(eviction: str, marks: tuple):
    """The tail that nobody marked is of no use without the marked head: it still goes first."""
    loop = run(small_pool(eviction=eviction), make_request("a", PREFIX, max_tokens=1, marks=marks))
    loop.now_s = 6.0
    run(loop, make_request("large", make_prompt(39, 1), max_tokens=1))
    assert cached_of(loop, [*PREFIX, 9]) == 8


def test_without_a_mark_a_flood_takes_them():
    loop = run(small_pool(), make_request("a", [*PREFIX, 1, 2, 3], max_tokens=1))
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 0


@pytest.mark.parametrize(("tokens", "kept"), [(3, 0), (4, 4), (11, 8), (16, 16)])
def test_whole_pages_before_the_breakpoint_are_kept_and_no_more(tokens: int, kept: int):
    loop = run(small_pool(), make_request("a", [*PREFIX, 1, 2, 3], max_tokens=1, marks=((tokens, 60.0),)))
    assert loop.scheduler.stats().pages_retained == kept // 4
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == kept


def test_each_breakpoint_has_its_time():
    loop = run(small_pool(), make_request("a", PREFIX, max_tokens=1, marks=((8, 100.0), (16, 10.0))))
    assert loop.scheduler.stats().pages_retained == 4
    loop.now_s = 50.0
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 8


def test_when_nothing_else_is_left_they_go_and_it_is_counted():
    loop = run(small_pool(), make_request("a", PREFIX, max_tokens=1, marks=((16, 1000.0),)))
    run(loop, make_request("huge", make_prompt(47, 1), max_tokens=1))
    stats = loop.scheduler.stats()
    assert (stats.num_retained_evictions, stats.pages_retained, stats.num_preemptions) == (4, 0, 0)
    assert cached_of(loop, [*PREFIX, 9]) == 0


def test_the_tail_of_what_is_kept_goes_first():
    loop = run(small_pool(), make_request("a", PREFIX, max_tokens=1, marks=((16, 1000.0),)))
    run(loop, make_request("large", make_prompt(39, 1), max_tokens=1))
    assert loop.scheduler.stats().num_retained_evictions == 2
    assert cached_of(loop, [*PREFIX, 9]) == 8


def test_who_finds_a_prefix_can_ask_to_keep_it():
    loop = run(small_pool(), make_request("a", PREFIX, max_tokens=1))
    run(loop, make_request("b", [*PREFIX, 5], max_tokens=1, marks=((16, 60.0),)))
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 16


def test_the_time_runs_from_the_end_of_the_last_use():
    loop = small_pool()
    loop.add(make_request("a", PREFIX, max_tokens=8, marks=((16, 10.0),)))
    loop.step()
    loop.now_s = 100.0
    loop.drain()
    assert loop.scheduler.stats().pages_retained == 4
    loop.now_s = 109.0
    flood(loop)
    assert cached_of(loop, [*PREFIX, 9]) == 16


def test_salts_keep_apart_what_is_kept():
    loop = Loop(small_config(num_pages=41, max_rows=1))
    for salt, seconds in (("x", 100.0), ("y", 1.0)):
        run(loop, make_request(f"of {salt}", PREFIX, max_tokens=1, salt=salt, marks=((16, seconds),)))
        assert loop.finished[f"of {salt}", 0].cache_written_tokens == 16, "nothing is shared"
    loop.now_s = 50.0
    flood(loop, 8)
    assert [cached_of(loop, [*PREFIX, 9], salt) for salt in ("", "y", "x")] == [0, 0, 16]


def test_a_mark_under_one_salt_says_nothing_about_another():
    loop = Loop(small_config(num_pages=41, max_rows=1))
    run(loop, make_request("of x", PREFIX, max_tokens=1, salt="x"))
    run(loop, make_request("of y", PREFIX, max_tokens=1, salt="y", marks=((16, 100.0),)))
    flood(loop, 8)
    assert [cached_of(loop, [*PREFIX, 9], salt) for salt in ("x", "y")] == [0, 16]


def test_clearing_the_cache_ends_what_is_kept():
    loop = run(small_pool(), make_request("a", PREFIX, max_tokens=1, marks=((16, 100.0),)))
    loop.scheduler.clear_cache(b"new weights")
    stats = loop.scheduler.stats()
    assert (stats.pages_cached, stats.pages_retained, stats.num_retained_evictions) == (0, 0, 0)


def test_an_aborted_prefill_keeps_what_was_published_only():
    loop = Loop(small_config(token_budget=8, max_rows=1))
    loop.add(make_request("a", make_prompt(30), max_tokens=1, marks=((30, 60.0),)))
    loop.dispatch()
    loop.dispatch()
    loop.scheduler.abort("a")
    assert loop.scheduler.stats().pages_retained == 2
    loop.drain()


def test_without_a_prefix_cache_nobody_can_ask():
    loop = Loop(small_config(prefix_cache=False))
    with pytest.raises(RequestError, match=r"cache_control or prompt_cache_retention needs the prefix cache"):
        loop.add(make_request("a", PREFIX, marks=((16, 60.0),)))
    with pytest.raises(RequestError, match=r"prompt_cache_key needs the prefix cache, which is off; load with"):
        loop.add(make_request("b", PREFIX, key="k"))
    assert not loop.scheduler.has_unfinished
