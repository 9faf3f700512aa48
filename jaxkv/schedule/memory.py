"""How sequences get, share, publish and give back pages: the allocator and the prefix cache behind one door.

Each data shard has its own: page ids, and so what can be shared, mean something on their shard only.

All pages of a sequence's known tokens are taken at once when it gets a row, so a prompt that started can always be
finished; only decode rows ask for more. There is one way out, `release`, and calling it twice is harmless.

Groups of layers that see a window only get as many pages as they have at once, and give one back for each that they ask
for.
"""

import dataclasses
import itertools
from collections.abc import Sequence as Ordered

import numpy as np

from jaxkv.cache.adaptive_eviction import make_order
from jaxkv.cache.pages import NULL_PAGE, PageAllocator, PageCounts
from jaxkv.cache.shelf import Shelf
from jaxkv.cache.tiers import PageTiers
from jaxkv.config import SchedulerConfig
from jaxkv.plan import PageAt
from jaxkv.schedule.group_cache import GroupCache
from jaxkv.schedule.sequence import Sequence

MAX_HELD_SHARE = 0.75  # of a shard's pages that open sessions may hold: the rest stays with those who have none


@dataclasses.dataclass(frozen=True)
class Reuse:
    """K/V that a sequence need not compute."""

    # Of each group of layers, its leading pages, held by others or cached; the null page for those that it does not see.
    tables: list[list[int]]
    num_tokens: int  # leading tokens whose K/V are there, or in lower tiers
    lower_keys: tuple[bytes, ...] = ()  # of the pages after them, which come up from lower tiers
    copy_from: tuple[int, ...] = ()  # of each group: the page after them is partly filled, copy this one first
    next_key: bytes | None = None  # of the first page that could have been reused but is not known
    may_publish: bool = True  # False: the pages' content and the cache's namespace differ

    @property
    def pages(self) -> list[int]:
        """Of the first group; all have as many."""
        return self.tables[0]


