"""GGUF files, dequantised while they are read.

The header is read by `gguf_metadata` (0.1 s where `gguf.GGUFReader` takes 4-9 s for a vocabulary of 49k tokens); the
`gguf` package knows the block formats.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxkv.checkpoint.file_source import FileSource
from jaxkv.checkpoint.gguf_config import ARCHITECTURES, ROPE_FACTORS, gguf_config
from jaxkv.checkpoint.gguf_names import hf_tensors, restore
from jaxkv.checkpoint.tensors import PLAIN_ENCODINGS, Encoding, TensorInfo, check_extent, read_tensor
from jaxkv.errors import CheckpointError
from jaxkv.gguf_metadata import GgufTensor, read_gguf_header
from jaxkv.models.registry import find_family

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
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.location}: general.architecture={name!r} is not known; jaxkv knows {known}")
        if (parts := header.metadata.get("split.count", 0)) > 1:
            raise CheckpointError(
                f"{self.location}: one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        self._architecture = ARCHITECTURES[name]
        size = self.location.stat().st_size
        infos = {tensor.name: _tensor_info(self.location, tensor, size) for tensor in header.tensors}
        factors = {key: infos.pop(key) for key in ROPE_FACTORS if key in infos}
        try:
            self.config: Mapping[str, Any] = gguf_config(
                name,
                header.metadata,
                {key: info.shape for key, info in infos.items()},
                {key: tuple(read_tensor(info, np.dtype(np.float32)).tolist()) for key, info in factors.items()},
            )
            family = find_family(self.config)
            cfg = family.config_from_hf(self.config)
            self.tensors: Mapping[str, TensorInfo] = hf_tensors(name, cfg.num_layers, family.weight_map(cfg), infos)
        except CheckpointError as error:
            raise error if str(self.location) in str(error) else CheckpointError(f"{self.location}: {error}") from error
        self._heads = cfg.num_heads, cfg.num_kv_heads

    @property
    def generation_config(self) -> Mapping[str, Any] | None:
        """The ids that end an output: of the sequence, of a turn and of a message."""
        ends = [self._metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        return {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}

    @property
    def tokenizer_source(self) -> Mapping[str, Any] | None:
        return self._metadata if "tokenizer.ggml.model" in self._metadata else None

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        info = self.tensors[name]
        # Norms are stored plus one, which would round them in bfloat16.
        exact = self._architecture.norm_shift and name.endswith("norm.weight")
        tensor = read_tensor(info, np.dtype(np.float32) if exact else dtype)
        return restore(self._architecture, name, tensor, *self._heads).astype(dtype, copy=False)


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
