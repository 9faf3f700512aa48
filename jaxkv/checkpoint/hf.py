"""Hugging Face folders: config.json, safetensors (one file, or several with an index), generation_config.json.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.checkpoint.file_source import FileSource
from jaxkv.checkpoint.source import read_json
from jaxkv.checkpoint.tensors import PLAIN_ENCODINGS, Encoding, TensorInfo, check_extent, read_tensor
from jaxkv.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class HfSource(FileSource):
    """A folder as `save_pretrained` and the hub lay it out.

    Raises:
        CheckpointError: a file is missing, damaged or cut off; the message names it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.location = Path(folder)
        self.config: Mapping[str, Any] = read_json(self.location / "config.json")
        path = self.location / "generation_config.json"
        self.generation_config: Mapping[str, Any] | None = read_json(path) if path.exists() else None
        self.tensors: Mapping[str, TensorInfo] = _read_folder(self.location)

    @property
    def tokenizer_source(self) -> Path | None:
        return self.location if any((self.location / name).exists() for name in _TOKENIZER_FILES) else None

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return read_tensor(self.tensors[name], dtype)


def _read_folder(folder: Path) -> dict[str, TensorInfo]:
    if (folder / _INDEX).exists():
        return _read_sharded(folder)
    if (folder / _SINGLE).exists():
        return {info.name: info for info in read_safetensors_header(folder / _SINGLE)}
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    raise CheckpointError(
        f"{folder}: neither {_SINGLE} nor {_INDEX} is there (found {found}); pickled weights are not read: "
        "convert them with transformers' `save_pretrained`"
    )


def _read_sharded(folder: Path) -> dict[str, TensorInfo]:
    files = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{folder / _INDEX}: it has no object 'weight_map'")
    present: dict[str, dict[str, TensorInfo]] = {}
    for file in sorted(set(files.values())):
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} is missing, but {_INDEX} names it; fetch the folder again")
        present[file] = {info.name: info for info in read_safetensors_header(folder / file)}
    tensors = {name: info for infos in present.values() for name, info in infos.items()}
    lost = [f"{name} ({file})" for name, file in files.items() if name not in present[file]]
    if lost:
        raise CheckpointError(f"{folder / _INDEX} names tensors that are not in their files: {', '.join(lost[:10])}")
    return tensors


def read_safetensors_header(path: Path) -> Iterator[TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: not such a file, or it is shorter than its header says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: truncated or no safetensors file: a header of {length} bytes in {size} bytes"
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _tensor_info(path, name, entry, 8 + length, size)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> TensorInfo:
    try:
        shape, kind = tuple(int(length) for length in entry["shape"]), str(entry["dtype"])
        start, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header's entry for tensor {name!r} is damaged: {entry!r}") from error
    encoding = PLAIN_ENCODINGS.get(kind) or Encoding(name=kind, block=1, block_bytes=1, decode=None)
    info = TensorInfo(
        name=name, shape=shape, encoding=encoding, path=path, offset=data_start + start, num_bytes=end - start
    )
    if encoding.decode is not None and info.num_bytes != math.prod(shape) * encoding.block_bytes:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape} and type {kind} has {info.num_bytes} bytes")
    check_extent(info, file_size)
    return info
