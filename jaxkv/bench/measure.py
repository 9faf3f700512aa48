"""Times one pass of a workload through an `LLM`."""

import dataclasses
import time
from typing import Any

from jaxkv.api import LLM
from jaxkv.bench.workloads import Workload
from jaxkv.errors import ConfigError
from jaxkv.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One pass; all requests were there at the start."""

    total_s: float
    ttft_s: float  # mean over requests
    decode_s: float  # from the first request's first token to the end of all
    num_output_tokens: int
    num_requests: int
    num_prompt_tokens: int
    cached_tokens: int  # prompt tokens read from the cache
    cache_written_tokens: int  # prompt tokens that later requests can find
    uncached_tokens: int  # the others
    utilisation: float | None  # tokens held / tokens that used pages could hold, mean over steps; None if not sampled
    mean_running: float | None  # requests that run at once, mean over steps

    def summary(self) -> dict[str, Any]:
        """Rounded numbers under the names that results use."""
        later = self.num_output_tokens - self.num_requests
        return {
            "total_s": round(self.total_s, 4),
            "ttft_s": round(self.ttft_s, 4),
            "total_tok_s": round(self.num_output_tokens / self.total_s, 2),
            "decode_tok_s": round(later / self.decode_s, 2) if self.decode_s else None,
            "cached_tokens": self.cached_tokens,
            "cache_written_tokens": self.cache_written_tokens,
            "uncached_tokens": self.uncached_tokens,
            "utilisation": None if self.utilisation is None else round(self.utilisation, 4),
            "mean_running": None if self.mean_running is None else round(self.mean_running, 2),
        }


def check_fits(workload: Workload, llm: LLM) -> None:
    """Raises ConfigError where a request would be cut short."""
    longest = max(p + o for p, o in zip(workload.prompt_lens, workload.output_lens, strict=True))
    if longest > llm.max_len:
        raise ConfigError(
            f"the longest request has {longest} tokens, max_len={llm.max_len}; shorten it or raise --max-len"
        )


def time_workload(llm: LLM, workload: Workload) -> Timing:
    """Greedy, end of sequence ignored, so that every engine makes the same number of tokens."""
    check_fits(workload, llm)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in workload.output_lens]
    usage = UsageProbe(llm)
    start = time.perf_counter()
    outputs = llm.generate(list(workload.prompts), params, progress=False, on_step=usage)
    total_s = time.perf_counter() - start
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    ttfts = [metric.ttft_s for metric in metrics if metric.ttft_s is not None]
    for output, wanted in zip(outputs, workload.output_lens, strict=True):
        assert len(output.outputs[0].token_ids) == wanted, output.outputs[0]
    return Timing(
        total_s=total_s,
        ttft_s=sum(ttfts) / len(ttfts),
        decode_s=total_s - min(ttfts),
        num_output_tokens=workload.num_output_tokens,
        num_requests=workload.num_requests,
        num_prompt_tokens=workload.num_prompt_tokens,
        cached_tokens=sum(output.cached_tokens for output in outputs),
        cache_written_tokens=sum(output.cache_written_tokens for output in outputs),
        uncached_tokens=sum(output.uncached_tokens for output in outputs),
        utilisation=usage.utilisation,
        mean_running=usage.mean_running,
    )


class UsageProbe:
    """Samples the pool after every step."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._held = self._room = self._running = self._samples = 0

    def __call__(self) -> None:
        stats = self._llm.stats()
        if stats.pages_used:
            self._held += stats.tokens_held
            self._room += stats.pages_used * self._llm.page_size
            self._running += stats.num_running
            self._samples += 1

    @property
    def utilisation(self) -> float | None:
        return self._held / self._room if self._room else None

    @property
    def mean_running(self) -> float | None:
        return self._running / self._samples if self._samples else None
