"""Back end for sentencepiece (tokenizer.model), and for GGUF vocabularies of that kind."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from jaxkv.errors import CheckpointError
from jaxkv.tokenizer.byte_decoder import EACH_BYTE
from jaxkv.tokenizer.hf import added_token, special_texts

_SPACE = "▁"
# ModelProto{normalizer_spec{add_dummy_prefix: false}}. Protobuf merges concatenated messages, so appending it to a
# model makes the same model without the space before a text.
_NO_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceVocabulary:
    """A sentencepiece model plus tokens added to it, as a `Vocabulary`.

    Args:
        proto: a serialised sentencepiece `ModelProto`.
        added: tokens found in the text before sentencepiece sees it, by id; they may rename pieces.
        prefix_every_segment: the text after each added token starts with a space too ("legacy" in Hugging Face, and
            what llama.cpp does), not only the start of the text.
        special_names: tokens that are special whatever `added` and the model say.

    Raises:
        CheckpointError: not a sentencepiece model.
    """

    utf8_errors = EACH_BYTE

    def __init__(
        self,
        proto: bytes,
        added: Mapping[int, tokenizers.AddedToken],
        *,
        prefix_every_segment: bool = True,
        special_names: Iterable[str] = (),
    ) -> None:
        self._proto = proto
        self._model = _load(proto)
        self._inner_model = self._model if prefix_every_segment else _load(proto + _NO_PREFIX)
        num_pieces = self._model.get_piece_size()
        control = (i for i in range(num_pieces) if self._model.is_control(i) or self._model.is_unknown(i))
        self._added = {**{i: _special(self._model.id_to_piece(i)) for i in control}, **added}
        self._added_id = {token.content: i for i, token in self._added.items()}
        for name in special_names:
            if (token_id := self.token_id(name)) is not None:
                self._added.setdefault(token_id, _special(name)).special = True
                self._added_id[name] = token_id
        self.added_ids = frozenset(self._added)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.size = max([num_pieces - 1, *self._added]) + 1
        # `tokenizers` finds the added tokens, as Hugging Face does; its empty model drops the text between them.
        self._finder = tokenizers.Tokenizer(tokenizers.models.BPE(cache_capacity=0))
        self._finder.add_tokens(list(self._added.values()))
        self._found_id = {found: self._added_id[name] for name, found in self._finder.get_vocab().items()}
        # sentencepiece decodes as its model says; asking it is simpler than reading the model.
        self._trims = self._model.decode([_SPACE + "a"]) == "a"
        self.trims_all_spaces = self._model.decode([_SPACE, _SPACE + "a"]) == "a"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for position, segment in self._segments(text):
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                ids += (self._model if position == 0 else self._inner_model).encode(segment)
        return ids

    def _segments(self, text: str) -> Iterator[tuple[int, str | int]]:
        """(start, text between added tokens | id of an added token), in order."""
        end = 0
        found = self._finder.encode(text, add_special_tokens=False)
        for found_id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            yield end, text[end:start]
            yield start, self._found_id[found_id]
            end = stop
        yield end, text[end:]

    def token_id(self, text: str) -> int | None:
        if text in self._added_id:
            return self._added_id[text]
        token_id = self._model.piece_to_id(text)
        return token_id if self._model.id_to_piece(token_id) == text else None  # unknown text maps to <unk>

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if token_id >= self._model.get_piece_size():
            return b""
        piece = self._model.id_to_piece(token_id)
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    def first_token_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        is_text = token_id not in self._added and not self._model.is_byte(token_id)
        return data.removeprefix(b" ") if self._trims and is_text else data

    def named_tokens(self) -> dict[str, str]:
        """The model's own special tokens in the words of a tokenizer_config.json."""
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(), "unk_token": self._model.unk_id()}
        return {name: self._added[token_id].content for name, token_id in ids.items() if token_id >= 0}

    def save(self, folder: Path) -> Mapping[str, Any]:
        (folder / "tokenizer.model").write_bytes(self._proto)
        names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        added = {str(i): {name: getattr(token, name) for name in names} for i, token in sorted(self._added.items())}
        return {"legacy": self._inner_model is self._model, "added_tokens_decoder": added}


def load_sentencepiece_vocabulary(
    path: Path, config: Mapping[str, Any], added: Mapping[str, int]
) -> SentencePieceVocabulary:
    """Reads a tokenizer.model.

    Args:
        path: the tokenizer.model.
        config: the tokenizer_config.json, empty if there is none.
        added: the added_tokens.json of older folders, text -> id.

    Raises:
        CheckpointError: the file is no sentencepiece model (Llama 3's own `tokenizer.model` is a tiktoken file).
    """
    tokens = {i: tokenizers.AddedToken(text, normalized=False) for text, i in added.items()}
    entries: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    tokens |= {int(key): added_token(entry) for key, entry in entries.items()}
    try:
        proto = path.read_bytes()
        return SentencePieceVocabulary(
            proto,
            tokens,
            prefix_every_segment=bool(config.get("legacy", True)),
            special_names=special_texts(config).values(),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; a tokenizer.json beside it would be used instead") from error


def _special(text: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=True, normalized=False)


def _load(proto: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"not a sentencepiece model: {error}") from error
