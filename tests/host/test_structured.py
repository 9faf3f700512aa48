"""The forms of structured output: what they accept, what they refuse and how, and when two are the same."""

import dataclasses
import enum

import pytest

from jaxkv.errors import RequestError
from jaxkv.request import SamplingParams
from jaxkv.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Tag, ToolCalls, Triggered

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}}}
TOOL = {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}


class Model:
    """What pydantic gives a class, without pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict:
        return SCHEMA


class Unit(enum.StrEnum):
    CELSIUS = "celsius"


def test_a_schema_is_the_same_however_it_is_given() -> None:
    text = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}}}'
    forms = [JsonSchema(SCHEMA), JsonSchema(text), JsonSchema(Model)]
    assert len({form.key for form in forms}) == len({*forms}) == 1
    assert forms[2].model is Model and forms[0].model is None
    assert JsonSchema({"enum": [Unit.CELSIUS]}).schema == {"enum": ["celsius"]}


def test_the_caller_may_change_theirs_afterwards() -> None:
    schema = {"type": "string"}
    form = JsonSchema(schema)
    schema["type"] = "integer"
    assert form.schema == {"type": "string"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        form.strict = False  # type: ignore[misc]


def test_the_order_of_properties_counts() -> None:
    """It is the order in which they are written."""
    turned = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}}}
    assert JsonSchema(SCHEMA).key != JsonSchema(turned).key


def test_different_forms_have_different_keys() -> None:
    content = Regex("a")
    forms = [
        JsonSchema(SCHEMA), JsonSchema(SCHEMA, strict=False), JsonSchema(SCHEMA, whitespace="flexible"),
        JsonSchema(SCHEMA, closed=True), JsonSchema(True), JsonObject(), JsonObject("flexible"), Regex("ab"), Regex("a"),
        Choice(["ab"]), Choice(["a", "b"]), Choice(["b", "a"]), Grammar("ab"), Grammar("ab", "gbnf"),
        Triggered([Tag("<a>", content)]), Triggered([Tag("<a>", content, "</a>")]),
        Triggered([Tag("<a>", content)], required=True), Triggered([Tag("<a>", content)], repeat=False),
        ToolCalls([TOOL]), ToolCalls([TOOL], "required"), ToolCalls([TOOL], "look_up"), ToolCalls([TOOL], parallel=False),
    ]  # fmt: skip
    assert len({form.key for form in forms}) == len({*forms}) == len(forms)


def test_tools_may_come_in_openai_s_wrapping() -> None:
    assert ToolCalls([{"type": "function", "function": TOOL}]).key == ToolCalls([TOOL]).key
    bare = ToolCalls([TOOL, {"name": "now"}], "now")
    assert [tool["name"] for tool in bare.callable_tools] == ["now"]
    assert bare.tools[1]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonSchema("{"), "schema='{' is not JSON"),
        (lambda: JsonSchema("[" * 100_000), "is not JSON"),
        (lambda: JsonSchema([1]), r"schema=\[1\] must be an object or a boolean"),
        (lambda: JsonSchema(int), "schema=int is a class but no pydantic model"),
        (lambda: JsonSchema({"const": {1, 2}}), "schema.const is set"),
        (lambda: JsonSchema({}, whitespace="none"), "whitespace='none' must be one of compact, flexible"),
        (lambda: JsonSchema({}, strict=1), "strict=1 must be True or False"),
        (lambda: JsonObject("no"), "whitespace='no'"),
        (lambda: Regex(""), "pattern='' must be non-empty text"),
        (lambda: Regex("\ud800"), "pattern='.ud800' is not valid Unicode"),
        (lambda: Choice([]), r"texts=\[\] leaves no choice"),
        (lambda: Choice("yes"), "texts='yes' must be a list of texts"),
        (lambda: Choice(["a", 2]), r"texts\[1\]=2 must be text"),
        (lambda: Grammar("a", "ebnf"), "syntax='ebnf' must be one of lark, gbnf"),
        (lambda: Tag("", Regex("a")), "begin='' must be non-empty text"),
        (lambda: Tag("a", "b"), "content='b' must be one of JsonSchema"),
        (lambda: Tag("a", Triggered([Tag("b", Regex("a"))])), "must be one of JsonSchema"),
        (lambda: Triggered([]), r"tags=\(\) must be one or more Tag"),
        (lambda: Triggered([Tag("<a", Regex("a")), Tag("<ab", Regex("a"))]), "begin='<a' is part of another tag's"),
        (lambda: ToolCalls([]), r"tools=\[\] leaves nothing to call"),
        (lambda: ToolCalls([{"parameters": {}}]), r"tools\[0\]=.*must have a \"name\""),
        (lambda: ToolCalls([TOOL, TOOL]), "are not distinct"),
        (lambda: ToolCalls([TOOL], "other"), "choice='other' must be auto, required, or a tool's name: look_up"),
        (lambda: SamplingParams(structured="a+"), r"structured='a\+' must be one form"),
        (lambda: SamplingParams(structured=[Regex("a"), Regex("b")]), "must be one form of jaxkv.structured"),
        (lambda: SamplingParams(suppress_eos_until="xml"), "suppress_eos_until='xml' must be None or \"json\""),
        (lambda: SamplingParams(structured=Regex("a"), suppress_eos_until="json"), "leave one of them out"),
        (
            lambda: SamplingParams(structured=Regex("a"), max_tokens=0, prompt_logprobs=0),
            "max_tokens=0 with structured",
        ),
    ],
)
def test_what_is_refused_is_named(make, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()
