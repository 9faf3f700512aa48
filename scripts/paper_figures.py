"""The vLLM paper's figures 2 and 13 on our own ground: where KV memory goes, and how many requests run at once.

    python scripts/paper_figures.py --json
    python scripts/paper_figures.py --num-requests 1000 --memory buddy --png figures.png

Replays the lengths of W4 (`jaxkv.bench.workloads`), or of more requests drawn alike, on the host alone
(`jaxkv.bench.replay`).
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxkv.bench import workloads
from jaxkv.bench.replay import RequestLens, replay, standard_allocators
from jaxkv.bench.replay_memory import Buddy, FirstFit
from jaxkv.bench.usage import Usage
from jaxkv.errors import JaxkvError

MEMORIES = {"first-fit": FirstFit, "buddy": Buddy}
# Figure 2: share of KV memory that holds tokens. Figure 13: how many times as many requests paging runs at once
# (ShareGPT; the text gives two).
PAPER: dict[str, dict[str, float | None]] = {
    "max": {"held": 0.204, "paged_runs_times_as_many": 4.3},
    "pow2": {"held": 0.268, "paged_runs_times_as_many": None},
    "oracle": {"held": 0.382, "paged_runs_times_as_many": 2.2},
    "paged": {"held": 0.963, "paged_runs_times_as_many": 1.0},
}


def request_lens(num_requests: int | None) -> list[RequestLens]:
    """Returns W4's lengths, or those of `num_requests` drawn from the same distributions."""
    pairs = workloads.mix_lens(num_requests) if num_requests else workloads.mix_lens()
    return [RequestLens(prompt_len=prompt_len, output_len=output_len) for prompt_len, output_len in pairs]


def compare(
    requests: Sequence[RequestLens], *, capacity: int, max_len: int, page_size: int, memory: str, max_rows: int | None
) -> list[Usage]:
    """Replays the requests through each allocator over the same memory of `capacity` tokens."""
    allocators = standard_allocators(capacity, max_len=max_len, page_size=page_size, memory=MEMORIES[memory])
    return [replay(requests, allocator, max_rows=max_rows) for allocator in allocators]


def figures(usages: Sequence[Usage]) -> list[dict[str, Any]]:
    """Returns each run's summary, with its ratio to `paged` and the paper's numbers beside it."""
    paged = next(usage for usage in usages if usage.name == "paged")
    result = []
    for usage in usages:
        at_once = round(paged.mean_running / usage.mean_running, 2)
        result.append({**usage.summary(), "paged_runs_times_as_many": at_once, "paper": PAPER.get(usage.name)})
    return result


def plot(usages: Sequence[Usage], path: pathlib.Path, title: str) -> None:
    """Draws memory shares, held / reserved over time, and requests at once, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (shares_axes, time_axes, running_axes) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    names = [usage.name for usage in usages]
    labels = {
        "held": "tokens",
        "future": "reserved, used later",
        "never_used": "reserved, never used",
        "free": "free, but nobody fits",
    }
    bottoms = [0.0] * len(usages)
    for (kind, label), color in zip(labels.items(), ("#2a7f62", "#8cc5a2", "#d98c5f", "#d9d9d9"), strict=True):
        heights = [100 * usage.shares_of_memory()[kind] for usage in usages]
        bars = shares_axes.bar(names, heights, bottom=bottoms, label=label, color=color)
        if kind == "held":
            shares_axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    shares_axes.set(ylabel="% of KV memory, while requests wait", title="where the memory goes (fig. 2)", ylim=(0, 100))
    shares_axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)

    for usage in usages:
        time_axes.plot([100 * share for share in usage.held_of_reserved_over_time()], label=usage.name)
    time_axes.set(xlabel="step", ylabel="tokens held / tokens reserved, %", title="over time", ylim=(0, 102))
    time_axes.legend(fontsize="small")

    bars = running_axes.bar(names, [usage.mean_running for usage in usages], color="#2a7f62")
    running_axes.bar_label(bars, fmt="%.1f")
    running_axes.set(ylabel="requests running at once, mean", title="in the same memory (fig. 13)")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, help="draw this many, instead of W4's 48")
    parser.add_argument("--memory-tokens", type=int, default=8192, help="KV memory in tokens")
    parser.add_argument("--max-len", type=int, default=1024, help="tokens that `max` reserves for each request")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--max-rows", type=int, help="requests that may run at once; default: what memory holds")
    parser.add_argument("--memory", choices=tuple(MEMORIES), default="first-fit", help="how contiguous spans are cut")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    parser.add_argument("--png", type=pathlib.Path, help="draw the figures into this file")
    args = parser.parse_args()
    requests = request_lens(args.num_requests)
    conditions = {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(request.prompt_len for request in requests),
        "num_output_tokens": sum(request.output_len for request in requests),
        "capacity": args.memory_tokens,
        "max_len": args.max_len,
        "page_size": args.page_size,
        "max_rows": args.max_rows,
        "memory": args.memory,
    }
    try:
        usages = compare(
            requests,
            capacity=args.memory_tokens,
            max_len=args.max_len,
            page_size=args.page_size,
            memory=args.memory,
            max_rows=args.max_rows,
        )
    except JaxkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = figures(usages)
    if args.json:
        print(json.dumps({**conditions, "allocators": results}))
    else:
        print(", ".join(f"{key}={value}" for key, value in conditions.items()))
        print(
            f"{'':8}{'held / reserved':>16}{'held / memory':>16}{'paper':>8}{'at once':>10}{'paged x':>10}{'steps':>8}"
        )
        for result in results:
            print(
                f"{result['name']:8}{result['held_of_reserved']:16.1%}{result['shares_of_memory']['held']:16.1%}"
                f"{result['paper']['held']:8.1%}{result['mean_running']:10.1f}{result['paged_runs_times_as_many']:10.2f}"
                f"{result['num_steps']:8}"
            )
    if args.png:
        plot(usages, args.png, f"{len(requests)} requests, {args.memory_tokens} tokens of memory, {args.memory}")
        print(f"wrote {args.png}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
