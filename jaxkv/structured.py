"""What an output must look like: the forms of `SamplingParams.structured`.

A form says what language the output is in, not how that is enforced. All are frozen; `key` is their content, so that
equal forms share one compiled grammar whoever built them.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxkv.errors import RequestError
from jaxkv.plain_json import plain, write_json

WHITESPACE = ("compact", "flexible")
SYNTAXES = ("lark", "gbnf")
CHOICES = ("auto", "required")
TOOL_FORMATS = ("auto", "hermes", "llama3", "mistral", "smollm2")


@dataclasses.dataclass(frozen=True)
class JsonSchema:
    """JSON that is valid under a schema (draft 2020-12; draft 7 where it is written differently).

    Properties come in the schema's order. A keyword that cannot be enforced is refused.

    Raises:
        RequestError: this is no schema; the message says why.
    """

    kind: ClassVar[str] = "json_schema"
    schema: Any  # dict, bool, JSON text, or a pydantic model class; becomes plain JSON
    strict: bool = True  # False: what cannot be enforced is left out and logged, instead of refused
    whitespace: str = (
        "compact"  # "compact": none, as `json.dumps` with separators (",", ":"); "flexible": as JSON allows
    )
    closed: bool = False  # objects that do not mention additionalProperties have none
    model: type | None = dataclasses.field(
        init=False, default=None, compare=False
    )  # the pydantic class, if one was given

    def __post_init__(self) -> None:
        _check_bool("strict", self.strict)
        _check_bool("closed", self.closed)
        _check_one_of("whitespace", self.whitespace, WHITESPACE)
        schema = self.schema
        if isinstance(schema, type):
            dump = getattr(schema, "model_json_schema", None)
            if not callable(dump):
                raise RequestError(
                    f"schema={schema.__name__} is a class but no pydantic model; give a dict or JSON text"
                )
            object.__setattr__(self, "model", schema)
            schema = dump()
        elif isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"schema={_shorten(schema)} is not JSON: {error}") from error
        if not isinstance(schema, (Mapping, bool)):
            raise RequestError(f"schema={_shorten(schema)} must be an object or a boolean")
        object.__setattr__(self, "schema", _plain("schema", schema))

    @property
    def key(self) -> str:
        """Its content: equal keys, equal language."""
        return _key(self, write_json(self.schema), self.strict, self.whitespace, self.closed)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""

    kind: ClassVar[str] = "json_object"
    whitespace: str = "compact"  # as in `JsonSchema`

    def __post_init__(self) -> None:
        _check_one_of("whitespace", self.whitespace, WHITESPACE)

    @property
    def key(self) -> str:
        return _key(self, self.whitespace)


@dataclasses.dataclass(frozen=True)
class Regex:
    """Text that a regular expression (ECMA-262, no lookaround, no back references) matches from end to end."""

    kind: ClassVar[str] = "regex"
    pattern: str

    def __post_init__(self) -> None:
        _check_text("pattern", self.pattern)

    @property
    def key(self) -> str:
        return _key(self, self.pattern)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of a few texts."""

    kind: ClassVar[str] = "choice"
    texts: Sequence[str]  # becomes a tuple

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or not isinstance(self.texts, Iterable):
            raise RequestError(f"texts={_shorten(self.texts)} must be a list of texts")
        object.__setattr__(self, "texts", tuple(self.texts))
        if not self.texts:
            raise RequestError("texts=[] leaves no choice; give at least one text")
        for index, text in enumerate(self.texts):
            _check_text(f"texts[{index}]", text, may_be_empty=True)

    @property
    def key(self) -> str:
        return _key(self, *self.texts)


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Text that a context-free grammar derives."""

    kind: ClassVar[str] = "grammar"
    text: str
    syntax: str = "lark"  # "lark" (llguidance's dialect) or "gbnf" (llama.cpp's)

    def __post_init__(self) -> None:
        _check_text("text", self.text)
        _check_one_of("syntax", self.syntax, SYNTAXES)

    @property
    def key(self) -> str:
        return _key(self, self.text, self.syntax)


@dataclasses.dataclass(frozen=True)
class Tag:
    """A constrained part of a `Triggered` text."""

    begin: str  # writing this starts the part
    content: "Form"
    end: str | None = None  # ends the part, free text follows; None: the output ends with the content

    def __post_init__(self) -> None:
        _check_text("begin", self.begin)
        if self.end is not None:
            _check_text("end", self.end)
        if not isinstance(self.content, FORMS) or isinstance(self.content, (Triggered, ToolCalls)):
            raise RequestError(
                f"content={_shorten(self.content)} must be one of JsonSchema, JsonObject, Regex, Choice, Grammar"
            )

    @property
    def key(self) -> str:
        return _key(self, self.begin, self.content.key, self.end)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class Triggered:
    """Free text in which the beginning of a tag must be followed by its content and its end.

    A model that reasons first: `Triggered([Tag("</think>", JsonSchema(...))], required=True)`.
    """

    kind: ClassVar[str] = "triggered"
    tags: Sequence[Tag]  # becomes a tuple
    required: bool = False  # the output must not end before a tag was written
    repeat: bool = True  # after a tag more may follow; False: the output ends with the first

    def __post_init__(self) -> None:
        _check_bool("required", self.required)
        _check_bool("repeat", self.repeat)
        object.__setattr__(self, "tags", tuple(self.tags))
        if not self.tags or not all(isinstance(tag, Tag) for tag in self.tags):
            raise RequestError(f"tags={_shorten(self.tags)} must be one or more Tag")
        begins = [tag.begin for tag in self.tags]
        for tag in begins:
            if any(other != tag and tag in other for other in begins) or begins.count(tag) > 1:
                raise RequestError(f"tags: begin={tag!r} is part of another tag's; a text must say which tag it starts")

    @property
    def key(self) -> str:
        return _key(self, *(tag.key for tag in self.tags), self.required, self.repeat)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class ToolCalls:
    """Calls of functions, written as the model's chat template writes them, with arguments that fit their schemas.

    Raises:
        RequestError: a tool is malformed, or `choice` names none of them.
    """

    kind: ClassVar[str] = "tool_calls"
    # OpenAI's form, `{"type": "function", "function": {"name": ...}}`, or the inner one; becomes a tuple of inner ones
    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"  # text, calls or both; "required": at least one call; a name: one call of that function
    parallel: bool = True  # several calls in one output
    format: str = "auto"  # how the model writes calls; "auto": as its chat template shows them

    def __post_init__(self) -> None:
        _check_bool("parallel", self.parallel)
        _check_one_of("format", self.format, TOOL_FORMATS)
        if isinstance(self.tools, (str, Mapping)) or not isinstance(self.tools, Iterable):
            raise RequestError(f"tools={_shorten(self.tools)} must be a list of function schemas")
        object.__setattr__(self, "tools", tuple(_plain_tool(i, tool) for i, tool in enumerate(self.tools)))
        names = [tool["name"] for tool in self.tools]
        if not names:
            raise RequestError("tools=[] leaves nothing to call; give at least one function")
        if len({*names}) < len(names):
            raise RequestError(f"tools: the names {names} are not distinct")
        if self.choice not in (*CHOICES, *names):
            raise RequestError(f"choice={self.choice!r} must be auto, required, or a tool's name: {', '.join(names)}")

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that may be called under `choice`."""
        return self.tools if self.choice in CHOICES else tuple(t for t in self.tools if t["name"] == self.choice)

    @property
    def key(self) -> str:
        return _key(self, *(write_json(tool) for tool in self.tools), self.choice, self.parallel, self.format)

    def __hash__(self) -> int:
        return hash(self.key)


