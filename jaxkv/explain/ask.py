"""`Ask`: what of a request decides its prompt and its cache keys, read from OpenAI's JSON."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.chat_cache import read_marks
from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from jaxkv.plain_json import plain

# Fields that change neither the prompt nor its keys; any other unknown one is named in the explanation.
_WITHOUT_EFFECT = frozenset((
    "best_of", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
    "metadata", "min_p", "min_tokens", "n", "presence_penalty", "priority", "repetition_penalty", "seed", "service_tier",
    "stop", "stop_token_ids", "store", "stream", "stream_options", "temperature", "top_k", "top_logprobs", "top_p",
    "user", "prompt_cache_key", "prompt_cache_retention", "cache_control", "tool_choice", "parallel_tool_calls",
))  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. Either `messages` or `prompt` is there."""

    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None  # text, or token ids
    tools: tuple[Any, ...] | None = None
    documents: tuple[Any, ...] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # "chat_template_kwargs"
    template: str | None = None  # "chat_template"; None is the model's own
    add_generation_prompt: bool = True
    cache_salt: str = ""
    adapter: str | None = None
    model: str | None = None
    prompt_logprobs: int | None = None
    rendered_at: datetime.datetime | None = None  # when it was laid out; None: together with the other one
    unread: tuple[str, ...] = ()  # fields that jaxkv does not know

    @property
    def kind(self) -> str:
        if self.messages is not None:
            return "chat"
        return "text" if isinstance(self.prompt, str) else "ids"


def parse_ask(value: Any, where: str = "request") -> Ask:
    """Reads a request.

    Args:
        value: `{"messages": [...], "tools": [...], "cache_salt": ...}` or `{"prompt": text or token ids}` as OpenAI's
            API has them, with vLLM's `chat_template`, `chat_template_kwargs`, `documents`, `add_generation_prompt`,
            `prompt_logprobs`, and `adapter` and `rendered_at` (ISO 8601, or seconds since 1970). A bare list of
            messages, a text or a list of token ids is taken for one.
        where: what to call it in errors.

    Raises:
        RequestError: it is none of these, or a field has the wrong type.
    """
    if isinstance(value, Ask):
        return value
    if isinstance(value, str):
        value = {"prompt": value}
    elif not isinstance(value, Mapping) and isinstance(value, Sequence):
        value = {"messages" if value and isinstance(value[0], Mapping) else "prompt": value}
    if not isinstance(value, Mapping):
        raise RequestError(f'{where} is {type(value).__name__}; it must be an object with "messages" or "prompt"')
    fields = _Fields(value, where)
    messages, prompt = fields.take("messages", list), fields.take("prompt", (str, list))
    if (messages is None) == (prompt is None):
        has = "both" if messages is not None else "neither"
        raise RequestError(f'{where} has {has} of "messages" and "prompt"; give one of them')
    if messages is not None:
        messages = tuple(_message(item, f"{where}.messages[{index}]") for index, item in enumerate(messages))
        if not messages:
            raise RequestError(f"{where}.messages is empty; a chat needs at least one message")
    for name in ("functions", "function_call"):
        if fields.take(name, object) is not None:
            raise RequestError(f'{where}.{name} is the old form of tools; send "tools" instead')
    if fields.take("continue_final_message", bool):
        raise RequestError(f"{where}.continue_final_message is not supported; send the text as a prompt")
    tools, documents = fields.take("tools", list), fields.take("documents", list)
    template, generation = fields.take("chat_template", str), fields.take("add_generation_prompt", bool)
    if messages is not None:  # what to keep is not what the model reads
        chat = read_marks(messages, tools)
        messages, tools = tuple(chat.messages), chat.tools
    if messages is None and (tools or documents or template):
        raise RequestError(f'{where} has a "prompt" and chat fields beside it; they need "messages"')
    echo, logprobs = fields.take("echo", bool), fields.take("logprobs", (int, bool))
    scored = fields.take("prompt_logprobs", int)
    if scored is None and echo and logprobs is not None:
        scored = int(logprobs)
    return Ask(
        messages=messages,
        prompt=_ids(prompt, f"{where}.prompt") if isinstance(prompt, list) else prompt,
        tools=None if tools is None else tuple(tools),
        documents=None if documents is None else tuple(documents),
        variables=fields.take("chat_template_kwargs", dict) or {},
        template=None if template is None else template,
        add_generation_prompt=generation is not False,
        cache_salt=fields.take("cache_salt", str) or "",
        adapter=fields.take("adapter", str),
        model=fields.take("model", str),
        prompt_logprobs=scored,
        rendered_at=_moment(fields.take("rendered_at", (str, int, float)), f"{where}.rendered_at"),
        unread=tuple(sorted(fields.left - _WITHOUT_EFFECT)),
    )


def chat_template(ask: Ask, own: ChatTemplate | None) -> ChatTemplate:
    """The template that lays out a request.

    Raises:
        RequestError: neither the request nor the model has one.
    """
    if ask.template is not None:
        return ChatTemplate(ask.template)
    if own is None:
        raise RequestError('this model has no chat template; send a "chat_template" with the request, or a "prompt"')
    return own


class _Fields:
    """Takes fields out of an object, checking their types."""

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        self._value: dict[str, Any] = plain(where, value)
        self._where = where
        self.left = set(self._value)

    def take(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """The field; None if it is missing or null.

        Raises:
            RequestError: it is of another kind.
        """
        self.left.discard(name)
        value = self._value.get(name)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is None or (
            isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds or object in kinds)
        ):
            return value
        wanted = " or ".join(_JSON_NAMES[each] for each in kinds if each in _JSON_NAMES)
        raise RequestError(f"{self._where}.{name} is {type(value).__name__}; it must be {wanted}")


_JSON_NAMES = {
    str: "text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RequestError(f'{where} must be an object with a "role"')
    return value


def _ids(value: list[Any], where: str) -> tuple[int, ...]:
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"{where}[{index}] is {token!r}; a list must hold the token ids of one prompt")
    if not value:
        raise RequestError(f"{where} is empty; a prompt needs at least one token")
    return tuple(value)


def _moment(value: str | float | None, where: str) -> datetime.datetime | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value)
        return datetime.datetime.fromtimestamp(value)
    except (ValueError, OverflowError, OSError) as error:
        raise RequestError(f"{where}={value!r} is no time; write it as 2031-05-14T13:24:35") from error
