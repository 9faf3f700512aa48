"""One long prefix that many requests begin with: seconds to the first token when it is new, and when it is cached."""

import random
import statistics
from typing import Any

from jaxkv.api import LLM
from jaxkv.bench.workloads import random_ids
from jaxkv.errors import ConfigError
from jaxkv.request import RequestOutput, SamplingParams


def time_long_prefix(llm: LLM, prefix_len: int, own_len: int, repeats: int) -> dict[str, Any]:
    """Sends the prefix once with an empty cache, then `repeats` times with other tokens after it.

    Args:
        llm: with a prefix cache, its programs compiled.
        prefix_len: tokens that all have in common.
        own_len: tokens that each has of its own.
        repeats: hits; their median is reported.

    Raises:
        ConfigError: `max_len` is too small.
    """
    if (needed := prefix_len + own_len + 1) > llm.max_len:
        raise ConfigError(f"--long-len {prefix_len} needs max_len={needed}, it is {llm.max_len}; raise --max-len")
    rng = random.Random(10)
    prefix = random_ids(rng, prefix_len)
    llm.clear_prefix_cache()
    cold, *warm = (_ask(llm, prefix + random_ids(rng, own_len)) for _ in range(repeats + 1))
    kept = prefix_len // llm.page_size * llm.page_size
    assert cold.cached_tokens == 0 and all(output.cached_tokens == kept for output in warm)
    cold_s, warm_s = _ttft_s(cold), statistics.median(map(_ttft_s, warm))
    return {
        "prefix_tokens": prefix_len,
        "cold_ttft_s": round(cold_s, 4),
        "hit_ttft_s": round(warm_s, 4),
        "hit_over_cold": round(warm_s / cold_s, 4),
    }


def _ask(llm: LLM, prompt: tuple[int, ...]) -> RequestOutput:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return llm.generate([prompt], params, progress=False)[0]


def _ttft_s(output: RequestOutput) -> float:
    assert output.metrics is not None and output.metrics.ttft_s is not None
    return output.metrics.ttft_s
