"""How long a prompt's beginning is to be kept: what callers write, and what the scheduler gets.

As in Anthropic's API a request has at most four breakpoints, and as in OpenAI's it can ask for "24h" as a whole.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxkv.errors import RequestError

MAX_BREAKPOINTS = 4
TTLS_S = {"5m": 300.0, "1h": 3600.0, "24h": 86400.0}
RETENTIONS = ("in_memory", "24h")


class Mark(NamedTuple):
    """The first `num_tokens` of a prompt are kept for `ttl_s` seconds from their last use on."""

    num_tokens: int
    ttl_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheControl:
    """Keeps a prompt up to its breakpoints.

    Raises:
        RequestError: a field is out of range; the message names value and limit.
    """

    # Where what is kept ends: after so many tokens of a prompt, or (in `chat`) after the messages with these indices.
    # Ascending, at most 4; None: at the end of the prompt.
    breakpoints: Sequence[int] | None = None
    ttl: str | float = "5m"  # "5m", "1h", "24h" or seconds, counted from the last use on

    def __post_init__(self) -> None:
        ttl_s(self.ttl)
        if self.breakpoints is None:
            return
        if isinstance(self.breakpoints, str) or not isinstance(self.breakpoints, Iterable):
            raise RequestError(f"breakpoints={self.breakpoints!r} must be a list of whole numbers")
        points = tuple(self.breakpoints)
        object.__setattr__(self, "breakpoints", points)
        for point in points:
            if not isinstance(point, int) or isinstance(point, bool) or point < 0:
                raise RequestError(f"breakpoints={list(points)} must be whole numbers >= 0")
        if not points or list(points) != sorted({*points}):
            raise RequestError(f"breakpoints={list(points)} must ascend; leave them out to keep the whole prompt")
        check_num_breakpoints(len(points))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caching:
    """All that a request says about the prefix cache."""

    salt: str = ""
    key: str | None = None  # OpenAI's `prompt_cache_key`
    retention: str | None = None  # OpenAI's `prompt_cache_retention`
    control: CacheControl | None = None
    chat_marks: tuple[Mark, ...] = ()  # from marks on tools and messages

    def marks(self, prompt_len: int) -> tuple[Mark, ...]:
        """What is to be kept of a prompt of `prompt_len` tokens.

        Raises:
            RequestError: as `prompt_marks`; or the chat has marks and there is a retention, too.
        """
        if self.chat_marks and self.retention is not None:
            raise RequestError(_two_answers(self.retention))
        return self.chat_marks + prompt_marks(self.control, self.retention, prompt_len)


def check_num_breakpoints(num: int) -> None:
    """Raises RequestError where a request has too many."""
    if num > MAX_BREAKPOINTS:
        raise RequestError(f"{num} cache breakpoints; the limit is {MAX_BREAKPOINTS}")


def ttl_s(ttl: object) -> float:
    """Seconds of a time to live.

    Raises:
        RequestError: it is none.
    """
    if isinstance(ttl, str) and ttl in TTLS_S:
        return TTLS_S[ttl]
    if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and math.isfinite(ttl) and ttl > 0:
        return float(ttl)
    raise RequestError(f"ttl={ttl!r} must be one of {', '.join(TTLS_S)}, or seconds > 0")


def prompt_marks(control: CacheControl | None, retention: str | None, prompt_len: int) -> tuple[Mark, ...]:
    """What a prompt of `prompt_len` tokens is to be kept of, by increasing length.

    Args:
        control: with breakpoints in tokens.
        retention: OpenAI's `prompt_cache_retention`; "in_memory" keeps as long as there is room, and no deadline.
        prompt_len: tokens.

    Raises:
        RequestError: a breakpoint lies beyond the prompt, or the two contradict each other.
    """
    if retention is not None and retention not in RETENTIONS:
        raise RequestError(f"prompt_cache_retention={retention!r} must be one of {', '.join(RETENTIONS)}")
    if control is None:
        return (Mark(prompt_len, TTLS_S["24h"]),) if retention == "24h" else ()
    if not isinstance(control, CacheControl):
        raise RequestError(f"cache_control={control!r} must be a CacheControl")
    if retention is not None:
        raise RequestError(_two_answers(retention))
    points = (prompt_len,) if control.breakpoints is None else control.breakpoints
    if points[-1] > prompt_len or points[0] < 1:
        raise RequestError(f"breakpoints={list(points)} must lie within the prompt of {prompt_len} tokens")
    return tuple(Mark(point, ttl_s(control.ttl)) for point in points)


def _two_answers(retention: str) -> str:
    return f"prompt_cache_retention={retention!r} and cache_control both say how long the prompt is kept; give one"
