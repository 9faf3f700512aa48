"""Behaviours 10-15: admission, preemption, fairness, lack of memory. Names begin with the number."""

import pytest

from jaxkv.errors import CapacityError, ConfigError, RequestError
from jaxkv.plan import StepPlan
from jaxkv.request import FinishReason, SamplingParams
from jaxkv.schedule.admission import check_fits
from tests.fake_model import generate_alone, make_prompt, make_request, small_config
from tests.fake_runner import Loop, run


def chunk_lens(plans: list[StepPlan], row: int) -> list[int]:
    return [len(chunk.token_ids) for plan in plans for chunk in plan.chunks if chunk.row == row]


def test_10_what_can_never_fit_is_refused_with_the_numbers():
    config, params = small_config(max_len=64, num_pages=11), SamplingParams(max_tokens=5)
    with pytest.raises(RequestError, match=r"prompt_len=64 .*max_len=64.*shorten"):
        check_fits(64, params, config)
    with pytest.raises(CapacityError, match=r"prompt_len=40 .*11 pages of 4.*has 10"):
        check_fits(40, params, config)
    with pytest.raises(RequestError, match="prompt_len=0"):
        check_fits(0, params, config)
    with pytest.raises(RequestError, match="n=2 with max_tokens=0"):
        check_fits(3, SamplingParams(max_tokens=0, prompt_logprobs=0, n=2), config)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    check_fits(40, scoring, config)
    check_fits(64, scoring, small_config())


def test_10_a_refused_request_leaves_no_trace():
    loop = Loop(small_config(num_pages=11))
    with pytest.raises(CapacityError):
        loop.add(make_request("big", make_prompt(40), max_tokens=1))
    assert not loop.scheduler.has_unfinished
    run(loop, make_request("big", make_prompt(39), max_tokens=1))


@pytest.mark.parametrize("depth", [1, 2])
def test_10_the_longest_prompt_and_the_fullest_pool_work(depth: int):
    loop = Loop(small_config(max_len=40, num_pages=11), depth=depth)
    run(
        loop,
        make_request("longest", make_prompt(39), max_tokens=9),
        make_request("other", make_prompt(30, 1), max_tokens=99),
    )
    assert loop.finished["longest", 0].reason is FinishReason.LENGTH
    assert len(loop.outputs()["longest", 0]) == 1
    assert len(loop.outputs()["other", 0]) == 10, "max_len ends what max_tokens would not"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_11_preemption_changes_no_token(depth: int, decode_steps: int):
    loop = Loop(small_config(num_pages=13, decode_steps=decode_steps), depth=depth)
    requests = [
        make_request(
            str(number), make_prompt(5, number), max_tokens=24, min_tokens=20, eos=tuple(range(0, 50, 5)), seed=number
        )
        for number in range(6)
    ]
    run(loop, *requests)
    assert loop.scheduler.stats().num_preemptions > 0
    assert (
        sum(finished.num_preemptions for finished in loop.finished.values()) == loop.scheduler.stats().num_preemptions
    )
    assert all(len(tokens) > 20 for tokens in loop.outputs().values()), "min_tokens counts from the first token on"


def test_11_a_victim_finds_its_own_pages_again():
    loop = Loop(small_config(num_pages=9, max_rows=2, decode_steps=1))
    run(loop, *[make_request(str(number), make_prompt(6, number), max_tokens=16, seed=number) for number in range(2)])
    starts = [chunk.start for plan in loop.plans for chunk in plan.chunks]
    assert loop.finished["1", 0].num_preemptions == 1
    assert starts[:2] == [0, 0] and starts[2] >= 8, "also those it generated"


def test_11_a_victim_leaves_the_step_with_its_pages_and_its_budget():
    # "low" arrived first and would be the first decode row, but ranks last. Both need a page at once, one is free.
    loop = Loop(small_config(num_pages=4, max_rows=3, token_budget=6, chunk_align=4, prefix_cache=False), depth=1)
    loop.add(make_request("low", make_prompt(4), max_tokens=20, priority=5))
    loop.step()
    loop.add(make_request("high", make_prompt(3, 1), max_tokens=4))
    loop.step()
    low, high = 0, 1
    assert [plan.decode_rows.tolist() for plan in loop.plans] == [[], [low]]
    loop.step()
    plan = loop.plans[-1]
    # "high" is at 4 tokens and still has room for the K/V of the last one; at 5 it takes the page "low" would want.
    assert plan.decode_rows.tolist() == [low, high]
    while loop.scheduler.stats().num_preemptions == 0:
        plan = loop.dispatch()
        loop.commit()
    assert plan is not None
    assert low not in plan.decode_rows.tolist() and high in plan.decode_rows.tolist()
    assert {write.row for write in plan.page_writes} <= {high}
    loop.drain()
    loop.check_against_alone()


