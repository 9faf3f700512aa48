"""Prefix cache: keys that every process agrees on, and pages found by them."""

import hashlib
import itertools
import struct

import numpy as np
import pytest

from jaxkv.cache.pages import PageAllocator, PageCounts
from jaxkv.cache.prefix_cache import PrefixCache, namespace, page_key, root_key

SIZE = 4


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(9)


@pytest.fixture
def cache(allocator: PageAllocator) -> PrefixCache:
    return PrefixCache(allocator, SIZE, b"model")


def keys_of(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    cache.extend_keys(keys, np.array(tokens, np.int32), salt)
    return keys


def publish(cache: PrefixCache, allocator: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    keys = keys_of(cache, tokens, salt)
    pages = allocator.try_allocate(len(keys))
    assert pages is not None
    cache.publish(keys, pages)
    return pages


def test_01_key_is_sha256_over_parent_tokens_and_length_prefixed_extras():
    parent, tokens = b"p" * 32, struct.pack("<4i", 1, 2, 3, 70_000)
    assert page_key(parent, tokens) == hashlib.sha256(parent + tokens).digest()
    extras = struct.pack("<I", 4) + b"salt" + struct.pack("<I", 0)
    assert page_key(parent, tokens, (b"salt", b"")) == hashlib.sha256(parent + tokens + extras).digest()


def test_01_keys_are_the_same_in_every_process(cache: PrefixCache):
    # Written down once: whoever changes them breaks caches that are shared or kept on disk, and raises the version tag.
    assert root_key(b"model").hex() == "8d93c7a59d2a1f8d8dd63020a454db722b9a2fcc29f046bd873d885b0a843bf8"
    assert [key.hex()[:16] for key in keys_of(cache, [1, 2, 3, 4, 5, 6, 7, 8])] == [
        "ff80ee729cd9d613",
        "80dbdd6f25aff863",
    ]


def test_01_extras_cannot_be_confused():
    parent = b"p" * 32
    keys = [
        page_key(parent, b"", extras) for extras in [(), (b"",), (b"ab",), (b"a", b"b"), (b"", b"ab"), (b"ab", b"")]
    ]
    assert len({*keys}) == len(keys)


def test_01_everything_that_changes_kv_changes_the_root():
    base = {"model": "abc", "kv_dtype": "bfloat16", "page_size": 16, "rope": "theta=10000"}
    others = [{"model": "abd"}, {"kv_dtype": "float32"}, {"page_size": 32}, {"rope": "theta=500000"}]
    others += [{"model": "abcb", "kv_dtype": "float16"}]  # the same text when run together
    roots = [root_key(namespace(**{**base, **change})) for change in [{}, *others]]
    assert len({*roots}) == len(roots)
    assert root_key(namespace(**base)) == roots[0]


def test_01_salt_goes_into_the_first_page_and_the_chain_carries_it(cache: PrefixCache):
    tokens = list(range(12))
    plain, salted = keys_of(cache, tokens), keys_of(cache, tokens, "tenant")
    assert all(a != b for a, b in zip(plain, salted, strict=True))
    later = np.array(tokens[4:8], np.int32).tobytes()
    assert salted[1] == page_key(salted[0], later)


def test_01_a_key_names_the_whole_prefix(cache: PrefixCache):
    same_page = [9, 9, 9, 9]
    keys = [keys_of(cache, [*before, *same_page])[-1] for before in ([1] * 4, [2] * 4, [])]
    assert len({*keys}) == 3


def test_01_full_pages_only_and_keys_grow(cache: PrefixCache):
    tokens = np.arange(12, dtype=np.int32)
    keys: list[bytes] = []
    for num_tokens, num_keys in ((0, 0), (3, 0), (4, 1), (7, 1), (12, 3)):
        cache.extend_keys(keys, tokens[:num_tokens])
        assert len(keys) == num_keys
    assert keys == keys_of(cache, tokens.tolist())


def test_match_is_the_longest_known_prefix(cache: PrefixCache, allocator: PageAllocator):
    pages = publish(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match(keys_of(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])) == pages
    assert cache.match(keys_of(cache, [1, 2, 3, 4, 0, 0, 0, 0])) == pages[:1]
    assert cache.match(keys_of(cache, [5, 6, 7, 8])) == [], "the same tokens after nothing are other K/V"
    assert cache.match(keys_of(cache, [1, 2, 3, 4], salt="tenant")) == []


def test_the_first_page_with_a_content_stays(cache: PrefixCache, allocator: PageAllocator):
    first = publish(cache, allocator, [1, 2, 3, 4])
    second = publish(cache, allocator, [1, 2, 3, 4])
    assert cache.match(keys_of(cache, [1, 2, 3, 4])) == first
    allocator.release(second)
    assert allocator.counts.cached == 0, "the second page has no key: it is worth nothing"


def test_05_an_evicted_page_is_forgotten(cache: PrefixCache, allocator: PageAllocator):
    pages = publish(cache, allocator, list(range(8)))
    allocator.release(pages)
    allocator.try_allocate(7)  # six free ones, and the tail of the prompt
    assert cache.match(keys_of(cache, list(range(8)))) == pages[:1]
    allocator.try_allocate(1)
    assert cache.match(keys_of(cache, list(range(8)))) == [] and len(cache) == 0
    cache.check()


def test_07_clear_forgets_everything_and_may_change_the_namespace(cache: PrefixCache, allocator: PageAllocator):
    held, dropped = publish(cache, allocator, [1] * 4), publish(cache, allocator, [2] * 4)
    allocator.release(dropped)
    old_keys = keys_of(cache, [1] * 4)
    cache.clear(b"new weights")
    assert cache.match(old_keys) == [] and len(cache) == 0
    assert keys_of(cache, [1] * 4) != old_keys
    assert allocator.counts == PageCounts(free=7, cached=0, referenced=1)
    allocator.release(held)
    allocator.check([])


def test_published_pages_can_be_taken_back_in_any_interleaving(cache: PrefixCache, allocator: PageAllocator):
    for order in itertools.permutations(range(3)):
        cache.clear()
        prompts = [[number] * 4 for number in range(3)]
        pages = [publish(cache, allocator, prompt) for prompt in prompts]
        for number in order:
            allocator.release(pages[number])
        for number in reversed(order):
            hit = cache.match(keys_of(cache, prompts[number]))
            assert hit == pages[number]
            allocator.share(hit)
            allocator.release(hit)
        allocator.check([])
