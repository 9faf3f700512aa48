"""Prefix cache: which page of the pool already holds the K/V of which tokens.

A full page is known by its *page key*, the SHA-256 over the key of the page before it and its own tokens, so a key
names the whole prefix that ends with the page, and equal keys mean equal K/V. The chain starts at a root that covers
everything else K/V depend on (model content, K/V dtype, page size, rope), so separate processes agree on keys.

    root = SHA-256(version tag, length-prefixed namespace)
    key  = SHA-256(32-byte parent key, int32 little-endian tokens, each extra with its length as uint32 in front)

Extras (the cache salt) go into the first page only; the chain carries them on. Eviction is the allocator's: it takes a
page from its shelf and calls `evict`.
"""

import bisect
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxkv.cache.pages import NULL_PAGE, PageAllocator

TOKEN_DTYPE = np.dtype("<i4")  # tokens as they are hashed; what `Sequence` stores them in
_VERSION = b"jaxkv page key 1"


def root_key(namespace: bytes) -> bytes:
    """The parent key of first pages: 32 bytes, the same in every process with this namespace."""
    return hashlib.sha256(_VERSION + _prefixed(namespace)).digest()


def namespace(*, model: str, kv_dtype: str, page_size: int, rope: str) -> bytes:
    """Everything but tokens and salt that K/V depend on, as bytes for `root_key`.

    Args:
        model: revision or content digest of the weights, not their name.
        kv_dtype: dtype name of the pool.
        page_size: tokens a page holds.
        rope: the rotary configuration as text, in a fixed order.
    """
    return b"".join(_prefixed(part.encode()) for part in (model, kv_dtype, str(page_size), rope))


def page_key(parent: bytes, tokens: bytes, extras: Sequence[bytes] = ()) -> bytes:
    """Key of a full page.

    Args:
        parent: key of the page before it, or the root key; 32 bytes.
        tokens: its tokens, int32 little-endian.
        extras: what else its K/V depend on.
    """
    return hashlib.sha256(parent + tokens + b"".join(map(_prefixed, extras)) if extras else parent + tokens).digest()


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


class PrefixCache:
    """Page key -> page, for full pages only; one page a key (the first one published).

    Args:
        allocator: keeps published pages alive on its shelf until their memory is needed.
        page_size: tokens a page holds.
        namespace: see `namespace`.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, namespace: bytes = b"") -> None:
        self._allocator = allocator
        allocator.on_evict = self.evict
        self._page_size = page_size
        self._root = root_key(namespace)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._num_holders: dict[bytes, int] = {}  # sessions that hold a key, whether its page is there or not
        self._link_of: dict[int, tuple[bytes, int]] = {}  # page -> key of the one before it, index in its prefix
        # Called with a page that is lost, its key and its link, while its content is still there.
        self.on_lost: Callable[[int, bytes, tuple[bytes, int]], None] | None = None

    def __len__(self) -> int:
        return len(self._page_of)

    def extend_keys(self, keys: list[bytes], token_ids: np.ndarray, salt: str = "") -> None:
        """Appends to `keys` the keys of the full pages of `token_ids` (int32 [num_tokens]) that it lacks."""
        width = self._page_size * TOKEN_DTYPE.itemsize
        start, end = len(keys), len(token_ids) // self._page_size
        tokens = token_ids[start * self._page_size : end * self._page_size].astype(TOKEN_DTYPE, copy=False).tobytes()
        for index in range(start, end):
            offset = (index - start) * width
            parent, extras = (keys[-1], ()) if keys else (self._root, (salt.encode(),) if salt else ())
            keys.append(page_key(parent, tokens[offset : offset + width], extras))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of `keys`. Call `share` on them before allocating anything else."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def match_lens(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
        """About how many leading pages of each chain of keys are known, in O(log n) where any is.

        Exact unless a page was lost before later ones: where nothing else was left to lose, or where whoever computed
        it too goes on with a copy of its own.
        """
        known = self._page_of
        return [
            bisect.bisect_left(keys, True, lo=1, key=lambda key: key not in known) if keys and keys[0] in known else 0
            for keys in chains
        ]

    def publish(self, keys: Sequence[bytes], pages: Sequence[int], start: int = 0) -> list[int]:
        """Makes referenced pages findable. The steps that fill them must have been dispatched (behaviour 4).

        Args:
            keys: of a prefix's full pages.
            pages: its pages; there may be more. The null page stands for one that is not there.
            start: the first one to publish.

        Returns:
            Indices of those whose content was not known yet.
        """
        new, page_of, key_of, published = [], self._page_of, self._key_of, self._allocator.shelf.order.published
        for index in range(start, len(keys)):
            key, page = keys[index], pages[index]
            if key in page_of or page in key_of or page == NULL_PAGE:
                continue  # the content is known on another page, or this page is shared and known, or left its window
            page_of[key] = page
            key_of[page] = key
            self._link_of[page] = (keys[index - 1] if index else self._root, index)
            self._allocator.mark_cached(page)
            if key in self._num_holders:
                self._allocator.shelf.hold(page)
            published(page, key, *self._link_of[page])
            new.append(index)
        return new

    def retain(self, keys: Iterable[bytes], ttl_s: float) -> None:
        """Keeps the known ones of some pages for `ttl_s` seconds from their last use on."""
        for key in keys:
            if (page := self._page_of.get(key)) is not None:
                self._allocator.shelf.retain(page, ttl_s)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keeps the pages of a prefix, those published later too, until as many `let_go`."""
        for key in keys:
            self._num_holders[key] = self._num_holders.get(key, 0) + 1
            if (page := self._page_of.get(key)) is not None:
                self._allocator.shelf.hold(page)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Ends one `hold` of these keys; the tail first, for it is worth less than the head."""
        for key in reversed(keys):
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                if (page := self._page_of.get(key)) is not None:
                    self._allocator.shelf.let_go(page)

    def num_shared(self, keys: Sequence[bytes]) -> int:
        """How many of these keys several sessions hold."""
        return sum(self._num_holders.get(key, 0) > 1 for key in keys)

    @property
    def root(self) -> bytes:
        """The parent key of first pages."""
        return self._root

    def evict(self, page: int) -> None:
        """Forgets a page whose memory is handed out again; the allocator's `on_evict`."""
        key, link = self._key_of.pop(page), self._link_of.pop(page)
        del self._page_of[key]
        if self.on_lost is not None:
            self.on_lost(page, key, link)

    def clear(self, namespace: bytes | None = None) -> None:
        """Forgets every page (new weights); with a namespace, later keys grow from its root."""
        for page in self._key_of:
            self._allocator.forget(page)
        self._page_of.clear()
        self._key_of.clear()
        self._link_of.clear()
        if namespace is not None:
            self._root = root_key(namespace)

    def check(self) -> None:
        """Asserts that both maps agree; for tests."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert self._link_of.keys() == self._key_of.keys()