Form = JsonSchema | JsonObject | Regex | Choice | Grammar | Triggered | ToolCalls
FORMS = (JsonSchema, JsonObject, Regex, Choice, Grammar, Triggered, ToolCalls)


def _plain_tool(index: int, tool: object) -> dict[str, Any]:
    """`{"name", "description"?, "parameters"}`, whichever way it was written."""
    where = f"tools[{index}]"
    tool = _plain(where, tool)
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        tool = tool["function"]
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestError(f'{where}={_shorten(tool)} must have a "name", or a "function" that has one')
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(f"{where}.parameters={_shorten(parameters)} must be a JSON schema")
    return {**tool, "parameters": parameters}


def _plain(where: str, value: Any) -> Any:
    try:
        return plain(where, value)
    except RecursionError as error:
        raise RequestError(f"{where} is nested too deeply") from error


def _key(form: Any, *parts: object) -> str:
    """Unambiguous: JSON of all parts, the kind first."""
    return json.dumps([type(form).__name__, *parts], ensure_ascii=False)


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or (not value and not may_be_empty):
        raise RequestError(f"{name}={_shorten(value)} must be {'' if may_be_empty else 'non-empty '}text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}={value!r} is not valid Unicode: lone surrogate at {error.start}") from error


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={value!r} must be True or False")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
