"""Traces for prefix caches, and what each policy makes of them: the engine itself, with a device that costs nothing."""

import itertools

import pytest

from jaxkv.api import LLM
from jaxkv.bench import policies
from jaxkv.bench.policies import POLICIES, ROWS, SHARES, LoggedScheduler, Policy, Replay
from jaxkv.bench.run import prefix
from jaxkv.bench.traces import TRACES, Trace, TraceRequest, chat, workload
from jaxkv.cli.command import build_parser
from jaxkv.config import SchedulerConfig
from jaxkv.device.settings import EngineConfig
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.intake import Intake
from jaxkv.outputs import OutputBuilder
from jaxkv.schedule.scheduler import Scheduler
from tests.fake_model import make_request
from tests.fake_runner import CheapRunner

SIZE = 16
SMALL = [policy for policy in POLICIES if policy.share is not None]
ADAPTIVE = [policy for policy in SMALL if policy.eviction == "adaptive"]


def run(
    trace: Trace, policy: Policy, *, think: int = 0, max_rows: int = ROWS, overlap: bool = True, **changes
) -> tuple[dict, LoggedScheduler, Replay]:
    """Replays a trace; a small pool holds at least a longest request for each row."""
    num_pages = max(policy.pool(trace, SIZE, 1000), max_rows * trace.most_pages(SIZE))
    sizes = dict(max_len=1024, max_rows=max_rows, page_size=SIZE, token_budget=256, num_pages=num_pages + 1)
    config = SchedulerConfig(**{**sizes, "prefix_cache": policy.prefix_cache, "eviction": policy.eviction, **changes})
    scheduler, ids = LoggedScheduler(config), itertools.count()
    engine = Engine(scheduler, CheapRunner(config.max_rows, 1), None, overlap=overlap)  # type: ignore[arg-type]

    def ask(request: TraceRequest) -> OutputBuilder:
        marks = tuple((point, 3600.0) for point in request.keep) if policy.keeps else ()
        asked = make_request(str(next(ids)), request.prompt, max_tokens=request.output_len, marks=marks)
        return engine.add(asked, None)

    done = policies.replay(trace, scheduler, ask, engine.step, think)
    limits = dict(page_size=SIZE, num_pages=config.num_pages - 1, max_rows=max_rows, think=think)
    return policies.numbers(trace, done, **limits), scheduler, done


def named(policy: Policy) -> str:
    return f"{policy.name} {policy.share}"


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_same_every_time_and_fit_small_engines(name: str):
    trace = TRACES[name]()
    assert trace == TRACES[name]() and trace.name == name
    assert max(len(request.prompt) + request.output_len for request in trace.requests) <= 512
    assert all(0 < point <= len(request.prompt) for request in trace.requests for point in request.keep)
    assert all(before < index for index, request in enumerate(trace.requests) for before in request.after)
    assert workload([trace]).num_prompt_tokens == trace.num_prompt_tokens < 5000


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_who_follows_goes_on_with_what_was_said_before(name: str):
    requests = TRACES[name]().requests
    shared = {"chat": lambda before: before, "agents": lambda before: before[:192]}[name]
    followers = [request for request in requests if request.after]
    assert len(followers) > len(requests) / 2
    for request in followers:
        (before,) = request.after
        head = shared(requests[before].prompt)
        assert request.prompt[: len(head)] == head


