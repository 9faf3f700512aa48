"""Turns what a caller asks for into a `Request`, or refuses it: every check that needs the model or tokenizer."""

import dataclasses
import math
from collections.abc import Sequence

from jaxkv.cache_control import Mark
from jaxkv.errors import RequestError
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS, Request, SamplingParams
from jaxkv.structured import ToolCalls
from jaxkv.tokenizer import Tokenizer
from jaxkv.tool_formats import format_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intake:
    """What requests are checked against."""

    vocab_size: int  # width of the logits
    eos_ids: tuple[int, ...]  # ids that end an output unless `ignore_eos`
    tokenizer: Tokenizer | None = None  # None: token-id prompts only, no stop strings, no bad words

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with nothing left open that the model decides: how it writes calls of tools."""
        form = params.structured
        if not isinstance(form, ToolCalls) or form.format != "auto":
            return params
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        name = format_of(template.sources.values() if template is not None else ())
        return dataclasses.replace(params, structured=dataclasses.replace(form, format=name))

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        cache_salt: str = "",
        cache_key: str = "",
        marks: tuple[Mark, ...] = (),
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Request:
        """Checks and assembles a request.

        Raises:
            RequestError: an id lies outside the vocabulary, a limit is exceeded, or a field needs a tokenizer.
        """
        params = self.resolve(params)
        _check_envelope(priority, deadline_s, cache_salt=cache_salt, prompt_cache_key=cache_key)
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if params.prompt_logprobs_from and params.prompt_logprobs_from >= len(prompt_token_ids):
            raise RequestError(
                f"prompt_logprobs_from={params.prompt_logprobs_from} leaves nothing of a prompt of "
                f"{len(prompt_token_ids)} tokens to score; it must be less than its length"
            )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise RequestError("stop and bad_words need a tokenizer, and this model has none; use stop_token_ids")
        if (params.structured or params.suppress_eos_until) and self.tokenizer is None:
            raise RequestError("structured and suppress_eos_until need a tokenizer, and this model has none")
        eos_ids = () if params.ignore_eos else self.eos_ids
        stop_ids = tuple(sorted({*eos_ids, *params.stop_token_ids}))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids and the model's own end ids are {len(stop_ids)} ids; the limit is {MAX_STOP_IDS}"
            )
        if params.structured is not None and not stop_ids:
            raise RequestError(
                "structured output ends with an end token, and there is none: ignore_eos=True leaves none of the model's; "
                "set ignore_eos=False or give stop_token_ids"
            )
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(int(token) for token in prompt_token_ids),
            params=params,
            stop_ids=stop_ids,
            bad_words_ids=self._bad_words(params.bad_words),
            priority=priority,
            cache_salt=cache_salt,
            cache_key=cache_key,
            marks=marks,
            deadline_s=deadline_s,
            arrival_s=arrival_s,
            seed=(params.seed if params.seed is not None else seed) % 2**64,
        )

    def _check_ids(self, name: str, token_ids: object) -> None:
        for token in token_ids:  # type: ignore[attr-defined]
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise RequestError(f"{name}: token id {token!r} is not a whole number")
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name}: token id {token} is outside the vocabulary of {self.vocab_size}")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        assert self.tokenizer is not None
        spelled = (ids for word in words for ids in self.tokenizer.encode_bad_word(word))
        sequences = tuple(dict.fromkeys(ids for ids in spelled if ids))
        if len(sequences) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words are {len(sequences)} token sequences; the limit is {MAX_BAD_WORDS}")
        for ids in sequences:
            if len(ids) > MAX_BAD_WORD_LEN:
                text = self.tokenizer.decode(ids)
                raise RequestError(f"bad_words: {text!r} is {len(ids)} tokens; the limit is {MAX_BAD_WORD_LEN}")
        return sequences


def _check_envelope(priority: object, deadline_s: object, **texts: object) -> None:
    """What surrounds the sampling parameters: anything odd here would fail later, inside a step of all requests."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority={priority!r} must be a whole number; lower runs first")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise RequestError(f"{name}={text!r} must be text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{name}={text!r} is not valid Unicode") from error
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and math.isfinite(deadline_s)):
        raise RequestError(f"timeout_s must be a finite number of seconds; the deadline became {deadline_s!r}")
