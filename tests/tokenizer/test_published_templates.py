"""Published templates of the families: the text and the ids that transformers makes of them."""

import datetime
import warnings
from pathlib import Path
from typing import Any

import pytest

from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from tests.tokenizer import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

FOLDER = Path(__file__).parent.parent / "data" / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SYSTEM, EMPTY = {"role": "system", "content": "Be <brief> & kind."}, {"role": "system", "content": ""}
USER, MORE = {"role": "user", "content": "  Wie spät ist es? 🙂\n"}, {"role": "user", "content": "And in Oslo?"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTen past nine."}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo ü", "n": [1, 2.5]}}}
    ],
}  # fmt: skip
RESULT = {"role": "tool", "name": "clock", "tool_call_id": "abcdefghi", "content": "09:10"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock", "description": "The time <now> in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]  # fmt: skip
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([USER], None),
    "several turns": ([USER, ANSWER, MORE], None),
    "system": ([SYSTEM, USER, ANSWER, MORE], None),
    "empty system": ([EMPTY, USER], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "a tool called": ([SYSTEM, USER, CALL, RESULT], TOOLS),
    "ends with an answer": ([USER, ANSWER], None),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Ours, and transformers' with the same vocabulary."""
    folder = tiny.write("byte_level", tmp_path_factory.mktemp("tokenizer"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tiny.load("byte_level"), theirs


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids(name: str, chat: str, generation_prompt: bool, tokenizers: tuple[Any, Any]) -> None:
    ours, theirs = tokenizers
    source = (FOLDER / f"{name}.jinja").read_text()
    (messages, tools), template = CHATS[chat], ChatTemplate(source)
    options = {"tools": tools, "add_generation_prompt": generation_prompt}
    special = {"bos_token": theirs.bos_token or "", "eos_token": theirs.eos_token or ""}
    try:
        expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except Exception:  # the template itself says no
        with pytest.raises(RequestError):
            template.render(messages, special_tokens=special, now=datetime.datetime.now(), **options)
        return
    assert template.render(messages, special_tokens=special, **options) == expected
    ids = theirs.apply_chat_template(messages, chat_template=source, tokenize=True, return_dict=False, **options)
    found = ours.encode_chat(messages, template=template, **options)
    assert list(found) == list(ids)
