"""How a family's parameters are put together from the tensors of a checkpoint, as plain data.

Names are Hugging Face's; other formats translate theirs. A parameter path is written with slashes and without layer
numbers: `embed`, `layers/qkv`.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor, or some of its rows, and its place in a parameter: `param[where] = tensor[rows].reshape(view)`."""

    name: str  # of the tensor; "{layer}" stands for the layer's number
    shape: tuple[int, ...]  # as stored
    view: tuple[int, ...]  # as many elements, laid out as the parameter wants them
    where: tuple[int | slice, ...] = ()  # () is the whole parameter
    rows: tuple[int, int] | None = None  # first and end of those that are taken; None: all


def whole(name: str, *shape: int, view: tuple[int, ...] | None = None) -> tuple[Part, ...]:
    """A parameter that is one tensor, maybe under another shape."""
    return (Part(name=name, shape=shape, view=view or shape),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMap:
    """What a checkpoint of one model has to hold."""

    params: Mapping[str, tuple[Part, ...]]  # parameter path -> its parts
    # Tensors that may be there as well, by `fnmatch` pattern: nothing reads them.
    ignored: tuple[str, ...] = ()
    # Tensors that may be there as well if they equal another one: a head stored beside the embedding it is tied to.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
