"""Pages that were read from disk into host memory, or are being read, for requests that wait for them."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class _Page:
    has_landed: bool = False
    wanted_in: int = 0  # newest round in which a waiting request asked for it


class Staging:
    """Their keys, in the order in which they were asked for.

    Args:
        num_pages: at most so many; one sequence's must fit.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: dict[bytes, _Page] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    @property
    def is_reading(self) -> bool:
        """Whether a page was asked for and has not come yet."""
        return any(not page.has_landed for page in self._pages.values())

    def start_round(self) -> None:
        """Another step is about to be planned."""
        self._round += 1

    def add(self, key: bytes) -> None:
        """A page is being read; the caller made room for it."""
        assert key not in self and len(self) < self._num_pages
        self._pages[key] = _Page(wanted_in=self._round)

    def want(self, key: bytes) -> None:
        """Some waiting request asks for it; harmless if it is not here."""
        if (page := self._pages.get(key)) is not None:
            page.wanted_in = self._round

    def land(self, key: bytes) -> None:
        """A page that was being read has come."""
        self._pages[key].has_landed = True

    def has_landed(self, key: bytes) -> bool:
        page = self._pages.get(key)
        return page is not None and page.has_landed

    def landed(self) -> list[bytes]:
        """All that have come."""
        return [key for key, page in self._pages.items() if page.has_landed]

    def remove(self, key: bytes) -> bool:
        """Takes a page out; False if it was not here."""
        return self._pages.pop(key, None) is not None

    def to_make_room(self, num: int) -> list[bytes] | None:
        """What must go for `num` more; None if that is not enough: what a request asked for a moment ago stays."""
        lacking = max(len(self._pages) + num - self._num_pages, 0)
        stale = [key for key, page in self._pages.items() if page.has_landed and page.wanted_in < self._round - 1]
        return stale[:lacking] if len(stale) >= lacking else None

    def clear(self) -> None:
        self._pages.clear()

    def check(self) -> None:
        """Asserts that the budget holds; for tests."""
        assert len(self._pages) <= self._num_pages
