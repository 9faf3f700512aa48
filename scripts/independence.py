"""Same tokens, whatever happens around a request: 48 mixed requests, each alone and then all together, many ways.

    python scripts/independence.py -m smollm2 --json

Every second request samples with a seed, the others are greedy; all in float32. The ways differ in pool size (so small
that preemption happens), prefix cache cold and warm, overlap, and tokens per step. A difference is excused, counted
and printed only if the two tokens' scores were within 1e-4 of each other in the run alone. Also prints how full the
pool was, against contiguous allocators replaying the same lengths in the same memory.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv import LLM, RequestOutput, SamplingParams
from jaxkv.bench import workloads
from jaxkv.bench.measure import UsageProbe
from jaxkv.bench.replay import RequestLens, replay, standard_allocators
from jaxkv.device.sampler import draw_key

TIE = 1e-4  # scores closer than this may come out in either order
MAX_ROWS = 16
PAGE_SIZE = 16
NUM_PAGES = 160  # 2,560 tokens for 16 rows of ~340 on average: some must be preempted


@dataclasses.dataclass(frozen=True)
class Way:
    """One schedule."""

    name: str
    settings: dict[str, Any]
    passes: int = 1  # the last one counts; a second pass meets a warm cache
    may_preempt: bool = False


def ways() -> list[Way]:
    roomy = {"num_pages": 1200}
    tight = {"num_pages": NUM_PAGES}
    return [
        Way("alone, roomy pool, cold", roomy | {"prefix_cache": False}),
        Way("tight pool", tight | {"prefix_cache": False}, may_preempt=True),
        Way("tight pool, no overlap", tight | {"prefix_cache": False, "overlap": False}, may_preempt=True),
        Way("tight pool, cache", tight, may_preempt=True),
        Way("warm cache", roomy, passes=2),
        Way("16-token chunks", roomy | {"token_budget": 16}),
        Way("64-token chunks", roomy | {"token_budget": 64}),
        Way("256-token chunks, one token a step", roomy | {"token_budget": 256, "decode_steps": 1}),
    ]


def load(model: str, settings: dict[str, Any]) -> LLM:
    gc.collect()  # the last engine's pool and weights go first
    return LLM.load(model, **({"dtype": "float32", "max_len": 1152, "max_rows": MAX_ROWS} | settings), progress=False)


def params_of(workload: workloads.Workload, logprobs: int | None = None) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            temperature=0.8 * (i % 2),
            top_p=0.95 if i % 4 == 1 else 1.0,
            seed=i,
            logprobs=logprobs,
        )
        for i, length in enumerate(workload.output_lens)
    ]


def score_gap(alone: RequestOutput, params: SamplingParams, step: int, other: int) -> float:
    """How far apart the scores of the two tokens were that the runs chose at `step`; inf if that is not known."""
    completion = alone.outputs[0]
    assert completion.logprobs is not None and params.seed is not None
    entry = completion.logprobs[step]
    known = dict(entry.top) | {entry.token_id: entry.logprob}
    if other not in known:
        return float("inf")
    gap = known[entry.token_id] - known[other]
    if params.temperature:
        key = draw_key(
            np.array([0, params.seed], np.uint32), np.uint32(0), np.int32(len(alone.prompt_token_ids) + step)
        )
        noise = jax.random.gumbel(key, (49152,), np.float32)
        gap = gap / params.temperature + float(noise[entry.token_id] - noise[other])
    return abs(gap)


def compare(
    alone: Sequence[RequestOutput], together: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> dict[str, int]:
    """Counts equal, excused and different requests; says where they part."""
    counts = {"equal": 0, "excused": 0, "different": 0}
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        a, b = one.outputs[0].token_ids, other.outputs[0].token_ids
        if a == b:
            counts["equal"] += 1
            continue
        step = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        gap = score_gap(one, params[index], step, b[step]) if step < min(len(a), len(b)) else float("inf")
        counts["excused" if gap < TIE else "different"] += 1
        print(f"  request {index} parts at token {step} of {len(a)}, scores {gap:.2e} apart", file=sys.stderr)
    return counts


def run(llm: LLM, workload: workloads.Workload, params: Sequence[SamplingParams]) -> tuple[list[RequestOutput], dict]:
    usage = UsageProbe(llm)
    start = time.perf_counter()
    outputs = llm.generate(list(workload.prompts), params, on_step=usage)
    facts = {
        "seconds": round(time.perf_counter() - start, 1),
        "preemptions": llm.stats().num_preemptions,
        "cached_tokens": sum(output.cached_tokens for output in outputs),
        "utilisation": round(usage.utilisation or 0.0, 4),
        "mean_running": round(usage.mean_running or 0.0, 2),
    }
    return outputs, facts


def contiguous_figures(workload: workloads.Workload, max_len: int) -> dict[str, Any]:
    """What contiguous allocators make of the same lengths in the tight pool's memory."""
    lens = [
        RequestLens(prompt_len=p, output_len=o) for p, o in zip(workload.prompt_lens, workload.output_lens, strict=True)
    ]
    allocators = standard_allocators(NUM_PAGES * PAGE_SIZE, max_len=max_len, page_size=PAGE_SIZE)
    return {usage.name: usage.summary() for usage in (replay(lens, each, max_rows=MAX_ROWS) for each in allocators)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=48)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    workload = workloads.mix(args.num_requests)
    params = params_of(workload)
    first, *others = ways()
    llm = load(args.model, first.settings)
    alone = [
        llm.generate([prompt], one, progress=False)[0]
        for prompt, one in zip(workload.prompts, params_of(workload, logprobs=20), strict=True)
    ]
    del llm
    result: dict[str, Any] = {"model": args.model, "num_requests": args.num_requests, "ways": {}}
    failed = False
    for way in [dataclasses.replace(first, name="roomy pool"), *others]:
        llm = load(args.model, way.settings)
        for _ in range(way.passes):
            outputs, facts = run(llm, workload, params)
        del llm
        counts = compare(alone, outputs, params)
        result["ways"][way.name] = counts | facts
        failed |= counts["different"] > 0 or (way.may_preempt and not facts["preemptions"])
        print(f"{way.name:40} {counts} {facts}", file=sys.stderr, flush=True)
    result["contiguous"] = contiguous_figures(workload, 1152)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
