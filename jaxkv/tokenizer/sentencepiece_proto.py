"""Writes a sentencepiece model, so that vocabularies from other files are encoded by sentencepiece itself.

Field numbers: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import enum
import struct
from collections.abc import Iterable


class PieceType(enum.IntEnum):
    """`ModelProto.SentencePiece.Type`; GGUF's `tokenizer.ggml.token_type` has the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def sentencepiece_bpe_model(
    pieces: Iterable[tuple[str, float, int]],
    *,
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    precompiled_charsmap: bytes = b"",
) -> bytes:
    """Returns a serialised `ModelProto` of type BPE.

    Args:
        pieces: (text, score, `PieceType`) by id; exactly one is UNKNOWN; higher scores merge first.
        byte_fallback: the 256 BYTE pieces spell what no other piece spells.
        add_dummy_prefix: a text is encoded with a space before it.
        remove_extra_whitespaces: runs of spaces become one, outer ones go.
        precompiled_charsmap: sentencepiece's compiled normalisation rules.
    """
    proto = bytearray()
    for text, score, kind in pieces:
        proto += _message(1, _message(1, text.encode()) + _float(2, score) + _varint(3, kind))
    bpe = 2  # TrainerSpec.ModelType
    proto += _message(2, _varint(3, bpe) + _varint(35, byte_fallback))
    rules = _message(2, precompiled_charsmap) if precompiled_charsmap else b""
    flags = _varint(3, add_dummy_prefix) + _varint(4, remove_extra_whitespaces) + _varint(5, True)
    proto += _message(3, _message(1, b"identity") + rules + flags)
    return bytes(proto)


_SINGLE_BYTES = [bytes([value]) for value in range(0x80)]  # nearly all numbers: three a piece, 262k pieces in Gemma


def _number(value: int) -> bytes:
    """Protobuf's varint: seven bits a byte, low ones first, the top bit on all but the last."""
    if value < 0x80:
        return _SINGLE_BYTES[value]
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _message(field: int, data: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(data)) + data


def _float(field: int, value: float) -> bytes:
    return _number(field << 3 | 5) + struct.pack("<f", value)
