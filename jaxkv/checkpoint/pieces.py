"""What a loader asks a source for: the pieces a model is filled with, and the check that they are all there."""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxkv.errors import CheckpointError

_MAX_NAMES = 10  # in one error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter without layers, or one layer of a parameter."""

    path: str  # without layer numbers: "embed", "layers/qkv"
    layer: int | None
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def order(self) -> int:
        """What has no layer comes first, then layer after layer, as files are laid out."""
        return -1 if self.layer is None else self.layer

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def piece_name(path: tuple[Any, ...]) -> tuple[str, int | None]:
    """(`Piece.path`, layer) of a path in a module: `("layers", 3, "qkv")` is `("layers/qkv", 3)`."""
    name = "/".join(key for key in path if isinstance(key, str))
    return name, next((key for key in path if isinstance(key, int)), None)


def is_stacked(leaf: Any) -> bool:
    """Whether a parameter holds all layers on its first axis."""
    return leaf.logical_axes[:1] == ("layers",)


class PieceReader(Protocol):
    """Brings pieces from a source to the devices."""

    def check(self, pieces: Sequence[Piece]) -> None:
        """Compares what the model needs with what the source has, before anything is read.

        Raises:
            CheckpointError: naming what is missing, unexpected, of another shape or unreadable.
        """
        ...

    def read(self, pieces: Iterable[Piece]) -> Iterator[jax.Array]:
        """The pieces in order, placed as they ask for; no more than a few are held at once."""
        ...


def check_shapes(
    location: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    ignored: Sequence[str] = (),
    unreadable: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compares names and shapes.

    Args:
        location: of the source, for the error.
        found: name -> shape of what is there.
        wanted: name -> shape of what the model needs.
        ignored: `fnmatch` patterns of names that may be there as well.
        unreadable: name -> encoding of tensors that are stored in a way jaxkv cannot read.

    Raises:
        CheckpointError: one error for everything, naming up to ten of each kind.
    """
    extra = [n for n in found if n not in wanted and not any(fnmatch.fnmatchcase(n, pattern) for pattern in ignored)]
    common = [name for name in wanted if name in found]
    wrong = [f"{name} is {found[name]}, not {wanted[name]}" for name in common if found[name] != wanted[name]]
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": extra,
        "wrong shape": wrong,
        "stored in an unsupported type": [f"{name} ({unreadable[name]})" for name in common if name in unreadable],
    }
    texts = [f"{problem}: {_some(names)}" for problem, names in problems.items() if names]
    if texts:
        raise CheckpointError(f"{location}: the weights do not fit the config; {'; '.join(texts)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
