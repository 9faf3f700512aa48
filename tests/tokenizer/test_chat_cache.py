"""`cache_control` in chats: where marks end in the prompt, for templates of every kind, and what is refused."""

from typing import Any

import pytest

from jaxkv.cache_control import CacheControl, Mark
from jaxkv.chat_cache import read_marks
from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from jaxkv.tokenizer import Tokenizer
from tests.tokenizer import templates, tiny

KEEP = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = {"role": "system", "content": "The quick brown fox jumps."}
USER = {"role": "user", "content": "Once upon a time, there was a little girl?"}
ANSWER = {"role": "assistant", "content": "She lived in a little house."}
MORE = {"role": "user", "content": "def fibonacci(n)"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "the lazy dog", "parameters": {}}, **more}


def with_template(source: str) -> Tokenizer:
    tokenizer = tiny.load("byte_level")
    return Tokenizer(tokenizer.vocabulary, tokenizer.special, ChatTemplate(source))


def kept(tokenizer: Tokenizer, messages: list, tools: list | None = None, control: CacheControl | None = None):
    """(text that is kept, seconds) of each mark; what is kept begins the prompt, token for token."""
    chat = read_marks(messages, tools, control)
    ids = tokenizer.encode_chat(chat.messages, tools=chat.tools)
    texts = []
    for mark in chat.marks(ids, tokenizer):
        assert 0 < mark.num_tokens <= len(ids)
        texts.append((tokenizer.decode(ids[: mark.num_tokens], skip_special_tokens=False), mark.ttl_s))
    return texts


def marked(piece: dict[str, Any], mark: Any = KEEP) -> dict[str, Any]:
    return {**piece, "cache_control": mark}


CHATML = with_template(tiny.CHATML)
START = "<|im_start|>system\nThe quick brown fox jumps.<|im_end|>\n"
SECOND = "<|im_start|>user\nOnce upon a time, there was a little girl?<|im_end|>\n"


def test_marks_on_messages():
    assert kept(CHATML, [marked(SYSTEM), USER]) == [(START, 300.0)]
    assert kept(CHATML, [marked(SYSTEM, LONG), marked(USER), ANSWER, MORE]) == [
        (START, 3600.0),
        (START + SECOND, 300.0),
    ]
    assert kept(CHATML, [SYSTEM, marked(USER)]) == [(START + SECOND, 300.0)], "without the header of the answer"
    assert kept(CHATML, [SYSTEM, USER]) == []


def test_breakpoints_are_indices_of_messages():
    chat = [SYSTEM, USER, ANSWER, MORE]
    control = CacheControl(breakpoints=[0, 1], ttl="24h")
    assert kept(CHATML, chat, control=control) == [(START, 86400.0), (START + SECOND, 86400.0)]
    ((whole, _),) = kept(CHATML, chat, control=CacheControl())
    assert whole.endswith("def fibonacci(n)<|im_end|>\n")
    assert kept(CHATML, [marked(SYSTEM, LONG), USER], control=CacheControl(breakpoints=[1])) == [
        (START, 3600.0), (START + SECOND, 300.0),
    ]  # fmt: skip


def test_marks_on_parts():
    parts = [marked({"type": "text", "text": "The quick"}), {"type": "text", "text": "brown fox jumps."}]
    ((text, _),) = kept(CHATML, [{"role": "system", "content": parts}, USER])
    assert text == "<|im_start|>system\nThe quick\n", "parts are joined with newlines"
    last = [{"type": "text", "text": "The quick"}, marked({"type": "text", "text": "brown fox"})]
    ((text, _),) = kept(CHATML, [{"role": "system", "content": last}, USER])
    assert text == "<|im_start|>system\nThe quick\nbrown fox<|im_end|>\n", "the end of the message"


@pytest.mark.parametrize("number", [0, 1])
def test_marks_on_tools(number: int):
    tokenizer = with_template(templates.CHATML_TOOLS)
    tools = [tool("fox"), tool("dog")]
    tools[number] = marked(tools[number])
    ((text, _),) = kept(tokenizer, [SYSTEM, USER], tools)
    whole = tokenizer.decode(tokenizer.encode_chat([SYSTEM, USER], tools=[tool("fox"), tool("dog")]), False)
    assert whole.startswith(text) and '"fox"' in text
    assert ('"dog"' in text) == (number == 1) and "Once" not in text