@pytest.mark.parametrize("name", TRACES)
def test_the_optimum_is_what_a_cache_without_end_finds(name: str):
    trace, known, hits = TRACES[name](), set(), 0
    for request in trace.requests:
        pages = [request.prompt[:end] for end in range(SIZE, len(request.prompt) + 1, SIZE)]
        hits += SIZE * len([page for page in pages if page in known and len(page) < len(request.prompt)])
        known.update(pages)
    assert trace.best_hits(SIZE) == hits > 0 and trace.num_pages(SIZE) == len(known)


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_rows", "overlap"), [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("policy", [POLICIES[1], *ADAPTIVE], ids=named)
@pytest.mark.parametrize("name", TRACES)
def test_the_hit_rate_is_96_percent_of_the_optimum(name: str, policy: Policy, max_rows: int, overlap: bool):
    """Of depth first order, with room for all and in pools of a half and a quarter; clients send on at once."""
    row, scheduler, _ = run(TRACES[name](), policy, max_rows=max_rows, overlap=overlap)
    assert row["of_optimum"] >= 0.96
    assert row["saved_tokens"] + row["written_tokens"] + row["uncached_tokens"] == TRACES[name]().num_prompt_tokens
    stats = scheduler.stats()
    assert stats.num_cached_tokens == row["saved_tokens"] and stats.num_written_tokens == row["written_tokens"]


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("name", TRACES)
def test_shards_compute_a_prefix_once_each_at_most(name: str, num_shards: int):
    trace = TRACES[name]()
    row, _, _ = run(trace, POLICIES[1], num_shards=num_shards, max_rows=4)
    once = trace.num_prompt_tokens - trace.best_hits(SIZE)
    assert trace.num_prompt_tokens - row["saved_tokens"] <= num_shards * once


@pytest.mark.parametrize("share", SHARES)
def test_in_a_small_pool_what_is_kept_stays_and_cost_is_no_worse_than_lru(share: object):
    found = {
        name: {policy.name: run(make(), policy)[0]["of_optimum"] for policy in SMALL if policy.share == share}
        for name, make in TRACES.items()
    }
    for shares in found.values():
        assert shares["retention"] >= shares["lru"] and shares["adaptive"] >= shares["cost"] >= shares["lru"]
    assert found["shared"]["retention"] == 1 and found["shared"]["lru"] < 0.96, "strangers come in between"


@pytest.mark.parametrize("max_rows", [1, 2])
@pytest.mark.parametrize("policy", ADAPTIVE, ids=named)
@pytest.mark.parametrize("name", ["chat", "agents"])
def test_round_by_round_adaptive_finds_96_percent_of_what_can_be_found(name: str, policy: Policy, max_rows: int):
    """Clients who think until all others were answered: depth first order is impossible."""
    row, _, _ = run(TRACES[name](), policy, think=99, max_rows=max_rows)
    assert row["of_attainable"] >= 0.96


@pytest.mark.parametrize("think", [0, 1, 3, 99])
@pytest.mark.parametrize("name", ["chat", "agents"])
def test_nobody_finds_more_than_who_knows_the_future(name: str, think: int):
    tried = [policy for policy in SMALL if policy.name in ("lru", "adaptive")]
    for policy, max_rows in itertools.product(tried, [1, 3]):
        row, _, _ = run(TRACES[name](), policy, think=think, max_rows=max_rows)
        assert row["of_eviction"] <= 1 and row["of_optimum"] <= row["of_attainable"] <= 1, (policy, max_rows)


def test_mixed_tasks_are_found_because_the_longest_prefix_gets_in_first():
    trace, lru = TRACES["few-shot"](), SMALL[-4]
    assert run(trace, lru)[0]["of_optimum"] == 1
    assert run(trace, lru, max_rows=1, max_bypass=0)[0]["of_optimum"] < 0.1


@pytest.mark.parametrize("max_rows", [1, 2])
def test_13_a_conversation_that_goes_on_and_on_does_not_starve_the_others(max_rows: int):
    """Who is answered sends on at once, with the longest prefix: at most so many overtake one that waits."""
    trace, max_bypass = chat(conversations=5, turns=12, user=16, answer=16), 6
    _, _, done = run(trace, ADAPTIVE[-1], max_rows=max_rows, max_bypass=max_bypass)
    came: dict[int, int] = {}  # request -> requests that had come when it did
    order = [event.index for event in done.served if not event.is_end]
    for place, event in enumerate(done.served):
        if event.is_end:
            came |= {index: place for index, each in enumerate(trace.requests) if each.after == (event.index,)}
    came |= {index: -1 for index, each in enumerate(trace.requests) if not each.after}
    overtaken = [
        sum((came[other], other) > (came[index], index) for other in order[:place]) for place, index in enumerate(order)
    ]
    assert max(overtaken) == max_bypass and len(order) == len(trace.requests)


