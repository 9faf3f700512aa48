"""GGUF files, dequantised while they are read.

The header is read by `gguf_metadata` (0.1 s where `gguf.GGUFReader` takes 4-9 s for a vocabulary of 49k tokens); the
`gguf` package knows the block formats.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxkv.checkpoint import gguf_llama
from jaxkv.checkpoint.file_source import FileSource
from jaxkv.checkpoint.tensors import PLAIN_ENCODINGS, Encoding, TensorInfo, check_extent, read_tensor
from jaxkv.errors import CheckpointError
from jaxkv.gguf_metadata import GgufTensor, read_gguf_header

# general.architecture -> what its files say
_ARCHITECTURES: Mapping[str, ModuleType] = {"llama": gguf_llama}
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


class GgufSource(FileSource):
    """A .gguf file.

    Raises:
        CheckpointError: the file is missing, damaged, cut off, one part of several, or of an unknown architecture.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = Path(path)
        header = read_gguf_header(self.location)
        self._metadata = header.metadata
        name = str(header.metadata.get("general.architecture"))
        if name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(f"{self.location}: general.architecture={name!r} is not known; jaxkv knows {known}")
        if (parts := header.metadata.get("split.count", 0)) > 1:
            raise CheckpointError(
                f"{self.location}: one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        self._architecture = _ARCHITECTURES[name]
        size = self.location.stat().st_size
        infos = [_tensor_info(self.location, tensor, size) for tensor in header.tensors]
        tensors = {self._architecture.hf_name(info.name): info for info in infos}
        factors = tensors.pop(self._architecture.ROPE_FACTORS, None)
        self.tensors: Mapping[str, TensorInfo] = tensors
        try:
            self.config: Mapping[str, Any] = self._architecture.config(
                header.metadata,
                {name: info.shape for name, info in tensors.items()},
                read_tensor(factors, np.dtype(np.float32)) if factors else None,
            )
        except CheckpointError as error:
            raise error if str(self.location) in str(error) else CheckpointError(f"{self.location}: {error}") from error

    @property
    def generation_config(self) -> Mapping[str, Any] | None:
        """The ids that end an output: of the sequence, of a turn and of a message."""
        ends = [self._metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        return {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}

    @property
    def tokenizer_source(self) -> Mapping[str, Any] | None:
        return self._metadata if "tokenizer.ggml.model" in self._metadata else None

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return self._architecture.restore(name, read_tensor(self.tensors[name], dtype), self.config)


def _tensor_info(path: Path, tensor: GgufTensor, file_size: int) -> TensorInfo:
    encoding = _encoding(path, tensor)
    row = tensor.shape[-1] if tensor.shape else 1
    if row % encoding.block:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has rows of {row} numbers, which is no multiple of the "
            f"{encoding.block} of a {encoding.name} block"
        )
    info = TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        encoding=encoding,
        path=path,
        offset=tensor.offset,
        num_bytes=math.prod(tensor.shape) // encoding.block * encoding.block_bytes,
    )
    check_extent(info, file_size)
    return info


def _encoding(path: Path, tensor: GgufTensor) -> Encoding:
    try:
        kind = GGMLQuantizationType(tensor.kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} is of GGML type {tensor.kind}, which is not known"
        ) from error
    if kind.name in PLAIN_ENCODINGS:
        return PLAIN_ENCODINGS[kind.name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    decode = _dequantiser(kind) if kind.name in _QUANTISED else None
    return Encoding(name=kind.name, block=block, block_bytes=block_bytes, decode=decode)


def _dequantiser(kind: GGMLQuantizationType) -> Callable[[np.ndarray], np.ndarray]:
    """One long row: the package works on 16 rows at a time, which is slow for the short rows of small models."""
    return lambda raw: dequantize(raw.reshape(1, -1), kind).reshape(-1)
