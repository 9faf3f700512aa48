"""Replays traces under each eviction policy: what is found, what it saves, and when first tokens come.

    off         no prefix cache
    roomy       one with room for everything
    lru         in a pool too small for all: what was not used for longest goes first
    cost        there: what is cheapest to compute again goes first
    adaptive    there: cost, or where that would have found less the newest first
    retention   there: lru, but what the trace marks is kept
    together    there: lru, but all requests are there from the start, so that the scheduler decides about their order

Two optima stand beside the numbers. `of_optimum`: each page is computed once, which is what depth first order gives in
any pool that holds the longest request, if all requests are there from the start. `of_attainable`: the most that can be
found in the small pool if they come round by round (`clairvoyant`).

The small pool holds two fifths of the pages that the trace's prompts fill, and at least the longest request's.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxkv.api import LLM
from jaxkv.bench import traces
from jaxkv.bench.clairvoyant import clairvoyant_hits
from jaxkv.bench.conditions import conditions
from jaxkv.bench.traces import Trace, TraceRequest
from jaxkv.cache_control import CacheControl
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Scheduler


class Policy(NamedTuple):
    """A way to run a trace."""

    name: str
    prefix_cache: bool = True
    eviction: str = "lru"
    is_small: bool = True
    keeps: bool = False  # whether the trace's breakpoints are sent
    is_together: bool = False  # whether all requests come at once, not round by round


POLICIES = (
    Policy("off", prefix_cache=False, is_small=False),
    Policy("roomy", is_small=False),
    Policy("lru"),
    Policy("cost", eviction="cost"),
    Policy("adaptive", eviction="adaptive"),
    Policy("retention", keeps=True),
    Policy("together", is_together=True),
)


class Answer(NamedTuple):
    """What a replay needs to know of one output."""

    cached_tokens: int
    cache_written_tokens: int
    uncached_tokens: int
    ttft_s: float


def small_pool(trace: Trace, page_size: int) -> int:
    """Pages of the pool that is too small for all."""
    return max(trace.num_pages(page_size) * 2 // 5, trace.most_pages(page_size) + 1)


def check_fits(trace: Trace, *, page_size: int, max_len: int, num_pages: int) -> None:
    """Raises ConfigError where an engine cannot run a trace, or has no room to forget nothing of it."""
    longest = trace.most_pages(page_size)
    needed_len, needed_pages = longest * page_size, trace.num_pages(page_size) + longest
    if needed_len > max_len or needed_pages > num_pages:
        raise ConfigError(
            f"trace {trace.name!r} needs max_len={needed_len} and num_pages={needed_pages}; this engine has {max_len} and "
            f"{num_pages}"
        )


def replay(
    trace: Trace,
    ask: Callable[[Sequence[TraceRequest]], list[Answer]],
    page_size: int,
    *,
    is_together: bool = False,
    attainable: int | None = None,
) -> dict[str, Any]:
    """Asks round after round; returns the numbers under the names that results use.

    Args:
        trace: what is asked.
        ask: answers the requests of a round.
        page_size: tokens a page holds.
        is_together: all rounds are one.
        attainable: tokens that can be found at best in the pool that there is; None where that is the optimum.
    """
    rounds = (tuple(trace.requests),) if is_together else trace.rounds
    start = time.perf_counter()
    answers = [answer for each in rounds for answer in ask(each)]
    total_s = time.perf_counter() - start
    saved, best = sum(answer.cached_tokens for answer in answers), trace.best_hits(page_size)
    attainable = best if attainable is None or is_together else attainable
    return {
        "hit_rate": round(saved / trace.num_prompt_tokens, 4),
        "of_optimum": round(saved / best, 4) if best else None,
        "of_attainable": round(saved / attainable, 4) if attainable else None,
        "saved_tokens": saved,
        "written_tokens": sum(answer.cache_written_tokens for answer in answers),
        "uncached_tokens": sum(answer.uncached_tokens for answer in answers),
        "ttft_s": round(sum(answer.ttft_s for answer in answers) / len(answers), 4),
        "total_s": round(total_s, 3),
    }


def bench(args: argparse.Namespace, load: Callable[[], LLM]) -> dict[str, Any]:
    """Runs every policy on the traces `args.trace`.

    Raises:
        ConfigError: a trace does not fit, or a flag is given that replays do not heed.
    """
    if args.given:
        raise ConfigError(
            f"{args.given[0]} has no say in traces, which have requests of their own; leave out --trace or it"
        )
    if args.compare:
        raise ConfigError(f"--compare {args.compare[0]} cannot replay traces; leave out --trace or --compare")
    if "eviction" in args:  # a flag that is not given is absent
        raise ConfigError(f"--eviction {args.eviction}: --trace replays under every policy; leave out one of them")
    names = list(traces.TRACES) if "all" in args.trace else list(dict.fromkeys(args.trace))
    chosen = [traces.TRACES[name]() for name in names]
    llm = load()
    result = conditions(llm, traces.workload(chosen)) | {"page_size": llm.page_size}
    for trace in chosen:
        size = llm.page_size
        check_fits(trace, page_size=size, max_len=llm.max_len, num_pages=llm.num_pages)
        attainable = clairvoyant_hits(trace, size, small_pool(trace, size))
        rows = [{"policy": policy.name} | _run(llm, trace, policy, attainable) for policy in POLICIES]
        result[trace.name] = {
            "num_requests": len(list(trace.requests)),
            "prompt_tokens": trace.num_prompt_tokens,
            "optimum_hit_rate": round(trace.best_hits(size) / trace.num_prompt_tokens, 4),
            "attainable_in_small_pool": round(attainable / trace.num_prompt_tokens, 4),
            "small_pool_pages": small_pool(trace, size),
            "all_pages": trace.num_pages(size),
            "policies": rows,
        }
    return result


def _run(llm: LLM, trace: Trace, policy: Policy, attainable: int) -> dict[str, Any]:
    """One pass with a scheduler of its own on the same device pool, of which it uses what it may.

    `attainable` is the small pool's, as of `replay`.
    """
    engine = llm._engine
    config = dataclasses.replace(
        engine.scheduler.config,
        prefix_cache=policy.prefix_cache,
        eviction=policy.eviction,
        num_pages=small_pool(trace, llm.page_size) + 1 if policy.is_small else engine.scheduler.config.num_pages,
    )
    llm._engine = Engine(Scheduler(config), engine.runner, llm.tokenizer, overlap=engine.overlaps)

    def ask(requests: Sequence[TraceRequest]) -> list[Answer]:
        params = [
            SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True) for request in requests
        ]
        controls = [
            CacheControl(breakpoints=request.keep, ttl="1h") if policy.keeps and request.keep else None
            for request in requests
        ]
        outputs = llm.generate([request.prompt for request in requests], params, progress=False, cache_control=controls)
        return [
            Answer(out.cached_tokens, out.cache_written_tokens, out.uncached_tokens, out.metrics.ttft_s or 0.0)
            for out in outputs
            if out.metrics is not None
        ]

    try:
        in_small = attainable if policy.is_small else None
        row = replay(trace, ask, llm.page_size, is_together=policy.is_together, attainable=in_small)
        return row | {"retained_evictions": llm.stats().num_retained_evictions}
    finally:
        llm._engine = engine