class Memory:
    """Pages of all sequences of a data shard.

    Args:
        config: sizes of pool and page; whether prefixes are cached.
        namespace: what K/V depend on besides tokens (`prefix_cache.namespace`).
        tiers: where pages go and come from; None: nowhere.
        shard: which data shard's this is.
    """

    def __init__(
        self, config: SchedulerConfig, namespace: bytes = b"", tiers: PageTiers | None = None, shard: int = 0
    ) -> None:
        self._tiers = PageTiers(config.tiers) if tiers is None else tiers
        self._shard = shard
        self._paging = config.paging
        self._windows = config.windows
        self._page_size = config.page_size
        self.num_left_windows = 0  # pages that sequences gave back while they ran
        order = make_order(config.eviction, config.page_size, config.attention_len, config.num_pages - 1)
        self._shelf = Shelf(order, max_held=int((config.num_pages - 1) * MAX_HELD_SHARE))
        self._allocator = PageAllocator(config.num_pages, self._shelf)
        self._cache = GroupCache(self._allocator, config.paging, namespace) if config.prefix_cache else None
        if self._cache is not None and config.tiers.is_on:
            self._cache.on_lost = self._demote

    @property
    def num_available(self) -> int:
        """Pages that can be taken now."""
        return self._allocator.num_available

    @property
    def counts(self) -> PageCounts:
        return self._allocator.counts

    def is_cached(self) -> np.ndarray:
        """Whether each page, the null page included, has a key in the prefix cache: bool [num_pages]."""
        return self._allocator.is_cached()

    @property
    def num_retained(self) -> int:
        """Cached pages that nobody holds, before their deadline."""
        return self._shelf.num_retained

    @property
    def num_retained_evictions(self) -> int:
        """Pages that were lost before their deadline, for nothing else was left."""
        return self._shelf.num_retained_evictions

    @property
    def num_held(self) -> int:
        """Pages that open sessions hold, in use or not."""
        return self._shelf.num_held

    @property
    def num_held_evictions(self) -> int:
        """Pages that were lost while a session held them, for nothing else was left."""
        return self._shelf.num_held_evictions

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def advance(self, now_s: float) -> None:
        """Time goes on: pages whose deadline passed are kept no longer."""
        self._shelf.advance(now_s)

    def cached_lens(self, sequences: list[Sequence]) -> list[int]:
        """About how many leading pages of each are cached and can be reused (see `PrefixCache.match_lens`)."""
        if self._cache is None:
            return [0] * len(sequences)
        for seq in sequences:
            if not seq.page_keys and seq.prompt_len >= self._page_size:
                self._cache.extend_keys(seq.page_keys, seq.tokens[: seq.num_tokens], seq.request.cache_salt)
        lens = self._cache.match_lens([seq.page_keys for seq in sequences])
        return [min(num, seq.max_reused // self._page_size) for seq, num in zip(sequences, lens, strict=True)]

    def find_reuse(self, seq: Sequence, parent: Sequence | None) -> Reuse:
        """What `seq` can share: with `parent` (a running sequence with the same, computed prompt) or with the cache."""
        size = self._page_size
        if parent is not None and (reuse := self._fork(seq, parent)) is not None:
            return reuse
        if self._cache is None:
            return Reuse([[] for _ in self._windows], 0)
        self._cache.extend_keys(seq.page_keys, seq.tokens[: seq.num_tokens], seq.request.cache_salt)
        keys = seq.page_keys[: seq.max_reused // size]
        tables = self._cache.match_tables(keys)
        num_known = len(tables[0])
        lower = tuple(self._tiers.run(keys[num_known:]))
        num = num_known + len(lower)
        return Reuse(tables, num * size, lower, next_key=keys[num] if num < len(keys) else None)

    def _fork(self, seq: Sequence, parent: Sequence) -> Reuse | None:
        """The prompt's pages of `parent`; None if some that `seq` would see have left a window meanwhile."""
        # The last prompt token is computed again, in the child's own page, to sample with the child's own key.
        num_tokens = seq.prompt_len - 1
        num_full, num_partial = divmod(num_tokens, self._page_size)
        lefts = [self._paging.num_left(num_tokens, window) for window in self._windows]
        if any(gone > left for gone, left in zip(parent.num_left, lefts, strict=True)):
            return None
        tables = [[NULL_PAGE] * left + pages[left:num_full] for left, pages in zip(lefts, parent.tables, strict=True)]
        copy_from = tuple(pages[num_full] for pages in parent.tables) if num_partial else ()
        return Reuse(tables, num_tokens, copy_from=copy_from, may_publish=parent.may_publish)

    def try_attach(self, seq: Sequence, reuse: Reuse, keep_free: int) -> bool:
        """Gives a sequence the pages of its known tokens, if `keep_free` pages are left after that."""
        lefts = [self._paging.num_left(reuse.num_tokens, window) for window in self._windows]
        num_new = self._num_first(seq, lefts, len(reuse.pages))
        # A hit that nobody holds is in the free list too: it must not count as room (behaviour 5).
        shared = [page for pages in reuse.tables for page in pages if page != NULL_PAGE]
        num_unheld = sum(not self._allocator.is_referenced(page) for page in shared)
        if self.num_available - num_unheld - sum(num_new) < keep_free:
            return False
        self._allocator.share(shared)
        self._tiers.hold(reuse.lower_keys)
        pages = self._allocator.try_allocate(sum(num_new))
        assert pages is not None
        self._tiers.promote(reuse.lower_keys, [PageAt(self._shard, page) for page in pages[: len(reuse.lower_keys)]])
        new = iter(pages)
        seq.tables = [[*known, *itertools.islice(new, num)] for known, num in zip(reuse.tables, num_new, strict=True)]
        seq.num_left = lefts
        seq.num_published, seq.may_publish = len(reuse.pages), reuse.may_publish
        if reuse.pages and seq.request.marks:
            self._retain(seq, 0, len(reuse.pages))
        return True

    def _num_first(self, seq: Sequence, lefts: list[int], num_reused: int) -> list[int]:
        """Of each group, pages that `seq` gets with its row: all of its known tokens', or as many as it has at once."""
        num_tokens, num_pages = seq.num_tokens, self.num_pages(seq.num_tokens)
        return [
            min(num_pages, left + self._paging.num_kept(num_tokens, window)) - num_reused
            for left, window in zip(lefts, self._windows, strict=True)
        ]

    def leave_windows(self, seq: Sequence, position: int) -> int:
        """Gives back the pages that no token from `position` on sees.

        Steps that were dispatched may still read them: what overwrites them is dispatched later.

        Returns:
            The position at which the next page leaves a window.
        """
        size, next_at = self._page_size, []
        for group, (pages, window) in enumerate(zip(seq.tables, self._windows, strict=True)):
            if window is None:
                continue
            start, end = seq.num_left[group], self._paging.num_left(position, window)
            if end > start:
                self._allocator.release(pages[start:end])
                self.num_left_windows += end - start
                pages[start:end] = [NULL_PAGE] * (end - start)
                seq.num_left[group] = end
            next_at.append((max(start, end) + 1) * size + window - 1)
        return min(next_at)

    def take(self, num: int) -> list[int]:
        """Pages for decode rows; the caller has looked at `num_available`."""
        pages = self._allocator.try_allocate(num)
        assert pages is not None, (num, self.num_available)
        return pages

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Makes full pages findable whose tokens are all known and whose computing steps were dispatched.

        Args:
            seq: a sequence with pages.
            num_tokens: leading tokens that satisfy both.
        """
        num_full = num_tokens // self._page_size
        if self._cache is None or not seq.may_publish or num_full <= seq.num_published:
            return
        self._cache.extend_keys(seq.page_keys, seq.tokens[: num_full * self._page_size], seq.request.cache_salt)
        keys = seq.page_keys[:num_full]
        new = self._cache.publish_tables(keys, seq.tables, seq.num_published)
        seq.note_published(new, num_full, self._page_size)
        if self._tiers.is_on:
            for index in new:
                if (ttl_s := self._tiers.ttl_s(seq.page_keys[index])) is not None:
                    self._cache.retain([seq.page_keys[index]], ttl_s)
        if seq.request.marks:
            self._retain(seq, seq.num_published, num_full)
        seq.num_published = num_full

    def keys_filled(self, seq: Sequence, start: int, end: int) -> list[bytes]:
        """Keys of the full pages that positions `[start, end)` of `seq` complete."""
        size = self._page_size
        return seq.page_keys[start // size : end // size] if self._cache is not None and seq.may_publish else []

    def release(self, seq: Sequence) -> None:
        """Gives back what a sequence holds; harmless when it holds nothing."""
        tables, seq.tables, seq.num_left, seq.num_published = seq.tables, [], [], 0
        by_place = itertools.chain.from_iterable(itertools.zip_longest(*tables, fillvalue=NULL_PAGE))
        self._allocator.release([page for page in by_place if page != NULL_PAGE])

    def page_keys(self, token_ids: np.ndarray, salt: str) -> list[bytes]:
        """Keys of the full pages of `token_ids` (int32 [num_tokens]); empty without a prefix cache."""
        keys: list[bytes] = []
        if self._cache is not None:
            self._cache.extend_keys(keys, token_ids, salt)
        return keys

    def hold(self, keys: Ordered[bytes]) -> None:
        """As `GroupCache.hold_seen`."""
        if self._cache is not None:
            self._cache.hold_seen(keys)

    def let_go(self, keys: Ordered[bytes]) -> None:
        """As `GroupCache.let_go_seen`."""
        if self._cache is not None:
            self._cache.let_go_seen(keys)

    def look_up(self, keys: Ordered[bytes]) -> tuple[int, int]:
        """How many leading pages are there or below, and how many of these several sessions hold."""
        if self._cache is None:
            return 0, 0
        num_known = len(self._cache.match_tables(keys)[0])
        num_known += len(self._tiers.run(keys[num_known:]))
        return num_known, self._cache.num_shared(keys[:num_known])

    def save(self, seq: Sequence, ttl_s: float | None) -> tuple[int, int]:
        """Writes the full pages of a sequence's tokens to disk, as far as they are known here or below.

        Returns:
            How many leading pages are there or on their way, and how many are known.
        """
        if self._cache is None:
            return 0, 0
        self._cache.extend_keys(seq.page_keys, seq.tokens[: seq.num_tokens], seq.request.cache_salt)
        pages = self._cache.match(seq.page_keys)
        num_known = len(pages) + len(self._tiers.run(seq.page_keys[len(pages) :]))
        for index, key in enumerate(seq.page_keys[:num_known]):
            at = PageAt(self._shard, pages[index]) if index < len(pages) else None
            parent = seq.page_keys[index - 1] if index else self._cache.root
            if not self._tiers.save(key, at, (parent, index), ttl_s):
                return index, num_known
        return num_known, num_known

    def _demote(self, page: int, key: bytes, link: tuple[bytes, int]) -> None:
        """The cache's `on_lost`."""
        at, is_held = PageAt(self._shard, page), self._shelf.is_held(page)
        self._tiers.demote(key, at, link, self._shelf.ttl_s(page), is_held=is_held)

    def _retain(self, seq: Sequence, start: int, end: int) -> None:
        """Keeps pages `[start, end)` of a sequence as far as its request marked them."""
        if self._cache is None:
            return
        for mark in seq.request.marks:
            keys = seq.page_keys[: mark.num_tokens // self._page_size]
            self._cache.retain_seen(keys, mark.ttl_s, start, end)

    def clear_cache(self, namespace: bytes | None = None) -> None:
        """Forgets every cached page (new weights)."""
        if self._cache is not None:
            self._cache.clear(namespace)

    def check(self, holders: list[Sequence]) -> None:
        """Asserts the invariants, and that `holders` are all who hold pages; for tests."""
        held = [page for seq in holders for pages in seq.tables for page in pages if page != NULL_PAGE]
        self._allocator.check(held)
        for seq in holders:
            for pages, num_left in zip(seq.tables, seq.num_left, strict=True):
                assert all((page == NULL_PAGE) == (i < num_left) for i, page in enumerate(pages)), seq
        if self._cache is not None:
            self._cache.check()
