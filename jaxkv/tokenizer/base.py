"""`Tokenizer`: text to ids and back, the same for every back end.

A back end is a `Vocabulary`; it knows how one tokenizer format spells text. Which ids start a prompt, which ones end
an output and how a chat is laid out is decided once, here.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxkv.chats.chat import ChatTemplate
from jaxkv.chats.template_check import warn_if_unstable
from jaxkv.errors import RequestError


class Vocabulary(Protocol):
    """What a tokenizer format has to tell."""

    size: int  # ids are 0 .. size - 1; some may have no token
    special_ids: frozenset[int]  # tokens that `skip_special_tokens` hides
    added_ids: frozenset[int]  # tokens that are found in the text before anything else, special ones included
    utf8_errors: str  # `bytes.decode` error handler: what stands for bytes that are no UTF-8
    trims_all_spaces: bool  # all leading spaces of a text go, not only the first one

    def encode(self, text: str) -> list[int]:
        """Ids of `text` and of the added tokens in it; nothing is put before or after."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled `text`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes (maybe part of a character) of the token; empty for an id without token."""
        ...

    def first_token_bytes(self, token_id: int) -> bytes:
        """The same where the token begins a text: without the space that encoding put there."""
        ...

    def save(self, folder: Path) -> Mapping[str, Any]:
        """Writes its file, and returns what tokenizer_config.json has to say about it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The model's conventions around the vocabulary."""

    texts: Mapping[str, str]  # "bos_token", "eos_token", ... -> text, as chat templates see them
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()  # ids that end an output
    prefix_ids: tuple[int, ...] = ()  # put before a prompt: usually the BOS or nothing
    suffix_ids: tuple[int, ...] = ()  # put after a prompt: nothing in generating models


class Tokenizer:
    """Text to ids and back for one model. Build it with `load_tokenizer`.

    Attributes:
        vocab_size: the id space of the tokenizer; the model's logits may be wider.
        bos_id: id of the beginning-of-sequence token, None if there is none.
        add_bos: whether `encode` starts a prompt with the BOS by default.
        eos_ids: every id that ends an output: the tokenizer's EOS, all `generation_config.eos_token_id` and the end
            of turn of the chat template.
        special_ids: ids that `skip_special_tokens` hides.
        chat_template: None for a base model.
    """

    def __init__(
        self, vocabulary: Vocabulary, special: SpecialTokens, chat_template: ChatTemplate | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.special = special
        self.chat_template = chat_template
        self.vocab_size = vocabulary.size
        self.bos_id = special.bos_id
        self.add_bos = bool(special.prefix_ids)
        self.eos_ids = special.eos_ids
        self.special_ids = vocabulary.special_ids
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turns text into token ids; special tokens written in the text become their ids, as in Hugging Face.

        Args:
            text: any text without lone surrogates.
            add_bos: None does what the model's tokenizer does by default, False adds nothing. A BOS that is already
                there, because the text spells it, is not doubled.

        Raises:
            RequestError: the text cannot be written in UTF-8, or a BOS is asked for and there is none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text is not valid Unicode: lone surrogate at character {error.start}") from error
        ids = self.vocabulary.encode(text)
        if add_bos is False:
            return ids
        if add_bos and self.bos_id is None:
            raise RequestError("add_bos=True: this model's tokenizer has no BOS token; use add_bos=None")
        prefix = self.special.prefix_ids
        if add_bos and not prefix:
            assert self.bos_id is not None
            prefix = (self.bos_id,)
        if tuple(ids[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        return ids if add_bos else [*ids, *self.special.suffix_ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: ChatTemplate | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Lays out a chat with the model's template (or `template`) and encodes it; see `ChatTemplate.render`.

        The template alone decides about the BOS, so that there is never a second one. A template that rewrites earlier
        tokens when turns are appended is warned of once, in the log: prefix-cache hits end where it does.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        template = template or self.chat_template
        if template is None:
            raise RequestError("this model has no chat template; pass `template=ChatTemplate(...)` or a plain prompt")
        warn_if_unstable(template, self.special.texts)
        text = template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special.texts,
            variables=variables,
        )
        return self.encode(text, add_bos=False)

    def encode_bad_word(self, text: str) -> list[tuple[int, ...]]:
        """Token sequences that write `text` at the start of a text and after a space.

        vLLM drops the second where it is longer or begins alike; here it goes only if forbidding the first one
        already forbids it (its tail is the first one).
        """
        word = text.lstrip()
        bare = tuple(self.encode(word, add_bos=False))
        spaced = tuple(self.encode(" " + word, add_bos=False))
        sequences = [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
        return [ids for ids in sequences if ids]  # a vocabulary may have no way to write it

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Turns ids back into text. Spaces are left as they are (no `clean_up_tokenization_spaces`)."""
        data = TokenBytes(self, skip_special_tokens=skip_special_tokens).feed(ids)
        return data.decode("utf-8", self.vocabulary.utf8_errors)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes the token contributes to a text; empty for an id without token (a padded vocabulary)."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self.vocabulary.token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """The token's text for display: parts of characters show as U+FFFD, special tokens by name."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class TokenBytes:
    """Turns the ids of one text into its bytes, in pieces of any size.

    Encoding with sentencepiece puts a space before a text; the first token that contributes anything loses it again.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, continues: bool = False, keep: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped -= {tokenizer.vocabulary.token_id(text) for text in keep}
        self._at_start = not continues

    def feed(self, token_ids: Iterable[int]) -> bytes:
        return b"".join([self._next(token_id) for token_id in token_ids if token_id not in self._skipped])

    def _next(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if not self._at_start or not data:
            return data
        vocabulary = self._tokenizer.vocabulary
        trimmed = vocabulary.first_token_bytes(token_id)
        self._at_start = vocabulary.trims_all_spaces and not trimmed
        return trimmed