def test_11_a_token_in_flight_at_preemption_is_delivered_before_readmission():
    loop = Loop(small_config(num_pages=7, max_rows=2, prefix_cache=False), depth=2)
    loop.add(make_request("a", make_prompt(8), max_tokens=16))
    loop.add(make_request("b", make_prompt(8, 1), max_tokens=10))
    loop.dispatch()
    while True:
        loop.dispatch()
        if loop.scheduler.stats().num_preemptions:
            break
        loop.commit()
    num_streamed = len(loop.streamed["b", 0])
    assert [plan.decode_rows.tolist() for plan in loop.plans[-2:]] == [[0, 1], [0]]
    assert loop.scheduler.num_in_flight == 2
    loop.commit()
    assert len(loop.streamed["b", 0]) == num_streamed + 1
    loop.drain()
    loop.check_against_alone()
    setup = [setup for plan in loop.plans for setup in plan.setups if setup.seed == 0 and setup.prompt_len == 8][-1]
    assert len(setup.token_ids) >= 8 + num_streamed + 1, "it came back with all its tokens"


@pytest.mark.parametrize("num_chunks", [3, 4])
def test_12_long_prompts_are_cut_and_only_the_last_chunk_samples(num_chunks: int):
    loop = Loop(small_config(token_budget=11, chunk_align=4))
    run(loop, make_request("a", make_prompt(num_chunks * 8), max_tokens=3))
    chunks = [chunk for plan in loop.plans for chunk in plan.chunks]
    assert [len(chunk.token_ids) for chunk in chunks] == [8] * num_chunks
    assert [chunk.samples for chunk in chunks] == [False] * (num_chunks - 1) + [True]


def test_12_decode_rows_are_in_every_step_while_prompts_arrive():
    loop = Loop(small_config(token_budget=7, chunk_align=4, decode_steps=8))
    loop.add(make_request("running", make_prompt(3), max_tokens=20))
    loop.step()
    for number in range(3):
        loop.add(make_request(str(number), make_prompt(30, number + 1), max_tokens=2))
    num_before = len(loop.plans)
    while ("running", 0) not in loop.finished:
        loop.step()
    mixed = [plan for plan in loop.plans[num_before:] if plan.chunks]
    assert len(mixed) >= 10
    assert all(0 in plan.decode_rows.tolist() for plan in mixed[:18])
    loop.drain()
    loop.check_against_alone()


def test_12_decode_rows_leave_the_whole_budget_to_chunks():
    loop = Loop(small_config(token_budget=8, chunk_align=4), depth=1)
    for number in range(2):
        loop.add(make_request(str(number), make_prompt(2, number), max_tokens=20))
    loop.step()
    loop.add(make_request("long", make_prompt(20, 9), max_tokens=1))
    for _ in range(2):
        loop.step()
        assert len(loop.plans[-1].decode_rows) == 2 and chunk_lens(loop.plans[-1:], 2) == [8]
    loop.drain()
    loop.check_against_alone()


def test_12_chunks_of_running_sequences_come_before_new_ones():
    loop = Loop(small_config(token_budget=11, chunk_align=4), depth=1)
    loop.add(make_request("a", make_prompt(20), max_tokens=1))
    loop.step()
    loop.add(make_request("b", make_prompt(4, 1), max_tokens=1, priority=-1))
    loop.step()
    assert loop.plans[1].chunks[0].start == 8 and chunk_lens(loop.plans, 0)[:2] == [8, 8]
    loop.drain()


def test_13_small_requests_overtake_a_big_one_but_only_so_often():
    loop = Loop(small_config(num_pages=11, max_rows=4, max_bypass=3, prefix_cache=False), depth=1)
    loop.add(make_request("running", make_prompt(12), max_tokens=8))
    loop.step()
    loop.add(make_request("big", make_prompt(36, 1), max_tokens=1))
    for number in range(20):
        loop.add(make_request(f"small{number}", make_prompt(3, number), max_tokens=2))
    loop.drain()
    loop.check_against_alone()
    order = [name for name, _ in loop.finished]
    assert order.index("big") == 1 + 3, order
    assert loop.admitted[:5] == ["running", "small0", "small1", "small2", "big"]


def test_13_no_bypass_means_first_come_first_served():
    loop = Loop(small_config(num_pages=11, max_bypass=0, prefix_cache=False), depth=1)
    loop.add(make_request("running", make_prompt(12), max_tokens=8))
    loop.step()
    run(
        loop,
        make_request("big", make_prompt(36, 1), max_tokens=1),
        make_request("small", make_prompt(3, 2), max_tokens=1),
    )
    assert loop.admitted == ["running", "big", "small"]


