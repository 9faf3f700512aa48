"""How many pages tokens take, where layers are split into groups of which some see a window only (`models.groups`)."""

import bisect
import dataclasses
import functools

MIN_CHUNK = 256  # tokens: with much fewer, reading the weights takes longer than computing (H200 206, v5e 240, v6e 560)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paging:
    """The arithmetic of one data shard's pages; a page holds tokens of one group of layers."""

    page_size: int  # tokens
    windows: tuple[int | None, ...] = (None,)  # of each group: tokens that its layers see; None: all before
    token_budget: int = 0  # prompt tokens computed in a step

    @functools.cached_property
    def max_chunk(self) -> int:
        """Tokens of a sequence that are computed at once: what half a window covers, for K/V of a chunk take as much again."""
        seen = min((window for window in self.windows if window is not None), default=2 * self.token_budget)
        return min(self.token_budget, max(seen // 2, MIN_CHUNK))

    def num_left(self, position: int, window: int | None) -> int:
        """Leading pages that a token at `position`, and those after it, do not see."""
        return 0 if window is None else max(position - window + 1, 0) // self.page_size

    def num_kept(self, num_tokens: int, window: int | None) -> int:
        """Most pages that a sequence of up to `num_tokens` tokens has at once in a group.

        In a window: those that it covers and those of a chunk, one for each end that lies within a page, and one that is kept
        so that the next turn can go on from the last full page.
        """
        num_pages = -(-num_tokens // self.page_size)
        return num_pages if window is None else min(num_pages, (window + self.max_chunk) // self.page_size + 4)

    def num_needed(self, num_tokens: int) -> int:
        """Most pages that a sequence of up to `num_tokens` tokens has at once, in all groups."""
        return sum(self.num_kept(num_tokens, window) for window in self.windows)

    def longest(self, num_pages: int, max_len: int) -> int:
        """Tokens of the longest sequence, up to `max_len`, that so many pages hold."""
        if self.num_needed(max_len) <= num_pages:
            return max_len
        lens = range(0, max_len + self.page_size, self.page_size)
        return lens[bisect.bisect_right(lens, num_pages, key=self.num_needed) - 1]
