import hypothesis
import hypothesis.strategies as st
import pytest

from jaxkv.bench.replay import Allocator, PagedAllocator, RequestLens, replay, standard_allocators
from jaxkv.bench.replay_memory import Buddy, FirstFit, Memory, next_power_of_two
from jaxkv.bench.usage import Usage, UsageRecord
from jaxkv.errors import CapacityError, ConfigError


def lens(*pairs: tuple[int, int]) -> list[RequestLens]:
    return [RequestLens(prompt_len=prompt_len, output_len=output_len) for prompt_len, output_len in pairs]


def allocator(name: str, capacity: int, *, max_len: int = 8, page_size: int = 4) -> Allocator:
    return {each.name: each for each in standard_allocators(capacity, max_len=max_len, page_size=page_size)}[name]


def rows(usage: Usage) -> list[tuple[int, int, int, int, int]]:
    """(held, future, reserved, running, waiting) by step."""
    return [(r.num_held, r.num_future, r.num_reserved, r.num_running, r.num_waiting) for r in usage.records]


THREE = [(3, 2)] * 3  # three requests of 3 + 2 tokens in 16 tokens of memory


def test_max_reserves_the_longest_for_everyone() -> None:
    usage = replay(lens(*THREE), allocator("max", 16))
    assert rows(usage) == [(8, 2, 16, 2, 1), (10, 0, 16, 2, 1), (4, 1, 8, 1, 0), (5, 0, 8, 1, 0)]
    assert usage.held_of_reserved == 27 / 48
    assert usage.held_of_reserved_over_time() == [8 / 16, 10 / 16, 4 / 8, 5 / 8]
    assert usage.mean_running == 2  # while one waited
    assert usage.shares_of_memory() == {"held": 18 / 32, "future": 2 / 32, "never_used": 12 / 32, "free": 0}


def test_oracle_reserves_what_will_be_needed() -> None:
    usage = replay(lens(*THREE), allocator("oracle", 16))
    assert rows(usage) == [(12, 3, 15, 3, 0), (15, 0, 15, 3, 0)]
    assert usage.held_of_reserved == 27 / 30
    assert usage.mean_running == 3  # nobody ever waited: mean over all steps


def test_pow2_rounds_the_output_up_and_stops_at_max_len() -> None:
    # 3 + 3 tokens reserve 3 + 4 = 7: two at once in 16
    usage = replay(lens((3, 3), (3, 3), (3, 3)), allocator("pow2", 16))
    assert rows(usage)[:3] == [(8, 4, 14, 2, 1), (10, 2, 14, 2, 1), (12, 0, 14, 2, 1)]
    assert usage.num_steps == 6
    # 2 + 5 tokens would reserve 2 + 8 = 10, but max_len is 8
    usage = replay(lens((2, 5)), allocator("pow2", 16))
    assert {record.num_reserved for record in usage.records} == {8}


def test_pages_come_as_tokens_do_and_the_newest_gives_way() -> None:
    # Four pages of 4. Step 1: three requests of 4 tokens, a page each. Step 2: the first takes the last page, the second
    # the page of the third, which is thrown out with 4 tokens. Step 3: the third alone, 5 tokens in 2 pages.
    usage = replay(lens(*THREE), allocator("paged", 16))
    assert rows(usage) == [(12, 0, 12, 3, 0), (10, 0, 16, 2, 1), (5, 0, 8, 1, 0)]
    assert (usage.num_preemptions, usage.num_recomputed) == (1, 4)
    assert usage.held_of_reserved == 27 / 36


def test_future_of_a_page_is_what_its_request_will_write() -> None:
    # 1 + 3 tokens in a page of 8: 2, 3, 4 held; 2, 1, 0 to come; 4 never used
    usage = replay(lens((1, 3)), allocator("paged", 8, page_size=8))
    assert rows(usage) == [(2, 2, 8, 1, 0), (3, 1, 8, 1, 0), (4, 0, 8, 1, 0)]
    assert usage.shares_of_memory() == {"held": 9 / 24, "future": 3 / 24, "never_used": 12 / 24, "free": 0}


def test_holes_between_spans_are_external_fragmentation() -> None:
    # Spans 3 + 4 + 3 of 10. After step 1 the outer ones end: 6 tokens are free, but no 5 in a row, until step 3 ends.
    usage = replay(lens((2, 1), (1, 3), (2, 1), (3, 2)), allocator("oracle", 10))
    assert rows(usage) == [(8, 2, 10, 3, 1), (3, 1, 4, 1, 1), (4, 0, 4, 1, 1), (4, 1, 5, 1, 0), (5, 0, 5, 1, 0)]
    assert usage.shares_of_memory() == {"held": 15 / 30, "future": 3 / 30, "never_used": 0, "free": 12 / 30}


def test_order_of_arrival_is_kept() -> None:
    # the second does not fit beside the first; the third would, but waits behind it
    usage = replay(lens((4, 4), (5, 3), (1, 1)), allocator("oracle", 10))
    assert [row[3] for row in rows(usage)] == [1, 1, 1, 1, 2, 1, 1]


def test_max_rows_limits_and_is_checked() -> None:
    usage = replay(lens(*THREE), allocator("oracle", 16), max_rows=2)
    assert usage.max_running == 2
    with pytest.raises(ConfigError, match="max_rows=0"):
        replay(lens(*THREE), allocator("oracle", 16), max_rows=0)


