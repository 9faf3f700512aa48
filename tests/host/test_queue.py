"""Waiting queue: order, and who may overtake whom."""

import pytest

from jaxkv.schedule.queue import Verdict, WaitingQueue
from jaxkv.schedule.sequence import Sequence
from tests.fake_model import make_request


def sequence(name: str, level: int = 0, arrival: int = 0) -> Sequence:
    return Sequence(make_request(name, [1]), 0, (level, arrival), 64, False)


def fill(max_bypass: int, names: str) -> WaitingQueue:
    queue = WaitingQueue(max_bypass)
    for arrival, name in enumerate(names):
        queue.push(sequence(name, arrival=arrival))
    return queue


def names(queue: WaitingQueue) -> str:
    return "".join(seq.request.request_id for seq in queue)


def offer(queue: WaitingQueue, closed: str = "", **verdicts: Verdict) -> tuple[str, str]:
    """Names that were offered and admitted; who has no verdict is admitted. The round ends when `closed` is next."""
    offered, admitted = "", ""

    def admit(seq: Sequence) -> Verdict:
        nonlocal offered, admitted
        name = seq.request.request_id
        verdict = verdicts.get(name, Verdict.ADMITTED)
        offered += name
        if verdict is Verdict.ADMITTED:
            admitted += name
        if verdict is Verdict.GONE:
            queue.discard(seq)
        return verdict

    queue.offer(admit, lambda equals: None if equals[0].request.request_id == closed else equals[0])
    return offered, admitted


def test_best_rank_first_whatever_the_order_of_arrival():
    queue = WaitingQueue(0)
    for name, level, arrival in (("c", 1, 0), ("a", 0, 2), ("d", 1, 3), ("b", 0, 4)):
        queue.push(sequence(name, level, arrival))
    assert names(queue) == "abcd"


def test_everybody_is_admitted_in_order():
    queue = fill(2, "abc")
    assert offer(queue) == ("abc", "abc") and len(queue) == 0


def test_closed_ends_the_round():
    queue = fill(2, "abc")
    assert offer(queue, closed="b") == ("a", "a")
    assert names(queue) == "bc"


def test_who_is_gone_neither_blocks_nor_overtakes():
    queue = fill(1, "abcd")
    assert offer(queue, a=Verdict.NOT_YET, b=Verdict.GONE) == ("abc", "c")
    assert names(queue) == "ad"


@pytest.mark.parametrize("max_bypass", [0, 1, 2, 5])
def test_13_only_so_many_overtake_also_over_several_rounds(max_bypass: int):
    queue = fill(max_bypass, "abcdefgh")
    _, first = offer(queue, closed="c", a=Verdict.NOT_YET)
    _, second = offer(queue, a=Verdict.NOT_YET)
    assert first + second == "bcdefgh"[:max_bypass]
    assert offer(queue, a=Verdict.NOT_YET) == ("a", "")
    offered, admitted = offer(queue)
    assert offered == admitted and admitted[0] == "a" and len(queue) == 0


def test_13_a_round_looks_at_no_more_than_the_bypass_allows():
    queue = fill(2, "abcdefgh")
    waits = dict.fromkeys("abcdefg", Verdict.NOT_YET)
    assert offer(queue, **waits) == ("abc", "")


def test_being_overtaken_is_forgotten_once_it_ran():
    queue = fill(1, "ab")
    offer(queue, a=Verdict.NOT_YET)
    (seq,) = queue
    assert seq.num_bypassed == 1
    queue.discard(seq)
    queue.push(seq)
    assert seq.num_bypassed == 0


def test_discarding_who_does_not_wait_changes_nothing():
    queue = fill(1, "ab")
    queue.discard(sequence("x", arrival=0))
    queue.discard(sequence("y", arrival=9))
    assert names(queue) == "ab"


# --- who of equals is next -------------------------------------------------------------------------------------------


def choose_last(equals: list[Sequence]) -> Sequence:
    return equals[-1]


def admit_all(queue: WaitingQueue, choose=choose_last) -> str:
    admitted = ""

    def admit(seq: Sequence) -> Verdict:
        nonlocal admitted
        admitted += seq.request.request_id
        return Verdict.ADMITTED

    queue.offer(admit, choose)
    return admitted


@pytest.mark.parametrize(
    ("max_bypass", "order"), [(0, "abcdefgh"), (1, "bacdefgh"[:2] + "dcfehg"), (2, "cdabghef"), (9, "hgfedcba")]
)
def test_13_a_choice_overtakes_nobody_more_often_than_is_allowed(max_bypass: int, order: str):
    assert admit_all(fill(max_bypass, "abcdefgh")) == order


def test_only_equals_are_chosen_from():
    queue = WaitingQueue(9)
    for arrival, (name, priority) in enumerate([("a", 0), ("b", 0), ("C", 1), ("d", 0), ("E", 1)]):
        request = make_request(name, [1], priority=priority)
        queue.push(Sequence(request, 0, (0, arrival), 64, False))  # C has aged to the level of the others
    assert admit_all(queue) == "baCdE"


def test_who_was_preempted_is_not_overtaken_by_choice():
    queue = fill(9, "abc")
    next(iter(queue)).num_preemptions = 1
    assert admit_all(queue) == "acb"


def test_nobody_chosen_ends_the_round():
    queue = fill(2, "abc")
    assert admit_all(queue, lambda equals: equals[0] if len(equals) > 2 else None) == "a"
    assert names(queue) == "bc"
