"""Calls of tools as each model family writes them: what the grammar admits, and what is read back."""

import json

import pytest

from jaxkv.grammar.forms import to_automaton
from jaxkv.structured import ToolCalls
from jaxkv.tool_formats import PYTHON_TAG, TextBeforeCalls, format_of, read_calls

TOOLS = [
    {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}},
    {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
]
LOOK, ADD = ("look_up", {"q": 'a}</tool_call>"b'}), ("add", {"n": -12})
STYLES = ("hermes", "llama3", "mistral", "smollm2")


def spell(style: str, *calls: tuple[str, dict]) -> str:
    """As the models' templates write a turn with calls; arguments compact."""
    key = "parameters" if style == "llama3" else "arguments"
    texts = [f'{{"name": {json.dumps(n)}, "{key}": {json.dumps(a, separators=(",", ":"))}}}' for n, a in calls]
    match style:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(texts)}]"
        case "smollm2":
            return f"<tool_call>[{', '.join(texts)}]</tool_call>"
    return texts[0]


def found(form: ToolCalls, text: str) -> tuple[list[tuple[str, dict]], str]:
    calls, content = read_calls(form, text, "r1/0")
    return [(call.name, call.arguments) for call in calls], content


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("choice", ["auto", "required", "look_up"])
def test_a_call_is_admitted_and_read_back(style: str, choice: str) -> None:
    form = ToolCalls(TOOLS, choice, format=style)
    automaton = to_automaton(form)
    text = spell(style, LOOK)
    assert automaton.matches(text)
    assert found(form, text) == ([LOOK], "")
    assert automaton.matches(spell(style, ADD)) == (choice != "look_up")
    for wrong in (("add", {"n": "x"}), ("other", {}), ("look_up", {}), ("look_up", {"q": "a", "r": 1})):
        assert not automaton.matches(spell(style, wrong))
    assert automaton.matches("Hello <b>, and so on.") == (choice == "auto")
    assert automaton.matches("") == (choice == "auto")


@pytest.mark.parametrize("style", ["hermes", "mistral", "smollm2"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls(style: str, choice: str, parallel: bool) -> None:
    form = ToolCalls(TOOLS, choice, parallel=parallel, format=style)
    text = spell(style, LOOK, ADD, LOOK)
    assert to_automaton(form).matches(text) == parallel
    calls, _ = found(form, text)
    assert calls == [LOOK, ADD, LOOK]
    ids = [call.id for call in read_calls(form, text, "r1/0")[0]]
    assert len({*ids}) == 3 and all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize("style", ["hermes", "mistral", "smollm2"])
def test_text_around_calls_is_kept(style: str) -> None:
    form = ToolCalls(TOOLS, format=style)
    text = f"Let me see.\n{spell(style, ADD)}"
    assert to_automaton(form).matches(text)
    assert found(form, text) == ([ADD], "Let me see.\n")
    assert found(form, "No calls.") == ([], "No calls.")


def test_llama_may_write_its_tag_first() -> None:
    form = ToolCalls(TOOLS, format="llama3")
    automaton = to_automaton(form)
    text = f"<|python_tag|>{spell('llama3', ADD)}"
    assert automaton.matches(text) and found(form, text) == ([ADD], "")
    assert not automaton.matches("<|python_tag|>print(1)")
    assert automaton.matches("<|python") and automaton.matches("<|pythonic")


def test_once_begun_a_call_must_be_one() -> None:
    automaton = to_automaton(ToolCalls(TOOLS, format="hermes"))
    assert not automaton.matches("hm <tool_call> what?")
    assert automaton.matches("hm <tool_cal")  # not begun


def test_the_template_says_which_format() -> None:
    assert format_of([]) == "smollm2"
    assert format_of(["{{ '<tool_call>' }}"]) == "hermes"
    assert format_of(["...", "{{ '[TOOL_CALLS] [' }}"]) == "mistral"
    assert format_of(["<|python_tag|>"]) == "llama3"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_before_calls_is_shown_as_it_comes(style: str, size: int) -> None:
    """Nothing of a call gets out, and nothing is held back that cannot become one."""
    form, call = ToolCalls(TOOLS, format=style), spell(style, LOOK)
    free = "a <tool_ b [TOOL <<tool_cal {x}" if style != "llama3" else "<|python_ and {"
    calls_only = [("", call), ("", PYTHON_TAG + call)] if style == "llama3" else [("", call), (free, call)]
    for before, after in [*calls_only, (free, "")]:
        text, watch, shown = before + after, TextBeforeCalls(form), ""
        for start in range(0, len(text), size):
            shown += watch.feed(text[start : start + size])
            so_far = text[: start + size]
            assert before.startswith(shown)
            assert len(shown) >= min(len(so_far), len(before)) - len("<|python_tag|>")
        assert shown + watch.rest(before) == before


def test_what_may_become_a_call_waits() -> None:
    watch = TextBeforeCalls(ToolCalls(TOOLS, format="hermes"))
    assert [watch.feed(piece) for piece in ("Hi <to", "ol", "s <", "tool_call>", "x")] == ["Hi ", "", "<tools ", "", ""]
    assert watch.rest("Hi <tools after") == "after"
    plain = TextBeforeCalls(ToolCalls(TOOLS, format="llama3"))
    assert [plain.feed(piece) for piece in ("<|p", "y", " {", '{"name"')] == ["", "", "<|py {", '{"name"']
