"""Traces for prefix caches, and what each policy makes of them: the scheduler itself, with a device that costs nothing."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence

import pytest

from jaxkv.bench.clairvoyant import clairvoyant_hits
from jaxkv.bench.policies import POLICIES, Answer, Policy, bench, check_fits, replay, small_pool
from jaxkv.bench.traces import TRACES, Trace, TraceRequest, workload
from jaxkv.cli.command import build_parser
from jaxkv.config import SchedulerConfig
from jaxkv.errors import ConfigError
from jaxkv.scheduler import Scheduler
from tests.fake_model import make_request
from tests.fake_runner import CheapRunner

SIZE = 16


def run(trace: Trace, policy: Policy, *, num_pages: int | None = None, **changes) -> tuple[dict, Scheduler]:
    """Replays a trace; `num_pages` is the small pool's, without the null page."""
    small = num_pages or small_pool(trace, SIZE)
    sizes = dict(
        max_len=512, max_rows=4, page_size=SIZE, token_budget=256, num_pages=small + 1 if policy.is_small else 1000
    )
    config = SchedulerConfig(**{**sizes, "prefix_cache": policy.prefix_cache, "eviction": policy.eviction, **changes})
    scheduler, runner, ids = Scheduler(config), CheapRunner(config.max_rows, 1), itertools.count()

    def ask(requests: Sequence[TraceRequest]) -> list[Answer]:
        finished = {}
        names = [str(next(ids)) for _ in requests]
        for name, request in zip(names, requests, strict=True):
            marks = tuple((point, 3600.0) for point in request.keep) if policy.keeps else ()
            scheduler.add(make_request(name, request.prompt, max_tokens=request.output_len, marks=marks))
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            assert plan is not None
            finished |= {event.request_id: event for event in scheduler.commit(runner.run(plan)).finished}
        numbers = [(finished[name].cached_tokens, finished[name].cache_written_tokens) for name in names]
        return [
            Answer(read, written, len(request.prompt) - read - written, 0.0)
            for (read, written), request in zip(numbers, requests, strict=True)
        ]

    attainable = at_best(trace, small) if policy.is_small else None
    return replay(trace, ask, SIZE, is_together=policy.is_together, attainable=attainable), scheduler


@functools.cache
def at_best(trace: Trace, num_pages: int) -> int:
    return clairvoyant_hits(trace, SIZE, num_pages)


def all_policies(trace: Trace, of: str = "of_optimum", **changes) -> dict[str, float]:
    """Share of the optimum that each finds."""
    return {policy.name: run(trace, policy, **changes)[0][of] for policy in POLICIES}


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_same_every_time_and_fit_small_engines(name: str):
    trace = TRACES[name]()
    assert trace == TRACES[name]() and trace.name == name
    assert max(len(request.prompt) + request.output_len for request in trace.requests) <= 512
    assert all(0 < point <= len(request.prompt) for request in trace.requests for point in request.keep)
    assert workload([trace]).num_prompt_tokens == trace.num_prompt_tokens < 5000


@pytest.mark.parametrize("name", TRACES)
def test_the_optimum_is_what_a_cache_without_end_finds(name: str):
    trace, known, hits = TRACES[name](), set(), 0
    for request in trace.requests:
        pages = [request.prompt[:end] for end in range(SIZE, len(request.prompt) + 1, SIZE)]
        hits += SIZE * len([page for page in pages if page in known and len(page) < len(request.prompt)])
        known.update(pages)
    assert trace.best_hits(SIZE) == hits > 0 and trace.num_pages(SIZE) == len(known)


@pytest.mark.parametrize("max_rows", [1, 4, 8])
@pytest.mark.parametrize("name", TRACES)
def test_with_room_for_all_the_hit_rate_is_96_percent_of_the_optimum(name: str, max_rows: int):
    row, scheduler = run(TRACES[name](), POLICIES[1], max_rows=max_rows)
    assert row["of_optimum"] >= 0.96
    assert row["saved_tokens"] + row["written_tokens"] + row["uncached_tokens"] == TRACES[name]().num_prompt_tokens
    stats = scheduler.stats()
    assert stats.num_cached_tokens == row["saved_tokens"] and stats.num_written_tokens == row["written_tokens"]


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("name", TRACES)
def test_shards_compute_a_prefix_once_each_at_most(name: str, num_shards: int):
    trace = TRACES[name]()
    row, _ = run(trace, POLICIES[1], num_shards=num_shards, max_rows=4)
    once = trace.num_prompt_tokens - trace.best_hits(SIZE)
    assert trace.num_prompt_tokens - row["saved_tokens"] <= num_shards * once


def test_in_a_small_pool_what_is_kept_stays_and_cost_is_no_worse_than_lru():
    found = {name: all_policies(make()) for name, make in TRACES.items()}
    for shares in found.values():
        assert shares["off"] == 0 and shares["roomy"] == 1
        assert shares["retention"] >= shares["lru"] and shares["cost"] >= shares["lru"]
    assert found["shared"]["retention"] == 1 and found["shared"]["lru"] <= 0.8
    assert found["shared"]["cost"] > found["shared"]["lru"]
    assert found["agents"]["retention"] > found["agents"]["lru"]
    assert all(shares["adaptive"] >= shares["cost"] for shares in found.values())


