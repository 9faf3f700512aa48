"""Which cached page goes first when memory runs out: `lru` or `cost` (or, in `adaptive_eviction`, the better of two).

An order holds the cached pages that nobody holds and that nobody asked to keep. Both orders give up the tail of a prefix
before its head, for a hit needs every page before it: `lru` because tails are released first, `cost` because a page
whose children are cached is worth at least what they are.

`cost` is GreedyDual (Young 1994; Cao and Irani 1997): a page's worth is what recomputing it takes, on top of a water
level that rises to the worth of each page that was lost. Where all pages cost the same this is LRU; a page deep in a
prefix, whose tokens attend to more, outlives shallow ones of the same age.
"""

import collections
import heapq
from typing import NamedTuple, Protocol


class EvictionOrder(Protocol):
    """Pages in the order in which they go."""

    def __len__(self) -> int: ...

    def add(self, page: int) -> None:
        """A page that was not there is the most recently used one."""
        ...

    def remove(self, page: int) -> bool:
        """Takes a page out; False if it was not there."""
        ...

    def pop(self) -> int:
        """Takes out the page to lose; there must be one."""
        ...

    def published(self, page: int, key: bytes, parent: bytes, index: int) -> None:
        """A page got a key: it is page `index` of a prefix, after the page whose key is `parent`."""
        ...

    def forgotten(self, page: int) -> None:
        """A page lost its key."""
        ...


class LruOrder:
    """The page that was not used for the longest time goes first; O(1)."""

    def __init__(self) -> None:
        self._pages: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, page: int) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> bool:
        return self._pages.pop(page, page) is None

    def pop(self) -> int:
        return self._pages.popitem(last=False)[0]

    def published(self, page: int, key: bytes, parent: bytes, index: int) -> None:
        pass  # age is all that counts

    def forgotten(self, page: int) -> None:
        pass


class _Known(NamedTuple):
    key: bytes
    parent: bytes
    cost: float


class CostOrder:
    """The page whose loss costs least to make good goes first; O(log n), amortised.

    A page of T tokens at position p costs T * (1 + p / attention_len), in units of what the weights take for a token.
    Pages with cached children go only when no others are left.

    Args:
        page_size: tokens a page holds.
        attention_len: tokens of context at which attention takes as many operations as the weights do.
    """

    def __init__(self, page_size: int, attention_len: int) -> None:
        self._page_size = page_size
        self._attention_len = attention_len
        self._level = 0.0  # worth of the last page that was lost
        self._known: dict[int, _Known] = {}
        self._page_of: dict[bytes, int] = {}
        self._num_children: dict[bytes, int] = {}  # of a key, whether its page is still cached or not
        self._worth: dict[int, float] = {}  # of the pages in the order
        # (has cached children, worth, serial number, page); stale where the page's serial number is another one.
        self._heap: list[tuple[bool, float, int, int]] = []
        self._serial: dict[int, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._worth)

    def add(self, page: int) -> None:
        self._worth[page] = self._level + self._known[page].cost
        self._push(page)

    def remove(self, page: int) -> bool:
        if self._serial.pop(page, None) is None:
            return False
        del self._worth[page]
        return True

    def pop(self) -> int:
        while True:
            _, worth, serial, page = heapq.heappop(self._heap)
            if self._serial.get(page) == serial:
                self._level = max(self._level, worth)
                del self._serial[page], self._worth[page]
                return page

    def published(self, page: int, key: bytes, parent: bytes, index: int) -> None:
        position = (index + 0.5) * self._page_size
        self._known[page] = _Known(key, parent, self._page_size * (1 + position / self._attention_len))
        self._page_of[key] = page
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if self._num_children[parent] == 1:
            self._push_again(parent)

    def forgotten(self, page: int) -> None:
        known = self._known.pop(page)
        del self._page_of[known.key]
        self._num_children[known.parent] -= 1
        if not self._num_children[known.parent]:
            del self._num_children[known.parent]
            self._push_again(known.parent)

    def cost_of(self, page: int) -> float:
        """What computing a page that has a key takes."""
        return self._known[page].cost

    def _push_again(self, key: bytes) -> None:
        """The page got its first child, or lost its last one."""
        page = self._page_of.get(key)
        if page in self._worth:
            self._push(page)

    def _push(self, page: int) -> None:
        self._num_pushed += 1
        self._serial[page] = self._num_pushed
        has_children = self._known[page].key in self._num_children
        heapq.heappush(self._heap, (has_children, self._worth[page], self._num_pushed, page))
        if len(self._heap) > 2 * len(self._worth) + 64:  # mostly stale
            self._heap = [entry for entry in self._heap if self._serial.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)
