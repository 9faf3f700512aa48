"""What a cache that knows the future finds of a trace in a pool too small for it: the bound that online policies face.

Requests run one at a time, round after round as they arrive. Of each round the best order is taken, and the pages that go
are those needed again last (Belady, "A study of replacement algorithms for virtual-storage computers", 1966); of pages
needed equally late the tail of a prefix goes before its head, so what stays is always whole prefixes.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxkv.bench.traces import Trace, TraceRequest

_MAX_ORDERS = 5000  # beyond, a round is only taken depth first


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request in pages: numbers that grow along a prefix, so that of two pages of one the later has the larger."""

    pages: tuple[int, ...]  # full ones of the prompt
    num_pages: int  # while it runs
    max_found: int  # its last token is always computed


def clairvoyant_hits(trace: Trace, page_size: int, num_pages: int) -> int:
    """Prompt tokens found at best in a pool of `num_pages`.

    Exact where the orders within all rounds together are at most 5000; else what depth first order within each gives, a
    lower bound (and exact where it finds all that there is to find).
    """
    rounds = _in_pages(trace, page_size)
    depth_first = [asked for each in rounds for asked in sorted(each, key=lambda asked: asked.pages)]
    best = _num_found(depth_first, num_pages)
    num_orders = math.prod(math.factorial(len(each)) for each in rounds)
    if best * page_size < trace.best_hits(page_size) and num_orders <= _MAX_ORDERS:
        orders = itertools.product(*(itertools.permutations(each) for each in rounds))
        best = max(_num_found(list(itertools.chain.from_iterable(order)), num_pages) for order in orders)
    return best * page_size


def _in_pages(trace: Trace, page_size: int) -> list[list[_Asked]]:
    number: dict[tuple[int, ...], int] = {}

    def in_pages(request: TraceRequest) -> _Asked:
        prompt = request.prompt
        ends = range(page_size, len(prompt) + 1, page_size)
        return _Asked(
            pages=tuple(number.setdefault(prompt[:end], len(number)) for end in ends),
            num_pages=-(-(len(prompt) + request.output_len) // page_size),
            max_found=(len(prompt) - 1) // page_size,
        )

    return [[in_pages(request) for request in each] for each in trace.rounds]


def _num_found(requests: Sequence[_Asked], num_pages: int) -> int:
    """Pages found if the requests run one after the other in this order."""
    next_use: dict[int, int] = {}
    uses: list[dict[int, int]] = []  # of each request's pages, which later request needs them next
    for index in range(len(requests) - 1, -1, -1):
        uses.append({page: next_use.get(page, len(requests)) for page in requests[index].pages})
        next_use |= dict.fromkeys(requests[index].pages, index)
    kept: dict[int, int] = {}  # page -> the request that needs it next
    total = 0
    for request in requests:
        found = next((i for i, page in enumerate(request.pages) if page not in kept), len(request.pages))
        total += min(found, request.max_found)
        own = uses.pop()
        others = sorted((use, page) for page, use in kept.items() if page not in own)
        kept = {page: use for use, page in others[: max(num_pages - request.num_pages, 0)]} | own
    return total