def test_a_mark_on_a_call_without_text():
    tokenizer = with_template(templates.CHATML_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "fox", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    ((text, _),) = kept(tokenizer, [SYSTEM, USER, marked(asks), MORE], [tool("fox")])
    assert "<tool_call>" in text and "fibonacci" not in text


def test_a_mark_on_tools_that_the_template_does_not_show_is_refused():
    with pytest.raises(RequestError, match=r"tools\[0\]: this chat template does not keep it in one place"):
        kept(CHATML, [SYSTEM, USER], [tool("fox", cache_control=KEEP)])


def test_templates_never_see_marks():
    tokenizer = with_template(templates.CHATML_TOOLS)
    bare = tokenizer.encode_chat([SYSTEM, USER], tools=[tool("fox")])
    chat = read_marks([marked(SYSTEM), marked(USER, None)], [tool("fox", cache_control=KEEP)])
    assert tokenizer.encode_chat(chat.messages, tools=chat.tools) == bare


@pytest.mark.parametrize("name", ["CHATML_TOOLS", "LLAMA31", "QWEN3", "MISTRAL_TOOLS", "MISTRAL_SYSTEM", "DEEPSEEK"])
def test_every_kind_of_template_keeps_what_is_marked_and_not_what_follows(name: str):
    tokenizer = with_template(getattr(templates, name))
    ((text, _),) = kept(tokenizer, [marked(SYSTEM), USER, ANSWER, MORE])
    assert "Once upon" not in text
    if name in ("CHATML_TOOLS", "LLAMA31", "QWEN3"):  # the others write a system's text elsewhere, or not at all
        assert "brown fox jumps." in text
    ((text, _),) = kept(tokenizer, [USER, marked(ANSWER), MORE])
    assert "little house." in text and "fibonacci" not in text
    ((text, _),) = kept(tokenizer, [USER, ANSWER, marked(MORE)])
    assert "fibonacci(n)" in text


def test_the_next_turn_begins_with_what_was_kept():
    for name in ("CHATML_TOOLS", "LLAMA31", "DEEPSEEK"):
        tokenizer = with_template(getattr(templates, name))
        chat = read_marks([SYSTEM, marked(USER)])
        ids = tokenizer.encode_chat(chat.messages)
        (mark,) = chat.marks(ids, tokenizer)
        later = tokenizer.encode_chat([SYSTEM, USER, ANSWER, MORE])
        assert later[: mark.num_tokens] == ids[: mark.num_tokens], name


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([marked(SYSTEM, {"type": "permanent"}), USER], None, r"messages\[0\]: cache_control=.* must be"),
        ([marked(SYSTEM, "1h"), USER], None, r"must be {'type': 'ephemeral'}"),
        ([marked(SYSTEM, {**KEEP, "scope": "all"}), USER], None, r"'scope': 'all'} must be"),
        ([marked(SYSTEM, {**KEEP, "ttl": "2h"}), USER], None, r"ttl='2h' must be one of 5m, 1h, 24h"),
        ([marked(SYSTEM, CacheControl(breakpoints=[1])), USER], None, r"must be {'type'"),
        ([marked({"role": "system", "content": ""}), USER], None, r"messages\[0\]: cache_control on an empty text"),
        ([marked(SYSTEM), marked(USER), marked(ANSWER), marked(MORE)], [tool("a", cache_control=KEEP)], r"5 cache break"),
        ([marked(SYSTEM), marked(USER, LONG)], None, r"messages\[1\] keeps for 3600 s, longer than .*messages\[0\]"),
        ([marked(SYSTEM, LONG)], [tool("a", cache_control=KEEP)], r"messages\[0\] keeps .* tools\[0\] .*order is tools"),
        ([USER, marked(SYSTEM)], None, r"messages\[1\]: the order is tools, system, messages; put the system's"),
    ],
)  # fmt: skip
def test_malformed_marks_are_refused(messages: list, tools: list | None, message: str):
    with pytest.raises(RequestError, match=message):
        read_marks(messages, tools)


def test_breakpoints_beyond_the_messages_are_refused():
    with pytest.raises(RequestError, match=r"breakpoints=\[2\]: there are 2 messages"):
        read_marks([SYSTEM, USER], None, CacheControl(breakpoints=[2]))
    with pytest.raises(RequestError, match=r"must be a CacheControl"):
        read_marks([SYSTEM, USER], None, {"ttl": "5m"})


def test_a_template_that_hides_where_a_piece_ends_is_refused():
    tokenizer = with_template("{{ messages[-1].content }}{{ messages[0].content }}")
    with pytest.raises(RequestError, match=r"messages\[0\]: this chat template does not keep it in one place"):
        kept(tokenizer, [marked(SYSTEM), USER])


def test_marks_are_plain_numbers():
    chat = read_marks([marked(SYSTEM, CacheControl(ttl=90)), USER])
    (mark,) = chat.marks(CHATML.encode_chat([SYSTEM, USER]), CHATML)
    assert mark == Mark(len(CHATML.encode(START, add_bos=False)), 90.0)
