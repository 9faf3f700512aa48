"""What a caller asks for and what comes back. All frozen; validation happens on construction and in `intake`."""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv.cache_control import Mark
from jaxkv.errors import RequestError
from jaxkv.structured import FORMS, Form

MAX_LOGPROBS = 20  # alternatives a step can return; vLLM's default limit
MAX_LOGIT_BIAS = 512  # entries of `logit_bias` a row can hold on the device
MAX_STOP_IDS = 32  # model's end-of-sequence ids plus the request's `stop_token_ids`
MAX_BAD_WORDS = 64  # token sequences a row can hold on the device
MAX_BAD_WORD_LEN = 16  # tokens in one forbidden sequence
MAX_N = 128


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end of sequence, stop id or stop string
    LENGTH = "length"  # max_tokens or max_len
    TOOL_CALLS = "tool_calls"  # the output calls tools, see `Completion.tool_calls`
    ABORT = "abort"  # cancelled, or its deadline passed
    ERROR = "error"  # the engine could not go on with this request


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The order on the logits is: allowed_token_ids / bad_words / min_tokens masks, logit_bias, penalties, temperature,
    top-k, top-p, min-p (as Hugging Face and vLLM do). `logprobs` and `prompt_logprobs` are taken from the raw logits.

    Raises:
        RequestError: a field is out of range; the message names field, value and limit.
    """

    max_tokens: int = 16  # most new tokens; 0 only with prompt_logprobs (scoring)
    min_tokens: int = 0  # new tokens before any stop id or stop string may match
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1], relative to the likeliest token
    repetition_penalty: float = 1.0  # > 0; on prompt and output tokens (CTRL, arXiv:1909.05858)
    frequency_penalty: float = 0.0  # in [-2, 2]; per occurrence in the output
    presence_penalty: float = 0.0  # in [-2, 2]; once if in the output
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # all others are impossible, but the end of a `structured` output
    bad_words: tuple[str, ...] = ()  # texts that must not be generated (matched on output tokens)
    stop: tuple[str, ...] = ()  # texts that end the output; a single str is accepted
    stop_token_ids: tuple[int, ...] = ()  # ids that end the output; a `structured` one is written without them
    ignore_eos: bool = False  # the model's own end ids do not stop; `stop_token_ids` still do
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: taken from the engine's seed and the request's number
    n: int = 1  # completions, forked from one prefill
    logprobs: int | None = None  # chosen token plus this many likeliest; 0: chosen only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # Index of the first prompt token that `prompt_logprobs` is for; what stands before it may come from the cache.
    prompt_logprobs_from: int = 0
    structured: Form | None = None  # what the output must look like, see `structured`
    suppress_eos_until: str | None = None  # "json": no stop id before the output holds a complete JSON object or array

    @property
    def needs_every_token(self) -> bool:
        """Whether the host must see each token as it comes, not only the finished output."""
        return bool(self.stop) or self.logprobs is not None

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 (frozen)
        if isinstance(self.stop, str):
            set_("stop", (self.stop,))
        if isinstance(self.bad_words, str):
            set_("bad_words", (self.bad_words,))
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                value = ()
            if value is not None:
                _require(name, value, isinstance(value, Iterable), "a list")
                set_(name, tuple(value))
        if self.logit_bias is not None:
            _require("logit_bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping of token ids")
            set_("logit_bias", dict(self.logit_bias))  # the caller may change theirs while the request runs
        self._check()

    def _check(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "n", "prompt_logprobs_from"):
            _require(name, getattr(self, name), _is_int(getattr(self, name)), "a whole number")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(name, value, _is_real(value) and math.isfinite(value), "a finite number")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 0, ">= 0")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens=0 generates nothing; set max_tokens >= 1, or prompt_logprobs to score a prompt"
            )
        _require(
            "min_tokens",
            self.min_tokens,
            0 <= self.min_tokens <= self.max_tokens,
            f"in [0, max_tokens={self.max_tokens}]",
        )
        _require("temperature", self.temperature, self.temperature >= 0, ">= 0 (0 is greedy)")
        _require("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 keeps all)")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0 (1 is none)")
        _require("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        _require("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        _require("n", self.n, 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]")
        if self.seed is not None:
            _require("seed", self.seed, _is_int(self.seed) and -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, _is_int(value) and 0 <= value <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
        _require("prompt_logprobs_from", self.prompt_logprobs_from, self.prompt_logprobs_from >= 0, ">= 0")
        if self.prompt_logprobs_from and self.prompt_logprobs is None:
            raise RequestError(f"prompt_logprobs_from={self.prompt_logprobs_from} needs prompt_logprobs; set it, too")
        self._check_collections()
        self._check_structured()

    def _check_collections(self) -> None:
        for text in self.stop:
            _require("stop", text, isinstance(text, str) and text != "", "non-empty text")
        for text in self.bad_words:
            _require("bad_words", text, isinstance(text, str) and text.strip() != "", "non-blank text")
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, _is_int(token) and token >= 0, "token ids >= 0")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids)} entries; the limit is {MAX_STOP_IDS}")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could be generated; use None to allow all")
            for token in self.allowed_token_ids:
                _require("allowed_token_ids", token, _is_int(token) and token >= 0, "token ids >= 0")
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}")
            for token, bias in self.logit_bias.items():
                _require("logit_bias", token, _is_int(token) and token >= 0, "token ids >= 0 as keys")
                _require(f"logit_bias[{token}]", bias, _is_real(bias) and math.isfinite(bias), "a finite number")

    def _check_structured(self) -> None:
        form, until = self.structured, self.suppress_eos_until
        _require("structured", form, form is None or isinstance(form, FORMS), "one form of jaxkv.structured")
        _require("suppress_eos_until", until, until in (None, "json"), 'None or "json"')
        if form is not None and until is not None:
            raise RequestError(
                f"suppress_eos_until={until!r} with structured: the structure alone says when the output may end; "
                "leave one of them out"
            )
        if form is not None and self.max_tokens == 0:
            raise RequestError("max_tokens=0 with structured: nothing is generated that could be constrained")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(name: str, value: object, ok: bool, what: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r} must be {what}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One admitted prompt. Built by `intake.make_request`, which has checked it against the model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # [prompt_len], never empty
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()  # every id that ends the output (model's, unless ignored, and the request's), sorted
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # `params.bad_words` as token sequences
    priority: int = 0  # lower runs first; waiting requests age towards the front
    cache_salt: str = ""  # prompts under different salts never share a page
    cache_key: str = ""  # requests with one key and salt run next to each other, on one data shard
    marks: tuple[Mark, ...] = ()  # beginnings of the prompt that are to be kept, by increasing length
    deadline_s: float | None = None  # `time.monotonic()` value after which the request ends with its partial text
    arrival_s: float = 0.0  # `time.monotonic()` at admission; metrics only, never scheduling order
    seed: int = 0  # resolved seed, uint64


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, finite."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest tokens, best first; empty for logprobs=0


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model wrote."""

    id: str  # as the model wrote it, or made from the request's id and the call's number
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated continuation (a request with n=3 has three)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while running (streaming)
    stop_reason: str | int | None = None  # the stop string or stop id that matched; None for end of sequence or length
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None  # with FinishReason.ERROR: what happened
    # With `structured`: the value that the text spells (a pydantic object if a model was given). None: the output was
    # cut off, or its form spells no value.
    parsed: Any = None
    tool_calls: tuple[ToolCall, ...] = ()  # calls in the text, in order; `content` is what stands around them
    content: str | None = None  # the text without its tool calls; None: there are none, `text` is all


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Seconds on the engine's monotonic clock, relative to arrival."""

    queue_s: float  # arrival -> first chunk dispatched
    ttft_s: float | None  # arrival -> first token known; None if no token came
    e2e_s: float  # arrival -> finished
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Result of one prompt.

    Its tokens are counted once each: `cached_tokens + cache_written_tokens + uncached_tokens` is the prompt's length,
    whatever preemption computed again and however many completions share it.
    """

    request_id: str
    prompt: str | None  # text as given; None for token-id prompts
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    cached_tokens: int  # prompt tokens read from the cache, also 0
    cache_written_tokens: int  # prompt tokens computed, in full pages that later requests can find
    uncached_tokens: int  # the rest: the prompt's last, partly filled page, and pages that someone else published first
    # The first entry is None, for nothing precedes it; so are those before `prompt_logprobs_from`.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    metrics: RequestMetrics | None = None
