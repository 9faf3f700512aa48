"""Puts parameters together from the tensors of a checkpoint, as the family's `WeightMap` says."""

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import jax
import numpy as np

from jaxkv.checkpoint.pieces import Piece, check_shapes
from jaxkv.checkpoint.tensors import TensorInfo, aligned_empty, same_bytes
from jaxkv.errors import CheckpointError
from jaxkv.models.weights import WeightMap

_AHEAD = 2  # pieces put together by threads while another one goes to the devices; dequantising keeps two cores busy

Item = TypeVar("Item")
Result = TypeVar("Result")


class TensorSource(Protocol):
    """Tensors under Hugging Face's names."""

    @property
    def location(self) -> Path:
        """The file or folder, for errors."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor in `dtype`; the array is the caller's own."""
        ...


class TensorReader:
    """A `PieceReader` over a `TensorSource`."""

    def __init__(self, source: TensorSource, weights: WeightMap) -> None:
        self._source = source
        self._weights = weights

    def check(self, pieces: Sequence[Piece]) -> None:
        source, weights = self._source, self._weights
        wanted = {
            part.name.format(layer=piece.layer): part.shape for piece in pieces for part in weights.params[piece.path]
        }
        check_shapes(
            source.location,
            {name: info.shape for name, info in source.tensors.items()},
            wanted,
            ignored=(*weights.ignored, *weights.copies),
            unreadable={
                name: info.encoding.name for name, info in source.tensors.items() if info.encoding.decode is None
            },
        )
        for name, original in weights.copies.items():
            if name in source.tensors and not same_bytes(source.tensors[name], source.tensors[original]):
                raise CheckpointError(
                    f"{source.location}: {name} differs from {original}, but the config ties them; set "
                    "tie_word_embeddings to false to use both"
                )

    def read(self, pieces: Iterable[Piece]) -> Iterator[jax.Array]:
        for piece, host in _ahead(lambda piece: (piece, self._assemble(piece)), pieces):
            yield jax.make_array_from_callback(piece.shape, piece.sharding, host.__getitem__)

    def _assemble(self, piece: Piece) -> np.ndarray:
        """The piece on the host: `piece[part.where] = tensor[rows].reshape(part.view)` for each part."""
        parts = self._weights.params[piece.path]
        if parts[0].where == ():
            return self._source.read(parts[0].name.format(layer=piece.layer), piece.dtype).reshape(parts[0].view)
        out = aligned_empty(piece.shape, piece.dtype)
        name, tensor = "", np.empty(0)
        for part in parts:
            if part.name != name:  # fused tensors are read once
                name, tensor = part.name, self._source.read(part.name.format(layer=piece.layer), piece.dtype)
            taken = tensor if part.rows is None else tensor[slice(*part.rows)]
            out[part.where] = taken.reshape(part.view)
        return out


def _ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map` in order, with the next `_AHEAD` results being computed by threads; never more than these are held."""
    waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_AHEAD, thread_name_prefix="jaxkv-load") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
