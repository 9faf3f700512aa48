"""Chats as tokens, turn by turn: they spell what the template writes, and tokens once computed stay."""

import copy

import pytest

from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from jaxkv.request import Completion, FinishReason
from jaxkv.sessions.transcript import ChatTranscript, TextTranscript
from jaxkv.tokenizer import Tokenizer
from tests.tokenizer import templates, tiny
from tests.tokenizer.test_template_check import STABLE, UNSTABLE

SYSTEM = {"role": "system", "content": "Answer briefly."}
TURNS = [("The quick brown fox?", "jumps over"), ("Café naïve 🙂", "the lazy dog; 12345"), ("more", " x\n\n y")]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "content": "{}", "tool_call_id": "call00001"}
SOUND = [name for name in STABLE if name != "refuses everything"]
# Where a question and its answer are followed by the next question, letter for letter.
KEEPS_ANSWERS = [name for name in SOUND if name != "arguments as text"]
# The texts of these differ from one second to the next, or say too little of the chat.
FICKLE = ("the minute", "the second", "last message only")


def tokenizer(source: str = tiny.CHATML, kind: str = "byte_level") -> Tokenizer:
    made = copy.copy(tiny.load(kind))
    made.chat_template = ChatTemplate(source)
    return made


def completion(
    tok: Tokenizer, text: str, *, ids: list[int] | None = None, stop_reason: str | int | None = None
) -> Completion:
    """An answer that the model ended itself, spelled as `ids`."""
    spelled = tok.encode(text, add_bos=False) if ids is None else ids
    end = () if stop_reason is not None else (min(tok.eos_ids),)
    return Completion(
        index=0, text=text, token_ids=(*spelled, *end), finish_reason=FinishReason.STOP, stop_reason=stop_reason
    )


def spelled(tok: Tokenizer, ids: list[int]) -> str:
    return tok.decode(ids, skip_special_tokens=False)


def rendered(tok: Tokenizer, messages: list, *, generation: bool = True, tools: list | None = None) -> str:
    assert tok.chat_template is not None
    return tok.chat_template.render(
        messages, tools=tools, add_generation_prompt=generation, special_tokens=tok.special.texts
    )


def source_of(name: str) -> str:
    return STABLE[name] if name in STABLE else UNSTABLE[name][0]


@pytest.mark.parametrize("name", [*SOUND, *(name for name in UNSTABLE if name not in FICKLE)])
def test_tokens_spell_what_the_template_writes_and_stay_where_it_lets_them(name: str):
    tok = tokenizer(source_of(name))
    messages = [] if name == "counts turns" else [SYSTEM]  # that one refuses system messages
    transcript, before = ChatTranscript(tok, messages), []
    for question, answer in TURNS:
        messages = [*messages, {"role": "user", "content": question}]
        prompt = transcript.prompt(question).token_ids
        assert spelled(tok, prompt) == rendered(tok, messages)
        if name in KEEPS_ANSWERS:
            assert prompt[: len(before)] == before
        before = [*prompt, *tok.encode(answer, add_bos=False)]
        transcript.answer(completion(tok, answer))
        messages.append({"role": "assistant", "content": answer})
        assert transcript.messages == messages
        if name in KEEPS_ANSWERS:
            assert transcript.token_ids == before


@pytest.mark.parametrize("name", SOUND)
def test_as_one_prompt_the_tokens_are_the_same(name: str):
    tok = tokenizer(STABLE[name])
    transcript, messages = ChatTranscript(tok, [SYSTEM]), [SYSTEM]
    for question, answer in TURNS[:2]:
        messages.append({"role": "user", "content": question})
        assert transcript.prompt(question).token_ids == tok.encode_chat(messages)
        transcript.answer(completion(tok, answer))
        messages.append({"role": "assistant", "content": answer})
    messages.append(RESULT)
    assert transcript.prompt(RESULT).token_ids == tok.encode_chat(messages)


def test_what_was_generated_stays_as_it_was_spelled():
    tok = tokenizer()
    odd = [token for character in "jumps" for token in tok.encode(character, add_bos=False)]
    assert odd != tok.encode("jumps", add_bos=False)
    transcript = ChatTranscript(tok, [SYSTEM])
    first = transcript.prompt("a").token_ids
    transcript.answer(completion(tok, "jumps", ids=odd))
    second = transcript.prompt("b").token_ids
    assert second[: len(first) + len(odd)] == [*first, *odd]
    transcript.answer(completion(tok, "ok"))
    assert transcript.prompt("c").token_ids[: len(second)] == second


