"""Page allocator: explicit cases, then random operations against an obvious model."""

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st
import pytest

from jaxkv.cache.adaptive_eviction import YOUNG, AdaptiveOrder, make_order
from jaxkv.cache.pages import NULL_PAGE, PageAllocator, PageCounts
from jaxkv.cache.shelf import Shelf

SIZE, ATTENTION_LEN = 4, 8  # tokens


def allocate(allocator: PageAllocator, num: int) -> list[int]:
    pages = allocator.try_allocate(num)
    assert pages is not None
    return pages


def test_hands_out_every_page_once_and_never_the_null_page():
    allocator = PageAllocator(9)
    pages = allocate(allocator, 8)
    assert sorted(pages) == list(range(1, 9))
    assert NULL_PAGE not in pages
    assert allocator.try_allocate(1) is None
    allocator.check(pages)


def test_a_refusal_changes_nothing():
    allocator = PageAllocator(5)
    allocate(allocator, 2)
    before = allocator.counts
    assert allocator.try_allocate(3) is None
    assert allocator.counts == before == PageCounts(free=2, cached=0, referenced=2)
    assert allocate(allocator, 2) == [3, 4]


def test_allocating_nothing_is_fine_when_full():
    allocator = PageAllocator(2)
    allocate(allocator, 1)
    assert allocator.try_allocate(0) == []


def test_05_free_list_is_the_lru_list_and_pages_are_freed_tail_first():
    allocator = PageAllocator(7)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    first, second = allocate(allocator, 3), allocate(allocator, 3)
    for page in first + second:
        allocator.mark_cached(page)
    allocator.release(first)
    allocator.release(second)
    assert allocator.counts == PageCounts(free=0, cached=6, referenced=0)
    # The older prompt goes before the newer, and each from its end: its head is worth the most.
    assert [allocate(allocator, 1)[0] for _ in range(6)] == [*reversed(first), *reversed(second)]
    assert evicted == [*reversed(first), *reversed(second)]


def test_05_worthless_pages_go_before_cached_ones():
    allocator = PageAllocator(4)
    pages = allocate(allocator, 3)
    allocator.mark_cached(pages[0])
    allocator.release(pages)
    assert allocate(allocator, 3)[-1] == pages[0]


def test_05_a_shared_page_leaves_the_free_list_and_comes_back_as_the_newest():
    allocator = PageAllocator(4)
    pages = allocate(allocator, 3)
    for page in pages:
        allocator.mark_cached(page)
    allocator.release(pages)
    oldest = pages[-1]
    allocator.share([oldest])
    assert allocator.counts == PageCounts(free=0, cached=2, referenced=1)
    assert allocator.try_allocate(3) is None, "a page that is held is no room"
    allocator.release([oldest])
    assert allocate(allocator, 3)[-1] == oldest


def test_a_page_stays_until_its_last_holder_lets_go():
    allocator = PageAllocator(2)
    pages = allocate(allocator, 1)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_available == 0
    allocator.release(pages)
    assert allocator.num_available == 1