def test_13_priority_goes_first_and_waiting_makes_up_for_it():
    loop = Loop(small_config(max_rows=1, token_budget=16, steps_per_priority_level=10), depth=1)
    loop.add(make_request("running", make_prompt(3), max_tokens=15))
    loop.step()
    loop.add(make_request("low", make_prompt(3, 1), max_tokens=15, priority=1))
    loop.add(make_request("high", make_prompt(3, 2), max_tokens=15))
    for _ in range(12):
        loop.step()
    loop.add(make_request("late high", make_prompt(3, 3), max_tokens=1))
    loop.drain()
    assert loop.admitted == ["running", "high", "low", "late high"], "after 10 steps a level is made up for"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_14_the_last_request_without_memory_ends_with_an_error_and_the_engine_lives(depth: int):
    loop = Loop(small_config(num_pages=6, max_rows=2), depth=depth)
    loop.add(make_request("hungry", make_prompt(6), max_tokens=50))
    loop.drain()
    finished = loop.finished["hungry", 0]
    assert finished.reason is FinishReason.ERROR
    assert finished.error is not None and "21 tokens need 6 pages of 4, the whole pool has 5" in finished.error
    assert len(finished.token_ids) == 15, "five pages hold the K/V of 20 tokens; the 21st is known"
    loop.check_against_alone()
    run(loop, make_request("next", make_prompt(6), max_tokens=5))
    assert loop.finished["next", 0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_14_a_request_that_ends_with_its_tokens_in_flight_is_no_error(depth: int):
    loop = Loop(small_config(num_pages=6, max_rows=2), depth=depth)
    alone = generate_alone(make_request("a", make_prompt(6), max_tokens=50), 0, 64).token_ids
    stop = next(token for token in alone[14:15])
    assert stop not in alone[:14]
    run(loop, make_request("a", make_prompt(6), max_tokens=50, eos=(stop,)))
    assert loop.finished["a", 0].reason is FinishReason.STOP


def test_14_who_outgrew_the_pool_while_waiting_ends_with_an_error_too():
    # "b" fills the pool, one page of it shared with "a", whose end is still in flight: so "b" is not alone and is
    # preempted, and comes back with one token more than the pool can hold.
    loop = Loop(small_config(num_pages=6), depth=4)
    loop.add(make_request("a", make_prompt(4), max_tokens=1))
    loop.dispatch()
    loop.add(make_request("b", [*make_prompt(4), *make_prompt(15, 1)], max_tokens=9))
    for _ in range(3):
        loop.dispatch()
    assert (loop.scheduler.num_in_flight, loop.scheduler.stats().num_preemptions) == (3, 1)
    loop.drain()
    loop.check_against_alone()
    assert (loop.finished["b", 0].reason, len(loop.finished["b", 0].token_ids)) == (FinishReason.ERROR, 2)
    assert "21 tokens need 6 pages" in str(loop.finished["b", 0].error)


def test_14_two_requests_that_fit_only_one_by_one_both_end_well():
    loop = Loop(small_config(num_pages=9, max_rows=2, prefix_cache=False))
    run(loop, *[make_request(str(number), make_prompt(10, number), max_tokens=20) for number in range(2)])
    assert [finished.reason for finished in loop.finished.values()] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(
    "odd",
    [
        {"token_budget": 2000, "page_size": 48, "max_rows": 7, "max_len": 200, "num_pages": 12},
        {"token_budget": 13, "page_size": 5, "max_rows": 7, "chunk_align": 7, "num_pages": 14},
        {"page_size": 1, "num_pages": 80, "decode_steps": 5},
        {"page_size": 100, "num_pages": 4, "decode_steps": 3},
        {"max_rows": 1, "token_budget": 1},
    ],
)
def test_15_odd_sizes_work(odd: dict):
    loop = Loop(small_config(**odd))
    run(
        loop,
        *[make_request(str(number), make_prompt(5 + number, number % 3), max_tokens=9, n=2) for number in range(8)],
    )
    assert len(loop.finished) == 16


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"token_budget": 7, "chunk_align": 8}, r"token_budget=7 .*one chunk tile.*at least 8"),
        ({"num_pages": 1}, "num_pages=1"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_bypass": -1}, "max_bypass=-1"),
    ],
)
def test_15_impossible_sizes_are_refused_with_the_reason(odd: dict, reason: str):
    with pytest.raises(ConfigError, match=reason):
        small_config(**odd)