def test_what_never_fits_is_refused_with_numbers() -> None:
    for name in ("max", "pow2"):  # 9 tokens in a reservation of 8
        with pytest.raises(CapacityError, match="request 1 of 9 tokens"):
            replay(lens((1, 1), (1, 8)), allocator(name, 64))
    for name in ("oracle", "paged"):
        with pytest.raises(CapacityError, match="capacity=16 tokens"):
            replay(lens((10, 7)), allocator(name, 16, max_len=32))
    with pytest.raises(ConfigError, match="output_len=0"):
        RequestLens(prompt_len=1, output_len=0)
    with pytest.raises(ConfigError, match="page_size=32"):
        PagedAllocator("paged", 16, 32)


def test_first_fit_joins_neighbours() -> None:
    memory = FirstFit(10)
    spans = [memory.try_take(4), memory.try_take(2), memory.try_take(4)]
    assert spans == [(0, 4), (4, 2), (6, 4)]
    memory.give_back((0, 4))
    memory.give_back((6, 4))
    assert memory.try_take(5) is None  # 8 free, 4 in a row
    memory.give_back((4, 2))
    assert memory.try_take(10) == (0, 10)


def test_buddy_rounds_and_joins_only_its_other_half() -> None:
    memory = Buddy(16)
    assert [memory.try_take(3), memory.try_take(4), memory.try_take(5)] == [(0, 4), (4, 4), (8, 8)]
    assert memory.try_take(1) is None
    memory.give_back((4, 4))
    memory.give_back((8, 8))
    assert memory.try_take(9) is None  # 12 free in a row, but no 16
    memory.give_back((0, 4))
    assert memory.try_take(9) == (0, 16)


def test_buddy_of_an_odd_capacity_is_a_row_of_arenas() -> None:
    memory = Buddy(7)
    assert memory.largest() == 4
    taken = [memory.try_take(4), memory.try_take(2), memory.try_take(1)]
    assert taken == [(0, 4), (4, 2), (6, 1)]
    for span in taken:
        assert span is not None
        memory.give_back(span)
    assert memory.try_take(5) is None
    assert memory.try_take(4) == (0, 4)


def test_next_power_of_two() -> None:
    assert [next_power_of_two(number) for number in (1, 2, 3, 4, 5, 63, 64, 65)] == [1, 2, 4, 4, 8, 64, 64, 128]


@hypothesis.given(
    st.sampled_from([FirstFit, Buddy]), st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(1, 60)))
)
def test_spans_never_overlap_and_all_memory_comes_back(
    make: type[FirstFit] | type[Buddy], capacity: int, operations: list[tuple[bool, int]]
) -> None:
    memory: Memory = make(capacity)
    largest = memory.largest()
    taken: list[tuple[int, int]] = []
    for take, number in operations:
        if take:
            if (span := memory.try_take(number)) is not None:
                assert span[1] >= number
                taken.append(span)
        elif taken:
            memory.give_back(taken.pop(number % len(taken)))
        tokens = [token for start, length in taken for token in range(start, start + length)]
        assert len(tokens) == len(set(tokens))
        assert all(0 <= token < capacity for token in tokens)
    for span in taken:
        memory.give_back(span)
    assert memory.try_take(largest) == (0, largest)


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=20),
    st.integers(64, 300),
    st.sampled_from([FirstFit, Buddy]),
)
def test_every_request_ends_and_nothing_stays_reserved(
    pairs: list[tuple[int, int]], capacity: int, memory: type[FirstFit] | type[Buddy]
) -> None:
    for each in standard_allocators(capacity, max_len=64, page_size=16, memory=memory):
        usage = replay(lens(*pairs), each)
        made = sum(record.num_running for record in usage.records)
        assert made == sum(output_len for _, output_len in pairs)  # one token a running request a step
        for record in usage.records:
            assert record.num_reserved <= usage.capacity
            if each.name == "paged":
                assert record.num_reserved - record.num_held < 16 * record.num_running
            if each.name == "oracle" and memory is FirstFit:
                assert record.num_held + record.num_future == record.num_reserved
        assert abs(sum(usage.shares_of_memory().values()) - 1) < 1e-9
        assert each.try_admit(0, lens((1, 1))[0], 2)  # room again


def test_long_tailed_lengths_show_the_papers_order() -> None:
    # half of them short, some long: what reserves least runs most
    pairs = [(20 + 37 * index % 300, 5 + 53 * index % 200) for index in range(200)]
    runs = [replay(lens(*pairs), each) for each in standard_allocators(8192, max_len=1024)]
    assert [usage.name for usage in runs] == ["max", "pow2", "oracle", "paged"]
    shares = [usage.held_of_reserved for usage in runs]
    at_once = [usage.mean_running for usage in runs]
    assert shares == sorted(shares)
    assert at_once == sorted(at_once)
    assert shares[0] < 0.4
    assert shares[-1] > 0.95
    assert at_once[-1] > 2 * at_once[0]


def test_usage_takes_records_from_elsewhere() -> None:
    usage = Usage(name="engine", capacity=100)
    assert usage.summary()["mean_running"] == 0
    usage.records.append(UsageRecord(num_held=45, num_future=3, num_reserved=50, num_running=4, num_waiting=0))
    usage.records.append(UsageRecord(num_held=90, num_future=6, num_reserved=100, num_running=8, num_waiting=2))
    assert usage.held_of_reserved == 0.9
    assert usage.summary()["shares_of_memory"] == {"held": 0.9, "future": 0.06, "never_used": 0.04, "free": 0.0}
    assert usage.mean_running == 8
    with pytest.raises(AssertionError):
        UsageRecord(num_held=45, num_future=6, num_reserved=50, num_running=4, num_waiting=0)
