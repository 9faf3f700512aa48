"""What was said in a session, as tokens: a text that grows, or a chat laid out by the model's template.

What was computed must stay as it is, token for token. A text only ever gets tokens appended. A chat is laid out anew for
each turn, and as far as its text begins with the text so far, the tokens stay; what a model generated stays as generated,
even where a tokenizer would have spelled it otherwise. Where a template rewrites what it wrote (`template_check`), the
template is right, and the chat is encoded anew from the last answer before that.
"""

import abc
import contextlib
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.cache_control import Mark
from jaxkv.chat_cache import read_marks
from jaxkv.chats.template_check import warn_if_unstable
from jaxkv.errors import RequestError
from jaxkv.request import Completion, FinishReason
from jaxkv.tokenizer import Tokenizer
from jaxkv.tokenizer.base import TokenBytes

Text = str | Sequence[int]
Message = Mapping[str, Any]


class Prompt(NamedTuple):
    """What a turn asks the engine."""

    token_ids: list[int]
    marks: tuple[Mark, ...] = ()


class Transcript(abc.ABC):
    """Tokens so far. A turn is `prompt` and then `answer`; without the latter it leaves no trace."""

    @property
    @abc.abstractmethod
    def token_ids(self) -> list[int]:
        """All tokens so far."""

    @abc.abstractmethod
    def copy(self) -> "Transcript":
        """One that goes its own way."""

    @abc.abstractmethod
    def prompt(self, more: Any) -> Prompt:
        """The prompt of a turn that begins with `more`; raises RequestError where that is malformed."""

    @abc.abstractmethod
    def answer(self, completion: Completion) -> None:
        """Takes in the turn: what was asked last, and what came of it."""

    @abc.abstractmethod
    def append(self, more: Any) -> None:
        """Adds to the end without asking for an answer; raises RequestError where it is malformed."""


