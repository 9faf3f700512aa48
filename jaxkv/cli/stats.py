"""What a run cost, in words: for people, on stderr."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxkv.kv_math import format_bytes
from jaxkv.request import RequestOutput

if TYPE_CHECKING:
    from jaxkv.api import Stats


def print_stats(stats: "Stats", outputs: Sequence[RequestOutput], elapsed_s: float) -> None:
    """Prints speed, reuse and memory of finished requests.

    Args:
        stats: from `LLM.stats`.
        outputs: of the run.
        elapsed_s: seconds the run took, without loading the model.
    """
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.cached_tokens for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    first_s = [output.metrics.ttft_s for output in outputs if output.metrics and output.metrics.ttft_s is not None]
    num_pages = stats.pages_free + stats.pages_cached + stats.pages_used
    rows = {
        "prompt tokens": f"{num_prompt} ({num_cached} from the prefix cache)",
        "output tokens": f"{num_output} in {elapsed_s:.2f} s: {num_output / elapsed_s:.1f} a second, prompts included",
        "first token after": f"{sum(first_s) / len(first_s):.3f} s (mean)" if first_s else "-",
        "pages": f"{stats.pages_used} used, {stats.pages_cached} cached, {stats.pages_free} free of {num_pages}",
        **({"given back": f"{stats.num_left_windows} pages that left their window"} if stats.num_left_windows else {}),
        "page pool": format_bytes(stats.pool_bytes),
        "steps": f"{stats.num_steps}, {stats.num_preemptions} preemptions, {stats.num_compiles} programs built",
    }
    for name, value in rows.items():
        print(f"{name:18} {value}", file=sys.stderr)
