"""`adaptive`: gives up the newest pages or the cheapest ones, whichever would have found more lately.

Where more prefixes take turns than the pool holds (conversations, branches of a tree of agents), `lru` and `cost` lose
each one right before it comes again. There it is best to keep what is there and to give up what was used last (but for
the few pages used just now): a part of the prefixes is then found every time. Where users come and go for good that would
be wrong. Which of the two this is shows in two *shadows*: caches without content, as large as the pool, one for each way;
the pages go the way whose shadow had more hits of late. (Choosing among policies by caches that are only simulated:
Gramacy et al., "Adaptive caching by refetching", NIPS 2002.)
"""

import collections
import itertools

from jaxkv.cache.eviction import CostOrder, EvictionOrder, LruOrder

YOUNG = 8  # one page of so many in the pool is young, see `NewestOrder`
_MEMORY = 4  # hits count for about as many page uses as four pools hold


class NewestOrder(CostOrder):
    """The page used last goes first, but the tail of a prefix before its head; pages just used only when no others are left.

    A conversation's next turn often comes soon or never, so what was used within the last eighth of a pool is *young*.

    Args:
        page_size: tokens a page holds.
        num_pages: pages of the pool.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        super().__init__(page_size, attention_len=1)
        self._num_added = 0
        self._num_young = num_pages // YOUNG
        self._young: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first; not in the heap

    def add(self, page: int) -> None:
        self._num_added += 1
        self._worth[page] = -float(self._num_added)
        self._young[page] = None
        self._grow_up(self._num_young)

    def remove(self, page: int) -> bool:
        if page not in self._young:
            return super().remove(page)
        del self._young[page], self._worth[page]
        return True

    def pop(self) -> int:
        if len(self._young) == len(self):
            self._grow_up(0)
        return super().pop()

    def _grow_up(self, num_young: int) -> None:
        while len(self._young) > num_young:
            self._push(self._young.popitem(last=False)[0])

    def _push_again(self, key: bytes) -> None:
        if self._page_of.get(key) not in self._young:
            super()._push_again(key)


class _Shadow:
    """What a pool of `num_pages` would hold if pages went in `order`, and how much it would have found."""

    def __init__(self, order: EvictionOrder, num_pages: int) -> None:
        self.score = 0.0
        self._order = order
        self._num_pages = num_pages
        self._decay = 1 - 1 / (_MEMORY * num_pages)
        self._id_of: dict[bytes, int] = {}  # of the pages it would hold; ids are the shadow's own
        self._key_of: dict[int, bytes] = {}
        self._ids = itertools.count()

    def use(self, key: bytes, parent: bytes, index: int, cost: float) -> None:
        """Somebody needed a page; `cost` is what computing it takes."""
        self.score *= self._decay
        id_ = self._id_of.get(key)
        if id_ is not None:
            self.score += cost
            self._order.remove(id_)
        else:
            id_ = self._id_of[key] = next(self._ids)
            self._key_of[id_] = key
            self._order.published(id_, key, parent, index)
        self._order.add(id_)
        if len(self._id_of) > self._num_pages:
            lost = self._order.pop()
            self._order.forgotten(lost)
            del self._id_of[self._key_of.pop(lost)]


class AdaptiveOrder:
    """The order in which the cheaper of two mistakes is made; O(log n), amortised, some four times `cost`.

    Args:
        page_size: tokens a page holds.
        attention_len: as of `CostOrder`.
        num_pages: pages of the pool.
    """

    def __init__(self, page_size: int, attention_len: int, num_pages: int) -> None:
        self._newest, self._cost = NewestOrder(page_size, num_pages), CostOrder(page_size, attention_len)
        self._if_newest = _Shadow(NewestOrder(page_size, num_pages), num_pages)
        self._if_cost = _Shadow(CostOrder(page_size, attention_len), num_pages)
        self._place: dict[int, tuple[bytes, bytes, int]] = {}  # page -> its key, its parent's, its index

    @property
    def gives_up_newest(self) -> bool:
        """Which way pages go now."""
        return self._if_newest.score >= self._if_cost.score

    def __len__(self) -> int:
        return len(self._cost)

    def add(self, page: int) -> None:
        self._newest.add(page)
        self._cost.add(page)
        for shadow in (self._if_newest, self._if_cost):
            shadow.use(*self._place[page], cost=self._cost.cost_of(page))

    def remove(self, page: int) -> bool:
        return self._newest.remove(page) and self._cost.remove(page)

    def pop(self) -> int:
        first, other = (self._newest, self._cost) if self.gives_up_newest else (self._cost, self._newest)
        page = first.pop()
        other.remove(page)
        return page

    def published(self, page: int, key: bytes, parent: bytes, index: int) -> None:
        self._place[page] = (key, parent, index)
        self._newest.published(page, key, parent, index)
        self._cost.published(page, key, parent, index)

    def forgotten(self, page: int) -> None:
        del self._place[page]
        self._newest.forgotten(page)
        self._cost.forgotten(page)


def make_order(name: str, page_size: int, attention_len: int, num_pages: int) -> EvictionOrder:
    """The order called `name`: one of `config.EVICTIONS`; numbers as for `AdaptiveOrder`."""
    if name == "adaptive":
        return AdaptiveOrder(page_size, attention_len, num_pages)
    return CostOrder(page_size, attention_len) if name == "cost" else LruOrder()
