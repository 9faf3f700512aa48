"""Anthropic's answers, whole and as streams, from `RequestOutput`."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxkv.outputs import Piece
from jaxkv.request import Completion, FinishReason, RequestOutput
from jaxkv.serve.engine_thread import Handle
from jaxkv.serve.errors import ApiError
from jaxkv.serve.sse import named_event, to_json
from jaxkv.structured import ToolCalls
from jaxkv.tool_formats import TextBeforeCalls, text_beside_calls


def usage(output: RequestOutput) -> dict[str, Any]:
    """Each token of the prompt is counted once: read from the cache, written to it, or neither."""
    return {
        "input_tokens": output.uncached_tokens,
        "cache_creation_input_tokens": output.cache_written_tokens,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }


def reply(output: RequestOutput, model: str) -> dict[str, Any]:
    """The message that answers a request.

    Raises:
        ApiError: the engine could not go on with it (500), or its time was over (504).
    """
    completion = output.outputs[0]
    check(completion)
    return {**_empty(model), "content": _blocks(completion), **_stop(output), "usage": usage(output)}


def check(completion: Completion) -> None:
    """Raises ApiError if a completion has not ended by itself."""
    if completion.finish_reason is FinishReason.ERROR:
        raise ApiError(500, completion.error or "the engine could not go on with this request")
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(504, "the time for this request was over before its answer was complete")


async def events(handle: Handle, model: str) -> AsyncGenerator[bytes, None]:
    """The events of a stream; the first one comes with the first token, for it tells what the cache held of the prompt.

    Args:
        handle: of the request.
        model: its name.
    """
    form = handle.request.params.structured
    before_calls = TextBeforeCalls(form) if isinstance(form, ToolCalls) else None
    pieces = await handle.pieces()
    yield _message_start(handle, pieces, model)
    is_open = False
    while pieces:
        text = "".join(piece.text for piece in pieces)
        if before_calls is not None:
            text = before_calls.feed(text)
        if text:
            opening = b"" if is_open else _open_block(0, {"type": "text", "text": ""})
            is_open = True
            yield opening + _delta(0, {"type": "text_delta", "text": text})
        pieces = await handle.pieces()
    output = handle.output
    assert output is not None
    try:
        check(output.outputs[0])
    except ApiError as error:
        yield named_event("error", error.anthropic())
        return
    blocks, data = _blocks(output.outputs[0]), b""
    if is_open:
        rest = before_calls.rest(blocks[0]["text"]) if before_calls is not None else ""
        data = (_delta(0, {"type": "text_delta", "text": rest}) if rest else b"") + _close_block(0)
    data += b"".join(_whole_block(index, block) for index, block in enumerate(blocks) if index or not is_open)
    delta = {"type": "message_delta", "delta": _stop(output), "usage": usage(output)}
    yield data + named_event("message_delta", delta) + named_event("message_stop", {"type": "message_stop"})


def _message_start(handle: Handle, pieces: Sequence[Piece], model: str) -> bytes:
    cached = max((piece.cached_tokens for piece in pieces), default=0)
    written = max((piece.cache_written_tokens for piece in pieces), default=0)
    start = {
        "input_tokens": len(handle.request.prompt_token_ids) - cached - written,
        "cache_creation_input_tokens": written, "cache_read_input_tokens": cached, "output_tokens": 0,
    }  # fmt: skip
    return named_event("message_start", {"type": "message_start", "message": {**_empty(model), "usage": start}})


def _empty(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    text = text_beside_calls(completion)
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in completion.tool_calls
    ]
    return [{"type": "text", "text": text}, *calls] if text else calls


def _stop(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    is_text = isinstance(completion.stop_reason, str)
    if completion.finish_reason is FinishReason.STOP:
        reason = "stop_sequence" if is_text else "end_turn"
    elif completion.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    else:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": completion.stop_reason if is_text else None}


def _open_block(index: int, block: dict[str, Any]) -> bytes:
    event = {"type": "content_block_start", "index": index, "content_block": block}
    return named_event("content_block_start", event)


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return named_event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})


def _close_block(index: int) -> bytes:
    return named_event("content_block_stop", {"type": "content_block_stop", "index": index})


def _whole_block(index: int, block: dict[str, Any]) -> bytes:
    """A block that is known as a whole, as its three events."""
    if block["type"] == "text":
        opening, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        opening = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": to_json(block["input"]).decode()}
    return _open_block(index, opening) + _delta(index, delta) + _close_block(index)
