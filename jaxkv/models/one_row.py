"""One row times bf16 weights, as fast as a CPU reads them.

XLA:CPU multiplies a few bf16 rows through a library that repacks the weights at every call: it reads them at 14 GB/s where
the memory gives 33 (two cores with AVX512-BF16), and a single row at 1.5. As sums of slices the same product is a plain loop
over 16 outputs' partial sums, which LLVM vectorises: 32 GB/s. It must not see bf16 on the way, for XLA:CPU would convert
every slice to float32 and back; so it takes the bits, which are the upper half of a float32.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LANES = 16  # partial sums of an output: a vector of AVX-512
MAX_TERMS = 128  # slices of a row; each is code of its own


def as_bits(leaf: Any) -> Any:
    """A parameter's value as `linear` and `lookup` may take it where one row is computed.

    Args:
        leaf: an `nnx.Param` on a single CPU device.

    Returns:
        The bits of a bf16 matrix, uint16 of the same shape `[out.., in]`, over the parameter's own memory. Any other value
        as it is: of no matrix, quantised, of experts, or not a whole number of `LANES` wide.
    """
    value, first_axis = leaf.get_value(), leaf.logical_axes[0]
    is_matrix = (leaf.is_matrix or first_axis == "vocab") and first_axis != "experts"
    if not is_matrix or not isinstance(value, jax.Array) or value.dtype != jnp.bfloat16 or value.shape[-1] % LANES:
        return value
    return jax.device_put(np.asarray(value).view(np.uint16), value.sharding)


@jax.jit  # traced once for each shape, however many layers there are
def multiply(x: jax.Array, bits: jax.Array) -> jax.Array:
    """`x [1, in]` times the transpose of `bits [out, in]`, which `as_bits` made: float32 `[1, out]`, summed in float32."""
    x, bits = jax.lax.optimization_barrier((x, bits))  # else XLA converts a head once, before the loop over tokens
    num_out, num_in = bits.shape
    lanes = LANES
    while num_in // lanes > MAX_TERMS and num_in % (2 * lanes) == 0:
        lanes *= 2
    bits = bits.reshape(num_out, -1, lanes)
    x = x.astype(jnp.float32).reshape(1, -1, lanes)
    terms = (_to_float32(bits[:, i]) * x[:, i] for i in range(num_in // lanes))
    partial = functools.reduce(operator.add, terms)  # [out, lanes]
    ones = jnp.ones((1, lanes), jnp.float32)
    return jax.lax.dot_general(ones, partial, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _to_float32(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
