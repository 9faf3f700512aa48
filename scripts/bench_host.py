"""What the host costs a step: planning, packing for the device and committing, in microseconds, without a device.

    python scripts/bench_host.py [--rows 256] [--steps 1000] [--decode-steps 1] [--data 1]

Prints one JSON line: medians of wall time, and means of the thread's CPU time (which other processes on the machine do
not disturb). `decode` has every row running, lengths spread over all offsets in a page, so that in each step one row in
`page_size` takes a page. `churn` adds a backlog: a request ends after about 128 tokens and the next one is admitted, so
most steps have chunks (`churn_mixed_share`), and finished pages are hashed and published.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxkv.config import SchedulerConfig
from jaxkv.device.batch import Buckets, make_buckets, pack_mixed, pad_writes, spread
from jaxkv.plan import StepPlan
from jaxkv.schedule.scheduler import Scheduler
from tests.fake_model import make_request
from tests.fake_runner import CheapRunner

PROMPT_LEN = 64  # mean tokens
CHURN_OUTPUT_LEN = 128  # mean tokens


class Stopwatch:
    """Microseconds of one kind of call."""

    def __init__(self) -> None:
        self.wall_us: list[float] = []
        self.cpu_us: list[float] = []

    def time(self, call, *args):
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*args)
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        self.wall_us.append(wall / 1000)
        self.cpu_us.append(cpu / 1000)
        return result


class Meter:
    """Runs steps with one in flight and keeps the time that the scheduler takes."""

    def __init__(self, rows: int, num_steps: int, decode_steps: int, data: int) -> None:
        max_len = PROMPT_LEN * 2 + (num_steps + 200) * decode_steps
        self.config = SchedulerConfig(
            max_len=max_len, max_rows=rows, page_size=16, num_pages=rows // data * (max_len // 16 + 1) + 1,
            token_budget=2048 + rows, chunk_align=16, decode_steps=decode_steps, num_shards=data,
        )  # fmt: skip
        self.scheduler = Scheduler(self.config)
        self.runner = CheapRunner(rows, decode_steps)
        self.random = np.random.default_rng(1)
        self.num_added = 0
        self.result = None
        self.num_mixed = 0
        self.buckets = make_buckets(
            max_rows=rows // data, token_budget=self.config.token_budget, query_tile=self.config.chunk_align,
            max_pages=max_len // 16 + 1, max_len=max_len,
        )  # fmt: skip
        self.plan, self.pack, self.commit = Stopwatch(), Stopwatch(), Stopwatch()

    def add(self, max_tokens: int) -> None:
        prompt = self.random.integers(0, 30_000, self.random.integers(PROMPT_LEN // 2, PROMPT_LEN * 3 // 2)).tolist()
        # Three ids that the runner never makes: they are compared, and never match.
        self.scheduler.add(make_request(str(self.num_added), prompt, eos=(1, 2, 3), max_tokens=max_tokens))
        self.num_added += 1

    def run(self, num_steps: int) -> None:
        self.plan, self.pack, self.commit, self.num_mixed = Stopwatch(), Stopwatch(), Stopwatch(), 0
        for _ in range(num_steps):
            plan = self.plan.time(self.scheduler.plan)
            assert plan is not None
            self.pack.time(pack, plan, self.buckets, self.config)
            result, self.result = self.result, self.runner.run(plan)
            self.num_mixed += bool(plan.chunks)
            if result is not None:
                self.commit.time(self.scheduler.commit, result)


def pack(plan: StepPlan, buckets: Buckets, config: SchedulerConfig) -> None:
    """Makes the arrays that `Runner.dispatch` hands to jax."""
    shards = config.shards
    if plan.page_writes:
        pad_writes(plan.page_writes, shards, buckets.page_writes)
    if plan.chunks:
        pack_mixed(plan, buckets, config.chunk_align, shards)
    else:
        spread(plan.decode_rows, shards, buckets.decode_rows).padded_rows()


def decode_only(rows: int, num_steps: int, decode_steps: int, data: int) -> Meter:
    """All rows run from beginning to end."""
    meter = Meter(rows, num_steps, decode_steps, data)
    for _ in range(rows):
        meter.add(max_tokens=meter.config.max_len)
    meter.run(100)  # prompts, and warm caches
    assert meter.scheduler.stats().num_running == rows and meter.scheduler.stats().num_waiting == 0
    meter.run(num_steps)
    assert not meter.num_mixed
    return meter


def churn(rows: int, num_steps: int, decode_steps: int, data: int) -> Meter:
    """Requests end and others, always waiting, take their place."""
    meter = Meter(rows, num_steps, decode_steps, data)
    for _ in range(rows + (num_steps + 100) * rows * decode_steps // CHURN_OUTPUT_LEN * 5 // 4):
        meter.add(max_tokens=int(meter.random.integers(1, 2 * CHURN_OUTPUT_LEN)))
    meter.run(100)
    meter.run(num_steps)
    assert meter.scheduler.stats().num_waiting > 0
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of planning, packing and committing a step, without a device.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    args = parser.parse_args()
    report = {"bench": "host", **vars(args), "python": platform.python_version(), "numpy": np.__version__}
    for name, case in (("decode", decode_only), ("churn", churn)):
        meter = case(args.rows, args.steps, args.decode_steps, args.data)
        for part, watches in (
            ("plan", [meter.plan]),
            ("pack", [meter.pack]),
            ("commit", [meter.commit]),
            ("total", [meter.plan, meter.pack, meter.commit]),
        ):
            report[f"{name}_{part}_us"] = round(sum(statistics.median(watch.wall_us) for watch in watches), 1)
            report[f"{name}_{part}_cpu_us"] = round(sum(statistics.fmean(watch.cpu_us) for watch in watches), 1)
        report[f"{name}_mixed_share"] = round(meter.num_mixed / args.steps, 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
