"""Every template met is checked for text that it rewrites when turns are appended, and the right thing is blamed."""

import logging
from typing import Any

import pytest

from jaxkv.chats import template_check
from jaxkv.chats.chat import ChatTemplate
from jaxkv.chats.template_check import RewriteKind, check_template, template_is_stable
from jaxkv.tokenizer import load_tokenizer
from tests.tokenizer import templates, test_chat, tiny

STABLE = {
    "chatml": tiny.CHATML,
    "smollm2": test_chat.SMOLLM2,
    "chatml with tools": templates.CHATML_TOOLS,
    "llama 3.1": templates.LLAMA31,
    "arguments as text": templates.TEXT_ARGUMENTS,
    "refuses everything": "{{ raise_exception('no') }}",
}
UNSTABLE = {
    "llama 3, the year": (test_chat.LLAMA3, {"date": "every year"}),
    "llama 3.2, the day": (templates.LLAMA32, {"date": "every day"}),
    "the minute": ("{{ strftime_now('%H:%M') }}" + tiny.CHATML, {"date": "every minute"}),
    "the second": ("{{ strftime_now('%c') }}" + tiny.CHATML, {"date": "every second"}),
    "qwen 3": (templates.QWEN3, {"reasoning": "strips the reasoning"}),
    "mistral, tools": (templates.MISTRAL_TOOLS, {"tools": "moves the tools"}),
    "mistral, system": (templates.MISTRAL_SYSTEM, {"system": "moves the system message"}),
    "deepseek": (templates.DEEPSEEK, {"reasoning": "strips the reasoning", "generation prompt": "starts an answer"}),
    "answers under another role": (test_chat.GEMMA, {"generation prompt": "starts an answer"}),
    "counts turns": (test_chat.MISTRAL, {"other": "'1' became"}),
    "last message only": (test_chat.RETRIEVAL, {"other": "'question?' became 'answer.'", "reasoning": "strips"}),
    "date and tools": ("{{ strftime_now('%d') }}" + templates.MISTRAL_TOOLS, {"date": "every day", "tools": "moves"}),
}


@pytest.mark.parametrize("name", STABLE)
def test_stable(name: str) -> None:
    assert template_is_stable(ChatTemplate(STABLE[name]), test_chat.SPECIAL)


@pytest.mark.parametrize("name", UNSTABLE)
def test_unstable(name: str) -> None:
    source, expected = UNSTABLE[name]
    template = ChatTemplate(source)
    found = {rewrite.kind.value: rewrite.what for rewrite in check_template(template, test_chat.SPECIAL)}
    assert found.keys() == expected.keys()
    assert all(expected[kind] in found[kind] for kind in expected)
    assert not template_is_stable(template, test_chat.SPECIAL)


def test_every_template_of_the_test_tree_is_in_a_table() -> None:
    met = {*STABLE.values(), *(source for source, _ in UNSTABLE.values())}
    for module in (templates, test_chat, tiny):
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, str) and "{%" in value:
                assert value in met, name


def test_the_shipped_model_is_stable(smollm2_gguf_path: Any) -> None:
    tokenizer = load_tokenizer(smollm2_gguf_path)
    assert tokenizer.chat_template is not None
    assert template_is_stable(tokenizer.chat_template, tokenizer.special.texts)


def test_named_templates_are_checked_as_they_are_chosen() -> None:
    sources = {"default": tiny.CHATML, "tool_use": templates.MISTRAL_TOOLS}
    assert [rewrite.kind for rewrite in check_template(ChatTemplate(sources), test_chat.SPECIAL)] == [RewriteKind.TOOLS]
    assert template_is_stable(ChatTemplate(sources, name="default"), test_chat.SPECIAL)


def test_one_warning_a_template(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "_warned", set())
    tokenizer, chat = tiny.load("byte_level"), [{"role": "user", "content": "Hi"}]
    with caplog.at_level(logging.WARNING, logger="jaxkv"):
        for source in (templates.QWEN3, templates.QWEN3, templates.LLAMA32, tiny.CHATML, templates.QWEN3):
            tokenizer.encode_chat(chat, template=ChatTemplate(source))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "it strips the reasoning of earlier turns" in caplog.messages[0]
    assert "it writes the date or time (its text changes every day)" in caplog.messages[1]
