"""Memory as contiguous allocators see it: spans of tokens, cut from one run and given back.

`FirstFit` is the kindest to contiguous caches: it reserves exactly what was asked. `Buddy` is what the vLLM paper assumes
of Orca: it rounds to powers of two. Both leave holes between spans that no new request fits into.
"""

import bisect
from typing import Protocol

from jaxkv.errors import ConfigError


class Memory(Protocol):
    """A run of `capacity` tokens from which contiguous spans are taken."""

    capacity: int  # tokens

    def largest(self) -> int:
        """Returns the longest span, in tokens, that this memory can give when it is empty."""
        ...

    def try_take(self, num_tokens: int) -> tuple[int, int] | None:
        """Takes a span of at least `num_tokens`; returns (start, length), or None when no hole is long enough."""
        ...

    def give_back(self, span: tuple[int, int]) -> None:
        """Frees a span that `try_take` returned."""
        ...


class FirstFit:
    """The first hole that is long enough, cut exactly; neighbouring holes join."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} must be >= 1 token")
        self.capacity = capacity
        self._holes: list[tuple[int, int]] = [(0, capacity)]  # (start, length), by start

    def largest(self) -> int:
        return self.capacity

    def try_take(self, num_tokens: int) -> tuple[int, int] | None:
        assert num_tokens >= 1
        for index, (start, length) in enumerate(self._holes):
            if length < num_tokens:
                continue
            rest = (start + num_tokens, length - num_tokens)
            self._holes[index : index + 1] = [rest] if rest[1] else []
            return start, num_tokens
        return None

    def give_back(self, span: tuple[int, int]) -> None:
        start, length = span
        index = bisect.bisect(self._holes, span)
        first = index
        if index > 0 and sum(self._holes[index - 1]) == start:
            first = index - 1
            start = self._holes[first][0]
            length += self._holes[first][1]
        if index < len(self._holes) and start + length == self._holes[index][0]:
            length += self._holes[index][1]
            index += 1
        self._holes[first:index] = [(start, length)]


class Buddy:
    """Halves of halves: a span's length is a power of two, and it joins only with the half it was cut from.

    A capacity that is no power of two is a row of arenas that are (5 → 4 + 1).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} must be >= 1 token")
        self.capacity = capacity
        self._holes: dict[int, list[int]] = {}  # length → starts, sorted
        start = 0
        for bit in reversed(range(capacity.bit_length())):
            if capacity >> bit & 1:
                self._holes[1 << bit] = [start]
                start += 1 << bit

    def largest(self) -> int:
        return 1 << (self.capacity.bit_length() - 1)

    def try_take(self, num_tokens: int) -> tuple[int, int] | None:
        assert num_tokens >= 1
        wanted = next_power_of_two(num_tokens)
        lengths = [length for length, starts in self._holes.items() if starts and length >= wanted]
        if not lengths:
            return None
        length = min(lengths)
        start = self._holes[length].pop(0)
        while length > wanted:  # keep the lower half, free the upper
            length //= 2
            bisect.insort(self._holes.setdefault(length, []), start + length)
        return start, wanted

    def give_back(self, span: tuple[int, int]) -> None:
        start, length = span
        # Arenas come largest first, so each starts at a multiple of its length, and XOR finds the other half. A whole
        # arena has no other half: the smaller arena behind it never offers a hole of this length.
        while start ^ length in self._holes.get(length, ()):
            self._holes[length].remove(start ^ length)
            start &= ~length
            length *= 2
        bisect.insort(self._holes.setdefault(length, []), start)


def next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is >= `number`, which must be >= 1."""
    assert number >= 1
    return 1 << (number - 1).bit_length()
