"""Single rows of bf16 products, read as bits: the same numbers as anything else computes, from the same memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import one_row
from jaxkv.models.layers import PerLayer, linear, lookup, param
from tests.tiny import config, model


def bf16(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def bits_of(weight: jax.Array, is_matrix: bool = True, axes: tuple[str | None, ...] | None = None) -> jax.Array:
    leaf = param(*weight.shape, dtype=weight.dtype, axes=axes or (None,) * weight.ndim, is_matrix=is_matrix)
    return one_row.as_bits(leaf.replace(weight))


@pytest.mark.parametrize("num_in", [16, 48, 576, 4096, 2064])  # the last: more terms than wanted, and no wider lanes
def test_products_are_those_of_float64(num_in: int) -> None:
    weight, x = bf16(33, num_in), bf16(1, num_in, seed=1)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    found = one_row.multiply(x, bits_of(weight))
    assert found.dtype == jnp.float32 and found.shape == (1, 33)
    largest = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    assert (np.abs(found - exact) <= 1e-6 * largest).all(), "bf16 products are exact, their sum is float32"


def test_infinities_and_nans_come_through() -> None:
    weight = bf16(2, 16).at[0, 3].set(jnp.inf).at[1, 5].set(jnp.nan)
    found = np.asarray(one_row.multiply(jnp.ones((1, 16), jnp.bfloat16), bits_of(weight)))[0]
    assert found[0] == np.inf and np.isnan(found[1])


def test_bits_are_the_weights_own_memory() -> None:
    weight = bf16(8, 32)
    bits = bits_of(weight)
    assert bits.dtype == jnp.uint16 and bits.unsafe_buffer_pointer() == weight.unsafe_buffer_pointer()


def test_what_no_single_row_is_multiplied_with_stays_as_it_is() -> None:
    for weight, is_matrix, axes in [
        (bf16(32), False, None),  # a norm
        (bf16(4, 2, 32, 16), True, ("experts", None, None, None)),
        (bf16(8, 24), True, None),  # not in whole vectors
        (bf16(8, 32).astype(jnp.float32), True, None),
    ]:
        assert bits_of(weight, is_matrix, axes) is weight


def test_linear_and_lookup_take_bits() -> None:
    weight, x = bf16(3, 5, 32), bf16(1, 32, seed=1)
    bits, layer = bits_of(weight), jnp.int32(0)
    whole = linear(x, PerLayer([weight], layer), out_dtype=jnp.dtype(jnp.float32))
    found = linear(x, PerLayer([bits], layer), out_dtype=jnp.dtype(jnp.float32))
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    assert linear(x, PerLayer([bits], layer)).dtype == jnp.bfloat16
    table, ids = bf16(97, 32), jnp.array([96], jnp.int32)
    np.testing.assert_array_equal(lookup(bits_of(table, 0, ("vocab", None)), ids, as_bits=True), table[ids])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_bits_gives_the_logits_of_its_weights(tied: bool) -> None:
    decoder = model(config(tied=tied), dtype=jnp.bfloat16)
    graph, state = nnx.split(decoder)
    leaves, tree = jax.tree.flatten(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    bits = [leaf.replace(one_row.as_bits(leaf)) for leaf in leaves]
    num_bits = sum(leaf.get_value().dtype == jnp.uint16 for leaf in bits)
    assert num_bits == 2 * 4 + 1 + (not tied), "all matrices, and the embedding"
    twin = nnx.merge(graph, jax.tree.unflatten(tree, bits))

    def attend(layer, q, k, v, pool, **_):
        return q, pool

    def logits(decoder):
        hidden, _ = decoder.hidden(jnp.array([5], jnp.int32), jnp.array([0], jnp.int32), (), attend)
        return decoder.logits(hidden)

    one, other = logits(twin), logits(decoder)
    assert one.dtype == other.dtype == jnp.float32
    np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02 * float(jnp.abs(other).max()))
