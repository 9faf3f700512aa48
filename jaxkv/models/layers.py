"""Layers shared by every family.

Axis letters: T tokens, L layers, E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary.

Weights are stored `[out, in]`, the layout checkpoints use, so that loading copies no transposes; XLA:CPU multiplies
bf16 twice as fast in this layout and XLA:TPU picks its own.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models import one_row
from jaxkv.models.quant import Quantised, scaled


class Attend(Protocol):
    """Writes the new keys and values of one layer into the pool and attends; built by the step programs."""

    def __call__(
        self,
        layer: jax.Array,  # int32 []
        q: jax.Array,  # [T, H, D], rotated
        k: jax.Array,  # [T, K, D], rotated
        v: jax.Array,  # [T, K, D]
        pool: Any,
        *,
        scale: float,  # of the scores `q . k`
        window: jax.Array | int | None,  # int32 []: keys that a token sees, its own included; None: all
        soft_cap: float | None,  # of the scores
    ) -> tuple[jax.Array, Any]:  # [T, H, D], pool
        ...


def param(*shape: int, dtype: jnp.dtype, axes: tuple[str | None, ...], is_matrix: bool = False) -> nnx.Param:
    """A parameter of zeros with one logical axis name per dimension (see `sharding.RULES`).

    Modules are only ever built under `nnx.eval_shape`, so nothing is allocated here.

    Args:
        is_matrix: products contract its last axis, as `linear` does; such a one may be quantised (`quant`).
    """
    assert len(shape) == len(axes)
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes, is_matrix=is_matrix)


@jax.tree_util.register_pytree_node_class
class PerLayer:
    """One parameter of all layers as separate arrays, read at a traced layer index without copying any.

    Stands in for an array in a layer's `nnx.Param`. XLA:CPU copies a layer's weights out of a stacked array before it
    multiplies (45 ms against 20 ms for a SmolLM2 decode step in float32); a `lax.switch` over the layers' products
    reads them in place, and the rest of the layer is still compiled once.
    """

    def __init__(self, arrays: list[jax.Array], layer: jax.Array):
        self.arrays, self.layer = arrays, layer

    def __getitem__(self, key: object) -> "PerLayer":
        assert key is Ellipsis
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.arrays, self.layer), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> "PerLayer":
        return cls(*children)


Weight = jax.Array | PerLayer | Quantised


def apply(function: Callable[..., jax.Array], weights: tuple[Weight, ...], *args: jax.Array) -> jax.Array:
    """`function(*weights, *args)`; the arrays of the weights are all `PerLayer` or none is."""
    arrays, tree = jax.tree.flatten(weights, is_leaf=lambda each: isinstance(each, PerLayer))
    if not isinstance(arrays[0], PerLayer):
        return function(*weights, *args)
    layers = zip(*(each.arrays for each in arrays), strict=True)
    branches = [functools.partial(function, *jax.tree.unflatten(tree, layer)) for layer in layers]
    return jax.lax.switch(arrays[0].layer, branches, *args)


def read(weight: Weight) -> jax.Array:
    """The array itself: for small parameters."""
    return apply(lambda array: array, (weight,))


def linear(x: jax.Array, weight: Weight, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts `x [T, in]` with the last axis of `weight [out.., in]`.

    Returns `[T, out..]` in `out_dtype`, by default x's; float32 is never rounded to bf16 or TF32.
    """
    if isinstance(weight, PerLayer):
        # XLA:CPU multiplies bf16 into float32 twice as fast as into bf16 (SmolLM2's products: 13 against 27 ms for 1-2
        # rows, 20 against 37 ms for 16, with AVX512-BF16). One row goes its own way where its bits are at hand.
        product = apply(lambda array, x: _linear_merged(x, array), (weight,), x)
        return product.astype(out_dtype or x.dtype)
    if isinstance(weight, Quantised):
        return scaled(linear(x, weight.values, out_dtype), read(weight.scale)[None])
    weight = weight.astype(x.dtype)  # int8
    # The out axes stay as they are: merged, one that is split over devices and not the first would be gathered.
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (weight.ndim - 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )


