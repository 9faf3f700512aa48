"""Fills a model with the weights of a source, straight into the target dtype and sharding.

One layer of one parameter at a time goes to the devices, so that the host never holds the model next to the devices'
copy. On the CPU, where both are the same memory, XLA takes over the host's arrays as they are (per layer), or they are
written into a donated stack (stacked).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxkv.checkpoint.pieces import Piece, is_stacked, piece_name
from jaxkv.checkpoint.source import ModelSource
from jaxkv.errors import CheckpointError, ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.quant import is_quantised, quantise_onto, shardings
from jaxkv.models.registry import Family, find_family
from jaxkv.progress import Progress
from jaxkv.sharding import RULES, named


def model_config(source: ModelSource) -> tuple[Family, ModelConfig]:
    """The family and the geometry of a source.

    Raises:
        CheckpointError: no family runs it, or its config asks for what jaxkv does not compute.
    """
    try:
        family = find_family(source.config)
        return family, family.config_from_hf(source.config)
    except CheckpointError as error:
        raise CheckpointError(f"{source.location}: {error}") from error


def load_model(
    source: ModelSource,
    family: Family,
    cfg: ModelConfig,
    *,
    dtype: np.dtype,
    mesh: Mesh,
    per_layer: bool,
    quant: str | None = None,
    progress: bool | None = None,
) -> nnx.Module:
    """Builds the model with its weights on the devices.

    Args:
        source: from `catalog.open_model`.
        family: from `model_config`.
        cfg: from `model_config`, maybe with copies of KV heads (`models.kv_heads`).
        dtype: of all parameters, before matrices are quantised.
        mesh: the parameters' logical axes are laid over it, see `sharding.RULES`.
        per_layer: one module per layer instead of stacked parameters.
        quant: what becomes of matrices, see `models.quant`; each layer's are quantised as they arrive.
        progress: show a bar on stderr; None shows it on a terminal only.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen, unreadable or cut off; the message names them.
        ConfigError: the mesh does not divide the model, or there is no such `quant`.
    """
    graph, abstract = nnx.split(family.build(cfg, dtype, per_layer=per_layer, quant=quant))
    leaves = dict(nnx.to_flat_state(abstract))
    stored = nnx.state(family.build(cfg.as_stored, dtype, per_layer=per_layer))
    targets = sorted(_targets(leaves, dict(nnx.to_flat_state(stored)), mesh), key=lambda target: target.piece.order)
    pieces = [target.piece for target in targets]
    reader = source.reader(family.weight_map(cfg.as_stored))
    reader.check(pieces)
    filled: dict[tuple[Any, ...], Any] = {}
    label = f"loading {source.location.name}"
    with Progress(label, total=sum(piece.num_bytes for piece in pieces), unit="B", show=progress) as bar:
        for target, array in zip(targets, reader.read(pieces), strict=True):
            leaf, piece = leaves[target.leaf], target.piece
            value: Any = array
            if target.sharding != piece.sharding:
                value = _copy_heads(array, family.copy_heads[piece.path], cfg.kv_copies, target.sharding)
            if is_quantised(leaf):
                value = quantise_onto(value, shardings(leaf, mesh, skip=int(target.is_stacked)))
            # Waiting bounds what is in flight; the reader's threads go on meanwhile.
            jax.block_until_ready(value)
            if target.is_stacked:
                assert piece.layer is not None
                stack = filled.get(target.leaf)
                value = _put_layer(_empty(leaf, mesh) if stack is None else stack, value, np.int32(piece.layer))
            filled[target.leaf] = value
            bar.advance(piece.num_bytes)
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(filled[path])) for path, leaf in leaves.items()]))


def _empty(leaf: Any, mesh: Mesh) -> Any:
    """A parameter's arrays, of zeros."""
    arrays, tree = jax.tree.flatten(leaf.get_value())
    placed = zip(arrays, shardings(leaf, mesh), strict=True)
    return jax.tree.unflatten(tree, [jnp.zeros(array.shape, array.dtype, device=where) for array, where in placed])


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: Any, layer: Any, index: np.int32) -> Any:
    """`stack[index] = layer`, in place, of each array of a parameter."""
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, index, 0), stack, layer)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _copy_heads(
    array: jax.Array, change: Callable[[jax.Array, int], jax.Array], copies: int, sharding: NamedSharding
) -> jax.Array:
    return jax.lax.with_sharding_constraint(change(array, copies), sharding)


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where a piece goes."""

    leaf: tuple[Any, ...]  # path in the module
    piece: Piece  # as stored
    sharding: NamedSharding  # of what becomes of it
    is_stacked: bool  # it is one index of the leaf's first axis


def _targets(leaves: dict[tuple[Any, ...], Any], stored: dict[tuple[Any, ...], Any], mesh: Mesh) -> Iterator[_Target]:
    for path, leaf in leaves.items():
        axes: tuple[str | None, ...] = leaf.logical_axes
        name, layer = piece_name(path)
        built: tuple[int, ...] = leaf.get_value().shape
        _check_divides(name, built, axes, mesh)
        stacked = is_stacked(leaf)
        skip = 1 if stacked else 0
        sharding = named(mesh, axes[skip:])
        shape, dtype = stored[path].shape, np.dtype(stored[path].dtype)
        for at in range(shape[0]) if stacked else [layer]:
            piece = Piece(
                path=name,
                layer=at,
                shape=shape[skip:],
                dtype=dtype,
                sharding=sharding if shape == built else named(mesh, ()),  # heads to copy go everywhere
            )
            yield _Target(path, piece, sharding, stacked)


def _check_divides(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh) -> None:
    for length, axis in zip(shape, axes, strict=True):
        mesh_axis = RULES[axis]
        if mesh_axis is not None and length % mesh.shape[mesh_axis]:
            raise ConfigError(
                f"{mesh_axis}={mesh.shape[mesh_axis]} does not divide the axis {axis}={length} of {name}; choose "
                f"a divisor of {length}"
            )