@pytest.mark.parametrize("max_rows", [1, 4])
def test_of_what_a_small_pool_can_find_adaptive_finds_most(max_rows: int):
    found = {
        name: all_policies(make(), "of_attainable", max_rows=max_rows)["adaptive"] for name, make in TRACES.items()
    }
    assert found["shared"] == found["few-shot"] == 1 and found["agents"] >= 0.96
    assert found["chat"] >= 0.91, "it does not know who speaks next; lru finds 0.72"


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.is_small], ids=lambda policy: policy.name)
def test_if_all_are_there_from_the_start_one_row_finds_the_optimum_in_a_small_pool(name: str, policy: Policy):
    """Longest prefix first is depth first order."""
    row, _ = run(TRACES[name](), policy._replace(is_together=True), max_rows=1)
    assert row["of_optimum"] == 1


@pytest.mark.parametrize("name", ["chat", "agents"])
@pytest.mark.parametrize("share", [2, 3, 4])
def test_nobody_finds_more_than_who_knows_the_future(name: str, share: int):
    trace = TRACES[name]()
    num_pages = max(trace.num_pages(SIZE) * share // 5, trace.most_pages(SIZE) + 1)
    best = clairvoyant_hits(trace, SIZE, num_pages)
    assert best <= clairvoyant_hits(trace, SIZE, num_pages + 4) <= trace.best_hits(SIZE)
    for policy in POLICIES:
        if policy.is_small and not policy.is_together:
            assert run(trace, policy, num_pages=num_pages, max_rows=1)[0]["saved_tokens"] <= best


def test_who_knows_the_future_finds_what_trying_everything_finds():
    """Five small requests in three pages: all choices of what to lose, all orders."""
    rng = random.Random(5)
    for _ in range(20):
        asked = [tuple(rng.choice("ab") for _ in range(2)) for _ in range(5)]
        prompts = [(*(ord(c) for c in each for _ in range(2)), 0) for each in asked]  # two pages of two
        rounds = tuple((TraceRequest(prompt=prompt, output_len=1),) for prompt in prompts)
        trace = Trace(name="tiny", rounds=rounds)
        assert clairvoyant_hits(trace, 2, 4) == try_everything(prompts, frozenset(), 4)


def try_everything(prompts: list[tuple[int, ...]], cached: frozenset, num_pages: int) -> int:
    if not prompts:
        return 0
    prompt, rest = prompts[0], prompts[1:]
    pages = [prompt[:2], prompt[:4]]
    found = next((i for i, page in enumerate(pages) if page not in cached), 2)
    others = cached - {*pages}
    room = num_pages - 3  # two tokens' page for what it says next
    kept = [frozenset(c) for n in range(min(room, len(others)) + 1) for c in itertools.combinations(sorted(others), n)]
    return 2 * found + max(try_everything(rest, each | {*pages}, num_pages) for each in kept)


def test_mixed_tasks_are_found_because_the_longest_prefix_gets_in_first():
    trace, lru = TRACES["few-shot"](), POLICIES[2]
    num_pages = trace.most_pages(SIZE) + 3
    assert run(trace, lru, num_pages=num_pages, max_rows=1)[0]["of_optimum"] == 1
    assert run(trace, lru, num_pages=num_pages, max_rows=1, max_bypass=0)[0]["of_optimum"] < 0.1


def test_what_an_engine_must_hold_is_said_in_tokens_and_pages():
    trace = TRACES["shared"]()
    longest = trace.most_pages(SIZE)
    fits = dict(page_size=SIZE, max_len=longest * SIZE, num_pages=trace.num_pages(SIZE) + longest)
    check_fits(trace, **fits)
    for field in ("max_len", "num_pages"):
        with pytest.raises(
            ConfigError, match=rf"'shared' needs max_len={fits['max_len']} and num_pages={fits['num_pages']}"
        ):
            check_fits(trace, **fits | {field: fits[field] - 1})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "hf"], "--compare hf cannot replay traces"),
        (["--eviction", "cost"], "--eviction cost: --trace"),
        (["--num-requests", "16"], "--num-requests has no say in traces"),
    ],
)
def test_flags_that_replays_do_not_heed_are_refused(flags: list[str], message: str):
    args = build_parser().parse_args(["bench", "prefix", "-m", "smollm2", "--trace", "all", *flags])
    with pytest.raises(ConfigError, match=message):
        bench(args, lambda: pytest.fail("loads for nothing"))


def test_the_command_of_the_readme_gets_as_far_as_loading():
    class LoadsError(Exception):
        pass

    def load() -> None:
        raise LoadsError

    args = build_parser().parse_args(["bench", "prefix", "-m", "smollm2", "--trace", "all"])
    with pytest.raises(LoadsError):
        bench(args, load)  # type: ignore[arg-type]


def test_depth_first_is_the_optimum_of_a_tree_and_the_queue_finds_it():
    trace = TRACES["agents"]()
    together = dataclasses.replace(trace, rounds=(tuple(trace.requests),))
    row, _ = run(together, POLICIES[2], num_pages=trace.most_pages(SIZE) + 5, max_rows=1)
    assert row["of_optimum"] == 1
