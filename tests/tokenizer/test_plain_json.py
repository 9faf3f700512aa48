"""Equal JSON becomes equal text, however Python spells it; order stays; what has no JSON form is refused."""

import enum
import types
from typing import Any

import pytest

from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from jaxkv.plain_json import plain, read_object, unordered
from tests.tokenizer import templates, test_chat


class Kind(str, enum.Enum):  # noqa: UP042 (its `str()` is not its text)
    FUNCTION = "function"


class Model:
    """Dumps itself as a pydantic model does."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, *, mode: str, by_alias: bool, exclude_none: bool) -> dict[str, Any]:
        assert mode == "json" and by_alias and exclude_none
        return {key: value for key, value in self.fields.items() if value is not None}


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, "é"]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SPELLINGS = {
    "enum": {"type": Kind.FUNCTION, "function": {"name": "f", "parameters": SCHEMA}},
    "tuple": {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": (1, "é")}}},
        },
    },
    "mapping": types.MappingProxyType(TOOL),
    "model": Model(type="function", function=Model(name="f", description=None, parameters=SCHEMA), strict=None),
}
ASK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tools(spelling: str) -> None:
    template = ChatTemplate(templates.CHATML_TOOLS)
    assert template.render(ASK, tools=[SPELLINGS[spelling]]) == template.render(ASK, tools=[TOOL])


def test_order_is_kept() -> None:
    text = ChatTemplate(templates.CHATML_TOOLS).render(ASK, tools=[TOOL])
    assert text.index('"b"') < text.index('"a"')
    assert list(plain("x", {"b": 1, "a": 2})) == ["b", "a"]


def test_keys_are_text() -> None:
    assert plain("x", {True: "b", None: "c", 2.5: "d"}) == {"true": "b", "null": "c", "2.5": "d"}
    assert plain("x", {3: "a"}) == {"3": "a"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "x is nan"),
        ({"a": [float("inf")]}, r"x\.a\[0\] is inf"),
        ({1: "a", "1": "b"}, "has the key '1' twice"),
        ({(1, 2): "a"}, "key of type tuple"),
        (Model, "x is type"),
        ({"a": object()}, r"x\.a is object"),
    ],
)
def test_refusals(value: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        plain("x", value)


@pytest.mark.parametrize("source", [templates.CHATML_TOOLS, templates.QWEN3, templates.TEXT_ARGUMENTS])
def test_arguments_as_object_or_text(source: str) -> None:
    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]

    render = ChatTemplate(source).render
    expected = render(chat({"a": 1, "é": [2]}))
    assert '{"a": 1, "é": [2]}' in expected
    for text in ('{"a": 1, "é": [2]}', '{"a":1,"\\u00e9":[2]}', '{ "a" : 1,\n "é": [ 2 ] }'):
        assert render(chat(text)) == expected
    assert "{broken" in render(chat("{broken"))


def test_messages_as_models() -> None:
    render = ChatTemplate(test_chat.SMOLLM2).render
    assert render([Model(role="user", content="x", refusal=None)]) == render(ASK)  # type: ignore[list-item]


def test_read_object() -> None:
    assert read_object('{"a": 1}') == {"a": 1}
    for text in ("[1]", "1", "{", '{"a": 1e999}', '{"a": NaN}', "[" * 100_000):
        assert read_object(text) is None


def test_unordered() -> None:
    assert unordered({"a": 1, "b": {"c": [1], "d": 2}}) == unordered({"b": {"d": 2, "c": [1]}, "a": 1})
    assert unordered([1, 2]) != unordered([2, 1])
    assert unordered({"a": 1}) != unordered({"a": True})
    assert unordered({"a": "1"}) != unordered({"a": 1})
