"""`load_tokenizer`: finds a model's tokenizer, its special tokens and its chat template."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import CheckpointError
from jaxkv.gguf_metadata import read_gguf_metadata
from jaxkv.tokenizer.base import SpecialTokens, Tokenizer, Vocabulary
from jaxkv.tokenizer.gguf import gguf_config, gguf_vocabulary
from jaxkv.tokenizer.hf import HfVocabulary, load_hf_vocabulary, special_texts
from jaxkv.tokenizer.sentencepiece import SentencePieceVocabulary, load_sentencepiece_vocabulary


class GgufField(Protocol):
    """`gguf.ReaderField`."""

    def contents(self) -> Any: ...


class GgufReader(Protocol):
    """The part of `gguf.GGUFReader` that is used here."""

    @property
    def fields(self) -> Mapping[str, GgufField]: ...


def load_tokenizer(
    source: str | os.PathLike[str] | Mapping[str, Any] | GgufReader,
    *,
    generation_config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        source: a folder (tokenizer.json, else tokenizer.model), a .gguf file, its metadata, or a `gguf.GGUFReader`.
        generation_config: whose `eos_token_id` (one or several) ends outputs too; None takes the folder's
            generation_config.json, or config.json where there is none.

    Raises:
        CheckpointError: there is no tokenizer, or one jaxkv does not know; the message names file and reason.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            return _from_folder(path, generation_config)
        try:
            return _from_gguf(read_gguf_metadata(path), generation_config)
        except CheckpointError as error:
            raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error
    if isinstance(source, Mapping):
        return _from_gguf(source, generation_config)
    keys = (key for key in source.fields if key.startswith("tokenizer."))
    return _from_gguf({key: source.fields[key].contents() for key in keys}, generation_config)


def _from_gguf(metadata: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> Tokenizer:
    return _assemble(gguf_vocabulary(metadata), gguf_config(metadata), generation_config)


def _from_folder(folder: Path, generation_config: Mapping[str, Any] | None) -> Tokenizer:
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    config["chat_template"] = _read_chat_templates(folder) or config.get("chat_template")
    vocabulary: HfVocabulary | SentencePieceVocabulary
    if (path := folder / "tokenizer.json").exists():
        vocabulary = load_hf_vocabulary(path, config)
    elif (path := folder / "tokenizer.model").exists():
        added = _read_json(folder / "added_tokens.json")
        vocabulary = load_sentencepiece_vocabulary(path, config, added)
        # The model does not say what a prompt starts with; Hugging Face starts it with the BOS.
        config = {**vocabulary.named_tokens(), "add_bos_token": True, **config}
    else:
        raise CheckpointError(f"{folder}: no tokenizer: neither tokenizer.json nor tokenizer.model is there")
    if generation_config is None:
        generation_config = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    return _assemble(vocabulary, config, generation_config)


def _assemble(
    vocabulary: HfVocabulary | SentencePieceVocabulary,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
) -> Tokenizer:
    """Puts vocabulary and conventions together.

    Args:
        vocabulary: the back end.
        config: in the words of tokenizer_config.json, plus `eos_ids` (GGUF, `Tokenizer.save`).
        generation_config: for its `eos_token_id`.
    """
    texts = special_texts(config)
    bos_id, eos_id = (
        vocabulary.token_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token")
    )
    prefix, suffix = vocabulary.affixes() if isinstance(vocabulary, HfVocabulary) else ((), ())
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if add_bos is not None or add_eos is not None:  # overrides the post-processor, as in transformers
        prefix = (bos_id,) if add_bos and bos_id is not None else ()
        suffix = (eos_id,) if add_eos and eos_id is not None else ()
    templates = _named_templates(config.get("chat_template"))
    chat_template = ChatTemplate(templates) if templates else None
    eos_ids = {eos_id, *config.get("eos_ids", ()), *_as_ids((generation_config or {}).get("eos_token_id"))}
    if chat_template is not None:
        eos_ids.add(_end_of_turn_id(vocabulary, chat_template, texts))
    special = SpecialTokens(
        texts=texts,
        bos_id=bos_id if bos_id is not None or not prefix else prefix[0],
        eos_ids=frozenset(token_id for token_id in eos_ids if token_id is not None),
        prefix_ids=prefix,
        suffix_ids=suffix,
    )
    return Tokenizer(vocabulary, special, chat_template)


def _end_of_turn_id(vocabulary: Vocabulary, template: ChatTemplate, texts: Mapping[str, str]) -> int | None:
    """The added token with which the template closes an assistant's message (`<|im_end|>`, `<|eot_id|>`, ...)."""
    after = template.end_of_turn(texts).lstrip()
    ids = vocabulary.encode(after) if after else []
    return ids[0] if ids and ids[0] in vocabulary.added_ids else None


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _named_templates(value: Any) -> dict[str, str]:
    """`chat_template` as tokenizer_config.json (text or list) and others here (dict) give it."""
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return dict(value) if isinstance(value, Mapping) else {entry["name"]: entry["template"] for entry in value}


def _read_chat_templates(folder: Path) -> dict[str, str]:
    """Templates in files of their own, which win over those in tokenizer_config.json."""
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").exists():
        paths["default"] = path
    templates = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return templates or _named_templates(_read_json(folder / "chat_template.json").get("chat_template"))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is not there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value
