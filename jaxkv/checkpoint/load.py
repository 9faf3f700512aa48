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
    progress: bool | None = None,
) -> nnx.Module:
    """Builds the model with its weights on the devices.

    Args:
        source: from `catalog.open_model`.
        family: from `model_config`.
        cfg: from `model_config`, maybe with copies of KV heads (`models.kv_heads`).
        dtype: of all parameters.
        mesh: the parameters' logical axes are laid over it, see `sharding.RULES`.
        per_layer: one module per layer instead of stacked parameters.
        progress: show a bar on stderr; None shows it on a terminal only.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen, unreadable or cut off; the message names them.
        ConfigError: the mesh does not divide the model.
    """
    graph, abstract = nnx.split(family.build(cfg, dtype, per_layer=per_layer))
    leaves = dict(nnx.to_flat_state(abstract))
    stored = nnx.state(family.build(cfg.as_stored, dtype, per_layer=per_layer))
    targets = sorted(_targets(leaves, dict(nnx.to_flat_state(stored)), mesh), key=lambda target: target.piece.order)
    pieces = [target.piece for target in targets]
    reader = source.reader(family.weight_map(cfg.as_stored))
    reader.check(pieces)
    filled: dict[tuple[Any, ...], jax.Array] = {}
    label = f"loading {source.location.name}"
    with Progress(label, total=sum(piece.num_bytes for piece in pieces), unit="B", show=progress) as bar:
        for target, array in zip(targets, reader.read(pieces), strict=True):
            # Waiting bounds the transfers in flight; the reader's threads go on meanwhile.
            array.block_until_ready()
            if target.sharding != target.piece.sharding:
                array = _copy_heads(array, family.copy_heads[target.piece.path], cfg.kv_copies, target.sharding)
            if target.is_stacked:
                assert target.piece.layer is not None
                stack = filled.get(target.leaf)
                if stack is None:
                    leaf = leaves[target.leaf]
                    stack = jnp.zeros(leaf.shape, dtype, device=named(mesh, leaf.logical_axes))
                array = _put_layer(stack, array, np.int32(target.piece.layer))
            filled[target.leaf] = array
            bar.advance(target.piece.num_bytes)
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(filled[path])) for path, leaf in leaves.items()]))


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, layer: jax.Array, index: np.int32) -> jax.Array:
    """`stack[index] = layer`, in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


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
        _check_divides(name, leaf.shape, axes, mesh)
        stacked = is_stacked(leaf)
        skip = 1 if stacked else 0
        sharding = named(mesh, axes[skip:])
        shape = stored[path].shape
        for at in range(shape[0]) if stacked else [layer]:
            piece = Piece(
                path=name,
                layer=at,
                shape=shape[skip:],
                dtype=np.dtype(leaf.dtype),
                sharding=sharding if shape == leaf.shape else named(mesh, ()),  # heads to copy go everywhere
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
