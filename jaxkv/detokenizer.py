"""Incremental detokenisation: text comes out as soon as it is certain, and each byte is looked at once."""

import codecs
from collections.abc import Iterable

from jaxkv.tokenizer.base import TokenBytes, Tokenizer


class Detokenizer:
    """Turns the ids of one output into text, piece by piece.

    The pieces, with `flush`, join to exactly `tokenizer.decode(ids)`: a character split over tokens waits for its last
    byte, U+FFFD appears only for bytes that can no longer become a character, and the space sentencepiece puts before
    a text goes once.

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out.
        continues: the ids go on from a text (a completion of a prompt) rather than start one, so that a leading space
            is part of the output: "The capital of France is" + " Paris". Only sentencepiece-like vocabularies care.
        keep: special tokens that are shown all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        keep: Iterable[str] = (),
    ) -> None:
        self._bytes = TokenBytes(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues, keep=keep)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.vocabulary.utf8_errors)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is certain now and was not returned before."""
        return self._utf8.decode(self._bytes.feed(token_ids))

    def flush(self) -> str:
        """Ends the output; returns what stands for a character that was cut off."""
        return self._utf8.decode(b"", final=True)
