"""One tier of pages below the device: which keys it has, and in which order they go.

Pages go as they do on the device's shelf: first those nobody asked to keep, or whose time is over, least recently used
first; then the soonest deadline.
"""

from typing import NamedTuple

from jaxkv.cache.eviction import LruOrder
from jaxkv.cache.shelf import Shelf


class OnDisk(NamedTuple):
    """A page that an earlier process left behind."""

    key: bytes
    ttl_s: float | None  # to be kept so many seconds from its last use on
    age_s: float  # since its last use


class Tier:
    """The keys of one tier, at most `num_pages`, in the order in which they go."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._shelf = Shelf(LruOrder())  # of numbers that stand for keys; those in use are not on it
        self._number_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._ttl_s: dict[bytes, float] = {}  # from the last use on; the shelf knows whether it is over
        self._pins: dict[bytes, int] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, key: object) -> bool:
        return key in self._number_of

    def all_keys(self) -> list[bytes]:
        """All of them, in the order in which they came."""
        return list(self._number_of)

    def ttl_s(self, key: bytes) -> float | None:
        """How long a key is to be kept from its last use on; None: nobody asked, its time is over, or it is not there."""
        number = self._number_of.get(key)
        return None if number is None or self._shelf.ttl_s(number) is None else self._ttl_s[key]

    def advance(self, now_s: float) -> None:
        """As `Shelf.advance`."""
        self._shelf.advance(now_s)

    def add(self, key: bytes, ttl_s: float | None, left_s: float | None = None) -> None:
        """A key that was not there is the most recently used one; `left_s` of its time are left, if not all."""
        assert len(self) < self.num_pages and key not in self
        self._num_added += 1
        self._number_of[key], self._key_of[self._num_added] = self._num_added, key
        if ttl_s is not None and (left_s is None or left_s > 0):
            self._ttl_s[key] = ttl_s
            self._shelf.retain(self._num_added, ttl_s if left_s is None else left_s)
        self._shelf.add(self._num_added)

    def touch(self, key: bytes, ttl_s: float | None = None) -> None:
        """It was used, and is to be kept for at least `ttl_s`, if that is given."""
        if ttl_s is not None:
            self._ttl_s[key] = max(ttl_s, self.ttl_s(key) or 0.0)
            self._shelf.retain(self._number_of[key], ttl_s)
        if key not in self._pins:
            self._shelf.remove(self._number_of[key])
            self._put_back(key)

    def pin(self, key: bytes) -> None:
        """It stays until `unpin` was called as often."""
        if not self._pins.get(key):
            self._shelf.remove(self._number_of[key])
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: bytes) -> None:
        """Harmless if it was removed meanwhile."""
        if key in self._pins:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._put_back(key)

    def pop(self, *, for_kept: bool) -> tuple[bytes, float | None] | None:
        """Takes out the page to lose, with its time to live; None if none may go.

        Args:
            for_kept: it makes room for a page that is to be kept; others displace only what nobody asked to keep.
        """
        if not len(self._shelf.order) and not (for_kept and len(self._shelf)):
            return None
        number = self._shelf.pop()
        key = self._key_of.pop(number)
        ttl_s = self.ttl_s(key)
        self._shelf.forgotten(number)
        del self._number_of[key]
        self._ttl_s.pop(key, None)
        return key, ttl_s

    def remove(self, key: bytes) -> None:
        """It is gone; harmless if it was not there."""
        number = self._number_of.pop(key, None)
        if number is not None:
            self._shelf.remove(number)
            self._shelf.forgotten(number)
            del self._key_of[number]
            self._ttl_s.pop(key, None)
            self._pins.pop(key, None)

    def _put_back(self, key: bytes) -> None:
        number = self._number_of[key]
        if (ttl_s := self.ttl_s(key)) is not None:
            self._shelf.retain(number, ttl_s)
        self._shelf.add(number)

    def check(self) -> None:
        """Asserts that the structures agree; for tests."""
        self._shelf.check()
        assert len(self) <= self.num_pages
        assert {key: number for number, key in self._key_of.items()} == self._number_of
        assert len(self._shelf) + len(self._pins) == len(self)
        assert self._ttl_s.keys() <= self._number_of.keys() >= self._pins.keys()