def test_an_answer_whose_tokens_say_something_else_is_spelled_anew():
    """A stop string, and tokens that the text does not show."""
    tok = tokenizer()
    for answer in (
        completion(tok, "jumps", ids=tok.encode("jumps over", add_bos=False), stop_reason=" over"),
        completion(tok, "jumps", ids=[*tok.encode("jumps", add_bos=False), *tok.encode("<|im_start|>", add_bos=False)]),
    ):
        transcript = ChatTranscript(tok, [SYSTEM])
        transcript.prompt("a")
        transcript.answer(answer)
        messages = [*transcript.messages, {"role": "user", "content": "b"}]
        assert messages[2] == {"role": "assistant", "content": "jumps"}
        assert transcript.prompt("b").token_ids == tok.encode_chat(messages)


def test_an_answer_that_the_template_refuses_is_told_with_the_next_turn():
    refuses = (
        "{% if messages[-1].content == '' or messages[-2].content == '' %}{{ raise_exception('empty') }}{% endif %}"
    )
    tok = tokenizer("{% if messages | length > 1 %}" + refuses + "{% endif %}" + tiny.CHATML)
    transcript = ChatTranscript(tok, [])
    transcript.prompt("a")
    transcript.answer(completion(tok, "", ids=tok.encode("x", add_bos=False), stop_reason="x"))
    assert transcript.messages[-1] == {"role": "assistant", "content": ""} and transcript.token_ids == []
    with pytest.raises(RequestError, match="refuses these messages: empty"):
        transcript.prompt("b")
    transcript.truncate(1)
    assert spelled(tok, transcript.token_ids) == rendered(tok, transcript.messages, generation=False)


def test_truncating_by_messages_and_turns_keeps_tokens():
    tok = tokenizer()
    transcript, lens = ChatTranscript(tok, [SYSTEM]), []
    for question, answer in TURNS[:2]:
        transcript.prompt(question)
        transcript.answer(completion(tok, answer))
        lens.append(len(transcript.token_ids))
    whole = transcript.token_ids
    assert [transcript.num_messages_of(turns) for turns in range(3)] == [1, 3, 5]
    first = transcript.copy()
    assert isinstance(first, ChatTranscript)
    first.truncate(3)
    assert first.token_ids[: lens[0]] == whole[: lens[0]]
    assert spelled(tok, first.token_ids) == rendered(tok, first.messages, generation=False)
    head = transcript.copy()
    assert isinstance(head, ChatTranscript)
    head.truncate(4)
    head.append({"role": "assistant", "content": "a summary"})
    assert spelled(tok, head.token_ids) == rendered(tok, head.messages, generation=False)
    common = rendered(tok, transcript.messages[:4], generation=False)
    assert head.token_ids[: len(tok.encode(common, add_bos=False))] == whole[: len(tok.encode(common, add_bos=False))]
    head.truncate(0)
    assert head.token_ids == [] and head.messages == []
    assert transcript.token_ids == whole, "copies go their own ways"


def test_turns_begin_with_the_users_first_message():
    tok = tokenizer(templates.CHATML_TOOLS)
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    transcript = ChatTranscript(tok, [SYSTEM, user, user, assistant, RESULT, assistant, user])
    assert [transcript.num_messages_of(turns) for turns in range(3)] == [1, 6, 7]
    with pytest.raises(RequestError, match="turns=3 must be a whole number between 0 and 2"):
        transcript.num_messages_of(3)
    with pytest.raises(RequestError, match="messages=8 must be a whole number between 0 and 7"):
        transcript.truncate(8)


def test_tools_are_laid_out_and_marks_become_tokens():
    tok = tokenizer(templates.CHATML_TOOLS)
    marked = {**SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    transcript = ChatTranscript(tok, [marked], [TOOL])
    prompt = transcript.prompt("hello")
    question = {"role": "user", "content": "hello"}
    assert spelled(tok, prompt.token_ids) == rendered(tok, [SYSTEM, question], tools=[TOOL])
    ((num_tokens, ttl_s),) = prompt.marks
    assert ttl_s == 3600 and 0 < num_tokens < len(prompt.token_ids)
    transcript.answer(completion(tok, "ok"))
    assert transcript.prompt("b").marks[0].num_tokens == num_tokens


def test_messages_that_are_refused_change_nothing():
    tok = tokenizer()
    transcript = ChatTranscript(tok, [SYSTEM])
    before = transcript.token_ids
    for use in (transcript.prompt, transcript.append):
        with pytest.raises(RequestError, match="must be text such as 'user'"):
            use({"content": "no role"})
    assert transcript.token_ids == before and transcript.messages == [SYSTEM]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_text_begins_as_a_prompt_and_goes_on_without_a_second_bos(kind: str):
    tok = tiny.load(kind)
    transcript = TextTranscript(tok)
    assert transcript.prompt("The quick").token_ids == tok.encode("The quick")
    transcript.append("The quick")
    prompt = transcript.prompt(" brown")
    assert prompt.token_ids == [*tok.encode("The quick"), *tok.encode(" brown", add_bos=False)]
    transcript.answer(completion(tok, "fox"))
    assert transcript.token_ids == [*prompt.token_ids, *tok.encode("fox", add_bos=False)]
