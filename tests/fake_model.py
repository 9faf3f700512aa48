"""The "model" that the fake runner computes, small requests for it, and what each of them must produce.

The model is a hash: the K/V of a position depend on its token, the position and the K/V of everything before it; the
next token depends on seed, child and all K/V so far. So one wrong or stale cell changes everything after it.
"""

import dataclasses

import numpy as np

from jaxkv.cache_control import Mark
from jaxkv.config import SchedulerConfig
from jaxkv.plan import RowSetup
from jaxkv.request import FinishReason, Request, SamplingParams

Windows = tuple[int | None, ...]  # of each group of layers

VOCAB = 50
MASK = 2**64 - 1


def small_config(**changes) -> SchedulerConfig:
    """Four rows of up to 64 tokens over 40 pages of 4; `changes` as wanted."""
    sizes = {"max_len": 64, "max_rows": 4, "page_size": 4, "num_pages": 41, "token_budget": 64, "reserve_steps": 0}
    return SchedulerConfig(**{**sizes, **changes})


def make_prompt(length: int, start: int = 0) -> list[int]:
    """A prompt that shares no prefix with one of another `start`."""
    return [(start * 7 + index * 3) % VOCAB for index in range(length)]


def make_request(
    request_id: str, prompt: list[int] | tuple[int, ...], *, eos: tuple[int, ...] = (), priority: int = 0,
    salt: str = "", key: str = "", marks: tuple[tuple[int, float], ...] = (), seed: int = 0,
    deadline_s: float | None = None, **params,
) -> Request:  # fmt: skip
    """A request as `engine.add` would build it; `params` are `SamplingParams` fields, `eos` the model's end ids.

    `marks`: (tokens, seconds to keep them).
    """
    sampling = SamplingParams(**params)
    stop_ids = (() if sampling.ignore_eos else eos) + sampling.stop_token_ids
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        stop_ids=tuple(sorted(dict.fromkeys(stop_ids))),
        priority=priority,
        cache_salt=salt,
        cache_key=key,
        marks=tuple(Mark(*mark) for mark in marks),
        deadline_s=deadline_s,
        seed=seed,
    )


def mix(*parts: int) -> int:
    """Splitmix64 over a few integers."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 29)) * 0x94D049BB133111EB & MASK
        state ^= state >> 32
    return state


def weight(position: int) -> int:
    return (2 * position + 1) * 0x9E3779B97F4A7C15 & MASK


def kv_of(context: int, token: int, position: int, windows: Windows) -> list[int]:
    """The K/V of a position in each group of layers."""
    return [mix(context, token, position, *([group] if group else [])) for group in range(len(windows))]


def extend(context: int, kv: int, position: int) -> int:
    """Context after one more position: what "attention" over all K/V so far returns."""
    return (context + kv * weight(position)) & MASK


def sample(setup: RowSetup | Request, key: tuple[int, int], num_output: int, context: int) -> int:
    token = mix(*key, context) % VOCAB
    while num_output < setup.params.min_tokens and token in setup.stop_ids:
        token = (token + 1) % VOCAB
    return token


def logprob(context: int, token: int) -> float:
    return -float(np.float32(mix(context, token) % 1000 / 100))


@dataclasses.dataclass
class Alone:
    """What a request must produce, whatever happens around it."""

    token_ids: list[int]
    logprobs: list[float]
    reason: FinishReason
    stop_reason: int | None
    scores: list[float]  # of prompt tokens 1 .. prompt_len - 1


def generate_alone(request: Request, child: int, max_len: int, windows: Windows = (None,)) -> Alone:
    """The slow, obvious reference: one sequence, no pages, no rows, no batch."""
    params, prompt = request.params, list(request.prompt_token_ids)
    tokens, out = list(prompt), Alone([], [], FinishReason.LENGTH, None, [])
    kv: list[list[int]] = [[] for _ in windows]  # of each group of layers
    max_total = min(len(prompt) + params.max_tokens, max_len)
    for position in range(max_total):
        if position == len(tokens):
            break
        before = sum(
            value * weight(place)
            for values, window in zip(kv, windows, strict=True)
            for place, value in enumerate(values)
            if window is None or place > position - window
        )
        new = kv_of(before & MASK, tokens[position], position, windows)
        context = extend(before & MASK, sum(new), position)
        for values, value in zip(kv, new, strict=True):
            values.append(value)
        if position + 1 < len(prompt):
            out.scores.append(logprob(context, prompt[position + 1]))
        elif position + 1 < max_total:
            token = sample(request, (request.seed, child), len(out.token_ids), context)
            num_before = len(out.token_ids)
            tokens.append(token)
            out.token_ids.append(token)
            out.logprobs.append(logprob(context, token))
            if token in request.stop_ids and num_before >= params.min_tokens:
                out.reason, out.stop_reason = FinishReason.STOP, token if token in params.stop_token_ids else None
                break
    return out
