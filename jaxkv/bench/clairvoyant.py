"""What a cache that knows the future finds of a trace in a pool too small for it: the bound that online policies face.

Three optima stand beside what an engine finds, the first the highest:

    depth first   each page is computed once (`Trace.best_hits`). No cache finds more. Serving depth first finds it, in any
                  pool that holds the longest request, if everybody comes as soon as answered (think 0).
    attainable    the most that a pool of this size gives to offline schedulers, who know who comes when and take, of those
                  that came, whoever is first in depth first order, with any number of rows up to the engine's
    as served     the most that it gives if requests run when the engine ran them

In the last two the pages that go are those needed again last (Belady, "A study of replacement algorithms for
virtual-storage computers", 1966), but never those of requests that run: these are *pinned*, as the engine's are. Of pages
needed equally late the tail of a prefix goes before its head, so what stays is always whole prefixes. For a given order
that is exact, and what it finds can be attained.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence

from jaxkv.bench.arrivals import Arrivals
from jaxkv.bench.traces import Trace, TraceRequest


@dataclasses.dataclass(frozen=True)
class Served:
    """Something that happened to a request, in the order in which an engine served a trace."""

    index: int  # in the trace
    is_end: bool = False  # it gave its pages back; else it got a row


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request in pages: numbers that grow along a prefix, so that of two pages of one the later has the larger."""

    pages: tuple[int, ...]  # full ones of the prompt
    num_pages: int  # once it ran
    num_first: int  # of its prompt, a last one that is not full included
    max_found: int  # its last token is always computed


def attainable_hits(trace: Trace, page_size: int, num_pages: int, *, think: int = 0, max_rows: int = 1) -> int:
    """Prompt tokens that the best of the offline schedulers finds.

    Args:
        trace: who asks.
        page_size: tokens a page holds.
        num_pages: for cached pages and running requests together, without the null page; at least the longest request's.
        think: as of `Arrivals`.
        max_rows: requests that may run at once.
    """
    asked = _in_pages(trace, page_size)
    orders = (_depth_first(trace, asked, num_pages, think, rows) for rows in range(1, max_rows + 1))
    return max(_num_found(asked, order, num_pages) for order in orders) * page_size


def hits_as_served(trace: Trace, page_size: int, num_pages: int, served: Sequence[Served]) -> int:
    """Prompt tokens that the best eviction finds in an engine's own order; arguments as of `attainable_hits`."""
    return _num_found(_in_pages(trace, page_size), served, num_pages) * page_size


def _in_pages(trace: Trace, page_size: int) -> list[_Asked]:
    number: dict[tuple[int, ...], int] = {}

    def in_pages(request: TraceRequest) -> _Asked:
        prompt = request.prompt
        ends = range(page_size, len(prompt) + 1, page_size)
        return _Asked(
            pages=tuple(number.setdefault(prompt[:end], len(number)) for end in ends),
            num_pages=-(-(len(prompt) + request.output_len) // page_size),
            num_first=-(-len(prompt) // page_size),
            max_found=(len(prompt) - 1) // page_size,
        )

    return [in_pages(request) for request in trace.requests]


def _depth_first(trace: Trace, asked: list[_Asked], num_pages: int, think: int, max_rows: int) -> list[Served]:
    """The order of a scheduler that takes, of those that came, whoever is first in depth first order.

    Requests end in the order in which they began. Nobody begins who would not fit beside those that run.
    """
    arrivals = Arrivals(trace.requests, think)
    waiting: list[int] = []
    running: collections.deque[int] = collections.deque()
    served: list[Served] = []
    while not arrivals.is_over:
        waiting = sorted([*waiting, *arrivals.take()], key=lambda index: asked[index].pages)
        while waiting and len(running) < max_rows and _num_held(asked, [*running, waiting[0]]) <= num_pages:
            running.append(waiting.pop(0))
            served.append(Served(running[-1]))
        ended = running.popleft()
        served.append(Served(ended, is_end=True))
        arrivals.answered(ended)
    return served


def _num_held(asked: list[_Asked], running: Iterable[int]) -> int:
    """Pages that requests hold together: those that they share once, and others of their own."""
    requests = [asked[index] for index in running]
    shared = {page for request in requests for page in request.pages}
    return len(shared) + sum(request.num_pages - len(request.pages) for request in requests)


def _num_found(asked: list[_Asked], served: Sequence[Served], num_pages: int) -> int:
    """Pages found in an order."""
    uses: dict[int, list[int]] = {}  # of each page, when it is asked for
    for time, event in enumerate(served):
        if not event.is_end:
            for page in asked[event.index].pages:
                uses.setdefault(page, []).append(time)
    pinned: collections.Counter[int] = collections.Counter()  # page -> requests that run on it
    own: dict[int, int] = {}  # request that runs -> further pages
    kept: dict[int, int] = {}  # page that nobody runs on -> when it is asked for next
    total = 0
    for time, event in enumerate(served):
        request = asked[event.index]
        if not event.is_end:
            is_there = (page in kept or page in pinned for page in request.pages)
            found = next((place for place, there in enumerate(is_there) if not there), len(request.pages))
            total += min(found, request.max_found)
            pinned.update(request.pages)
            kept = {page: use for page, use in kept.items() if page not in pinned}
        own[event.index] = (request.num_pages if event.is_end else request.num_first) - len(request.pages)
        room = max(num_pages - len(pinned) - sum(own.values()), 0)
        if len(kept) > room:
            kept = dict(sorted(kept.items(), key=lambda item: (item[1], item[0]))[:room])
        if event.is_end:
            del own[event.index]
            pinned.subtract(request.pages)
            for page in request.pages:
                if not pinned[page]:
                    del pinned[page]
                    later = bisect.bisect_right(uses[page], time)
                    kept[page] = uses[page][later] if later < len(uses[page]) else len(served)
    return total
