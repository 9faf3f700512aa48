"""Tokenizers out of GGUF metadata (the `tokenizer.*` keys that llama.cpp defines)."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxkv.errors import CheckpointError
from jaxkv.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from jaxkv.tokenizer.hf import HfVocabulary
from jaxkv.tokenizer.sentencepiece import SentencePieceVocabulary
from jaxkv.tokenizer.sentencepiece_proto import PieceType, sentencepiece_bpe_model


def gguf_vocabulary(metadata: Mapping[str, Any]) -> HfVocabulary | SentencePieceVocabulary:
    """Builds the vocabulary a GGUF file describes.

    Raises:
        CheckpointError: a key is missing, or the kind of tokenizer is unknown; the message names it.
    """
    model = _get(metadata, "tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level_bpe(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    raise CheckpointError(f"tokenizer.ggml.model={model!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' are")


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of the metadata in the words of a tokenizer_config.json, plus `eos_ids`.

    `eos_ids` holds the end of sequence, of turn and of message: llama.cpp stops at each.
    """
    tokens = _get(metadata, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config["eos_ids"] = [i for i in ends if i is not None]
    # Without the flag llama.cpp adds a BOS to sentencepiece vocabularies and to those of Llama 3 and Tekken.
    pre = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))
    default = metadata["tokenizer.ggml.model"] == "llama" or (pre is not None and pre.add_bos)
    config["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", default)
    config["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    templates = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    }
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    config["chat_template"] = templates or None
    return config


def _byte_level_bpe(metadata: Mapping[str, Any]) -> HfVocabulary:
    tokens = _get(metadata, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "tokenizer.ggml.merges")]
    name = metadata.get("tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre={name!r} is not supported: without its rule for splitting text the token ids would be "
            f"wrong. Known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(pre.build()))
    backend.decoder = decoders.ByteLevel()
    types = _per_token(metadata, "tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in metadata else ()
    kinds = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}  # type -> special
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in kinds
        ]
    )
    return HfVocabulary(backend)


def _sentencepiece(metadata: Mapping[str, Any]) -> SentencePieceVocabulary:
    """Writes the metadata back into the sentencepiece model it was made from, so that sentencepiece itself encodes."""
    tokens = _get(metadata, "tokenizer.ggml.tokens")
    scores = _per_token(metadata, "tokenizer.ggml.scores")
    types = _per_token(metadata, "tokenizer.ggml.token_type")
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    pieces: list[tuple[str, float, int]] = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        if i == unknown_id:
            kind = PieceType.UNKNOWN
        elif kind == PieceType.UNKNOWN:  # sentencepiece wants exactly one
            kind = PieceType.UNUSED
        if kind not in (PieceType.CONTROL, PieceType.UNKNOWN):
            token = token.replace(" ", "▁")  # Gemma's files write runs of spaces as such
        pieces.append((token or f"[EMPTY_{i}]", score, kind))
    proto = sentencepiece_bpe_model(
        pieces,
        byte_fallback=sum(kind == PieceType.BYTE for kind in types) == 256,
        add_dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
        precompiled_charsmap=bytes(byte & 0xFF for byte in metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
    )
    return SentencePieceVocabulary(proto, {})


def _per_token(metadata: Mapping[str, Any], key: str) -> list[Any]:
    values, num_tokens = _get(metadata, key), len(_get(metadata, "tokenizer.ggml.tokens"))
    if len(values) != num_tokens:
        raise CheckpointError(f"{key} has {len(values)} entries for {num_tokens} tokens")
    return values


def _get(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise CheckpointError(f"GGUF metadata has no {key}: the file carries no usable tokenizer")
    return metadata[key]
