"""Page allocator: who holds which page of the pool, in O(1) a page.

A page is in exactly one of three states:

    referenced   one or more sequences hold it
    cached       nobody holds it, but its content has a key in the prefix cache and may be taken back by `share`
    free         nobody holds it and its content is worth nothing

Cached and free pages together form one list, which is both the free list and the LRU list: allocation pops its head,
released cached pages join at the tail, released worthless pages join at the head. So a cached page lives exactly as
long as nobody needs its memory, and no second structure can disagree about that.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

NULL_PAGE = 0  # never handed out: padding and rows that are done write here


@dataclasses.dataclass(frozen=True)
class PageCounts:
    """Pages of the pool by state, without the null page; they always add up to `num_pages - 1`."""

    free: int
    cached: int
    referenced: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.referenced


class PageAllocator:
    """Hands out pages `1 .. num_pages - 1` and counts who holds them.

    Args:
        num_pages: pages in the pool, including the null page.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        # Called with a cached page when its memory is handed out again; its key must be forgotten.
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._cached = [False] * num_pages  # has a key in the prefix cache, referenced or not
        # The list is circular and intrusive. The null page, which is never in it, is its sentinel:
        # next[0] is the head (popped first), prev[0] the tail.
        self._next = [*range(1, num_pages), 0]
        self._prev = [num_pages - 1, *range(num_pages - 1)]
        self._num_listed = num_pages - 1
        self._num_cached_listed = 0

    @property
    def num_available(self) -> int:
        """Pages that `try_allocate` could hand out now: free and cached ones."""
        return self._num_listed

    @property
    def counts(self) -> PageCounts:
        listed, cached = self._num_listed, self._num_cached_listed
        return PageCounts(free=listed - cached, cached=cached, referenced=self.num_pages - 1 - listed)

    def is_referenced(self, page: int) -> bool:
        return self._references[page] > 0

    def try_allocate(self, num: int) -> list[int] | None:
        """`num` pages with one reference each, or None (and nothing changed) if there are not as many."""
        if num > self._num_listed:
            return None
        pages = []
        page, next_, references, cached = self._next[NULL_PAGE], self._next, self._references, self._cached
        for _ in range(num):
            pages.append(page)
            references[page] = 1
            if cached[page]:
                cached[page] = False
                self._num_cached_listed -= 1
                if self.on_evict is not None:
                    self.on_evict(page)
            page = next_[page]
        next_[NULL_PAGE], self._prev[page] = page, NULL_PAGE
        self._num_listed -= num
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that are referenced or cached; cached ones leave the free list."""
        for page in pages:
            if self._references[page] == 0:
                assert self._cached[page], f"page {page} is free: its content may be anything"
                self._unlink(page)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page, last page first.

        The head of a prompt is worth more than its tail (a hit needs every page before it), so it is evicted last.
        """
        for page in reversed(pages):
            count = self._references[page] - 1
            assert count >= 0 and page != NULL_PAGE, f"page {page} was released more often than taken"
            self._references[page] = count
            if count == 0:
                self._link(page)

    def mark_cached(self, page: int) -> None:
        """A referenced page's content got a key."""
        assert self._references[page] > 0 and not self._cached[page], page
        self._cached[page] = True

    def forget(self, page: int) -> None:
        """A cached page's key is gone (the cache was cleared); unreferenced, it is the first to be handed out."""
        assert self._cached[page], page
        if self._references[page] == 0:
            self._unlink(page)
            self._cached[page] = False
            self._link(page)
        else:
            self._cached[page] = False

    def check(self, held: Sequence[int] | None = None) -> None:
        """Walks everything and asserts the invariants, and that `held` are all references; for tests."""
        listed, page, previous = [], self._next[NULL_PAGE], NULL_PAGE
        while page != NULL_PAGE:
            assert self._prev[page] == previous and self._references[page] == 0, page
            assert len(listed) < self.num_pages, "the free list has a cycle"
            listed.append(page)
            page, previous = self._next[page], page
        assert self._prev[NULL_PAGE] == previous
        assert sorted(listed) == [p for p in range(1, self.num_pages) if self._references[p] == 0]
        assert self._num_listed == len(listed)
        assert self._num_cached_listed == sum(self._cached[page] for page in listed)
        assert self._references[NULL_PAGE] == 0 and not self._cached[NULL_PAGE]
        assert self.counts.total == self.num_pages - 1
        if held is not None:
            assert sorted(held) == [page for page, count in enumerate(self._references) for _ in range(count)]

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self._num_listed -= 1
        self._num_cached_listed -= self._cached[page]

    def _link(self, page: int) -> None:
        if self._cached[page]:  # at the tail
            before, after = self._prev[NULL_PAGE], NULL_PAGE
        else:  # at the head
            before, after = NULL_PAGE, self._next[NULL_PAGE]
        self._prev[page], self._next[page] = before, after
        self._next[before] = self._prev[after] = page
        self._num_listed += 1
        self._num_cached_listed += self._cached[page]
