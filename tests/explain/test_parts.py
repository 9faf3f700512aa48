"""The pieces of an explanation: reading requests, finding places, where tokens begin, and what is printed."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxkv.chats.chat import ChatTemplate
from jaxkv.cli.command import main
from jaxkv.errors import RequestError
from jaxkv.explain import Cause, explain, parse_ask, to_text
from jaxkv.explain.place import find_place
from jaxkv.explain.texts import common_prefix, common_suffix, token_start
from tests.explain.pairs import LONG, RULES, TEMPLATES, TOOLS, called, chat
from tests.tokenizer import test_chat, tiny

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "request is int"),
        ({}, 'neither of "messages" and "prompt"'),
        ({"messages": [], "prompt": "x"}, 'both of "messages" and "prompt"'),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["x"]}, r"messages\[0\] must be an object"),
        ({"messages": "x"}, "messages is str; it must be a list"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", "b"]}, r"prompt\[0\] is 'a'"),
        ({"prompt": "x", "tools": [1]}, "chat fields"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt is int; it must be text"),
        ({"prompt": "x", "prompt_logprobs": True}, "prompt_logprobs is bool"),
        ({"prompt": "x", "rendered_at": "soon"}, "rendered_at='soon' is no time"),
        ({"messages": [{"role": "user"}], "functions": [1]}, 'send "tools" instead'),
    ],
)
def test_bad_requests(value: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_ask(value)


def test_short_forms() -> None:
    assert parse_ask("x").prompt == "x"
    assert parse_ask([1, 2]).prompt == (1, 2)
    assert parse_ask([{"role": "user", "content": "x"}]).messages == ({"role": "user", "content": "x"},)
    assert parse_ask({"prompt": "x", "temperature": 1, "colour": "red"}).unread == ("colour",)


@pytest.mark.parametrize("template", ["smollm2", "llama3", "llama31", "chatml", "qwen3", "mistral", "gemma"])
def test_every_character_of_a_message_is_found(template: str) -> None:
    """Also where messages say the same, say it in parts, are trimmed, or say what the template says."""
    turns = ["  user\n", "Hi", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}], "assistant", "Hi"]
    messages = [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    ask = parse_ask({"messages": messages, "tools": TOOLS})

    def render(ask: Any) -> str:
        return ChatTemplate(TEMPLATES[template]).render(ask.messages, tools=ask.tools, special_tokens=test_chat.SPECIAL)

    text = render(ask)
    places = [find_place(ask, text, at, render) for at in range(len(text))]
    for index, message in enumerate(messages):
        found = [
            (text[at], place) for at, place in enumerate(places) if place.kind == "message" and place.index == index
        ]
        shown = "".join(char for char, place in found if place.character is not None)
        said = message["content"] if isinstance(message["content"], str) else "Hithere"
        assert said.strip() in shown.replace("\n", "") or said in shown
        for char, place in found:
            if isinstance(message["content"], str) and place.character is not None and place.character < len(said):
                # The place after the end of what is shown is the text's, too, although the template trimmed it.
                assert said[place.character] == char or not said[place.character :].strip()


def test_places_in_tool_calls() -> None:
    a, b = (chat(None, LONG, called({"city": city, "day": 1}), LONG) for city in ("Oslo", "Bergen"))
    tokenizer = tiny.load("byte_level")
    a["chat_template"] = b["chat_template"] = TEMPLATES["chatml"]
    found = explain(a, b, tokenizer=tokenizer)
    assert found.difference.b.place.path == "messages[1].tool_calls[0].function.arguments.city"
    assert found.difference.b.place.character == 0


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("text", [text for text in tiny.TEXTS if text.strip()])
def test_token_starts(kind: str, text: str) -> None:
    tokenizer = tiny.load(kind)
    ids = tokenizer.vocabulary.encode(text)
    starts = [token_start(tokenizer, text, ids, index) for index in range(len(ids) + 1)]
    assert all(0 <= start <= len(text) for start in starts)
    if kind in ("byte_level", "gguf_gpt2"):
        assert starts == sorted(starts) and starts[-1] == len(text)


def test_common_ends() -> None:
    assert common_prefix("abcd", "abxd") == 2 and common_prefix([1, 2], [1, 2, 3]) == 2 and common_prefix("", "a") == 0
    assert (
        common_suffix("xabc", "yabc", 4) == 3 and common_suffix("aa", "aaa", 1) == 1 and common_suffix("", "", 0) == 0
    )


def test_text_is_one_line_and_the_caret_stands_below_wide_letters() -> None:
    a, b = ({"prompt": f"漢字 {LONG}\x1b[31m\n{end}{LONG}"} for end in ("dog", "fox"))
    lines = to_text(explain(a, b, tokenizer=tiny.load("byte_level"))).splitlines()
    (shown,) = (line for line in lines if line.startswith(" b |"))
    assert "\\x1b[31m\\nfox" in shown and "\x1b" not in shown
    (caret,) = (line for line in lines if "^" in line)
    assert caret.index("^") == shown.index("fox")
    a, b = ({"prompt": LONG + "漢字" + end + LONG} for end in ("dog", "fox"))
    lines = to_text(explain(a, b, tokenizer=tiny.load("byte_level"))).splitlines()
    (shown,) = (line for line in lines if line.startswith(" b |"))
    (caret,) = (line for line in lines if "^" in line)
    assert caret.index("^") == shown.index("fox", 30) + 2


def test_notes() -> None:
    request = chat(RULES, LONG, chat_template=TEMPLATES["llama32"], colour="red")
    found = explain(request, request, tokenizer=tiny.load("byte_level"))
    assert "changes every day" in found.notes[0] and "colour" in found.notes[1]


def test_refusals_name_the_request() -> None:
    with pytest.raises(RequestError, match="request b: chat template refuses"):
        explain("x", chat(RULES, LONG, chat_template="{{ 1 / 0 }}"), tokenizer=tiny.load("byte_level"))
    with pytest.raises(RequestError, match="page_size=0"):
        explain("x", "x", tokenizer=None, page_size=0)


class TestCommand:
    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        folder = tmp_path / "model"
        folder.mkdir()
        return str(tiny.write("byte_level", folder))

    def run(self, tmp_path: Path, model: str, a: Any, b: Any, *flags: str) -> int:
        for name, value in (("a.json", a), ("b.json", b)):
            text = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return main(["cache", "explain", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-m", model, *flags])

    def test_differs(self, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        a, b = (chat(f"{RULES} {time} {LONG}", LONG) for time in ("It is 9:15.", "It is 9:16."))
        assert self.run(tmp_path, model, a, b) == 1
        out = capsys.readouterr().out
        assert out.startswith("miss[time]: a date or time changes: '9:15' / '9:16'\n  --> messages[0].content (system)")
        assert self.run(tmp_path, model, a, b, "--json", "--page-size", "4") == 1
        found = json.loads(capsys.readouterr().out)
        assert found["cause"] == "time" and found["page_size"] == 4

    def test_same(self, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path, model, chat(RULES, LONG), chat(RULES, LONG, "So.", "And?")) == 0
        assert capsys.readouterr().out.startswith("ok[prefix]")
        assert self.run(tmp_path, model, chat(RULES, LONG), chat(RULES, LONG, cache_salt="x")) == 1

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "b.json is not JSON"),
            ("[" * 100_000, "b.json is nested too deeply"),
            ("{}", 'b.json has neither of "messages" and "prompt"'),
            ('{"messages": [{"role": "user", "content": 3}]}', r"request b: messages[0].content is int"),
        ],
    )
    def test_bad_files(
        self, text: str, reason: str, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path, model, chat(RULES, LONG), text) == 2
        assert reason in capsys.readouterr().err

    def test_missing_file_and_stdin(
        self, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert main(["cache", "explain", str(tmp_path / "no.json"), "-", "-m", model]) == 2
        assert "no.json cannot be read" in capsys.readouterr().err
        assert main(["cache", "explain", "-", "-", "-m", model]) == 2
        (tmp_path / "a.json").write_text('"The dog"')
        monkeypatch.setattr(sys, "stdin", io.StringIO('"The dog"'))
        assert main(["cache", "explain", str(tmp_path / "a.json"), "-", "-m", model]) == 0

    def test_readme(self, tmp_path: Path, smollm2_gguf_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The example in the README is what the command prints."""
        system = (
            "You are Ada, an assistant for a small library. It is 2026-03-01 09:{}. Answer briefly, and say so when you "
            "do not know. Books are lent for three weeks; a loan can be extended twice, unless someone else waits."
        )
        a, b = (chat(system.format(minute), "May I keep a book for two months?") for minute in (14, 15))
        assert self.run(tmp_path, str(smollm2_gguf_path), a, b) == 1
        assert capsys.readouterr().out in README


def test_every_cause_has_words() -> None:
    from jaxkv.explain.cause import HINTS, TITLES

    assert set(TITLES) == set(HINTS) == set(Cause)
