"""Plans, overlap, stopping, forks, life cycle, with a fake device. Names begin with the number of the behaviour."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxkv.errors import RequestError
from jaxkv.request import FinishReason
from tests.fake_model import VOCAB, generate_alone, make_prompt, make_request, small_config
from tests.fake_runner import Loop, run

# --- plans -----------------------------------------------------------------------------------------------------------


def test_16_plans_do_not_change_after_they_were_handed_over():
    loop = Loop(small_config(num_pages=13), depth=3)  # `Loop.commit` compares each plan with a deep copy
    run(loop, *[make_request(str(number), make_prompt(9, number), max_tokens=20, n=2) for number in range(4)])
    assert loop.scheduler.stats().num_preemptions > 0
    rows = loop.scheduler._roster.rows
    for plan in loop.plans:
        for array in [plan.decode_rows, *(chunk.token_ids for chunk in plan.chunks)]:
            assert not any(np.may_share_memory(array, column) for column in (rows.tokens, rows.known, rows.computed))


PLANS_OF_A_STORM = """
import hashlib, dataclasses
from tests.fake_model import make_request, small_config
from tests.fake_runner import Loop, plain
loop = Loop(small_config(num_pages=17, decode_steps=3))
for number in range(12):
    prompt = [number % 3, 1, 2, 3, 4, number]
    loop.add(make_request(f"r{number * 7919}", prompt, max_tokens=9 + number, n=1 + number % 2))
    loop.step()
