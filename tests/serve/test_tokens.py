"""Tokens over HTTP are the tokenizer's, and what watches servers gets its answers."""

import pytest

import jaxkv
from jaxkv import LLM
from tests.serve.stage import NAME, LiveServer

CHAT = [{"role": "user", "content": "Zürich €"}]


def test_there_and_back(server: LiveServer, tiny_llm: LLM) -> None:
    got = server.post("/tokenize", {"model": NAME, "prompt": "Zürich €", "return_token_strs": True}).json()
    assert got["tokens"] == tiny_llm.tokenizer.encode("Zürich €") and got["count"] == len(got["tokens"])
    assert got["max_model_len"] == tiny_llm.max_len and "".join(got["token_strs"]).startswith("Z")
    assert server.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": "Zürich €"}
    chat = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert chat == tiny_llm.chat_prompt(CHAT)
    short = server.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()["tokens"]
    assert chat[: len(short)] == short and len(short) < len(chat)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_refusals_name_the_field(server: LiveServer, path: str, body: dict, param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_what_watchers_ask(server: LiveServer, tiny_llm: LLM) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": jaxkv.__version__}
    info = server.get("/tokenizer_info").json()
    assert info["vocab_size"] == tiny_llm.tokenizer.vocab_size and "default" in info["chat_templates"]
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1") and "/v1/messages" in document["paths"]
