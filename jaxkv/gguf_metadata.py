"""Reads the header of a GGUF file: keys and values, and the directory of tensors.

A 100 MB file's header with a 49k vocabulary takes 0.1 s here and 3.7 s in `gguf.GGUFReader`, which makes a numpy array
of every token. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxkv.errors import CheckpointError

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """An entry of the directory."""

    name: str
    shape: tuple[int, ...]  # slowest axis first, as numpy has it; the file lists the fastest first
    kind: int  # a `gguf.GGMLQuantizationType`
    offset: int  # bytes from the start of the file


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns every key of the header as plain Python values (int, float, bool, str, list).

    Args:
        path: a little-endian GGUF file, version 2 or 3.

    Raises:
        CheckpointError: the file is missing, no GGUF, of another version, or cut off.
    """
    return read_gguf_header(path).metadata


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The same with the directory of tensors.

    Raises:
        CheckpointError: the file is missing, cut off or damaged.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _Header(file, path.stat().st_size).read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


class _Header:
    """Cursor over the header; every fault is a ValueError that the caller turns into an error with the file's name."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._left = size  # bytes not read yet; lengths are checked against it before anything is allocated

    def read(self) -> GgufHeader:
        if self._left < 4 or self._take(4) != b"GGUF":
            raise ValueError("not a GGUF file: it does not start with 'GGUF'")
        version = self._unsigned(4)
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported; versions 2 and 3 (little-endian) are")
        num_tensors, num_keys = self._unsigned(8), self._unsigned(8)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._unsigned(4), key)
        tensors = [self._tensor() for _ in range(num_tensors)]
        position = self._size - self._left
        start = position + -position % int(metadata.get("general.alignment", 32))
        return GgufHeader(metadata, [tensor._replace(offset=start + tensor.offset) for tensor in tensors])

    def _tensor(self) -> GgufTensor:
        name = self._string()
        shape = tuple(self._unsigned(8) for _ in range(self._unsigned(4)))
        return GgufTensor(name, shape[::-1], self._unsigned(4), self._unsigned(8))

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            raise ValueError(f"truncated GGUF header: {num_bytes} bytes wanted, {self._left} left in the file")
        self._left -= num_bytes
        return self._file.read(num_bytes)

    def _unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _string(self) -> str:
        # The pair of reads is the hot spot: one per token of the vocabulary.
        (length,) = struct.unpack("<Q", self._take(8))
        return self._take(length).decode("utf-8", "replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, length = self._unsigned(4), self._unsigned(8)
            if kind in _SCALARS:
                return self._scalars(kind, length).tolist()
            return [self._value(kind, key) for _ in range(length)]
        if kind in _SCALARS:
            return self._scalars(kind, 1).item()
        raise ValueError(f"GGUF key {key!r} has unknown value type {kind}")

    def _scalars(self, kind: int, length: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(length * dtype.itemsize), dtype)