loop.drain()
assert loop.scheduler.stats().num_preemptions
print(hashlib.sha256(repr([plain(plan) for plan in loop.plans]).encode()).hexdigest())
"""


def test_17_every_process_makes_the_same_plans():
    root = pathlib.Path(__file__).resolve().parents[2]
    digests = [
        subprocess.run(
            [sys.executable, "-c", PLANS_OF_A_STORM], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(digests[0].strip()) == 64 and digests[0] == digests[1]


def test_17_decode_rows_follow_request_order_not_row_order():
    loop = Loop(small_config(max_rows=3, decode_steps=1), depth=1)
    for name, max_tokens in (("a", 2), ("b", 20), ("c", 4)):
        loop.add(make_request(name, make_prompt(3, ord(name)), max_tokens=max_tokens))
    for name in ("d", "e"):
        loop.add(make_request(name, make_prompt(3, ord(name)), max_tokens=20))
    while ("c", 0) not in loop.finished:
        loop.step()
    loop.step()
    loop.step()
    assert loop.plans[-1].decode_rows.tolist() == [1, 0, 2], "b, then d in a's row, then e in c's row"


def test_plans_carry_deltas_only():
    loop = Loop(small_config(), depth=1)
    run(loop, make_request("a", make_prompt(7), max_tokens=12))
    assert [len(plan.setups) for plan in loop.plans] == [1] + [0] * 11
    assert [(write.index, write.row) for plan in loop.plans for write in plan.page_writes] == [(i, 0) for i in range(5)]


def test_decode_steps_shrink_to_what_pages_and_rows_allow():
    loop = Loop(small_config(decode_steps=8), depth=1)
    run(loop, make_request("a", make_prompt(4), max_tokens=1 + 8 + 3))
    assert [plan.num_steps for plan in loop.plans] == [1, 8, 3]
    loop = Loop(small_config(decode_steps=8, num_pages=8, max_rows=2, prefix_cache=False), depth=1)
    run(loop, *[make_request(str(number), make_prompt(8, number), max_tokens=8) for number in range(2)])
    # Three pages are left: 7 tokens a row would need four, 3 need two, then 1 more token fits into what is there.
    assert [(plan.num_steps, len(plan.decode_rows)) for plan in loop.plans[1:4]] == [(3, 2), (1, 2), (3, 1)]


# --- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 4])
def test_18_overlap_changes_no_token(times: int):
    outputs = []
    for depth, decode_steps, num_pages in ((1, 1, 41), (2, 1, 41), (3, 1, 15), (1, 4, 41), (2, 4, 15), (3, 4, 15)):
        loop = Loop(small_config(decode_steps=decode_steps, num_pages=num_pages), depth=depth)
        run(
            loop,
            *[
                make_request(
                    str(number),
                    make_prompt(3 + number, number % 4),
                    max_tokens=5 + number,
                    eos=(1, 2),
                    seed=number,
                    n=1 + number % 2,
                )
                for number in range(4 * times)
            ],
        )
        outputs.append(loop.outputs())
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_18_nothing_comes_after_an_abort(depth: int):
    loop = Loop(small_config(), depth=depth)
    for name in ("a", "b"):
        loop.add(make_request(name, make_prompt(5, ord(name)), max_tokens=30))
    for _ in range(6):
        loop.step()
    loop.scheduler.abort("a")
    num_streamed = len(loop.streamed["a", 0])
    loop.drain()  # `Loop` asserts that no token comes after the end
    loop.check_against_alone()
    assert len(loop.finished["a", 0].token_ids) == num_streamed
    assert loop.finished["a", 0].reason is FinishReason.ABORT


def test_18_a_row_that_makes_too_few_tokens_is_noticed():
    loop = Loop(small_config(), depth=1)
    loop.add(make_request("a", make_prompt(5), max_tokens=30))
    loop.step()
    loop.dispatch()
    loop.results[0].decode_counts[0] = 0
    with pytest.raises(AssertionError, match="promised"):
        loop.commit()


# --- stopping --------------------------------------------------------------------------------------------------------


def test_26_stop_reason_is_the_users_id_and_none_for_the_models():
    alone = generate_alone(make_request("a", make_prompt(5), max_tokens=9), 0, 64).token_ids
    stop = alone[4]
    cut = alone[: alone.index(stop) + 1]
    loop = run(
        Loop(small_config()),
        make_request("users", make_prompt(5), max_tokens=9, stop_token_ids=(stop,)),
        make_request("models", make_prompt(5), max_tokens=9, eos=(stop,)),
        make_request("ignored", make_prompt(5), max_tokens=9, eos=(stop,), ignore_eos=True),
        make_request("both", make_prompt(5), max_tokens=9, eos=(stop,), ignore_eos=True, stop_token_ids=(stop,)),
    )
    assert loop.outputs() == {("both", 0): cut, ("ignored", 0): alone, ("models", 0): cut, ("users", 0): cut}
    reasons = {name: (end.reason, end.stop_reason) for (name, _), end in loop.finished.items()}
    assert reasons["users"] == reasons["both"] == (FinishReason.STOP, stop)
    assert reasons["models"] == (FinishReason.STOP, None)
    assert reasons["ignored"] == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_27_a_stop_id_counts_only_after_min_tokens(decode_steps: int):
    loop = Loop(small_config(decode_steps=decode_steps))
    run(
        loop,
        *[
            make_request(str(least), make_prompt(5), max_tokens=12, min_tokens=least, eos=tuple(range(0, VOCAB, 2)))
            for least in range(13)
        ],
    )
    lengths = [len(loop.outputs()[str(least), 0]) for least in range(13)]
    assert all(least < length or length == 12 for least, length in enumerate(lengths))
    assert lengths[12] == 12 and loop.finished["12", 0].reason is FinishReason.LENGTH, "length wins over min_tokens"
    assert any(end.reason is FinishReason.STOP for end in loop.finished.values())


def test_28_a_stop_string_found_by_the_caller_trims_the_output():
    loop = Loop(small_config(decode_steps=4), depth=2)
    loop.add(make_request("a", make_prompt(5), max_tokens=30, stop=("x",)))
    while len(loop.streamed["a", 0]) < 6:
        loop.step()
    assert loop.scheduler.finish("a", 0, num_output=4, stop_reason="x")
    assert not loop.scheduler.finish("a", 0, num_output=4, stop_reason="x"), "only the first counts"
    loop.drain()
    finished = loop.finished["a", 0]
    assert (finished.reason, finished.stop_reason, len(finished.token_ids)) == (FinishReason.STOP, "x", 4)
    loop.check_against_alone()


# --- n > 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 7, 8, 9])
def test_forks_compute_the_prompt_once_and_share_its_pages(length: int, prefix_cache: bool):
    loop = Loop(small_config(prefix_cache=prefix_cache, decode_steps=1), depth=1)
    loop.add(make_request("a", make_prompt(length), max_tokens=6, n=4))
    loop.step()
    loop.step()
    assert [chunk.start for chunk in loop.plans[1].chunks] == [length - 1] * 3
    partial = (length - 1) % 4 > 0
    assert len(loop.plans[1].page_copies) == (3 if partial else 0)
    assert loop.scheduler.stats().pages_used == (length - 1) // 4 + 4 + ((length + 1) > -(-length // 4) * 4)
    loop.drain()
    loop.check_against_alone()
    assert loop.runner.num_computed == length + 3 + 4 * 5
    assert len({tuple(tokens) for tokens in loop.outputs().values()}) == 4


def test_forks_wait_until_all_chunks_of_the_prompt_are_computed():
    loop = Loop(small_config(prefix_cache=False, token_budget=8))
    run(loop, make_request("a", make_prompt(15), max_tokens=1, n=3))
    assert loop.runner.num_computed == 15 + 2


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_forks_wait_for_rows_and_for_a_parent_that_is_gone(prefix_cache: bool):
    loop = Loop(small_config(max_rows=2, prefix_cache=prefix_cache))
    run(loop, make_request("a", make_prompt(9), max_tokens=3, n=7))
    assert [child for _, child in loop.finished] == list(range(7))
    assert [loop.finished["a", child].is_last for child in range(7)] == [False] * 6 + [True]


@pytest.mark.parametrize("end_parent_after", [0, 1, 2, 3])
def test_forks_live_on_when_their_parent_ends(end_parent_after: int):
    loop = Loop(small_config(token_budget=8, max_rows=2))
    loop.add(make_request("a", make_prompt(14), max_tokens=3, n=3))
    for _ in range(end_parent_after):
        loop.step()
    loop.scheduler.finish("a", 0, reason=FinishReason.ABORT)
    loop.drain()
    loop.check_against_alone()
    assert [len(loop.outputs()["a", child]) for child in (1, 2)] == [3, 3]


def test_abort_ends_all_forks_also_those_held_back():
    loop = Loop(small_config(token_budget=8, max_rows=2))
    loop.add(make_request("a", make_prompt(14), max_tokens=3, n=5))
    loop.step()
    loop.scheduler.abort("a")
    assert [event.child for event in loop.scheduler.take_finished()] == list(range(5))
    assert not loop.scheduler.has_unfinished


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_35_abort_frees_pages_at_once_wherever_the_request_is():
    loop = Loop(small_config(max_rows=1, token_budget=8), depth=2)
    for name in ("a", "b"):
        loop.add(make_request(name, make_prompt(20, ord(name)), max_tokens=30))
    loop.step()
    assert loop.scheduler.stats().pages_used > 0
    loop.scheduler.abort("a")
    loop.scheduler.abort("b")
    loop.scheduler.abort("a")
    loop.scheduler.abort("unknown")
    stats = loop.scheduler.stats()
    assert (stats.pages_used, stats.num_requests, stats.num_waiting) == (0, 0, 0)
    loop.drain()
    assert sorted(loop.finished) == [("a", 0), ("b", 0)]


def test_35_the_second_request_with_an_id_is_refused_while_the_first_runs():
    loop = Loop(small_config())
    loop.add(make_request("a", make_prompt(5), max_tokens=3))
    with pytest.raises(RequestError, match=r"request_id='a' is already running"):
        loop.add(make_request("a", make_prompt(6), max_tokens=3))
    loop.drain()
    loop.check_against_alone()
    loop.scheduler.add(make_request("a", make_prompt(6), max_tokens=3))


def test_35_a_deadline_ends_with_the_partial_output():
    loop = Loop(small_config(max_rows=2), depth=2)
    for name, deadline_s in (("slow", 10.0), ("waiting", 5.0), ("patient", None)):
        loop.add(make_request(name, make_prompt(5, ord(name[0])), max_tokens=20, deadline_s=deadline_s))
    for _ in range(5):
        loop.step()
    loop.scheduler.expire(4.9)
    assert loop.scheduler.take_finished() == ()
    loop.scheduler.expire(10.0)
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["slow", 0].reason is loop.finished["waiting", 0].reason is FinishReason.ABORT
    assert 0 < len(loop.outputs()["slow", 0]) < 20
    assert loop.finished["patient", 0].reason is FinishReason.LENGTH


def test_35_deadlines_of_requests_that_are_over_take_no_memory():
    loop = Loop(small_config())
    for number in range(200):
        run(loop, make_request(str(number), [1, 2], max_tokens=1, deadline_s=1000.0 + number))
    loop.add(make_request("late", [1, 2], max_tokens=40, deadline_s=2000.0))
    assert len(loop.scheduler._deadlines) <= 2 * 1 + 65
    loop.scheduler.expire(2000.0)
    assert not loop.scheduler.has_unfinished


def test_35_a_deadline_does_not_outlive_its_request():
    loop = Loop(small_config())
    run(loop, make_request("a", make_prompt(5), max_tokens=1, deadline_s=1.0))
    loop.finished.clear()
    loop.streamed.clear()
    loop.logprobs.clear()
    loop.add(make_request("a", make_prompt(5), max_tokens=3))
    loop.scheduler.expire(2.0)
    loop.drain()
    assert loop.finished["a", 0].reason is FinishReason.LENGTH


def test_36_a_prompt_of_one_token_and_scoring_without_generation():
    loop = run(
        Loop(small_config()),
        make_request("one", [7], max_tokens=3),
        make_request("score", make_prompt(9), max_tokens=0, prompt_logprobs=0),
        make_request("score one", [7], max_tokens=0, prompt_logprobs=0),
    )
    assert loop.finished["score", 0].reason is FinishReason.LENGTH
    assert loop.outputs()["score", 0] == [] and len(loop.scores["score"]) == 8
    assert loop.outputs()["score one", 0] == [] and loop.scores["score one"] == []


def test_only_watched_requests_are_reported_step_by_step():
    loop = Loop(small_config(decode_steps=3), depth=1)
    loop.scheduler.add(make_request("quiet", make_prompt(5), max_tokens=9))
    loop.scheduler.add(make_request("stop", make_prompt(5, 1), max_tokens=9, stop=("x",)))
    loop.scheduler.add(make_request("logprobs", make_prompt(5, 2), max_tokens=9, logprobs=0))
    seen: dict[str, int] = {}
    while loop.scheduler.has_unfinished:
        committed = None
        if loop.dispatch() is not None:
            committed = loop.scheduler.commit(loop.results.popleft())
        assert committed is not None
        for tokens in committed.watched_tokens():
            seen[tokens.request_id] = seen.get(tokens.request_id, 0) + len(tokens.token_ids)
        for event in committed.finished:
            assert len(event.token_ids) == 9
    assert seen == {"quiet": 1, "stop": 9, "logprobs": 9}, "the first token always shows: it is what TTFT is taken from"


def test_stats_tell_utilisation():
    loop = Loop(small_config(), depth=1)
    loop.add(make_request("a", make_prompt(6), max_tokens=9))
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.pages_used, stats.tokens_held, stats.utilisation) == (2, 6, 0.75)
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 0, 1)
    assert stats.pages_free + stats.pages_cached + stats.pages_used == 40


def test_a_newcomer_leaves_room_for_running_rows_to_grow():
    config = {"num_pages": 9, "max_rows": 2, "page_size": 4, "prefix_cache": False}
    requests = [make_request(str(number), make_prompt(12, number), max_tokens=16) for number in range(2)]
    greedy = run(Loop(small_config(**config, reserve_steps=0)), *requests)
    modest = run(Loop(small_config(**config, reserve_steps=12)), *requests)
    assert greedy.scheduler.stats().num_preemptions > modest.scheduler.stats().num_preemptions == 0