def test_releasing_too_often_is_our_mistake():
    allocator = PageAllocator(3)
    pages = allocate(allocator, 1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        allocator.release(pages)


def test_sharing_a_free_page_is_our_mistake():
    with pytest.raises(AssertionError, match="free"):
        PageAllocator(3).share([1])


def test_a_forgotten_page_is_handed_out_first_and_not_evicted_again():
    allocator = PageAllocator(4)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    pages = allocate(allocator, 3)
    for page in pages:
        allocator.mark_cached(page)
    allocator.release(pages)
    allocator.forget(pages[0])
    assert allocator.counts == PageCounts(free=1, cached=2, referenced=0)
    assert allocate(allocator, 1) == [pages[0]] and evicted == []


class AllocatorMachine(hypothesis.stateful.RuleBasedStateMachine):
    """Random operations with keys, kept pages and time; the model is dictionaries, and `min` over them."""

    @hypothesis.stateful.initialize(num_pages=st.integers(2, 20), policy=st.sampled_from(["lru", "cost", "adaptive"]))
    def start(self, num_pages: int, policy: str) -> None:
        self.policy = policy
        self.allocator = PageAllocator(num_pages, Shelf(make_order(policy, SIZE, ATTENTION_LEN, num_pages)))
        self.allocator.on_evict = lambda page: self.evicted.append(page)
        self.evicted: list[int] = []
        self.free = list(range(1, num_pages))  # the head first
        self.references = dict.fromkeys(range(num_pages), 0)
        self.held: list[list[int]] = []
        self.keys: dict[int, tuple[bytes, bytes, int]] = {}  # cached page -> its key, its parent's, its index
        self.ttl_s: dict[int, float] = {}
        self.shelf: dict[int, tuple[float, float | None]] = {}  # -> worth when it came (or age), deadline
        self.ages: dict[int, int] = {}
        self.young: list[int] = []  # of the adaptive order, oldest first
        self.now_s = self.level = 0.0
        self.num_events = self.num_lost = 0

    def put(self, page: int) -> None:
        """Onto the model's shelf."""
        self.num_events += 1
        deadline = self.now_s + self.ttl_s[page] if page in self.ttl_s else None
        worth = float(self.num_events)
        if self.policy != "lru" and deadline is None:
            worth = self.level + SIZE * (1 + (self.keys[page][2] + 0.5) * SIZE / ATTENTION_LEN)
        self.shelf[page], self.ages[page] = (worth, deadline), self.num_events
        if deadline is None:
            self.young.append(page)
            del self.young[: -(self.allocator.num_pages // YOUNG) or len(self.young)]

    def next_to_lose(self) -> list[int]:
        """Pages that may go now: several where only the order of their becoming leaves decides."""
        plain = [page for page, (_, deadline) in self.shelf.items() if deadline is None]
        if not plain:
            return [min(self.shelf, key=lambda page: (self.shelf[page][1], self.ages[page]))]
        if self.policy == "lru":
            return [min(plain, key=self.ages.__getitem__)]
        parents = {parent for _, parent, _ in self.keys.values()}
        newest = self.gives_up_newest()
        if newest:
            plain = [page for page in plain if page not in self.young] or plain
        rank = {
            page: (self.keys[page][0] in parents, -self.ages[page] if newest else self.shelf[page][0]) for page in plain
        }
        return [page for page in plain if rank[page] == min(rank.values())]

    def gives_up_newest(self) -> bool:
        """Which of its two ways the adaptive order goes: its own word, for `test_eviction` asks when."""
        order = self.allocator.shelf.order
        return isinstance(order, AdaptiveOrder) and order.gives_up_newest

    def lose(self, page: int) -> None:
        assert page in self.next_to_lose()
        worth, deadline = self.shelf.pop(page)
        if page in self.young and self.gives_up_newest():
            self.young.clear()  # no others were left
        elif page in self.young:
            self.young.remove(page)
        self.num_lost += deadline is not None
        if deadline is None and not self.gives_up_newest():
            self.level = max(self.level, worth)
        del self.keys[page]
        self.ttl_s.pop(page, None)

    @hypothesis.stateful.rule(num=st.integers(0, 5))
    def allocate(self, num: int) -> None:
        self.evicted.clear()
        pages = self.allocator.try_allocate(num)
        if num > len(self.free) + len(self.shelf):
            assert pages is None
            return
        assert pages is not None
        num_free = min(num, len(self.free))
        assert pages[:num_free] == self.free[:num_free] and self.evicted == pages[num_free:]
        del self.free[:num_free]
        for page in self.evicted:
            self.lose(page)
        self.references |= dict.fromkeys(pages, 1)
        self.held.append(pages)

    @hypothesis.stateful.precondition(lambda self: self.held)
    @hypothesis.stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    def give_back(self, pages: list[int]) -> None:
        self.allocator.release(pages)
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0 and page in self.keys:
                self.put(page)
            elif self.references[page] == 0:
                self.free.insert(0, page)

    @hypothesis.stateful.rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        possible = [page for page, count in self.references.items() if count or page in self.keys]
        if possible:
            pages = data.draw(st.lists(st.sampled_from(possible), unique=True, max_size=4))
            self.allocator.share(pages)
            for page in pages:
                self.take_off(page)
                self.references[page] += 1
            self.held.append(pages)

    def take_off(self, page: int) -> bool:
        if page in self.young:
            self.young.remove(page)
        return self.shelf.pop(page, None) is not None

    @hypothesis.stateful.rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        possible = [pages for pages in self.held if any(page not in self.keys for page in pages)]
        if possible:
            self.publish_as_chain(data, data.draw(st.sampled_from(possible)))

    def publish_as_chain(self, data: st.DataObject, pages: list[int]) -> None:
        before = data.draw(st.sampled_from([(b"root", b"", -1), *self.keys.values()]))
        for page in pages:
            if page in self.keys:
                before = self.keys[page]
                continue
            self.num_events += 1
            before = self.keys[page] = b"key %d" % self.num_events, before[0], before[2] + 1
            self.allocator.mark_cached(page)
            self.allocator.shelf.order.published(page, *before)

    @hypothesis.stateful.rule(data=st.data(), num=st.integers(1, 4))
    def prompt(self, data: st.DataObject, num: int) -> None:
        """One comes and goes."""
        num_held = len(self.held)
        self.allocate(num)
        if len(self.held) > num_held:
            self.publish_as_chain(data, self.held[-1])
            self.give_back(self.held.pop())

    @hypothesis.stateful.rule(data=st.data(), ttl_s=st.sampled_from([1.0, 5.0]))
    def retain(self, data: st.DataObject, ttl_s: float) -> None:
        if self.keys:
            page = data.draw(st.sampled_from(sorted(self.keys)))
            self.allocator.shelf.retain(page, ttl_s)
            was_listed = self.take_off(page)
            self.ttl_s[page] = max(ttl_s, self.ttl_s.get(page, 0))
            if was_listed:
                self.put(page)

    @hypothesis.stateful.rule(seconds=st.sampled_from([-1.0, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.allocator.shelf.advance(self.now_s + seconds)
        self.now_s += max(seconds, 0)
        over = [page for page, (_, deadline) in self.shelf.items() if deadline is not None and deadline <= self.now_s]
        for page in sorted(over, key=lambda page: (self.shelf[page][1], self.ages[page])):
            del self.shelf[page], self.ttl_s[page]
            self.put(page)

    @hypothesis.stateful.rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.keys:
            page = data.draw(st.sampled_from(sorted(self.keys)))
            self.allocator.forget(page)
            del self.keys[page]
            self.ttl_s.pop(page, None)
            if self.take_off(page):
                self.free.insert(0, page)

    @hypothesis.stateful.invariant()
    def agrees(self) -> None:
        allocator, num_listed = self.allocator, len(self.shelf)
        allocator.check([page for pages in self.held for page in pages])
        referenced = allocator.num_pages - 1 - len(self.free) - num_listed
        assert allocator.counts == PageCounts(free=len(self.free), cached=num_listed, referenced=referenced)
        assert allocator.shelf.num_retained == sum(deadline is not None for _, deadline in self.shelf.values())
        assert allocator.shelf.num_retained_evictions == self.num_lost


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = hypothesis.settings(max_examples=200, stateful_step_count=50, deadline=None)
