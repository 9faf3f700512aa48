"""Anthropic's messages, made of blocks, as the messages that chat templates read."""

import json
from collections.abc import Iterable
from typing import Any

from jaxkv.serve.errors import ApiError

Block = dict[str, Any]


def chat_messages(
    system: str | list[Block] | None, messages: Iterable[tuple[str, str | list[Block]]]
) -> list[dict[str, Any]]:
    """Turns a conversation into a chat: tool results become messages of their own, calls and reasoning keys.

    Args:
        system: text, or text blocks.
        messages: (role, text or blocks).

    Raises:
        ApiError: a block is malformed, or of a kind that is not supported.
    """
    chat: list[dict[str, Any]] = []
    if system is not None:
        chat.append({"role": "system", "content": system if isinstance(system, str) else _texts(system, "system")})
    for index, (role, content) in enumerate(messages):
        where = f"messages[{index}].content"
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif role == "assistant":
            chat.append(_assistant(content, where))
        else:
            chat += _user(role, content, where)
    return chat


def _user(role: str, blocks: list[Block], where: str) -> list[dict[str, Any]]:
    results = [_result(block, f"{where}[{i}]") for i, block in enumerate(blocks) if block.get("type") == "tool_result"]
    others = [(i, block) for i, block in enumerate(blocks) if block.get("type") != "tool_result"]
    texts = [_text(block, f"{where}[{i}]") for i, block in others]
    if not texts and results:
        return results
    return [*results, {"role": role, "content": texts}]


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    message: dict[str, Any] = {"role": "assistant"}
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") == "tool_use":
            calls.append(_call(block, place))
            message |= _mark(block)
        elif block.get("type") == "thinking":
            thoughts.append(_take(block, "thinking", str, place))
        else:
            texts.append(_text(block, place))
    message["content"] = texts or ""
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _texts(blocks: list[Block], where: str) -> list[Block]:
    return [_text(block, f"{where}[{index}]") for index, block in enumerate(blocks)]


def _text(block: Block, where: str) -> Block:
    kind = block.get("type")
    if kind != "text":
        message = f"{where} is of type {kind!r}; supported are text, tool_use, tool_result and thinking"
        raise ApiError(400, message, param=f"{where}.type")
    if block.get("citations"):
        raise ApiError(400, f"{where}.citations is not supported; leave them out", param=f"{where}.citations")
    _only(block, ("type", "text", "citations", "cache_control"), where)
    return {"type": "text", "text": _take(block, "text", str, where), **_mark(block)}


def _call(block: Block, where: str) -> dict[str, Any]:
    _only(block, ("type", "id", "name", "input", "caller", "cache_control"), where)
    arguments = json.dumps(_take(block, "input", dict, where), ensure_ascii=False)
    function = {"name": _take(block, "name", str, where), "arguments": arguments}
    return {"id": _take(block, "id", str, where), "type": "function", "function": function}


def _result(block: Block, where: str) -> dict[str, Any]:
    _only(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), where)
    content = block.get("content") or ""
    if not isinstance(content, str):
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ApiError(400, f"{where}.content must be text or a list of blocks", param=f"{where}.content")
        content = "\n".join(_text(part, f"{where}.content[{i}]")["text"] for i, part in enumerate(content))
    if block.get("is_error"):  # templates have no other place for it
        content = f"Error: {content}"
    message = {"role": "tool", "tool_call_id": _take(block, "tool_use_id", str, where), "content": content}
    return {**message, **_mark(block)}


def _mark(block: Block) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") is not None else {}


def _take(block: Block, name: str, kind: type, where: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        wanted = "text" if kind is str else "an object"
        raise ApiError(400, f"{where}.{name} must be {wanted}", param=f"{where}.{name}")
    return value


def _only(block: Block, known: tuple[str, ...], where: str) -> None:
    for name, value in block.items():
        if name not in known and value is not None:
            raise ApiError(400, f"{where}.{name} is not supported", param=f"{where}.{name}")
