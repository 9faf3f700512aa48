"""Who goes first: the two orders and the shelf, case by case. `test_pages` has the random operations."""

import pytest

from jaxkv.cache.adaptive_eviction import YOUNG, AdaptiveOrder, NewestOrder, make_order
from jaxkv.cache.eviction import CostOrder, EvictionOrder, LruOrder
from jaxkv.cache.shelf import Shelf

SIZE = 16


def grow(order: EvictionOrder, first_page: int, length: int, name: bytes = b"") -> list[int]:
    """Publishes a prefix of `length` pages; returns them."""
    for index in range(length):
        parent = b"%s/%d" % (name, index - 1) if index else b"root"
        order.published(first_page + index, b"%s/%d" % (name, index), parent, index)
    return list(range(first_page, first_page + length))


def release(order: EvictionOrder, pages: list[int]) -> None:
    for page in reversed(pages):
        order.add(page)


def lose(order: EvictionOrder, num: int) -> list[int]:
    lost = []
    for _ in range(num):
        lost.append(order.pop())
        order.forgotten(lost[-1])
    return lost


@pytest.mark.parametrize("name", ["lru", "cost", "adaptive"])
def test_the_tail_goes_before_the_head_whoever_was_used_last(name: str):
    order = make_order(name, SIZE, 4096, 64)
    pages = grow(order, 1, 5)
    release(order, pages)
    order.remove(1)
    order.add(1)
    assert lose(order, 5) == [5, 4, 3, 2, 1] and len(order) == 0


def test_cost_is_lru_where_all_pages_cost_the_same():
    orders: list[EvictionOrder] = [LruOrder(), CostOrder(SIZE, 10**12)]
    for order in orders:
        for page in range(1, 6):
            grow(order, page, 1, b"%d" % page)
        for page in (3, 1, 5, 2, 4):
            order.add(page)
        order.remove(1)
        order.add(1)
    assert lose(orders[0], 5) == lose(orders[1], 5) == [3, 5, 2, 4, 1]


def test_cost_keeps_a_deep_page_longer_than_a_shallow_one_of_its_age():
    order = CostOrder(SIZE, attention_len=SIZE)
    deep = grow(order, 1, 8, b"deep")
    for page in deep[:-1]:
        assert not order.remove(page), "held"
    order.add(deep[-1])
    shallow = grow(order, 20, 1, b"shallow")
    release(order, shallow)
    assert lose(order, 2) == [20, 8], "the shallow one was used later"


def test_cost_forgets_deep_pages_too_when_others_are_used_again_and_again():
    order = CostOrder(SIZE, attention_len=SIZE)
    release(order, grow(order, 1, 8)[-1:])
    lost: list[int] = []
    for number in range(20):
        (page,) = grow(order, 100 + number, 1, b"%d" % number)
        order.add(page)
        if len(order) > 2:
            lost += lose(order, 1)
    assert 8 in lost, "the level rose above what it is worth"


def test_a_page_with_cached_children_is_worth_at_least_what_they_are():
    order = CostOrder(SIZE, 4096)
    parent, child = grow(order, 1, 2)
    order.add(parent)
    order.add(child)
    assert order.pop() == child
    order.forgotten(child)
    assert order.pop() == parent


def test_a_page_goes_before_its_children_if_they_are_held():
    order = CostOrder(SIZE, 4096)
    grow(order, 1, 2)
    order.add(1)
    assert order.pop() == 1


@pytest.mark.parametrize("name", ["lru", "cost", "adaptive"])
def test_taking_pages_back_leaves_no_trace(name: str):
    order = make_order(name, SIZE, 64, 64)
    pages = grow(order, 1, 50)
    for _ in range(100):
        release(order, pages)
        assert all(order.remove(page) for page in pages) and not order.remove(pages[0])
    assert len(order) == 0
    if isinstance(order, CostOrder):
        assert len(order._heap) <= 2 * 50 + 64, "what is stale is thrown out"
    release(order, pages)
    assert lose(order, 50) == pages[::-1]


class Pool:
    """A pool of `num_pages` that prefixes are asked of, one after the other."""

    def __init__(self, order: EvictionOrder, num_pages: int) -> None:
        self.order, self.num_pages = order, num_pages
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.free = list(range(1, num_pages + 1))

    def ask(self, name: bytes, length: int) -> int:
        """Returns how many of its pages were there."""
        keys = [b"%s/%d" % (name, index) for index in range(length)]
        num_found = next((i for i, key in enumerate(keys) if key not in self.page_of), length)
        for key in keys:
            if key in self.page_of:
                assert self.order.remove(self.page_of[key])
        for index, key in enumerate(keys):
            if key not in self.page_of:
                if not self.free:
                    page = self.order.pop()
                    self.order.forgotten(page)
                    del self.page_of[self.key_of.pop(page)]
                    self.free.append(page)
                page = self.page_of[key] = self.free.pop()
                self.key_of[page] = key
                self.order.published(page, key, keys[index - 1] if index else b"root", index)
        release(self.order, [self.page_of[key] for key in keys])
        return num_found


