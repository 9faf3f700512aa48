"""The prefix cache where layers are split into groups, some of which see a window only (`models.groups`).

A prefix can be reused if every group has the pages that the token after it sees. The keys of other groups' pages are those
of the first one's with the group's number after them.
"""

from collections.abc import Sequence

from jaxkv.cache.pages import NULL_PAGE, PageAllocator
from jaxkv.cache.prefix_cache import PrefixCache
from jaxkv.paging import Paging


class GroupCache(PrefixCache):
    """Keys of the first group -> pages of every group.

    Args:
        allocator: as of `PrefixCache`.
        paging: page size, and the window of each group.
        namespace: as of `PrefixCache`.
    """

    def __init__(self, allocator: PageAllocator, paging: Paging, namespace: bytes = b"") -> None:
        super().__init__(allocator, paging.page_size, namespace)
        self._paging = paging

    def match_tables(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Of each group, pages of the longest prefix of `keys` of which every group has what the next token sees.

        The null page stands for those that it does not see.
        """
        num = len(keys)
        for group, window in enumerate(self._paging.windows):
            if window is None:
                num = len(self.match(of_group(keys[:num], group)))
        num = self._shorten(keys, num)
        lefts = [self._num_left(num, window) for window in self._paging.windows]
        return [[NULL_PAGE] * left + self.match(of_group(keys[left:num], group)) for group, left in enumerate(lefts)]

    def publish_tables(self, keys: Sequence[bytes], tables: Sequence[Sequence[int]], start: int) -> list[int]:
        """As `publish`, for the pages of every group; returns what was new of the first one's."""
        new = self.publish(keys, tables[0], start)
        for group, pages in enumerate(tables[1:], 1):
            self.publish(of_group(keys, group), pages, start)
        return new

    def retain_seen(self, keys: Sequence[bytes], ttl_s: float, start: int, end: int) -> None:
        """As `retain`, for those of the pages that a token after `keys` sees, in any group, that lie in `[start, end)`."""
        self.retain(self._seen_after(keys, start, end), ttl_s)

    def hold_seen(self, keys: Sequence[bytes]) -> None:
        """As `hold`, for the pages that a token after `keys` sees, in any group."""
        self.hold(self._seen_after(keys))

    def let_go_seen(self, keys: Sequence[bytes]) -> None:
        """Ends one `hold_seen` of these keys."""
        self.let_go(self._seen_after(keys))

    def _num_left(self, num_pages: int, window: int | None) -> int:
        """Leading pages that the token after `num_pages` pages does not see."""
        return self._paging.num_left(num_pages * self._paging.page_size, window)

    def _shorten(self, keys: Sequence[bytes], num: int) -> int:
        """The most pages, up to `num`, from whose end every page that is seen through a window is there."""
        groups = range(len(self._paging.windows))
        while (shorter := min(self._first_gap(keys, num, group) for group in groups)) < num:
            num = shorter  # what is missing is seen from the end of every prefix that it is part of
        return num

    def _first_gap(self, keys: Sequence[bytes], num: int, group: int) -> int:
        """The first page that is missing of those that a token after `num` pages sees through a group's window, or `num`."""
        window = self._paging.windows[group]
        if window is None:
            return num
        left = self._num_left(num, window)
        return left + len(self.match(of_group(keys[left:num], group)))

    def _seen_after(self, keys: Sequence[bytes], start: int = 0, end: int | None = None) -> list[bytes]:
        """Keys of the pages, of all groups, that a token after these pages sees; of those in `[start, end)`."""
        return [
            key
            for group, window in enumerate(self._paging.windows)
            for key in of_group(keys[max(start, self._num_left(len(keys), window)) : end], group)
        ]


def of_group(keys: Sequence[bytes], group: int) -> Sequence[bytes]:
    """Keys of pages of a group of layers, from those of the first one's."""
    return [key + group.to_bytes(2, "little") for key in keys] if group else keys
