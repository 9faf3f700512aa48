"""One function per benchmark: arguments in, one result (plain data) out."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxkv.api import LLM
from jaxkv.bench import kv_cache, peers, policies, workloads
from jaxkv.bench.conditions import conditions, peak_rss_bytes
from jaxkv.bench.long_prefix import time_long_prefix
from jaxkv.bench.measure import Timing, time_workload
from jaxkv.bench.workloads import Workload
from jaxkv.errors import ConfigError

Load = Mapping[str, Any]  # keyword arguments of `LLM.load`, with the model under "model"


def run(args: argparse.Namespace, load: Load) -> int:
    """Runs the benchmark `args.benchmark` and prints its result. Returns the exit status."""
    for name in getattr(args, "compare", ()):
        peers.command(name, load["model"])  # refuses now what would fail after minutes
    result = _BENCHMARKS[args.benchmark](args, load)
    print(json.dumps(result) if args.json else _table(result), flush=True)
    return 0


def throughput(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    workload = workloads.equal("throughput", args.num_requests, args.prompt_len, args.output_len)
    return _one_workload(workload, "total_tok_s", args, load)


def latency(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    return _one_workload(workloads.equal("latency", 1, args.prompt_len, args.output_len), "decode_tok_s", args, load)


def mix(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    return _one_workload(workloads.mix(args.num_requests), "total_tok_s", args, load)


def prefix(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Off, from cold, and warm: seconds until all requests are done. With `args.trace`, policies on traces instead."""
    if args.trace:
        return policies.bench(args, lambda: _load(load, prefix_cache=True))
    if args.think is not None:
        raise ConfigError(f"--think {args.think}: only the clients of traces think; add --trace all or leave it out")
    workload = workloads.shared_prefix(args.num_requests, args.shared_len, args.own_len, args.output_len)
    llm = _load(load, prefix_cache=False)
    off = _median(time_workload(llm, workload) for _ in range(args.repeats))
    del llm
    llm = _load(load, prefix_cache=True)
    cold, warm = [], []
    for _ in range(args.repeats):
        llm.clear_prefix_cache()
        cold.append(time_workload(llm, workload))
        warm.append(time_workload(llm, workload))
    cold_run, warm_run = _median(cold), _median(warm)
    result = {
        **conditions(llm, workload),
        "off": off.summary(),
        "cold": cold_run.summary(),
        "warm": warm_run.summary(),
        "cold_over_off": round(cold_run.total_s / off.total_s, 3),
        "warm_over_off": round(warm_run.total_s / off.total_s, 3),
        "warm_ttft_over_off": round(warm_run.ttft_s / off.ttft_s, 3),
    }
    if args.long_len is not None:
        result["long_prefix"] = time_long_prefix(llm, args.long_len, args.own_len, args.repeats)
    dtype = llm.dtype
    del llm
    for name in args.compare:
        peer = peers.run(name, workload, model=load["model"], dtype=dtype, repeats=args.repeats)
        result |= {name: peer, f"cold_times_as_fast_as_{name}": round(peer["total_s"] / cold_run.total_s, 2)}
    return result


def _one_workload(workload: Workload, metric: str, args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Ours, then each peer, on the same prompts; every pass begins with an empty prefix cache."""
    llm = _load(load)
    runs = []
    for _ in range(args.repeats):
        llm.clear_prefix_cache()
        runs.append(time_workload(llm, workload))
    result = conditions(llm, workload) | {"metric": metric}
    dtype = llm.dtype
    ours = _median(runs).summary() | {"peak_rss_bytes": peak_rss_bytes()}
    stats = llm.stats()
    result["jaxkv"] = ours | {"num_preemptions": stats.num_preemptions, "num_compiles": stats.num_compiles}
    del llm
    for name in args.compare:
        peer = peers.run(name, workload, model=load["model"], dtype=dtype, repeats=args.repeats)
        result[name] = peer
        result[f"jaxkv_over_{name}"] = round(ours[metric] / peer[metric], 2)
    return result


def _load(load: Load, **more: Any) -> LLM:
    arguments = dict(load) | more
    print(f"loading {arguments['model']} and compiling all programs ...", file=sys.stderr, flush=True)
    return LLM.load(**arguments, warm_up=True)


def _median(runs: Iterable[Timing]) -> Timing:
    by_time = sorted(runs, key=lambda run: run.total_s)
    return by_time[len(by_time) // 2] if len(by_time) % 2 else by_time[len(by_time) // 2 - 1]


def _table(result: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in result.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}", _table(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines.append(f"{indent}{key}")
            lines += [indent + "  " + "  ".join(f"{k}={v}" for k, v in row.items()) for row in value]
        else:
            lines.append(f"{indent}{key:24} {value}")
    return "\n".join(lines)


_BENCHMARKS: dict[str, Callable[[argparse.Namespace, Load], dict[str, Any]]] = {
    "throughput": throughput,
    "latency": latency,
    "mix": mix,
    "prefix": prefix,
    "kv-cache": kv_cache.bench,
}
