"""Replays traces under each eviction policy: what is found, what it saves, and when first tokens come.

    off         no prefix cache
    roomy       one with room for everything
    lru         in a pool too small for all: what was not used for longest goes first
    cost        there: what is cheapest to compute again goes first
    adaptive    there: cost, or where that would have found less the newest first
    retention   there: lru, but what the trace marks is kept

Requests come in a closed loop (`arrivals`), and optima stand beside the numbers (`clairvoyant`). `of_optimum`: each page is
computed once, as in depth first order. `of_attainable`: what can be found in the pool that there is by who knows what will
come. `of_eviction`: the same, but in the order in which the engine served; what is missing there the order did not cost.

The small pools hold a half and a quarter of the pages that the trace's prompts fill, and at least `ROWS` of the longest
request; so many run at once there, and more wait.
"""

import argparse
import dataclasses
import fractions
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxkv.api import LLM
from jaxkv.bench import traces
from jaxkv.bench.arrivals import Arrivals
from jaxkv.bench.clairvoyant import Served, attainable_hits, hits_as_served
from jaxkv.bench.conditions import conditions
from jaxkv.bench.traces import Trace, TraceRequest
from jaxkv.cache_control import CacheControl, Caching
from jaxkv.config import SchedulerConfig
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.events import Committed
from jaxkv.outputs import OutputBuilder
from jaxkv.plan import StepPlan, StepResult
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.schedule.scheduler import Scheduler

ROWS = 2  # requests that run at once in a small pool
SHARES = (fractions.Fraction(1, 2), fractions.Fraction(1, 4))  # that the small pools hold of all pages


class Policy(NamedTuple):
    """A way to run a trace."""

    name: str
    share: fractions.Fraction | None = None  # of all pages, that the pool has room for; None: all there is
    prefix_cache: bool = True
    eviction: str = "lru"
    keeps: bool = False  # whether the trace's breakpoints are sent

    def pool(self, trace: Trace, page_size: int, num_pages: int) -> int:
        """Pages to use of the `num_pages` that there are, neither with the null page."""
        if self.share is None:
            return num_pages
        return max(math.ceil(trace.num_pages(page_size) * self.share), ROWS * trace.most_pages(page_size))


POLICIES = (
    Policy("off", prefix_cache=False),
    Policy("roomy"),
    *(
        policy
        for share in SHARES
        for policy in (
            Policy("lru", share),
            Policy("cost", share, eviction="cost"),
            Policy("adaptive", share, eviction="adaptive"),
            Policy("retention", share, keeps=True),
        )
    ),
)


