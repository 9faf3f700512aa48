"""Layers shared by every family.

Axis letters: T tokens, L layers, E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary.

Weights are stored `[out, in]`, the layout checkpoints use, so that loading copies no transposes; XLA:CPU multiplies
bf16 twice as fast in this layout and XLA:TPU picks its own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Attend(Protocol):
    """Writes the new keys and values of one layer into the pool and attends; built by the step programs."""

    def __call__(
        self,
        layer: jax.Array,  # int32 []
        q: jax.Array,  # [T, H, D], rotated
        k: jax.Array,  # [T, K, D], rotated
        v: jax.Array,  # [T, K, D]
        pool: Any,
    ) -> tuple[jax.Array, Any]:  # [T, H, D], pool
        ...


def param(*shape: int, dtype: jnp.dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter of zeros with one logical axis name per dimension (see `sharding.RULES`).

    Modules are only ever built under `nnx.eval_shape`, so nothing is allocated here.
    """
    assert len(shape) == len(axes)
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


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

    def apply(self, function: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
        """`function(array of this layer, *args)`."""
        return jax.lax.switch(self.layer, [functools.partial(function, array) for array in self.arrays], *args)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.arrays, self.layer), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> "PerLayer":
        return cls(*children)


Weight = jax.Array | PerLayer


def read(weight: Weight) -> jax.Array:
    """The array itself: for small parameters."""
    return weight.apply(lambda array: array) if isinstance(weight, PerLayer) else weight


def linear(x: jax.Array, weight: Weight, num_in: int = 1, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts all but the first axis of `x [T, in..]` with the last `num_in` axes of `weight [out.., in..]`.

    Returns `[T, out..]` in `out_dtype`, by default x's; float32 is never rounded to bf16 or TF32.
    """
    if isinstance(weight, PerLayer):
        # XLA:CPU multiplies bf16 into float32 twice as fast as into bf16 (SmolLM2's products: 13 against 27 ms for 1-2
        # rows, 20 against 37 ms for 16, with AVX512-BF16).
        return weight.apply(lambda array, x: _linear_merged(x, array, num_in), x).astype(x.dtype)
    num_out = weight.ndim - num_in
    # The out axes stay as they are: merged, one that is split over devices and not the first would be gathered.
    return jax.lax.dot_general(
        x.reshape(x.shape[0], -1),
        weight.reshape(*weight.shape[:num_out], -1),
        (((1,), (num_out,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )


def _linear_merged(x: jax.Array, weight: jax.Array, num_in: int) -> jax.Array:
    """`linear` into float32 with the weight as a matrix: XLA:CPU transposes one of more axes at every call.

    (Where an axis but the first is split over devices, the weight is gathered; per-layer weights are the CPU's.)
    """
    out_shape = weight.shape[:-num_in]
    matrix = weight.reshape(math.prod(out_shape), -1)
    return linear(x, matrix, out_dtype=jnp.dtype(jnp.float32)).reshape(-1, *out_shape)


def lookup(table: jax.Array, token_ids: jax.Array, *, as_bits: bool) -> jax.Array:
    """Rows `token_ids [T]` of `table [V, E]`.

    Args:
        table: may be split over V.
        token_ids: int32.
        as_bits: read a bf16 table as bits, because XLA:CPU would convert all of it to float32 first; the barrier keeps
            XLA from hoisting a copy of the bits out of the decode loop. XLA:TPU makes that copy in any case (131 MB a
            step for Llama 3.1 8B over 8 devices, 14% of all bytes moved).
    """
    if table.dtype != jnp.bfloat16 or not as_bits:
        return table[token_ids]
    table, token_ids = jax.lax.optimization_barrier((table, token_ids))
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[token_ids], jnp.bfloat16)


def rms_norm(x: jax.Array, weight: Weight, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis in float32 (arXiv:1910.07467). `x [..., E]`, `weight [E]`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(read(weight), tuple(range(x.ndim - 1))) * x32.astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864), rotate-half layout.

    `scaling` follows Hugging Face: `None`, or the `llama3` rule (frequency bands between two wavelengths are
    interpolated), or `linear`; `factors` are divisors of the frequencies one by one, as GGUF files carry them.
    """

    head_dim: int
    base: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | factors
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_max_len: int = 8192  # llama3 only
    factors: tuple[float, ...] = ()  # factors only: D / 2 numbers

    def inv_freq(self) -> jax.Array:
        """float32 [D / 2], radians per position."""
        freq = 1.0 / self.base ** (jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim)
        if self.kind == "linear":
            return freq / self.factor
        if self.kind == "factors":
            return freq / jnp.asarray(self.factors, jnp.float32)
        if self.kind == "llama3":
            wavelen = 2 * math.pi / freq
            low, high = self.original_max_len / self.low_freq_factor, self.original_max_len / self.high_freq_factor
            smooth = (self.original_max_len / wavelen - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            middle = (1 - smooth) * freq / self.factor + smooth * freq
            return jnp.where(wavelen > low, freq / self.factor, jnp.where(wavelen < high, freq, middle))
        return freq

    def phases(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos, sin: float32 [T, 1, D / 2] for int32 positions [T]; float32 keeps 128k positions apart."""
        angle = positions.astype(jnp.float32)[:, None] * self.inv_freq()[None, :]
        return jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]


def rotate(x: jax.Array, phases: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate `x [T, heads, D]` by `phases` from `Rope.phases`, in float32."""
    cos, sin = phases
    lo, hi = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1).astype(x.dtype)


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
