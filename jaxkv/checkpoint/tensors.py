"""How the bytes of a file become numbers.

Files are read with plain reads instead of being mapped: mapped pages would count as this process's memory a second
time next to the weights, and a file that shrinks under a mapping kills the process.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.errors import CheckpointError

_CHUNK = 1 << 17  # elements decoded at once: 512 KiB of float32, which stay in the L2 cache (measured best for Q4_1)
_COMPARE_BYTES = 1 << 20  # read at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How numbers are stored: `block` numbers in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int
    # uint8 [num_blocks * block_bytes] -> numbers [num_blocks * block]; None: jaxkv cannot read this encoding
    decode: Callable[[np.ndarray], np.ndarray] | None
    dtype: np.dtype | None = None  # set if the bytes are numbers of this type as they are


def plain_encoding(name: str, dtype: Any) -> Encoding:
    """Numbers stored as numpy (or `ml_dtypes`) has them, little-endian."""
    dtype = np.dtype(dtype)
    return Encoding(name=name, block=1, block_bytes=dtype.itemsize, decode=lambda raw: raw.view(dtype), dtype=dtype)


PLAIN_ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        plain_encoding("F64", np.float64),
        plain_encoding("F32", np.float32),
        plain_encoding("F16", np.float16),
        plain_encoding("BF16", ml_dtypes.bfloat16),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor's place in a file."""

    name: str  # as the file spells it
    shape: tuple[int, ...]
    encoding: Encoding
    path: Path
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which XLA:CPU takes over without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def read_tensor(info: TensorInfo, dtype: np.dtype) -> np.ndarray:
    """Reads a tensor and converts it chunk by chunk: no second copy of it exists in any other type.

    Raises:
        CheckpointError: the encoding is not supported, or the file is shorter than its header says.
    """
    encoding = info.encoding
    if encoding.decode is None:
        raise CheckpointError(f"{info.path}: tensor {info.name!r} is stored as {encoding.name}, which is not supported")
    out = aligned_empty(info.shape, dtype)
    flat = out.reshape(-1)
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.offset)
            if encoding.dtype == dtype:
                _read_exactly(file, flat.view(np.uint8), info)
                return out
            step = _CHUNK // encoding.block * encoding.block
            raw = np.empty(step // encoding.block * encoding.block_bytes, np.uint8)
            for start in range(0, flat.size, step):
                target = flat[start : start + step]
                piece = raw[: target.size // encoding.block * encoding.block_bytes]
                _read_exactly(file, piece, info)
                target[...] = encoding.decode(piece)
    except OSError as error:
        raise CheckpointError(f"{info.path}: tensor {info.name!r} cannot be read: {error.strerror or error}") from error
    return out


def _read_exactly(file: Any, out: np.ndarray, info: TensorInfo) -> None:
    view = out.data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise CheckpointError(
                f"{info.path}: truncated: tensor {info.name!r} should end at byte {info.offset + info.num_bytes}, the "
                f"file ends at {file.tell()}; fetch it again"
            )
        view = view[count:]


def check_extent(info: TensorInfo, file_size: int) -> None:
    """Refuses a file that ends before the tensor does.

    Raises:
        CheckpointError: with both byte counts.
    """
    if info.offset + info.num_bytes > file_size:
        raise CheckpointError(
            f"{info.path}: truncated: tensor {info.name!r} should end at byte {info.offset + info.num_bytes}, the file "
            f"has {file_size} bytes; fetch it again"
        )


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors hold the same numbers in the same encoding."""
    if (one.shape, one.encoding.name) != (other.shape, other.encoding.name):
        return False
    with one.path.open("rb") as one_file, other.path.open("rb") as other_file:
        one_file.seek(one.offset)
        other_file.seek(other.offset)
        for start in range(0, one.num_bytes, _COMPARE_BYTES):
            count = min(_COMPARE_BYTES, one.num_bytes - start)
            if one_file.read(count) != other_file.read(count):
                return False
    return True
