"""Collects one request's tokens into text, log-probabilities and, at its end, a `RequestOutput`."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.after_decoding import after_decoding
from jaxkv.detokenizer import Detokenizer
from jaxkv.events import Finished, NewTokens, Scores
from jaxkv.grammar.compiled import CompiledGrammar
from jaxkv.request import Completion, FinishReason, Request, RequestMetrics, RequestOutput, TokenLogprobs
from jaxkv.stop_strings import StopMatch, StopMatcher
from jaxkv.structured import ToolCalls, Triggered
from jaxkv.tokenizer import Tokenizer
from jaxkv.tool_formats import SPECIAL_TEXTS

LOWEST_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON does not have; OpenAI's API and vLLM write the same

_NO_TOKENS = np.zeros(0, np.int32)


class CompletionText:
    """The text of one completion while it grows: detokeniser and stop strings, token by token."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        # Calls of tools are found by their tags, which may be special tokens.
        keep = SPECIAL_TEXTS if isinstance(params.structured, ToolCalls) else ()
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, continues=True, keep=keep)
            if tokenizer
            else None
        )
        self._stops = StopMatcher(
            params.stop, include_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )
        self._pieces: list[str] = []

    @property
    def match(self) -> StopMatch | None:
        return self._stops.match

    @property
    def is_holding(self) -> bool:
        """Whether text is held back because a stop string may begin there."""
        return self._stops.is_holding

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, token_ids: list[int]) -> str:
        """Takes new tokens; returns the text that can be shown now."""
        if self._detokenizer is None:
            return ""
        return self._add("".join(self._stops.feed(self._detokenizer.feed([token])) for token in token_ids))

    def finish(self) -> str:
        """Ends the output; returns the text that was held back."""
        if self._detokenizer is None:
            return ""
        return self._add(self._stops.flush(self._detokenizer.flush()))

    def _add(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """What one completion gained since it was last looked at; the texts of its pieces join to its text."""

    index: int  # of the completion
    text: str
    num_tokens: int  # that became known; their text may still be held back
    logprobs: tuple[TokenLogprobs, ...] = ()  # of tokens whose text is out, if they were asked for
    completion: Completion | None = None  # with the last piece
    # Of the request's prompt, as far as it is known with its first token; see `RequestOutput`.
    cached_tokens: int = 0
    cache_written_tokens: int = 0


@dataclasses.dataclass
class _Child:
    text: CompletionText
    logprobs: list[TokenLogprobs]
    fresh: list[str] = dataclasses.field(default_factory=list)  # text not yet taken
    num_fresh: int = 0  # tokens not yet taken
    num_shown: int = 0  # of `logprobs`, taken
    error: str | None = None
    completion: Completion | None = None


class OutputBuilder:
    """One request from admission to its output.

    Times are `time.monotonic()` seconds, given by the caller.

    Args:
        request: what was asked.
        tokenizer: None leaves texts empty.
        prompt: its text, if it was given as text.
        stream: text is wanted as it grows. Without, and unless stop strings or log-probabilities need every token,
            the text is made at the end.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, prompt: str | None, *, stream: bool) -> None:
        self.request = request
        self._watched = stream or request.params.needs_every_token
        self.prompt = prompt
        self._tokenizer = tokenizer
        self.grammar: CompiledGrammar | None = None  # set by the engine when it is compiled
        self._children = [_Child(CompletionText(request, tokenizer), []) for _ in range(request.params.n)]
        self._scores: list[TokenLogprobs | None] = [None] * max(request.params.prompt_logprobs_from, 1)
        self._cached_tokens = self._written_tokens = 0
        self._num_preemptions = 0
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._fed = [0] * request.params.n  # tokens seen through `feed`, per child
        self._changed: dict[int, None] = {}  # children with something to take, in order
        self.output: RequestOutput | None = None  # set when the last completion ended

    def admitted(self, now_s: float) -> None:
        if self._admitted_s is None:
            self._admitted_s = now_s

    def feed(self, tokens: NewTokens, now_s: float) -> StopMatch | None:
        """Takes tokens that became known; returns the stop string they complete, once."""
        child = self._children[tokens.child]
        self._first_token_s = self._first_token_s or now_s
        if not self._watched or child.completion is not None or child.text.match is not None:
            return None
        ids = tokens.token_ids.tolist()
        self._fed[tokens.child] += len(ids)
        child.num_fresh += len(ids)
        self._show(tokens.child, child.text.feed(ids))
        if self.request.params.logprobs is not None:
            child.logprobs += token_logprobs(tokens, self.request.params.logprobs)
        return child.text.match

    def prompt_computed(self, cached_tokens: int, cache_written_tokens: int) -> None:
        """Takes what the cache had of the prompt, and got."""
        self._cached_tokens, self._written_tokens = cached_tokens, cache_written_tokens

    def score(self, scores: Scores) -> None:
        """Takes log-probabilities of prompt tokens `scores.start + 1 ..`."""
        wanted = self.request.params.prompt_logprobs
        assert wanted is not None
        ids = np.asarray(self.request.prompt_token_ids[scores.start + 1 :][: len(scores.logprobs)], np.int32)
        tokens = NewTokens(self.request.request_id, 0, ids, scores.logprobs, scores.top_ids, scores.top_logprobs)
        self._scores += token_logprobs(tokens, wanted)

    def fail(self, child: int, error: str) -> None:
        """The text of a completion cannot be made: it keeps what there is, and ends with this error."""
        self._children[child].error = error

    def finish(self, event: Finished, now_s: float) -> None:
        """Takes the end of one completion; the last one makes `output`."""
        child = self._children[event.child]
        if event.token_ids.size:
            self._first_token_s = self._first_token_s or now_s
        if child.error is None:
            missing = event.token_ids.tolist()[self._fed[event.child] :]  # a request nobody watched was never fed
            self._fed[event.child] += len(missing)
            piece = child.text.feed(missing) if child.text.match is None else ""
            child.num_fresh += len(missing)
            self._show(event.child, piece + child.text.finish())
        child.completion = self._completion(child, event)
        self._changed[event.child] = None
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        self._written_tokens = max(self._written_tokens, event.cache_written_tokens)
        self._num_preemptions += event.num_preemptions
        if event.is_last:
            self.output = self._assemble(now_s)

    def end_rest(self, error: str, now_s: float) -> None:
        """Ends every completion that has not ended, keeping the tokens that were fed as text only."""
        for index, child in enumerate(self._children):
            if child.completion is None:
                child.error = error
                self.finish(
                    Finished(
                        self.request.request_id, index, FinishReason.ERROR, _NO_TOKENS, error=error, is_last=False
                    ),
                    now_s,
                )
        self.output = self._assemble(now_s)

    def take_text(self) -> str:
        """Streamed text of the first completion since the last call."""
        child = self._children[0]
        text, child.fresh = "".join(child.fresh), []
        return text

    def take_pieces(self) -> list[Piece]:
        """What each completion gained since the last call; instead of `take_text`, where log-probabilities or several
        completions are streamed."""
        changed, self._changed = self._changed, {}
        return [self._take_piece(index, self._children[index]) for index in changed]

    def _take_piece(self, index: int, child: _Child) -> Piece:
        text, child.fresh = "".join(child.fresh), []
        num_tokens, child.num_fresh = child.num_fresh, 0
        logprobs = child.logprobs
        if child.completion is not None:
            logprobs = list(child.completion.logprobs or ())
        elif child.text.is_holding:  # a stop string may yet take these tokens away
            logprobs = logprobs[: child.num_shown]
        shown, child.num_shown = tuple(logprobs[child.num_shown :]), len(logprobs)
        cached, written = self._cached_tokens, self._written_tokens
        return Piece(index, text, num_tokens, shown, child.completion, cached, written)

    def _show(self, index: int, text: str) -> None:
        if text:
            self._children[index].fresh.append(text)
        self._changed[index] = None

    def _completion(self, child: _Child, event: Finished) -> Completion:
        token_ids, reason, stop_reason = tuple(event.token_ids.tolist()), event.reason, event.stop_reason
        if child.error is not None:
            reason, stop_reason = FinishReason.ERROR, None
        if (match := child.text.match) is not None and reason is not FinishReason.ERROR:
            token_ids, reason, stop_reason = token_ids[: match.num_tokens], FinishReason.STOP, match.stop
        reason, extra = self._after_decoding(event.child, token_ids, reason, stop_reason)
        wants = self.request.params.logprobs is not None
        return Completion(
            index=event.child,
            text=child.text.text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=tuple(child.logprobs[: len(token_ids)]) if wants else None,
            error=child.error or event.error,
            **extra,
        )

    def _after_decoding(
        self, child: int, token_ids: tuple[int, ...], reason: FinishReason, stop_reason: str | int | None
    ) -> tuple[FinishReason, dict[str, Any]]:
        """Why a structured output really ended, and what it says if it is whole."""
        form, stop_ids = self.request.params.structured, self.request.stop_ids
        if form is None or self.grammar is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return reason, {}
        output = token_ids[:-1] if token_ids and token_ids[-1] in stop_ids else token_ids
        if reason is FinishReason.LENGTH or isinstance(stop_reason, str):  # cut off, or whole with its very last token
            if not self.grammar.accepts(output):
                return reason, {}
            if not isinstance(form, (Triggered, ToolCalls)):  # in free text, only the model can say that it is whole
                reason = FinishReason.STOP
        tokenizer = self._tokenizer
        assert tokenizer is not None, "intake refuses structured output without a tokenizer"
        text = self._children[child].text.text
        if len(output) < len(token_ids) and not isinstance(stop_reason, str):  # an id that stops may have a text
            skip = self.request.params.skip_special_tokens
            stop = Detokenizer(tokenizer, skip_special_tokens=skip, continues=True)
            text = text.removesuffix(stop.feed(token_ids[-1:]) + stop.flush())
        extra = after_decoding(
            form,
            text,
            lambda: _raw_text(tokenizer, output),
            f"{self.request.request_id}/{child}",
        )
        return FinishReason.TOOL_CALLS if extra.get("tool_calls") else reason, extra

    def _assemble(self, now_s: float) -> RequestOutput:
        request = self.request
        arrival = request.arrival_s
        completions = tuple(child.completion for child in self._children if child.completion is not None)
        assert len(completions) == request.params.n
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            cached_tokens=self._cached_tokens,
            cache_written_tokens=self._written_tokens,
            uncached_tokens=len(request.prompt_token_ids) - self._cached_tokens - self._written_tokens,
            prompt_logprobs=tuple(self._scores) if request.params.prompt_logprobs is not None else None,
            metrics=RequestMetrics(
                queue_s=(self._admitted_s if self._admitted_s is not None else now_s) - arrival,
                ttft_s=None if self._first_token_s is None else self._first_token_s - arrival,
                e2e_s=now_s - arrival,
                num_preemptions=self._num_preemptions,
            ),
        )


def _raw_text(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    """The text of a completion with all special tokens."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, continues=True)
    return detokenizer.feed(token_ids) + detokenizer.flush()


def token_logprobs(tokens: NewTokens, num_top: int) -> list[TokenLogprobs]:
    """One entry a token with its `num_top` likeliest alternatives, all finite: impossible alternatives are left out."""
    assert tokens.logprobs is not None and tokens.top_ids is not None and tokens.top_logprobs is not None
    columns = zip(
        tokens.token_ids.tolist(), tokens.logprobs.tolist(), tokens.top_ids.tolist(), tokens.top_logprobs.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(
            token_id,
            logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB,
            tuple((i, p) for i, p in zip(ids[:num_top], probs[:num_top], strict=True) if p > float("-inf")),
        )
        for token_id, logprob, ids, probs in columns
    ]
