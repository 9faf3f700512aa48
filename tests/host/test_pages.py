"""Page allocator: explicit cases, then random operations against an obvious model."""

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st
import pytest

from jaxkv.pages import NULL_PAGE, PageAllocator, PageCounts


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
    """Random operations; the model is a list and two dictionaries."""

    @hypothesis.stateful.initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.allocator.on_evict = lambda page: self.evicted.append(page)
        self.evicted: list[int] = []
        self.free = list(range(1, num_pages))  # the head first
        self.references = dict.fromkeys(range(num_pages), 0)
        self.cached = dict.fromkeys(range(num_pages), False)
        self.held: list[list[int]] = []

    @hypothesis.stateful.rule(num=st.integers(0, 6))
    def allocate(self, num: int) -> None:
        self.evicted.clear()
        pages = self.allocator.try_allocate(num)
        if num > len(self.free):
            assert pages is None
            return
        assert pages is not None
        expected, self.free = self.free[:num], self.free[num:]
        assert pages == expected
        assert self.evicted == [page for page in pages if self.cached[page]]
        for page in pages:
            self.references[page], self.cached[page] = 1, False
        self.held.append(pages)

    @hypothesis.stateful.precondition(lambda self: self.held)
    @hypothesis.stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.allocator.release(pages)
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.insert(len(self.free) if self.cached[page] else 0, page)

    @hypothesis.stateful.rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        possible = [page for page, count in self.references.items() if count or self.cached[page]]
        if possible:
            pages = data.draw(st.lists(st.sampled_from(possible), unique=True, max_size=4))
            self.allocator.share(pages)
            for page in pages:
                if self.references[page] == 0:
                    self.free.remove(page)
                self.references[page] += 1
            self.held.append(pages)

    @hypothesis.stateful.rule(data=st.data())
    def mark_cached(self, data: st.DataObject) -> None:
        possible = [page for page, count in self.references.items() if count and not self.cached[page]]
        if possible:
            page = data.draw(st.sampled_from(possible))
            self.allocator.mark_cached(page)
            self.cached[page] = True

    @hypothesis.stateful.rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        possible = [page for page, cached in self.cached.items() if cached]
        if possible:
            page = data.draw(st.sampled_from(possible))
            self.allocator.forget(page)
            self.cached[page] = False
            if self.references[page] == 0:
                self.free.remove(page)
                self.free.insert(0, page)

    @hypothesis.stateful.invariant()
    def agrees(self) -> None:
        self.allocator.check([page for pages in self.held for page in pages])
        cached = sum(self.cached[page] for page in self.free)
        assert self.allocator.counts == PageCounts(
            free=len(self.free) - cached, cached=cached, referenced=self.allocator.num_pages - 1 - len(self.free)
        )


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