class LoggedScheduler(Scheduler):
    """A scheduler that notes who got a row and who gave it back, in this order."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.log: list[tuple[str, bool]] = []  # request id, whether it ended

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        plan = super().plan(now_s)
        if plan is not None:
            self.log += [(request_id, False) for request_id in self._flights[-1].admitted]
        return plan

    def commit(self, result: StepResult) -> Committed:
        committed = super().commit(result)
        self.log += [(event.request_id, True) for event in committed.finished]
        return committed


class Replay(NamedTuple):
    """What became of a trace."""

    outputs: list[RequestOutput]  # in the order of its requests
    served: list[Served]

    @property
    def saved_tokens(self) -> int:
        return sum(output.cached_tokens for output in self.outputs)


def check_fits(trace: Trace, *, page_size: int, max_len: int, num_pages: int) -> None:
    """Raises ConfigError where an engine cannot run a trace, or has no room to forget nothing of it."""
    longest = trace.most_pages(page_size)
    needed_len, needed_pages = longest * page_size, trace.num_pages(page_size) + ROWS * longest
    if needed_len > max_len or needed_pages > num_pages:
        raise ConfigError(
            f"trace {trace.name!r} needs max_len={needed_len} and num_pages={needed_pages}; this engine has {max_len} and "
            f"{num_pages}"
        )


def replay(
    trace: Trace, scheduler: LoggedScheduler, ask: Callable[[TraceRequest], OutputBuilder], step: Callable[[], None],
    think: int = 0,
) -> Replay:  # fmt: skip
    """Asks and steps until all are answered.

    Args:
        trace: who asks.
        scheduler: serves nobody else.
        ask: queues a request.
        step: computes one step.
        think: as of `Arrivals`.
    """
    arrivals = Arrivals(trace.requests, think)
    builders: dict[int, OutputBuilder] = {}
    outputs: dict[int, RequestOutput] = {}
    while not arrivals.is_over:
        for index in arrivals.take():
            builders[index] = ask(trace.requests[index])
        step()
        for index, builder in builders.items():
            if index not in outputs and builder.output is not None:
                outputs[index] = builder.output
                arrivals.answered(index)
    index_of = {builder.request.request_id: index for index, builder in builders.items()}
    served = [Served(index_of[request_id], is_end) for request_id, is_end in scheduler.log]
    return Replay([outputs[index] for index in range(len(outputs))], served)


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
    if (data := getattr(args, "data", 1)) != 1:
        raise ConfigError(
            f"--data {data}: replays run on one data shard, whose rows they choose; leave out --trace or it"
        )
    if "eviction" in args:  # a flag that is not given is absent
        raise ConfigError(f"--eviction {args.eviction}: --trace replays under every policy; leave out one of them")
    names = list(traces.TRACES) if "all" in args.trace else list(dict.fromkeys(args.trace))
    chosen = [traces.TRACES[name]() for name in names]
    llm = load()
    if llm._engine.scheduler.config.has_windows:
        raise ConfigError(
            f"{llm.name}: its pages hold K/V of some layers only, where traces count whole ones; no --trace"
        )
    result = conditions(llm, traces.workload(chosen)) | {"page_size": llm.page_size}
    for trace in chosen:
        size = llm.page_size
        check_fits(trace, page_size=size, max_len=llm.max_len, num_pages=llm.num_pages)
        result[trace.name] = {
            "num_requests": len(trace.requests),
            "prompt_tokens": trace.num_prompt_tokens,
            "optimum_hit_rate": round(trace.best_hits(size) / trace.num_prompt_tokens, 4),
            "all_pages": trace.num_pages(size),
            "policies": [run_policy(llm, trace, policy, args.think or 0) for policy in POLICIES],
        }
    return result


def run_policy(llm: LLM, trace: Trace, policy: Policy, think: int) -> dict[str, Any]:
    """One pass with a scheduler of its own on the same device pool, of which it uses what it may."""
    engine, config = llm._engine, llm._engine.scheduler.config
    num_pages = policy.pool(trace, llm.page_size, llm.num_pages)
    max_rows = config.max_rows if policy.share is None else min(ROWS, config.max_rows)
    scheduler = LoggedScheduler(
        dataclasses.replace(
            config,
            prefix_cache=policy.prefix_cache,
            eviction=policy.eviction,
            num_pages=num_pages + 1,
            max_rows=max_rows,
        )
    )
    llm._engine = Engine(scheduler, engine.runner, llm.tokenizer, overlap=engine.overlaps)

    def ask(request: TraceRequest) -> OutputBuilder:
        params = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        control = CacheControl(breakpoints=request.keep, ttl="1h") if policy.keeps and request.keep else None
        return llm.enqueue(llm.prepare(request.prompt, params, Caching(control=control)))

    try:
        start = time.perf_counter()
        done = replay(trace, scheduler, ask, llm.step, think)
        total_s = time.perf_counter() - start
        return {
            "policy": policy.name,
            "pool": str(policy.share or "all"),
            "pages": num_pages,
            **numbers(trace, done, page_size=llm.page_size, num_pages=num_pages, max_rows=max_rows, think=think),
            "total_s": round(total_s, 3),
            "retained_evictions": scheduler.stats().num_retained_evictions,
        }
    finally:
        llm._engine = engine


def numbers(
    trace: Trace, done: Replay, *, page_size: int, num_pages: int, max_rows: int, think: int
) -> dict[str, Any]:  # fmt: skip
    """A replay's numbers under the names that results use; arguments as of `attainable_hits`."""
    saved, best = done.saved_tokens, trace.best_hits(page_size)
    as_served = hits_as_served(trace, page_size, num_pages, done.served)
    offline = attainable_hits(trace, page_size, num_pages, think=think, max_rows=max_rows)
    attainable = max(offline, as_served)
    ttfts = [output.metrics.ttft_s or 0.0 for output in done.outputs if output.metrics is not None]
    return {
        "hit_rate": round(saved / trace.num_prompt_tokens, 4),
        "of_optimum": _share(saved, best),
        "of_attainable": _share(saved, attainable),
        "of_eviction": _share(saved, as_served),
        "attainable_of_optimum": _share(attainable, best),
        "saved_tokens": saved,
        "written_tokens": sum(output.cache_written_tokens for output in done.outputs),
        "uncached_tokens": sum(output.uncached_tokens for output in done.outputs),
        "ttft_s": round(sum(ttfts) / len(ttfts), 4),
    }


def _share(tokens: int, of_tokens: int) -> float | None:
    """None where there is nothing to find: pages may be longer than all that prompts share."""
    return round(tokens / of_tokens, 4) if of_tokens else None
