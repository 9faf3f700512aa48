"""How the tokens of a tokenizer.json spell bytes: its `decoder` section, read for one token at a time.

`tokenizers` decodes whole sequences; streaming, grammars and log-probabilities need each token's own bytes.
"""

import codecs
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from jaxkv.errors import CheckpointError

EACH_BYTE = "jaxkv.each_byte"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# sentencepiece writes one U+FFFD for each byte that is no UTF-8; Python's "replace" one for each cut-off character.
codecs.register_error(EACH_BYTE, _replace_each_byte)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where printable, else U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


@dataclasses.dataclass(frozen=True)
class ByteDecoder:
    """Token text -> bytes."""

    byte_level: bool = False  # characters stand for bytes (GPT-2)
    byte_fallback: bool = False  # "<0x41>" stands for a byte
    replacements: tuple[tuple[str, str], ...] = ()  # e.g. "▁" -> " "
    leading: str = ""  # taken off the start of a text once
    first_token_drops: str = ""  # character that vanishes from the first token (Metaspace)

    @property
    def utf8_errors(self) -> str:
        """Invalid bytes as the format's own decoder shows them.

        `tokenizers` turns a whole run of byte-fallback tokens into U+FFFD if any byte of it is wrong. Streaming would
        have to hold such runs back, so the characters that are complete are kept, as sentencepiece does.
        """
        return EACH_BYTE if self.byte_fallback else "replace"

    def to_bytes(self, token: str, *, added: bool = False, first: bool = False) -> bytes:
        """Bytes of a token; `added` tokens are spelled as plain text even in a byte-level vocabulary."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        elif self.byte_level and not added and all(char in byte_alphabet() for char in token):
            data = bytes(byte_alphabet()[char] for char in token)
        else:
            if first and self.first_token_drops:
                token = token.replace(self.first_token_drops, "")
            for old, new in self.replacements:
                token = token.replace(old, new)
            data = token.encode()
        return data.removeprefix(self.leading.encode()) if first else data


def parse_decoder(decoder: Mapping[str, Any] | None) -> ByteDecoder:
    """Reads the `decoder` of a tokenizer.json.

    Raises:
        CheckpointError: the decoder does something that has no per-token meaning; the message names it.
    """
    if decoder is None:
        raise CheckpointError("tokenizer.json has no decoder: jaxkv cannot tell how its tokens spell text")
    result = ByteDecoder()
    fused = False
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match step:
            case {"type": "ByteLevel"}:
                result = dataclasses.replace(result, byte_level=True)
            case {"type": "ByteFallback"}:
                result = dataclasses.replace(result, byte_fallback=True)
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                result = dataclasses.replace(result, replacements=(*result.replacements, (old, new)))
            case {"type": "Metaspace", "replacement": old} if not fused:
                drops = "" if step.get("prepend_scheme") == "never" else old
                replacements = (*result.replacements, (old, " "))
                result = dataclasses.replace(result, replacements=replacements, first_token_drops=drops)
            case {"type": "Strip", "content": content, "start": 0 | 1 as start, "stop": 0} if fused:
                result = dataclasses.replace(result, leading=content * start)
            case _:
                raise CheckpointError(f"tokenizer.json: decoder step {step} is not supported")
    return result
