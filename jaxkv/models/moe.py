"""Mixture of experts: each token goes to its likeliest experts, and none is dropped.

Axis letters: T tokens, E embed, F ffn of an expert, X experts, k experts of a token.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sharding
from jaxkv.models.config import Experts
from jaxkv.models.layers import Weight, apply, linear
from jaxkv.models.quant import Quantised, scaled


def mixture(
    x: jax.Array,  # [T, E]
    router: Weight,  # [X, E]
    gate_up: Weight,  # [X, 2, F, E]
    down: Weight,  # [X, E, F]
    experts: Experts,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:  # [T, E]
    """The weighted sum of each token's `experts.per_token` likeliest MLPs (arXiv:2101.03961, arXiv:2401.04088).

    Tokens are sorted by expert, so that the products of all experts are two ragged matmuls of T * k rows, whatever the
    router chose. Each device of the `tensor` axis has some of the experts, and computes the rows that are theirs.
    """
    weights, chosen = route(x, router, experts)
    order = jnp.argsort(chosen.reshape(-1))  # stable: rows of one expert stay in the order of their tokens
    place = jnp.argsort(order).reshape(chosen.shape)  # [T, k]: where the rows of a token are after sorting
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.num).astype(jnp.int32)

    def on_device(gate_up: Any, down: Any, ids: jax.Array, *arrays: jax.Array) -> jax.Array:
        return _local_mixture(gate_up, down, ids, *arrays, activation=activation)

    def on_all(gate_up: Any, down: Any, *arrays: jax.Array) -> jax.Array:
        # No `jnp.arange`: XLA makes one of it and the one in `sizes`, and splits that over devices too.
        ids = np.arange(experts.num, dtype=np.int32)
        return sharding.sum_over_tensor_shards(on_device, num_split=3)(gate_up, down, ids, *arrays)

    return apply(on_all, (gate_up, down), x, weights, order, place, sizes)


def _local_mixture(
    gate_up: jax.Array | Quantised,  # [x, 2, F, E], x: experts of this device
    down: jax.Array | Quantised,  # [x, E, F]
    ids: jax.Array,  # int32 [x]: which experts these are
    x: jax.Array,  # [T, E]
    weights: jax.Array,  # float32 [T, k]
    order: jax.Array,  # int32 [T * k]: (token, its j-th expert), sorted by expert
    place: jax.Array,  # int32 [T, k]: its inverse
    sizes: jax.Array,  # int32 [X]: rows of each expert
    *,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:  # [T, E]
    """What this device's experts add. Their rows are brought to the front; what comes after them counts as zero."""
    num_rows, per_token = order.shape[0], weights.shape[1]
    own = jax.lax.dynamic_slice_in_dim(sizes, ids[0], ids.shape[0])
    start = jnp.where(jnp.arange(sizes.shape[0]) < ids[0], sizes, 0).sum()
    index = jnp.arange(num_rows, dtype=jnp.int32)
    rows = x[order[(index + start) % num_rows] // per_token]
    gated = _ragged_linear(rows, gate_up, own)  # [T * k, 2, F]
    out = _ragged_linear(activation(gated[:, 0]) * gated[:, 1], down, own)
    place = (place - start) % num_rows
    out = jnp.where((place < own.sum())[..., None], out[place].astype(jnp.float32), 0.0)  # [T, k, E]
    return (out * weights[..., None]).sum(axis=1).astype(x.dtype)


def _ragged_linear(rows: jax.Array, weight: jax.Array | Quantised, sizes: jax.Array) -> jax.Array:
    """`rows [N, in]`, the first `sizes[0]` by `weight[0] [out.., in]` and so on; anything after the last group."""
    if isinstance(weight, Quantised):
        product = _ragged_linear(rows, weight.values.astype(rows.dtype), sizes)
        return scaled(product, jnp.repeat(weight.scale, sizes, axis=0, total_repeat_length=rows.shape[0]))
    num_groups, *out_shape, num_in = weight.shape
    out = jax.lax.ragged_dot_general(
        rows,
        weight.reshape(num_groups, -1, num_in),
        sizes,
        _ROWS_BY_GROUP,
        precision=jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
    )
    return out.reshape(-1, *out_shape)


_ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def route(x: jax.Array, router: Weight, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Of each token: the weights float32 [T, k] of its experts, and which they are, int32 [T, k]."""
    scores = jax.nn.softmax(linear(x, router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(scores, experts.per_token)
    if experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen
