"""Chat templates: messages to prompt text, with Jinja2 in a sandbox, as Hugging Face lays them out.

Templates come with the model, so they see plain JSON data only and cannot touch Python objects. Equal JSON gives equal
text (`plain_json`), with the caller's order of tools and keys; so does a tool call whose arguments are an object or, as in
OpenAI's API, the JSON text of one.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from jaxkv.errors import RequestError
from jaxkv.plain_json import plain, read_object, write_json

# Names a message's reasoning goes by; templates read the first one, gpt-oss the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The layout of one model's chats.

    Args:
        source: Jinja text, or several by name ("default", "tool_use", ...).
        name: which one to use; None: "tool_use" (if there is one) with tools, else "default".
    """

    def __init__(self, source: str | Mapping[str, str], *, name: str | None = None) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.name = name
        if name is not None and name not in self.sources:
            raise RequestError(f"chat template {name!r} does not exist; this model has {sorted(self.sources)}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """Writes a chat as prompt text.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first. Content is text or a list of text parts; parts
                go to the template as they are if it reads them, else they are joined with newlines (as vLLM and
                llama.cpp do). Empty text stays; None, or none at all, is empty text, for many templates read it unasked
                (of an answer that only calls tools, say). Other keys that are None count as absent.
            tools: JSON schemas of the functions the model may call.
            documents: what retrieval templates read.
            add_generation_prompt: end with the header of an assistant message.
            special_tokens: "bos_token", "eos_token", ... -> text.
            variables: anything else the template reads, e.g. `enable_thinking`.
            now: the time a template may write; None is the clock's.

        Raises:
            RequestError: the messages are malformed, or the template fails on them or refuses them.
        """
        source = self._select(tools)
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message")
        chat = [_check_message(index, message) for index, message in enumerate(messages)]
        if any(isinstance(message.get("content"), list) for message in chat) and not _reads_parts(source):
            chat = [_join_parts(message) for message in chat]
        if any("tool_calls" in message for message in chat):
            chat = [_spell_arguments(message, as_text=_prints_arguments(source)) for message in chat]
        context = {
            "messages": chat,
            "tools": plain("tools", tools),
            "documents": plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        extra = plain("variables", variables or {})
        if taken := sorted(context.keys() & extra.keys()):
            raise RequestError(f"template variables {taken} are arguments of their own; pass them there")
        clock = {} if now is None else {"strftime_now": lambda format: now.strftime(format)}
        return _render(source, {**(special_tokens or {}), **extra, **context, **clock})

    def end_of_turn(self, special_tokens: Mapping[str, str] | None = None) -> str:
        """What the template writes after an assistant's answer; "" if it writes nothing or cannot be asked."""
        marker = "jaxkv-answer"
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}]
        try:
            text = self.render(chat, add_generation_prompt=False, special_tokens=special_tokens)
        except RequestError:
            return ""
        _, found, after = text.rpartition(marker)
        return after if found else ""

    def _select(self, tools: object) -> str:
        if self.name is not None:
            return self.sources[self.name]
        if tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise RequestError(f"this model has no default chat template; choose one of {sorted(self.sources)}")
        return self.sources["default"]


def _check_message(index: int, message: object) -> dict[str, Any]:
    """A plain copy of a message without its None values; the content is always there."""
    where = f"messages[{index}]"
    if hasattr(message, "model_dump"):
        message = plain(where, message)
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}; a message is a dict with 'role' and 'content'")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has role={message.get('role')!r}; it must be text such as 'user'")
    checked = {key: plain(f"{where}.{key}", value) for key, value in message.items() if value is not None}
    content = checked.setdefault("content", "")
    if isinstance(content, list):
        checked["content"] = [_check_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content is {type(content).__name__}; it must be text or a list of text parts")
    reasoning = next((checked[key] for key in _REASONING_KEYS if key in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(f"{where} is of type {kind!r}; only text parts {{'type': 'text', 'text': ...}} are supported")


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


@functools.lru_cache(maxsize=64)
def _reads_parts(source: str) -> bool:
    """Whether a template lays out a list of parts itself instead of printing it as a list: ask it."""
    parts = [{"type": "text", "text": "jaxkv-part-1"}, {"type": "text", "text": "jaxkv-part-2"}]
    try:
        text = _render(source, {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": True})
    except RequestError:
        return False
    return all(part["text"] in text for part in parts) and "'type'" not in text and '"type"' not in text


def _spell_arguments(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message whose tool calls have arguments as the template wants them, however the caller spelled them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_spell_call(call, as_text) for call in calls]}


def _spell_call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _spell_call(call["function"], as_text)}
    arguments = call.get("arguments")
    value = read_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):  # the model wrote broken JSON: it is shown what it wrote
        return call
    return {**call, "arguments": write_json(value) if as_text else value}


@functools.lru_cache(maxsize=64)
def _prints_arguments(source: str) -> bool:
    """Whether a template prints a tool call's arguments as they are, so that they must come as text: ask it."""
    function = {"name": "jaxkv", "arguments": {"jaxkv-key": "x"}}
    call = {"id": "call00001", "type": "function", "function": function, **function}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    context = {"messages": chat, "tools": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
    try:
        return "{'jaxkv-key'" in _render(source, context)
    except RequestError as error:
        return '(not "dict")' in str(error)  # `'<call>' + arguments`: only text can be added to text


def _render(source: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compile(source).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # templates can raise anything: TemplateError on purpose, TypeError on odd messages
        raise RequestError(f"chat template refuses these messages: {error}") from error


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands in for the class, whose attributes lead out of the sandbox."""
    return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without underscore names, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self, so that `namespace(self=...)` works
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"chat templates cannot set {name!r} on a namespace")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks an assistant's text for training; here it only shows its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
