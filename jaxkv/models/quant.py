"""Weights in int8 with one float32 scale for each output channel: half the memory of bfloat16, and half the reads.

A product multiplies by the whole numbers, which the activations' dtype holds exactly, and then by the scales:
`sum_i x_i (q_oi s_o) = s_o sum_i x_i q_oi`. So what is computed is the model of the dequantised weights, up to the order
of roundings; all that is lost is lost when the weights are rounded.

Matrices are the parameters that say that they are (`layers.param`): those of attention, MLP and
experts, and a head that is not tied to the embedding. Embedding, norms, biases and routers stay as they are.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxkv.errors import ConfigError
from jaxkv.sharding import named

SCHEMES = ("int8",)
SCALE_BYTES = 4
_MOST = 127  # symmetric: -128 is not used


def check_scheme(quant: str | None) -> None:
    """Raises ConfigError if there is no such scheme; None stands for weights as they are."""
    if quant is not None and quant not in SCHEMES:
        raise ConfigError(
            f"quant={quant!r} is not supported; jaxkv quantises weights to {', '.join(SCHEMES)}, or to nothing without "
            "this setting"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """Stands in for an array in an `nnx.Param`, as `layers.PerLayer` does; its fields may be stacked, or `PerLayer`."""

    values: Any  # int8 [out.., in]
    scale: Any  # float32 [out..]

    def __getitem__(self, key: object) -> "Quantised":
        assert key is Ellipsis
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def quantise(weight: jax.Array) -> Quantised:
    """`weight [out.., in]` to the nearest multiples of a 127th of a channel's largest.

    Both fields are the same on every mesh: no step of it depends on the order of a sum.
    """
    exact = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=-1, keepdims=True)
    scale = largest / _MOST
    scale = jnp.where(scale == 0, 1.0, scale)  # a channel of zeros
    values = jnp.clip(jnp.round(exact / scale), -_MOST, _MOST)
    return Quantised(values.astype(jnp.int8), jnp.squeeze(scale, -1))


def dequantise(weight: Quantised) -> jax.Array:
    """float32 `[out.., in]`: what a `Quantised` stands for."""
    return weight.values.astype(jnp.float32) * weight.scale[..., None]


def scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    """What a product with `Quantised.values` becomes, in its dtype; `scale` is float32 and has as many axes."""
    return (product.astype(jnp.float32) * scale).astype(product.dtype)


@functools.partial(jax.jit, static_argnums=1)
def quantise_onto(weight: jax.Array, placed: tuple[NamedSharding, NamedSharding]) -> Quantised:
    """`quantise` on the devices; `placed` says how values and scales lie there."""
    made = quantise(weight)
    return Quantised(*map(jax.lax.with_sharding_constraint, (made.values, made.scale), placed))


def with_quantised_matrices(module: nnx.Module) -> nnx.Module:
    """A module of `jax.ShapeDtypeStruct`s with a `Quantised` for each matrix."""
    graph, state = nnx.split(module)

    def change(leaf: Any) -> Any:
        return leaf.replace(jax.eval_shape(quantise, leaf.get_value())) if leaf.is_matrix else leaf

    return nnx.merge(graph, nnx.from_flat_state([(path, change(leaf)) for path, leaf in nnx.to_flat_state(state)]))


def is_quantised(leaf: Any) -> bool:
    """Whether a parameter is."""
    return isinstance(leaf.get_value(), Quantised)


def shardings(leaf: Any, mesh: Mesh, skip: int = 0) -> tuple[NamedSharding, ...]:
    """How the arrays of a parameter lie over a mesh, without its first `skip` axes: a `Quantised` has two."""
    axes = leaf.logical_axes[skip:]
    whole = named(mesh, axes)
    return (whole, named(mesh, axes[:-1])) if is_quantised(leaf) else (whole,)
