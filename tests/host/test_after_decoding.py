"""Values read from whole structured outputs."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxkv.after_decoding import after_decoding
from jaxkv.chats.chat import ChatTemplate
from jaxkv.intake import Intake
from jaxkv.request import SamplingParams
from jaxkv.structured import Choice, Form, JsonObject, JsonSchema, Regex, Tag, ToolCalls, Triggered


class Point:
    """Stands in for a pydantic model with a validator that its schema does not show."""

    def __init__(self, x: int) -> None:
        self.x = x

    @classmethod
    def model_json_schema(cls) -> dict:
        return {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

    @classmethod
    def model_validate(cls, value: dict) -> "Point":
        if value["x"] > 9:
            raise ValueError("too far")
        return cls(value["x"])


def parsed(form: Form, text: str) -> object:
    return after_decoding(form, text, lambda: text, "r/0").get("parsed")


THOUGHT = Tag("</think>", JsonSchema({"type": "array"}))
PARTS = Triggered([Tag("<n>", Regex("[0-9]+"), "</n>"), Tag("<j>", JsonObject(), "</j>")])


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (JsonSchema({"type": "integer"}), "12", 12),
        (JsonSchema({"type": "string"}), '"é\\n"', "é\n"),
        (JsonObject(), '{"a":[1,null]}', {"a": [1, None]}),
        (Choice(["yes", "no"]), "no", "no"),
        (Regex("[0-9]+"), "12", None),
        (Triggered([THOUGHT], required=True, repeat=False), "hm</think>[1]", [1]),
        (Triggered([THOUGHT], repeat=False), "hm", []),
        (PARTS, 'a<n>12</n>b<j>{"c":"</j><n>3"}</j><n>4</n>', ["12", {"c": "</j><n>3"}, "4"]),
    ],
)
def test_values(form: Form, text: str, value: object) -> None:
    assert parsed(form, text) == value


def test_an_object_of_the_model_that_was_given() -> None:
    point = parsed(JsonSchema(Point), '{"x":3}')
    assert isinstance(point, Point) and point.x == 3


def test_a_model_may_refuse_what_its_schema_allows(caplog: pytest.LogCaptureFixture) -> None:
    assert parsed(JsonSchema(Point), '{"x":30}') is None
    assert "too far" in caplog.text


def format_in(params: SamplingParams) -> str:
    assert isinstance(params.structured, ToolCalls)
    return params.structured.format


def test_the_model_s_template_says_how_calls_are_written() -> None:
    params = SamplingParams(structured=ToolCalls([{"name": "now"}]))
    plain = Intake(vocab_size=9, eos_ids=(1,))
    assert format_in(plain.resolve(params)) == "smollm2"
    template = ChatTemplate({"default": "{{ messages }}", "tool_use": "[TOOL_CALLS]"})
    of_model = dataclasses.replace(plain, tokenizer=SimpleNamespace(chat_template=template))
    assert format_in(of_model.resolve(params)) == "mistral"
    given = SamplingParams(structured=ToolCalls([{"name": "now"}], format="hermes"))
    assert of_model.resolve(given) is given
    assert of_model.resolve(SamplingParams()) == SamplingParams()
