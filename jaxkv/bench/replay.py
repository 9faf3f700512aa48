"""Replays the lengths of requests through KV allocators: how much memory holds tokens, and how many requests fit at once.

After "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon et al., SOSP 2023), figures
2 and 13: contiguous caches that reserve the maximal length, the next power of two of the output, or (an oracle) exactly
what will be needed, against pages taken as tokens come.

Time is counted in steps, in which each running request makes one token; prompts take none. Requests start in order of
arrival, and one that does not fit makes those behind it wait, with every allocator alike.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from jaxkv.bench.replay_memory import FirstFit, Memory, next_power_of_two
from jaxkv.bench.usage import Usage, UsageRecord
from jaxkv.errors import CapacityError, ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLens:
    """What a replay needs to know of a request."""

    prompt_len: int  # tokens
    output_len: int  # tokens

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise ConfigError(f"prompt_len={self.prompt_len}, output_len={self.output_len} must both be >= 1")

    @property
    def final_len(self) -> int:
        """Tokens at the end."""
        return self.prompt_len + self.output_len


class Allocator(Protocol):
    """Gives requests, known by their index, room for tokens."""

    name: str
    capacity: int  # tokens

    def fits_alone(self, lens: RequestLens) -> bool:
        """Whether the request can run to its end when it has all memory."""
        ...

    def try_admit(self, index: int, lens: RequestLens, num_tokens: int) -> bool:
        """Gives room to a request that holds no memory and is about to have `num_tokens` tokens."""
        ...

    def try_grow(self, index: int, num_tokens: int) -> bool:
        """Makes sure that an admitted request has room for `num_tokens`."""
        ...

    def release(self, index: int) -> None:
        """Takes all of a request's memory back."""
        ...

    def reserved(self, index: int) -> int:
        """Returns the tokens that nobody but this request can use."""
        ...


class ContiguousAllocator:
    """One span a request, reserved at admission for its whole life."""

    def __init__(self, name: str, memory: Memory, reserve: Callable[[RequestLens], int]) -> None:
        self.name = name
        self.capacity = memory.capacity
        self._memory = memory
        self._reserve = reserve
        self._spans: dict[int, tuple[int, int]] = {}  # request → (start, length)

    def fits_alone(self, lens: RequestLens) -> bool:
        return lens.final_len <= self._reserve(lens) <= self._memory.largest()

    def try_admit(self, index: int, lens: RequestLens, num_tokens: int) -> bool:
        if (span := self._memory.try_take(self._reserve(lens))) is None:
            return False
        self._spans[index] = span
        return True

    def try_grow(self, index: int, num_tokens: int) -> bool:
        assert num_tokens <= self._spans[index][1]
        return True

    def release(self, index: int) -> None:
        self._memory.give_back(self._spans.pop(index))

    def reserved(self, index: int) -> int:
        return self._spans[index][1]


class PagedAllocator:
    """Pages of `page_size` tokens, taken when the last one is full."""

    def __init__(self, name: str, capacity: int, page_size: int) -> None:
        if page_size < 1 or capacity < page_size:
            raise ConfigError(f"page_size={page_size} must be >= 1 and <= capacity={capacity} tokens")
        self.name = name
        self.capacity = capacity // page_size * page_size
        self.page_size = page_size
        self._num_free = capacity // page_size
        self._num_pages: dict[int, int] = {}  # request → pages

    def fits_alone(self, lens: RequestLens) -> bool:
        return self._pages(lens.final_len) * self.page_size <= self.capacity

    def try_admit(self, index: int, lens: RequestLens, num_tokens: int) -> bool:
        if self._pages(num_tokens) > self._num_free:
            return False
        self._num_pages[index] = 0
        return self.try_grow(index, num_tokens)

    def try_grow(self, index: int, num_tokens: int) -> bool:
        missing = self._pages(num_tokens) - self._num_pages[index]
        if missing > self._num_free:
            return False
        self._num_pages[index] += missing
        self._num_free -= missing
        return True

    def release(self, index: int) -> None:
        self._num_free += self._num_pages.pop(index)

    def reserved(self, index: int) -> int:
        return self._num_pages[index] * self.page_size

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def standard_allocators(
    capacity: int, *, max_len: int, page_size: int = 16, memory: Callable[[int], Memory] = FirstFit
) -> list[Allocator]:
    """Returns the four allocators of the paper's figures over the same memory: max, pow2, oracle, paged.

    Args:
        capacity: tokens of memory.
        max_len: tokens a request may have; what `max` reserves, and a limit to `pow2`.
        page_size: tokens a page.
        memory: how contiguous spans are cut, `FirstFit` or `Buddy`.
    """
    reservations: dict[str, Callable[[RequestLens], int]] = {
        "max": lambda lens: max_len,
        # the output's length is guessed at most twice too long
        "pow2": lambda lens: min(lens.prompt_len + next_power_of_two(lens.output_len), max_len),
        "oracle": lambda lens: lens.final_len,
    }
    contiguous = [ContiguousAllocator(name, memory(capacity), reserve) for name, reserve in reservations.items()]
    return [*contiguous, PagedAllocator("paged", capacity, page_size)]


def replay(requests: Iterable[RequestLens], allocator: Allocator, *, max_rows: int | None = None) -> Usage:
    """Runs requests, all there at the start, to their end.

    When a request cannot grow, the newest one gives its memory back and starts again, at the head of the queue, with the
    tokens it has already made.

    Args:
        requests: in order of arrival.
        allocator: empty at the start, and again at the end.
        max_rows: requests that may run at once; None for as many as memory holds.

    Raises:
        CapacityError: a request does not fit even alone.
        ConfigError: `max_rows` is below 1.
    """
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows={max_rows} must be >= 1")
    lens = list(requests)
    for index, each in enumerate(lens):
        if not allocator.fits_alone(each):
            raise CapacityError(
                f"request {index} of {each.final_len} tokens does not fit allocator {allocator.name!r} with"
                f" capacity={allocator.capacity} tokens; raise the capacity (or max_len, where that is reserved)"
            )

    usage = Usage(name=allocator.name, capacity=allocator.capacity)
    num_held = [each.prompt_len for each in lens]  # tokens, by request
    waiting = collections.deque(range(len(lens)))
    running: list[int] = []  # oldest first
    while waiting or running:
        num_preemptions = usage.num_preemptions
        row = 0
        while row < len(running):
            index = running[row]
            if allocator.try_grow(index, num_held[index] + 1):
                num_held[index] += 1
                row += 1
                continue
            victim = running.pop()  # rows from `row` on have not made this step's token: nothing new is lost
            allocator.release(victim)
            waiting.appendleft(victim)
            usage.num_preemptions += 1
            usage.num_recomputed += num_held[victim]

        full = usage.num_preemptions > num_preemptions  # then nobody gets in: they would be thrown out at once
        while waiting and not full and (max_rows is None or len(running) < max_rows):
            index = waiting[0]
            if not allocator.try_admit(index, lens[index], num_held[index] + 1):
                break
            running.append(waiting.popleft())
            num_held[index] += 1

        reserved = [allocator.reserved(index) for index in running]
        useful = [min(room, lens[index].final_len) for room, index in zip(reserved, running, strict=True)]
        held = sum(num_held[index] for index in running)
        usage.records.append(
            UsageRecord(
                num_held=held,
                num_future=sum(useful) - held,
                num_reserved=sum(reserved),
                num_running=len(running),
                num_waiting=len(waiting),
            )
        )
        for index in [index for index in running if num_held[index] == lens[index].final_len]:
            allocator.release(index)
            running.remove(index)
    return usage