def cheap_llm(**changes) -> LLM:
    sizes = dict(max_len=512, max_rows=4, page_size=SIZE, token_budget=256, num_pages=200)
    scheduler = Scheduler(SchedulerConfig(**{**sizes, **changes}))
    engine = Engine(scheduler, CheapRunner(4, 1), None, overlap=True)  # type: ignore[arg-type]
    return LLM("fake", engine, Intake(vocab_size=30_000, eos_ids=()), EngineConfig())


def test_every_policy_borrows_the_pool_of_the_engine_that_is_there():
    trace = TRACES["shared"]()
    llm = cheap_llm()
    engine = llm._engine
    rows = {
        (row["policy"], row["pool"]): row for row in (policies.run_policy(llm, trace, policy, 1) for policy in POLICIES)
    }
    assert llm._engine is engine and engine.stats().num_prompt_tokens == 0
    assert len(rows) == len(POLICIES) and {pool for _, pool in rows} == {"all", "1/2", "1/4"}
    assert rows["off", "all"]["of_optimum"] == 0 and rows["roomy", "all"]["of_optimum"] == 1
    assert rows["retention", "1/4"]["of_optimum"] == 1 > rows["lru", "1/4"]["of_optimum"]
    assert rows["lru", "1/4"]["pages"] == ROWS * trace.most_pages(SIZE) < rows["lru", "1/2"]["pages"]


def test_where_nothing_can_be_found_nothing_is_said_about_the_share():
    trace = TRACES["chat"]()
    limits = dict(page_size=256, num_pages=99, max_rows=1, think=0)
    _, _, done = run(trace, POLICIES[0])
    row = policies.numbers(trace, done, **limits)
    assert trace.best_hits(256) == 0 and row["of_optimum"] is row["of_attainable"] is row["of_eviction"] is None


def test_what_an_engine_must_hold_is_said_in_tokens_and_pages():
    trace = TRACES["shared"]()
    longest = trace.most_pages(SIZE)
    fits = dict(page_size=SIZE, max_len=longest * SIZE, num_pages=trace.num_pages(SIZE) + ROWS * longest)
    policies.check_fits(trace, **fits)
    for field in ("max_len", "num_pages"):
        with pytest.raises(
            ConfigError, match=rf"'shared' needs max_len={fits['max_len']} and num_pages={fits['num_pages']}"
        ):
            policies.check_fits(trace, **fits | {field: fits[field] - 1})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "hf"], "--compare hf cannot replay traces"),
        (["--eviction", "cost"], "--eviction cost: --trace"),
        (["--num-requests", "16"], "--num-requests has no say in traces"),
        (["--data", "2"], "--data 2: replays run on one data shard"),
    ],
)
def test_flags_that_replays_do_not_heed_are_refused(flags: list[str], message: str):
    args = build_parser().parse_args(["bench", "prefix", "-m", "smollm2", "--trace", "all", *flags])
    with pytest.raises(ConfigError, match=message):
        policies.bench(args, lambda: pytest.fail("loads for nothing"))


def test_models_with_windows_are_refused():
    args = build_parser().parse_args(["bench", "prefix", "-m", "fake", "--trace", "all"])
    with pytest.raises(ConfigError, match="fake: its pages hold K/V of some layers only"):
        policies.bench(args, lambda: cheap_llm(windows=(None, 64)))


def test_the_command_of_the_readme_gets_as_far_as_loading():
    class LoadsError(Exception):
        pass

    def load() -> None:
        raise LoadsError

    args = build_parser().parse_args(["bench", "prefix", "-m", "smollm2", "--trace", "all"])
    with pytest.raises(LoadsError):
        policies.bench(args, load)  # type: ignore[arg-type]


def test_thinking_without_traces_is_refused():
    args = build_parser().parse_args(["bench", "prefix", "-m", "smollm2", "--think", "2"])
    with pytest.raises(ConfigError, match="--think 2: only the clients of traces think"):
        prefix(args, {"model": "smollm2"})
