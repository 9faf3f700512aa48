"""Back end for `tokenizers` (tokenizer.json), and for what else can be built as one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxkv.errors import CheckpointError
from jaxkv.tokenizer.byte_decoder import parse_decoder


class HfVocabulary:
    """A `tokenizers.Tokenizer` as a `Vocabulary`."""

    trims_all_spaces = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # Lengths are the scheduler's business, but many files carry the limits of their training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._decoder = parse_decoder(_decoder_json(backend))
        self.utf8_errors = self._decoder.utf8_errors

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.to_bytes(token, added=token_id in self.added_ids)

    def first_token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.to_bytes(token, added=token_id in self.added_ids, first=True)

    def affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the file's post-processor puts before and after a prompt.

        Raises:
            CheckpointError: it does something else to the prompt.
        """
        bare = self.backend.encode("a", add_special_tokens=False).ids
        full = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
        raise CheckpointError(
            f"tokenizer.json: the post-processor makes {full} of ids {bare}; it may only add around them"
        )

    def save(self, folder: Path) -> Mapping[str, Any]:
        self.backend.save(str(folder / "tokenizer.json"))
        return {}


def load_hf_vocabulary(path: Path, config: Mapping[str, Any]) -> HfVocabulary:
    """Reads a tokenizer.json and adds what only tokenizer_config.json knows, as transformers does.

    Args:
        path: the tokenizer.json.
        config: the tokenizer_config.json, empty if there is none.

    Raises:
        CheckpointError: the file cannot be read, or both files disagree about an id.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: `tokenizers` {tokenizers.__version__} cannot read it: {error}") from error
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted((int(key), value) for key, value in entries.items()):
        if entry["content"] in known:
            continue
        backend.add_tokens([added_token(entry)])
        text, actual_id = entry["content"], backend.token_to_id(entry["content"])
        if actual_id != token_id:
            raise CheckpointError(
                f"{path.parent}: tokenizer_config.json gives {text!r} id {token_id}, tokenizer.json {actual_id}"
            )
        known.add(text)
    for text in special_texts(config).values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    return HfVocabulary(backend)


def added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    """An entry of `added_tokens_decoder`."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(entry["content"], **{name: entry[name] for name in names if name in entry})


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json (or special_tokens_map.json): name -> text."""
    values = {name: config.get(name) for name in _SPECIAL_NAMES}
    texts = {name: value["content"] if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _decoder_json(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """The decoder's description without the vocabulary's: a 256k vocabulary takes a second to write out."""
    if backend.decoder is None:
        return None
    probe = tokenizers.Tokenizer(tokenizers.models.BPE())
    probe.decoder = backend.decoder
    return json.loads(probe.to_str())["decoder"]
