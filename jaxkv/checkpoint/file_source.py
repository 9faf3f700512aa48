"""What Hugging Face folders and GGUF files have in common: a directory of tensors in files."""

import abc
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.checkpoint.assemble import TensorReader
from jaxkv.checkpoint.pieces import PieceReader
from jaxkv.checkpoint.tensors import TensorInfo
from jaxkv.models.weights import WeightMap

_SAMPLES, _SAMPLE_BYTES = 4, 1024  # of each tensor, for the digest


class FileSource(abc.ABC):
    """The part of a `ModelSource` that does not depend on the format."""

    location: Path
    config: Mapping[str, Any]  # in the words of Hugging Face's config.json
    tensors: Mapping[str, TensorInfo]  # by Hugging Face's names

    @abc.abstractmethod
    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor in `dtype`; the array is the caller's own."""

    @property
    def auto_dtype(self) -> np.dtype:
        return majority_dtype(self.tensors)

    @property
    def digest(self) -> str:
        return tensors_digest(self.config, self.tensors)

    def reader(self, weights: WeightMap) -> PieceReader:
        return TensorReader(self, weights)


def majority_dtype(tensors: Mapping[str, TensorInfo]) -> np.dtype:
    """float32 if most numbers are stored as F32 or F64, else bfloat16."""
    wide = sum(info.size for info in tensors.values() if info.encoding.name in ("F32", "F64"))
    total = sum(info.size for info in tensors.values())
    return np.dtype(np.float32 if 2 * wide > total else ml_dtypes.bfloat16)


def tensors_digest(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 over the config and, of each tensor, name, shape, encoding and four samples of 1 KiB spread over it.

    The same on every machine, and takes milliseconds instead of the seconds of a full hash. Weights that differ only
    in bytes between the samples get the same digest; a training step changes all of them.
    """
    state = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        info = tensors[name]
        state.update(json.dumps([name, info.shape, info.encoding.name]).encode())
        stride = max((info.num_bytes - _SAMPLE_BYTES) // max(_SAMPLES - 1, 1), 1)
        with info.path.open("rb", buffering=0) as file:
            for start in sorted({min(i * stride, max(info.num_bytes - _SAMPLE_BYTES, 0)) for i in range(_SAMPLES)}):
                file.seek(info.offset + start)
                state.update(file.read(min(_SAMPLE_BYTES, info.num_bytes)))
    return state.hexdigest()
