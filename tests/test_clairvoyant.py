"""Who comes when, and what a cache that knows the future finds of it: against everything that could be done."""

import itertools
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxkv.bench.arrivals import Arrivals
from jaxkv.bench.clairvoyant import Served, attainable_hits, hits_as_served
from jaxkv.bench.traces import TRACES, Trace, TraceRequest, chat
from jaxkv.errors import ConfigError

SIZE = 16


def asked(*after: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(prompt=(index,), after=each) for index, each in enumerate(after)]


def test_a_client_sends_on_as_soon_as_it_was_answered():
    arrivals = Arrivals(asked((), (), (0,), (1,), (2, 3)))
    assert arrivals.take() == [0, 1] and arrivals.take() == []
    arrivals.answered(1)
    assert arrivals.take() == [3]
    arrivals.answered(0)
    arrivals.answered(3)
    assert arrivals.take() == [2] and not arrivals.is_over
    arrivals.answered(2)
    assert arrivals.take() == [4]
    arrivals.answered(4)
    assert arrivals.is_over and arrivals.take() == []


def test_a_client_thinks_while_others_are_answered_but_not_while_nobody_is():
    arrivals = Arrivals(asked((), (), (), (0,), (1,), (2,)), think=2)
    assert arrivals.take() == [0, 1, 2]
    arrivals.answered(0)
    arrivals.answered(1)
    assert arrivals.take() == []
    arrivals.answered(2)
    assert arrivals.take() == [3], "two answers after its own"
    arrivals.answered(3)
    assert arrivals.take() == [4]
    arrivals.answered(4)
    assert arrivals.take() == [5] and not arrivals.is_over
    idle = Arrivals(asked((), (0,)), think=9)
    idle.take()
    idle.answered(0)
    assert idle.take() == [1], "nobody is there to wait for"


def test_thinking_backwards_is_refused():
    with pytest.raises(ConfigError, match="think=-1 must be >= 0"):
        Arrivals([], think=-1)


@hypothesis.given(st.data(), st.integers(0, 5))
def test_everybody_comes_once_and_after_those_it_follows(data: st.DataObject, think: int):
    num = data.draw(st.integers(1, 12))
    requests = asked(*(tuple(data.draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else () for i in range(num)))
    arrivals, here, answered = Arrivals(requests, think), [], []
    while not arrivals.is_over:
        new = arrivals.take()
        assert all(set(requests[index].after) <= set(answered) for index in new)
        here += new
        answered.append(here.pop(data.draw(st.integers(0, len(here) - 1))))
        arrivals.answered(answered[-1])
    assert sorted(answered) == list(range(num))


# --- what can be found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("name", TRACES)
def test_without_thinking_depth_first_is_attainable_where_the_rows_fit(name: str, max_rows: int):
    trace = TRACES[name]()
    num_pages = max_rows * trace.most_pages(SIZE) + (16 if name == "shared" else 0)  # its prompt, kept over strangers
    assert attainable_hits(trace, SIZE, num_pages, max_rows=max_rows) == trace.best_hits(SIZE)


@pytest.mark.parametrize("think", [0, 1, 3, 99])
def test_more_memory_and_more_rows_give_no_less(think: int):
    trace = chat()
    found = [
        [attainable_hits(trace, SIZE, num_pages, think=think, max_rows=rows) for rows in (1, 2, 3)]
        for num_pages in (18, 24, 36, 54, 120)
    ]
    assert all(less <= more for row in found for less, more in itertools.pairwise(row))
    assert all(less <= more for less, more in itertools.pairwise(row[0] for row in found))
    assert found[-1][0] == trace.best_hits(SIZE)


def test_what_runs_cannot_be_lost_and_what_others_hold_is_no_room():
    """`a` is asked for again. Beside it `b`, of three pages, leaves one of four; after it, all but one are for `a`."""
    head = tuple(range(SIZE))
    a = TraceRequest(prompt=(*head, 1), output_len=1)
    b = TraceRequest(prompt=tuple(range(100, 100 + 2 * SIZE + 1)), output_len=1)
    trace = Trace(name="pins", requests=(a, b, a))
    one_by_one = [
        Served(0),
        Served(0, is_end=True),
        Served(1),
        Served(1, is_end=True),
        Served(2),
        Served(2, is_end=True),
    ]
    assert hits_as_served(trace, SIZE, 4, one_by_one) == SIZE
    assert hits_as_served(trace, SIZE, 3, one_by_one) == 0, "b needs all three"
    together = [Served(0), Served(1), Served(0, is_end=True), Served(2), Served(2, is_end=True), Served(1, is_end=True)]
    assert hits_as_served(trace, SIZE, 4, together) == SIZE
    assert hits_as_served(trace, SIZE, 3, together[:2] + together[3:]) == SIZE, "it never let go"


def test_who_knows_the_future_finds_what_trying_everything_finds():
    """Five small requests in three pages: all choices of what to lose."""
    rng = random.Random(5)
    for _ in range(20):
        letters = [tuple(rng.choice("ab") for _ in range(2)) for _ in range(5)]
        prompts = [(*(ord(c) for c in each for _ in range(2)), 0) for each in letters]  # two pages of two
        trace = Trace(name="tiny", requests=tuple(TraceRequest(prompt=prompt, output_len=1) for prompt in prompts))
        served = [Served(index, is_end) for index in range(5) for is_end in (False, True)]
        assert hits_as_served(trace, 2, 4, served) == try_everything(prompts, frozenset(), 4)


def try_everything(prompts: list[tuple[int, ...]], cached: frozenset, num_pages: int) -> int:
    if not prompts:
        return 0
    prompt, rest = prompts[0], prompts[1:]
    pages = [prompt[:2], prompt[:4]]
    found = next((i for i, page in enumerate(pages) if page not in cached), 2)
    others = cached - {*pages}
    room = num_pages - 3  # two tokens' page for what it says next
    kept = [frozenset(c) for n in range(min(room, len(others)) + 1) for c in itertools.combinations(sorted(others), n)]
    return 2 * found + max(try_everything(rest, each | {*pages}, num_pages) for each in kept)
