"""The shelf: cached pages that nobody holds, those that callers asked to keep among them.

A page that is to be kept has a time to live, in seconds after its last use: each time its last holder lets go of it, its
deadline is set anew. Until then it goes only when nothing else is left, and that is counted. When memory is needed,
pages go in this order:

    1. those nobody asked to keep, in the order of `eviction`
    2. those still to be kept, the soonest deadline first
    3. those that an open session holds, the one not used for longest first; this is counted too

A page whose deadline passes joins the first ones as if it had just been used. It must not go before them: the pages after
it, which nobody asked to keep, may be among them, and are worth nothing without it.

Time is a number that the caller brings; nothing here reads a clock.
"""

import heapq
import math

from jaxkv.cache.eviction import EvictionOrder


class Shelf:
    """Keeps unheld cached pages until their memory is needed; O(1) a page, O(log n) for kept ones.

    Args:
        order: in which pages go that nobody asked to keep.
        max_held: pages that `hold` may keep at once; None is no limit.
    """

    def __init__(self, order: EvictionOrder, max_held: int | None = None) -> None:
        self.order = order
        self.num_retained_evictions = 0  # pages that went before their deadline
        self.num_held_evictions = 0  # pages that went while a session held them
        self._max_held = max_held
        self._held: dict[int, None] = {}  # pages of open sessions, on the shelf or in use
        self._now_s = 0.0
        self._ttl_s: dict[int, float] = {}  # pages to keep, on the shelf or held
        self._retained: dict[int, int] = {}  # pages on the shelf before their deadline -> serial number
        # (deadline, serial number, page); stale where the page has another serial number. Released tail first, pages
        # of one deadline go tail first too.
        self._deadlines: list[tuple[float, int, int]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self.order) + len(self._retained)

    @property
    def num_retained(self) -> int:
        """Pages on the shelf before their deadline; those that sessions hold have none."""
        return sum(page not in self._held for page in self._retained)

    @property
    def num_held(self) -> int:
        """Pages that sessions hold, on the shelf or in use."""
        return len(self._held)

    def add(self, page: int) -> None:
        """Takes in a page that its last holder let go of."""
        ttl_s = math.inf if page in self._held else self._ttl_s.get(page)
        if ttl_s is None:
            self.order.add(page)
            return
        self._num_pushed += 1
        self._retained[page] = self._num_pushed
        heapq.heappush(self._deadlines, (self._now_s + ttl_s, self._num_pushed, page))
        if len(self._deadlines) > 2 * len(self._retained) + 64:  # mostly stale
            self._deadlines = [entry for entry in self._deadlines if self._retained.get(entry[2]) == entry[1]]
            heapq.heapify(self._deadlines)

    def remove(self, page: int) -> bool:
        """Takes a page out, for someone holds it again; False if it was not there."""
        return self.order.remove(page) or self._retained.pop(page, None) is not None

    def pop(self) -> int:
        """Takes out the page to lose; there must be one. Call `forgotten` when its key is gone."""
        if len(self.order):
            return self.order.pop()
        while True:
            deadline_s, serial, page = heapq.heappop(self._deadlines)
            if self._retained.get(page) == serial:
                del self._retained[page]
                if deadline_s == math.inf:
                    self.num_held_evictions += 1
                else:
                    self.num_retained_evictions += 1
                return page

    def retain(self, page: int, ttl_s: float) -> None:
        """Keeps a cached page, held or not, for at least `ttl_s` seconds from its last use on."""
        was_here = self.remove(page)
        self._ttl_s[page] = max(ttl_s, self._ttl_s.get(page, 0.0))
        if was_here:
            self.add(page)

    def hold(self, page: int) -> None:
        """Keeps a cached page, in use or not, until `let_go`; beyond `max_held` pages it stays as it is."""
        if page in self._held or (self._max_held is not None and len(self._held) >= self._max_held):
            return
        was_here = self.remove(page)
        self._held[page] = None
        if was_here:
            self.add(page)

    def let_go(self, page: int) -> None:
        """Ends `hold`; the page is one just used. Harmless for one that is not held."""
        if page in self._held:
            was_here = self.remove(page)
            del self._held[page]
            if was_here:
                self.add(page)

    def is_held(self, page: int) -> bool:
        """Whether `hold` keeps a page."""
        return page in self._held

    def ttl_s(self, page: int) -> float | None:
        """How long a page is to be kept from its last use on; None: nobody asked, or the time is over."""
        return self._ttl_s.get(page)

    def advance(self, now_s: float) -> None:
        """Time goes on; a `now_s` in the past changes nothing."""
        self._now_s = max(self._now_s, now_s)
        while self._deadlines and self._deadlines[0][0] <= self._now_s:
            _, serial, page = heapq.heappop(self._deadlines)
            if self._retained.get(page) == serial:
                del self._retained[page], self._ttl_s[page]
                self.order.add(page)

    def forgotten(self, page: int) -> None:
        """As in `EvictionOrder`; nor is the page to be kept any longer."""
        self._ttl_s.pop(page, None)
        self._held.pop(page, None)
        self.order.forgotten(page)

    def check(self) -> None:
        """Asserts that the structures agree; for tests."""
        assert self._retained.keys() <= self._ttl_s.keys() | self._held.keys()
        assert self._max_held is None or len(self._held) <= self._max_held
        assert {page for _, serial, page in self._deadlines if self._retained.get(page) == serial} == {*self._retained}
