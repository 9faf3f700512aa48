"""OpenAI's streams: one event for what a step brought, `finish_reason` in every chunk, the usage, `[DONE]`."""

import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxkv.outputs import Piece
from jaxkv.request import Completion, FinishReason, RequestOutput
from jaxkv.serve.engine_thread import Handle
from jaxkv.serve.errors import ApiError
from jaxkv.serve.merge import merged
from jaxkv.serve.openai_replies import LogprobWriter, tool_calls, usage
from jaxkv.serve.sse import data_event
from jaxkv.structured import Form, ToolCalls
from jaxkv.tool_formats import TextBeforeCalls, text_beside_calls

DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How a stream is written."""

    head: dict[str, Any]  # of every chunk
    is_chat: bool
    with_usage: bool
    writer: Callable[[], LogprobWriter] | None  # makes one for each completion; None: no log-probabilities
    echoes: Sequence[str] = ()  # what the completions of each prompt begin with


async def events(plan: StreamPlan, handles: Sequence[Handle]) -> AsyncGenerator[bytes, None]:
    """The events of one HTTP request, over all its prompts and completions."""
    num = handles[0].request.params.n
    forms = [handle.request.params.structured for handle in handles]
    choices = [_Choice(plan, index, index // num, forms[index // num]) for index in range(num * len(handles))]
    if opening := b"".join(choice.opening() for choice in choices):
        yield opening
    async for which, pieces in merged(handles):
        data, error = [], None
        for piece in pieces:
            error = error or _error(piece.completion)
            data.append(choices[which * num + piece.index].chunks(piece))
        if error is not None:
            yield b"".join(data) + data_event(error.openai()) + DONE
            return
        if chunk := b"".join(data):
            yield chunk
    if plan.with_usage:
        outputs: list[RequestOutput] = [handle.output for handle in handles if handle.output is not None]
        yield data_event({**plan.head, "choices": [], "usage": usage(outputs)})
    yield DONE


def _error(completion: Completion | None) -> ApiError | None:
    if completion is None or completion.finish_reason is not FinishReason.ERROR:
        return None
    return ApiError(500, completion.error or "the engine could not go on with this request")


class _Choice:
    """One completion of a stream."""

    def __init__(self, plan: StreamPlan, index: int, prompt: int, form: Form | None) -> None:
        self._plan = plan
        self._index = index
        self._echo = plan.echoes[prompt] if plan.echoes else ""
        self._writer = plan.writer() if plan.writer else None
        self._shown = TextBeforeCalls(form) if isinstance(form, ToolCalls) else None

    def opening(self) -> bytes:
        """What comes before all text."""
        if self._plan.is_chat:
            return self._chunk({"delta": {"role": "assistant", "content": ""}})
        return self._chunk({"text": self._echo}) if self._echo else b""

    def chunks(self, piece: Piece) -> bytes:
        """The chunks of a piece; none if it says nothing."""
        done = piece.completion
        text, logprobs = piece.text, self._logprobs(piece)
        calls = tool_calls(done) if done is not None else []
        if self._shown is not None:
            text = self._shown.feed(text)
            text += self._shown.rest(text_beside_calls(done)) if done is not None else ""
        data = b""
        if text or logprobs is not None:
            data += self._chunk({**self._text(text), "logprobs": logprobs})
        if calls:
            delta = {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
            data += self._chunk({"delta": delta})
        if done is not None and done.finish_reason is not FinishReason.ERROR:
            data += self._chunk({**self._text(None), "finish_reason": done.finish_reason})
        return data

    def _text(self, text: str | None) -> dict[str, Any]:
        if self._plan.is_chat:
            return {"delta": {} if text is None else {"content": text}}
        return {"text": text or ""}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._writer is None or not piece.logprobs:
            return None
        if self._plan.is_chat:
            return self._writer.chat(piece.logprobs)
        return self._writer.legacy(piece.logprobs, [entry.token_id for entry in piece.logprobs])

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        whole = {"index": self._index, "logprobs": None, "finish_reason": None, **choice}
        tail = {"usage": None} if self._plan.with_usage else {}
        return data_event({**self._plan.head, "choices": [whole], **tail})
