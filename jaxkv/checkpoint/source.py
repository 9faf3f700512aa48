"""What every kind of model file offers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxkv.checkpoint.pieces import PieceReader
from jaxkv.errors import CheckpointError
from jaxkv.models.weights import WeightMap

CHECKPOINT_MARKER = "jaxkv.json"  # the file that tells a folder written by `convert` from others


class ModelSource(Protocol):
    """A model on disk: everything but the weights."""

    @property
    def location(self) -> Path:
        """The file or folder, for errors."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """In the words of Hugging Face's config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any] | None:
        """In the words of generation_config.json; None if there is none."""
        ...

    @property
    def tokenizer_source(self) -> Path | Mapping[str, Any] | None:
        """What `load_tokenizer` takes: a folder or GGUF metadata; None if the model has no tokenizer."""
        ...

    @property
    def auto_dtype(self) -> np.dtype:
        """What "auto" stands for: float32 if most weights are stored so, else bfloat16."""
        ...

    @property
    def digest(self) -> str:
        """Names the weights and the geometry, for prefix-cache keys; see `file_source.tensors_digest`."""
        ...

    def reader(self, weights: WeightMap) -> PieceReader:
        """What brings the weights to the devices."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value