class TextTranscript(Transcript):
    """Text or token ids without a template.

    Args:
        tokenizer: None takes token ids only.
    """

    def __init__(self, tokenizer: Tokenizer | None, token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(token_ids)
        self._asked = self._token_ids

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids

    def copy(self) -> "TextTranscript":
        return TextTranscript(self._tokenizer, self._token_ids)

    def prompt(self, more: Text) -> Prompt:
        self._asked = [*self._token_ids, *self._encode(more)]
        return Prompt(self._asked)

    def answer(self, completion: Completion) -> None:
        self._token_ids = [*self._asked, *_without_end(completion)]

    def append(self, more: Text) -> None:
        self._token_ids = self.prompt(more).token_ids

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens; raises RequestError where there are fewer."""
        _check_at_most("num_tokens", num_tokens, len(self._token_ids))
        self._token_ids = self._token_ids[:num_tokens]

    def _encode(self, more: Text) -> Sequence[int]:
        if not isinstance(more, str):
            return [_checked(token) for token in more]
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; pass token ids instead of text")
        return self._tokenizer.encode(more, add_bos=False if self._token_ids else None)


def _checked(token: Any) -> int:
    """A token id; the engine knows the vocabulary, but pages have names before it is asked."""
    if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < 2**31:
        raise RequestError(f"token id {token!r} must be a whole number of the vocabulary")
    return int(token)


class _Piece(NamedTuple):
    """A part of a chat's text and its tokens."""

    text: str
    token_ids: list[int]
    is_answer: bool = False  # generated; the others are what the template wrote between two answers


class ChatTranscript(Transcript):
    """Messages, laid out by the chat template.

    Args:
        tokenizer: with a chat template.
        messages: so far, with `cache_control` if the caller likes.
        tools: as `ChatTemplate.render` takes them.

    Raises:
        RequestError: there is no chat template, or it refuses the messages.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> None:
        if tokenizer is None or tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; begin the session with text or token ids")
        warn_if_unstable(tokenizer.chat_template, tokenizer.special.texts)
        self._tokenizer = tokenizer
        self._tools = tools
        self._messages = list(messages)
        self._pieces: list[_Piece] = []  # template's and model's by turns, up to the last answer
        self._rest: list[int] = []  # after the pieces: messages that no turn has asked yet
        self._asked: tuple[list[Message], list[_Piece]] = ([], [])
        self._lay_out_rest()

    @property
    def messages(self) -> list[Message]:
        """A copy of all messages, answers included."""
        return list(self._messages)

    @property
    def token_ids(self) -> list[int]:
        return [*_tokens(self._pieces), *self._rest]

    def copy(self) -> "ChatTranscript":
        return copy.copy(self)  # its lists are replaced, never changed

    def prompt(self, more: str | Message | Sequence[Message]) -> Prompt:
        messages = [*self._messages, *_as_messages(more)]
        chat = read_marks(messages, self._tools)
        text = self._render(chat.messages, chat.tools, add_generation_prompt=True)
        pieces = self._lay_out(text)
        self._asked = (messages, pieces)
        token_ids = _tokens(pieces)
        return Prompt(token_ids, chat.marks(token_ids, self._tokenizer))

    def answer(self, completion: Completion) -> None:
        messages, pieces = self._asked
        token_ids = _without_end(completion)
        self._messages = [*messages, {"role": "assistant", "content": completion.text}]
        self._rest = []
        if self._spell(token_ids) == completion.text:
            self._pieces = [*pieces, _Piece(completion.text, token_ids, is_answer=True)]
        else:  # a stop string or hidden tokens: the text that the next turn shows is not what these tokens say
            self._pieces = pieces[:-1]
            with contextlib.suppress(RequestError):  # the template refuses what was said: the next turn will say so
                self._lay_out_rest()

    def append(self, more: str | Message | Sequence[Message]) -> None:
        self._replace([*self._messages, *_as_messages(more)])

    def truncate(self, num_messages: int) -> None:
        """Keeps the first messages; raises RequestError where there are fewer."""
        _check_at_most("messages", num_messages, len(self._messages))
        self._replace(self._messages[:num_messages])

    def num_messages_of(self, num_turns: int) -> int:
        """Messages of the first turns; a turn begins with a user's message that follows on something else.

        Raises:
            RequestError: there are fewer turns.
        """
        roles = [read_marks([message]).messages[0].get("role") for message in self._messages]
        starts = [i for i, role in enumerate(roles) if role == "user" and (i == 0 or roles[i - 1] != "user")]
        _check_at_most("turns", num_turns, len(starts))
        return [*starts, len(roles)][num_turns]

    def _replace(self, messages: list[Message]) -> None:
        before = self._messages
        self._messages = messages
        try:
            self._lay_out_rest()
        except RequestError:
            self._messages = before
            raise

    def _lay_out_rest(self) -> None:
        """Makes pieces and rest say what the messages say, without asking for an answer."""
        chat = read_marks(self._messages, self._tools)
        if not chat.messages:
            self._pieces, self._rest = [], []
            return
        pieces = self._lay_out(self._open_text(chat.messages, chat.tools))
        self._pieces, self._rest = (pieces[:-1], pieces[-1].token_ids) if pieces else ([], [])

    def _lay_out(self, text: str) -> list[_Piece]:
        """The pieces that `text` begins with, and one for what follows; a cut lies behind an answer or at the start."""
        at, num_kept, kept_len = 0, 0, 0
        for index, piece in enumerate(self._pieces):
            if not text.startswith(piece.text, at):
                break
            at += len(piece.text)
            if piece.is_answer:
                num_kept, kept_len = index + 1, at
        rest = text[kept_len:]
        return [*self._pieces[:num_kept], _Piece(rest, self._tokenizer.encode(rest, add_bos=False))]

    def _open_text(self, messages: list[Any], tools: Any) -> str:
        """The text of a chat whose next message is not known; some templates want a user's message in it."""
        try:
            return self._render(messages, tools, add_generation_prompt=False)
        except RequestError:
            nexts = [[*messages, {"role": "user", "content": content}] for content in ("x", "y")]
            texts = [self._render(each, tools, add_generation_prompt=True) for each in nexts]
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
            return "".join(character for character, _ in alike)

    def _render(self, messages: list[Any], tools: Any, *, add_generation_prompt: bool) -> str:
        assert self._tokenizer.chat_template is not None
        return self._tokenizer.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt,
            special_tokens=self._tokenizer.special.texts,
        )  # fmt: skip

    def _spell(self, token_ids: list[int]) -> str:
        data = TokenBytes(self._tokenizer, skip_special_tokens=False, continues=True).feed(token_ids)
        return data.decode("utf-8", self._tokenizer.vocabulary.utf8_errors)


def _tokens(pieces: Sequence[_Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def _as_messages(more: str | Message | Sequence[Message]) -> list[Message]:
    if isinstance(more, str):
        return [{"role": "user", "content": more}] if more else []
    return [more] if isinstance(more, Mapping) or hasattr(more, "model_dump") else list(more)  # type: ignore[list-item]


def _without_end(completion: Completion) -> list[int]:
    """What was generated, without the id by which the model ended it: that is not part of the text."""
    is_end = completion.finish_reason is FinishReason.STOP and completion.stop_reason is None
    return list(completion.token_ids[:-1] if is_end else completion.token_ids)


def _check_at_most(name: str, value: object, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise RequestError(f"{name}={value!r} must be a whole number between 0 and {limit}, what the session has")
