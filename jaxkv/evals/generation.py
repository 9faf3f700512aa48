"""The harness's `generation_kwargs` as sampling parameters."""

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from jaxkv.errors import RequestError
from jaxkv.request import SamplingParams

_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "min_tokens", "skip_special_tokens", "ignore_eos", "stop_token_ids", "bad_words",
)  # fmt: skip


def read_gen_kwargs(gen_kwargs: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
    """Reads what a task says about its answers; without `do_sample` and a temperature they are greedy.

    Args:
        gen_kwargs: of the task.
        default_max_tokens: where it does not say how long they may be.

    Raises:
        RequestError: an argument is not known or out of range.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(dict(gen_kwargs), default_max_tokens))
    if not given.pop("do_sample"):
        given["temperature"] = 0.0
    until, max_tokens = given.pop("until"), given.pop("max_gen_toks")
    if unknown := sorted(given.keys() - set(_AS_THEY_ARE)):
        raise RequestError(f"generation_kwargs {unknown} are not supported; known are until, max_gen_toks, do_sample, "
                           f"{', '.join(_AS_THEY_ARE)}")  # fmt: skip
    return SamplingParams(max_tokens=max_tokens, stop=tuple(text for text in until if text), **given)
