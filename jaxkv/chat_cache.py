"""`cache_control` in chats: from tools, messages and parts, as in Anthropic's API, to lengths in tokens.

    {"role": "system", "content": "...", "cache_control": {"type": "ephemeral", "ttl": "1h"}}

What is marked is kept together with everything before it. The order is tools, system, messages; at most four marks,
and a longer time to live never follows a shorter one. Templates never see the marks.

Where a marked piece ends is asked of the template: the prompt is laid out again without what follows, or with something
else in its place, and what both begin with belongs to the mark. So whatever a template does, only a true beginning of
the prompt is kept.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.cache_control import CacheControl, Mark, check_num_breakpoints, ttl_s
from jaxkv.errors import RequestError
from jaxkv.plain_json import plain
from jaxkv.tokenizer import Tokenizer

_KEY = "cache_control"
_OTHER_TOOL = {"type": "function", "function": {"name": "zz", "description": "zz", "parameters": {"type": "object"}}}

Messages = list[dict[str, Any]]
Tools = list[Any] | None
Render = Callable[[Messages, Tools, bool], str]  # the last one: with the header of an answer


@dataclasses.dataclass(frozen=True)
class _Place:
    """One marked piece of a chat."""

    where: str  # as errors call it
    ttl_s: float
    tool: int | None = None  # index
    message: int | None = None  # index
    part: int | None = None  # index in the message's content; None: the whole message


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkedChat:
    """A chat as templates see it, and its marks."""

    messages: Messages
    tools: Tools
    places: tuple[_Place, ...]

    def marks(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[Mark, ...]:
        """The marks by increasing length, for the prompt `token_ids` that the tokenizer made of the chat.

        Raises:
            RequestError: the template does not say where a marked piece ends.
        """
        if not self.places:
            return ()
        template = tokenizer.chat_template
        assert template is not None, "the chat was laid out"

        def render(messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
            texts = tokenizer.special.texts
            return template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, special_tokens=texts
            )

        text = render(self.messages, self.tools, True)
        found = []
        for place in self.places:
            ids = tokenizer.encode(text[: self._end(place, text, render)], add_bos=False)
            num_tokens = _num_alike(ids, token_ids)
            if not num_tokens:
                raise RequestError(
                    f"{_KEY} on {place.where}: this chat template does not keep it in one place; leave it out"
                )
            found.append(Mark(num_tokens, place.ttl_s))
        return tuple(sorted(found))

    def _end(self, place: _Place, text: str, render: Render) -> int:
        """Characters of the prompt up to the end of a place."""
        if place.message is None:
            tools, number = self.tools or [], (place.tool or 0) + 1
            other = [*tools, _OTHER_TOOL] if number == len(tools) else tools[:number]
            return _varied_len(text, render, self.messages, other)
        end = place.message + 1
        if place.part is not None:
            varied = [*self.messages[: end - 1], _vary(self.messages[end - 1], place.part + 1), *self.messages[end:]]
            return _varied_len(text, render, varied, self.tools)
        if end == len(self.messages):
            return _common_len(text, render, self.messages, self.tools, False) or len(text)
        without = _common_len(text, render, self.messages[:end], self.tools, False)
        if _last_words(self.messages[end - 1]) in text[:without]:
            return without
        # Some templates refuse a chat that ends here, or move the system's text into the user's first message.
        varied = [*self.messages[:end], _vary(self.messages[end], 0), *self.messages[end + 1 :]]
        return max(without, _varied_len(text, render, varied, self.tools))


def read_marks(
    messages: Sequence[Any], tools: Sequence[Any] | None = None, control: CacheControl | None = None
) -> MarkedChat:
    """Takes the marks out of a chat.

    Args:
        messages: with `cache_control` on some of them, or on parts of their content.
        tools: the same.
        control: further marks, after the messages with the indices `breakpoints`; without, after the last one.

    Raises:
        RequestError: a mark is malformed, on an empty text, out of order, or one too many.
    """
    places: list[_Place] = []
    bare_tools = None if tools is None else [_read(tool, f"tools[{i}]", places, tool=i) for i, tool in enumerate(tools)]
    bare_messages = [_read_message(message, index, places) for index, message in enumerate(messages)]
    if control is not None:
        if not isinstance(control, CacheControl):
            raise RequestError(f"cache_control={control!r} must be a CacheControl")
        for index in (len(messages) - 1,) if control.breakpoints is None else control.breakpoints:
            if not 0 <= index < len(messages):
                raise RequestError(f"breakpoints={list(control.breakpoints or ())}: there are {len(messages)} messages")
            places.append(_Place(f"messages[{index}]", ttl_s(control.ttl), message=index))
    places.sort(key=_order)
    _check_order(places, bare_messages)
    return MarkedChat(messages=bare_messages, tools=bare_tools, places=tuple(places))


def _read_message(message: Any, index: int, places: list[_Place]) -> Any:
    where = f"messages[{index}]"
    if hasattr(message, "model_dump"):
        message = plain(where, message)
    if not isinstance(message, Mapping):
        return message  # the template will refuse it
    content = message.get("content")
    if isinstance(content, list):
        parts = [_read(part, f"{where}.content[{i}]", places, message=index, part=i) for i, part in enumerate(content)]
        if places and places[-1].message == index and places[-1].part == len(parts) - 1:
            places[-1] = dataclasses.replace(places[-1], part=None)  # the message's end
        message = {**message, "content": parts}
    return _read(message, where, places, message=index)


def _read(piece: Any, where: str, places: list[_Place], **indices: int) -> Any:
    """A piece without its mark, which joins `places`."""
    if hasattr(piece, "model_dump"):
        piece = plain(where, piece)
    if not isinstance(piece, Mapping) or _KEY not in piece:
        return piece
    mark = piece[_KEY]
    bare = {key: value for key, value in piece.items() if key != _KEY}
    if mark is None:
        return bare
    if isinstance(mark, CacheControl) and mark.breakpoints is None:
        mark = {"type": "ephemeral", "ttl": mark.ttl}
    if not isinstance(mark, Mapping) or mark.get("type") != "ephemeral" or mark.keys() - {"type", "ttl"}:
        raise RequestError(f"{where}: {_KEY}={mark!r} must be {{'type': 'ephemeral'}}, with a 'ttl' if you like")
    if "tool" not in indices and not bare.get("tool_calls") and bare.get("text", bare.get("content")) in ("", None, []):
        raise RequestError(f"{where}: {_KEY} on an empty text; put it on the piece before")
    places.append(_Place(where, ttl_s(mark.get("ttl", "5m")), **indices))
    return bare


def _order(place: _Place) -> tuple[bool, int, float]:
    if place.message is None:
        return False, place.tool or 0, 0
    return True, place.message, float("inf") if place.part is None else place.part


def _check_order(places: Sequence[_Place], messages: Messages) -> None:
    check_num_breakpoints(len(places))
    for before, after in itertools.pairwise(places):
        if after.ttl_s > before.ttl_s:
            raise RequestError(
                f"{_KEY} on {after.where} keeps for {after.ttl_s:g} s, longer than that on {before.where} before it "
                f"({before.ttl_s:g} s); the order is tools, system, messages, and the longer time comes first"
            )
    is_system = [isinstance(m, Mapping) and m.get("role") in ("system", "developer") for m in messages]
    for place in places:
        if place.message is not None and is_system[place.message] and not all(is_system[: place.message]):
            raise RequestError(
                f"{_KEY} on {place.where}: the order is tools, system, messages; put the system's text first"
            )


def _common_len(text: str, render: Render, messages: Messages, tools: Tools, add_generation_prompt: bool) -> int:
    """Characters that `text` and another layout begin with; 0 where the template refuses that one."""
    try:
        other = render(messages, tools, add_generation_prompt)
    except RequestError:
        return 0
    return _num_alike(text, other)


def _varied_len(text: str, render: Render, messages: Messages, tools: Tools) -> int:
    """As `_common_len`, of a chat where what follows a mark is varied; 0 where the template shows nothing of that."""
    num = _common_len(text, render, messages, tools, True)
    return num if num < len(text) else 0


def _num_alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Items that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _vary(message: dict[str, Any], part: int) -> dict[str, Any]:
    """A message whose text begins differently from `part` on."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _other_text(content)}
    if not isinstance(content, list) or part >= len(content):
        return message
    piece = content[part]
    other = _other_text(piece) if isinstance(piece, str) else {**piece, "text": _other_text(str(piece.get("text", "")))}
    return {**message, "content": [*content[:part], other, *content[part + 1 :]]}


def _other_text(text: str) -> str:
    return ("y" if text.lstrip()[:1] == "x" else "x") + text


def _last_words(message: Mapping[str, Any]) -> str:
    """The end of a message's text; what holds it holds the message."""
    content = message.get("content")
    if isinstance(content, list) and content:
        content = content[-1] if isinstance(content[-1], str) else content[-1].get("text")
    return content.strip()[-40:] if isinstance(content, str) else ""
