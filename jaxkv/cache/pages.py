"""Page allocator: who holds which page of the pool, in O(1) a page.

A page is in exactly one of three states:

    referenced   one or more sequences hold it
    cached       nobody holds it, but its content has a key in the prefix cache and may be taken back by `share`
    free         nobody holds it and its content is worth nothing

Allocation takes free pages first, the one that came back last before others, then cached ones from the *shelf*
(`shelf`), which keeps them in the order in which they are given up. So a cached page lives exactly as long as nobody
needs its memory, and no second structure can disagree about that.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxkv.cache.eviction import LruOrder
from jaxkv.cache.shelf import Shelf

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
        shelf: where cached pages lie that nobody holds; None is an LRU one.
    """

    def __init__(self, num_pages: int, shelf: Shelf | None = None) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self.shelf = Shelf(LruOrder()) if shelf is None else shelf  # an empty one is falsy
        # Called with a cached page when its memory is handed out again; its key must be forgotten.
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._cached = [False] * num_pages  # has a key in the prefix cache, referenced or not
        self._free = list(range(num_pages - 1, 0, -1))  # the last one is handed out first

    @property
    def num_available(self) -> int:
        """Pages that `try_allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self.shelf)

    @property
    def counts(self) -> PageCounts:
        free, cached = len(self._free), len(self.shelf)
        return PageCounts(free=free, cached=cached, referenced=self.num_pages - 1 - free - cached)

    def is_referenced(self, page: int) -> bool:
        return self._references[page] > 0

    def is_cached(self) -> np.ndarray:
        """Whether each page's content has a key, held or not: bool [num_pages]."""
        return np.array(self._cached)

    def try_allocate(self, num: int) -> list[int] | None:
        """`num` pages with one reference each, or None (and nothing changed) if there are not as many."""
        if num > self.num_available:
            return None
        num_free = min(num, len(self._free))
        pages = self._free[len(self._free) - num_free :][::-1]
        del self._free[len(self._free) - num_free :]
        for _ in range(num - num_free):
            page = self.shelf.pop()
            pages.append(page)
            self._cached[page] = False
            if self.on_evict is not None:
                self.on_evict(page)
            self.shelf.forgotten(page)
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that are referenced or cached; cached ones leave the shelf."""
        for page in pages:
            if self._references[page] == 0:
                assert self._cached[page], f"page {page} is free: its content may be anything"
                self.shelf.remove(page)
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
                if self._cached[page]:
                    self.shelf.add(page)
                else:
                    self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """A referenced page's content got a key."""
        assert self._references[page] > 0 and not self._cached[page], page
        self._cached[page] = True

    def forget(self, page: int) -> None:
        """A cached page's key is gone (the cache was cleared); unreferenced, it is the first to be handed out."""
        assert self._cached[page], page
        self._cached[page] = False
        if self._references[page] == 0:
            self.shelf.remove(page)
            self._free.append(page)
        self.shelf.forgotten(page)

    def check(self, held: Sequence[int] | None = None) -> None:
        """Walks everything and asserts the invariants, and that `held` are all references; for tests."""
        self.shelf.check()
        unreferenced = [page for page in range(1, self.num_pages) if self._references[page] == 0]
        assert sorted(self._free) == [page for page in unreferenced if not self._cached[page]]
        assert len(self.shelf) == sum(self._cached[page] for page in unreferenced)
        assert self._references[NULL_PAGE] == 0 and not self._cached[NULL_PAGE]
        assert self.counts.total == self.num_pages - 1
        if held is not None:
            assert sorted(held) == [page for page, count in enumerate(self._references) for _ in range(count)]