def adaptive_pool() -> Pool:
    return Pool(AdaptiveOrder(SIZE, 10**9, 32), 32)


def test_adaptive_keeps_a_part_of_what_takes_turns_where_lru_finds_nothing():
    found = {}
    for name in ("lru", "cost", "adaptive"):
        pool = Pool(make_order(name, SIZE, 10**9, 32), 32)
        found[name] = sum(pool.ask(b"%d" % (turn % 5), 8) for turn in range(100))
    assert found["lru"] == found["cost"] == 0
    assert found["adaptive"] >= 0.7 * 95 * 8, "24 of 40 pages can stay while another 8 are in use"


def test_of_the_newest_those_just_used_stay_while_there_are_others():
    order = NewestOrder(SIZE, num_pages=4 * YOUNG)
    for page in range(1, 11):
        grow(order, page, 1, b"%d" % page)
        order.add(page)
    assert lose(order, 4) == [6, 5, 4, 3], "four are young"
    assert order.remove(8) and not order.remove(8)
    order.add(8)
    assert lose(order, 5) == [2, 1, 8, 10, 9], "then the newest of them"


def test_adaptive_notices_when_others_come_and_those_who_were_there_do_not_come_back():
    pool = adaptive_pool()
    assert isinstance(pool.order, AdaptiveOrder) and pool.order.gives_up_newest
    for turn in range(20):
        pool.ask(b"old %d" % (turn % 5), 8)
    found = [pool.ask(b"new %d" % (turn // 4), 8) for turn in range(80)]
    assert not pool.order.gives_up_newest
    late = found[40:]
    assert sum(late) == 8 * (len(late) - len(late) // 4), "each but the first of four finds everything"


def test_adaptive_shadows_hold_as_much_as_the_pool_and_no_more():
    pool = adaptive_pool()
    for number in range(200):
        pool.ask(b"%d" % number, 3)
    assert isinstance(pool.order, AdaptiveOrder)
    for shadow in (pool.order._if_newest, pool.order._if_cost):
        assert len(shadow._id_of) == len(shadow._key_of) == 32


def shelf_of(*pages: int, ttl_s: dict[int, float]) -> Shelf:
    shelf = Shelf(LruOrder())
    for page, seconds in ttl_s.items():
        shelf.retain(page, seconds)
    for page in pages:
        shelf.add(page)
    return shelf


def test_kept_pages_go_last_the_soonest_deadline_first_and_are_counted():
    shelf = shelf_of(1, 2, 3, 4, ttl_s={1: 10.0, 3: 5.0})
    assert shelf.num_retained == 2
    assert [shelf.pop() for _ in range(4)] == [2, 4, 3, 1]
    assert shelf.num_retained_evictions == 2 and len(shelf) == 0


def test_a_page_whose_time_is_over_is_as_one_just_used_and_not_counted():
    shelf = shelf_of(1, 2, 3, ttl_s={2: 5.0, 3: 4.0})
    shelf.advance(4.9)
    assert shelf.num_retained == 1
    shelf.advance(5.0)
    shelf.advance(1.0)
    assert [shelf.pop() for _ in range(3)] == [1, 3, 2] and shelf.num_retained_evictions == 0


def test_each_use_sets_the_deadline_anew():
    shelf = shelf_of(1, ttl_s={1: 5.0})
    shelf.advance(4.0)
    assert shelf.remove(1)
    shelf.advance(8.0)
    shelf.add(1)
    shelf.advance(12.9)
    assert shelf.num_retained == 1
    shelf.advance(13.0)
    assert shelf.num_retained == 0
    assert shelf.remove(1)
    shelf.add(1)
    assert shelf.num_retained == 0, "it is an ordinary page now"


def test_the_longer_time_counts_also_for_a_page_that_lies_there():
    shelf = shelf_of(1, ttl_s={1: 5.0})
    shelf.retain(1, 2.0)
    shelf.advance(4.0)
    shelf.retain(1, 8.0)
    shelf.advance(11.9)
    assert shelf.num_retained == 1
    shelf.check()


def test_a_forgotten_page_is_kept_no_longer():
    shelf = shelf_of(ttl_s={1: 5.0})
    shelf.forgotten(1)
    shelf.add(1)
    assert shelf.num_retained == 0


def test_time_never_goes_back():
    shelf = shelf_of(ttl_s={1: 5.0})
    shelf.advance(10.0)
    shelf.advance(2.0)
    shelf.add(1)
    shelf.advance(14.9)
    assert shelf.num_retained == 1