def unrounded(weight: Weight, dtype: jnp.dtype) -> jnp.dtype:
    """The `out_dtype` of a `linear` whose result is computed with further before it is rounded to `dtype`: float32 where it is
    that anyway (XLA:CPU rounds to bf16 value by value: a fifth of a second of a SmolLM2 prefill of 4096 tokens)."""
    values = weight.values if isinstance(weight, Quantised) else weight
    return jnp.dtype(jnp.float32) if isinstance(values, PerLayer) else dtype


def _linear_merged(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`linear` into float32 with the weight as a matrix: XLA:CPU transposes one of more axes at every call.

    (Where an axis but the first is split over devices, the weight is gathered; per-layer weights are the CPU's.)
    """
    *out_shape, num_in = weight.shape
    matrix = weight.reshape(-1, num_in)
    if matrix.dtype == jnp.uint16:
        product = one_row.multiply(x, matrix)
    elif x.shape[0] == 1 and x.dtype != jnp.float32:  # ten times slower than two
        product = linear(jnp.concatenate([x, x]), matrix, out_dtype=jnp.dtype(jnp.float32))[:1]
    else:
        product = linear(x, matrix, out_dtype=jnp.dtype(jnp.float32))
    return product.reshape(-1, *out_shape)


def lookup(table: jax.Array, token_ids: jax.Array, *, as_bits: bool) -> jax.Array:
    """Rows `token_ids [T]` of `table [V, E]`.

    Args:
        table: may be split over V; or its bits, see `one_row`.
        token_ids: int32.
        as_bits: read a bf16 table as bits, because XLA:CPU would convert all of it to float32 first; the barrier keeps
            XLA from hoisting a copy of the bits out of the decode loop.
    """
    if table.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(table[token_ids], jnp.bfloat16)
    if table.dtype != jnp.bfloat16 or not as_bits:
        return table[token_ids]
    table, token_ids = jax.lax.optimization_barrier((table, token_ids))
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[token_ids], jnp.bfloat16)


def rms_norm(x: jax.Array, weight: Weight, eps: float, *, plus_one: bool = False) -> jax.Array:
    """Root-mean-square norm in float32 (arXiv:1910.07467) over the last axes of `x`, those that `weight` has.

    Args:
        plus_one: multiply by 1 + weight, and round after that, as Gemma does.
    """
    weight = read(weight)
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axes, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, tuple(range(x.ndim - weight.ndim)))
    if plus_one:
        return (x32 * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * x32.astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)` (arXiv:2408.00118); `x` if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def run_layers(layers: nnx.Module, body: Callable[[Any, jax.Array, Any], Any], carry: Any, num_layers: int) -> Any:
    """`carry = body(layer_module, layer_index, carry)` for each layer, under one `lax.scan`.

    One layer is compiled, and the pool in the carry stays in place.

    Args:
        layers: one module whose parameters are stacked on a leading L axis, or an `nnx.List` of one module per layer,
            whose parameters `body` then sees as `PerLayer`.
    """
    if isinstance(layers, nnx.List):
        graph, _ = nnx.split(layers[0])
        states = [nnx.split(layer)[1] for layer in layers]

        def at(layer: jax.Array) -> Any:
            return jax.tree.map(lambda *arrays: PerLayer(list(arrays), layer), *states)

        scanned: Any = jnp.arange(num_layers, dtype=jnp.int32)
        return jax.lax.scan(lambda c, layer: (body(nnx.merge(graph, at(layer)), layer, c), None), carry, scanned)[0]
    graph, stacked = nnx.split(layers)
    scanned = (jnp.arange(num_layers, dtype=jnp.int32), stacked)
    return jax.lax.scan(lambda c, xs: (body(nnx.merge(graph, xs[1]), xs[0], c), None), carry, scanned)[0]
