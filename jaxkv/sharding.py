"""The mesh and the one table from logical axes to mesh axes.

Rows and their pages are split over `data`, weights and K/V heads over `tensor`. Programs are written for one data shard
and run on all of them (`on_data_shards`); within one, XLA splits the arithmetic over `tensor` by itself, except for
kernels, which it cannot look into (`on_tensor_shards`).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.errors import ConfigError

DATA, TENSOR = "data", "tensor"

# logical axis -> mesh axis; everything else is replicated
RULES: dict[str | None, str | None] = {
    "rows": DATA,
    "pages": DATA,
    "kv_heads": TENSOR,
    "heads": TENSOR,  # the numbers of all query heads, one after the other: a device has those of its KV heads
    "ffn": TENSOR,
    "vocab": TENSOR,
    "experts": TENSOR,
    "layers": None,
    None: None,
}


def make_mesh(tensor: int = 1, data: int = 1) -> Mesh:
    """A mesh `(data, tensor)` of the first `data * tensor` devices.

    Raises:
        ConfigError: there are fewer devices, or these are no numbers of devices.
    """
    for name, size in ((TENSOR, tensor), (DATA, data)):
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}={size!r} must be a whole number >= 1")
    devices, num = jax.devices(), data * tensor
    if num > len(devices):
        raise ConfigError(
            f"data={data} x tensor={tensor} needs {num} devices, but {len(devices)} {devices[0].platform} device(s) are "
            f"visible; lower one of them"
        )
    if num == len(devices):  # laid out so that neighbours in the mesh are neighbours in the machine
        return jax.make_mesh((data, tensor), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
    return Mesh(np.asarray(devices[:num]).reshape(data, tensor), (DATA, TENSOR))


def spec(*axes: str | None) -> P:
    """The partition of an array whose dimensions have these logical names; trailing ones may be left out."""
    return P(*(RULES[axis] for axis in axes))


def named(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Sharding of an array whose dimensions have these logical names; trailing ones may be left out."""
    return NamedSharding(mesh, spec(*axes))


def on_data_shards(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on each data shard's part of the arguments; how they lie over `tensor` is left to XLA."""
    only_data = lambda partition: P(*(axis if axis == DATA else None for axis in partition))  # noqa: E731
    in_specs, out_specs = jax.tree.map(only_data, (in_specs, out_specs))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA}, check_vma=False
    )


def on_tensor_shards(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on each tensor shard's part of the arguments, within `on_data_shards`; it must need no other part."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)


def sum_over_tensor_shards(function: Callable[..., jax.Array], num_split: int) -> Callable[..., jax.Array]:
    """The sum of `function` over the tensor shards; each gets its part of the first `num_split` arguments' first axes.

    Outside a mesh there is one shard.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def run(*args: jax.Array) -> jax.Array:
        specs = tuple(P(TENSOR) if i < num_split else P() for i in range(len(args)))
        return on_tensor_shards(lambda *args: jax.lax.psum(function(*args), TENSOR), specs, P())(*args)

    return run


def any_data_shard(flag: jax.Array) -> jax.Array:
    """Where `flag` (bool, of any shape) holds on any data shard: the same answer on all.

    What guards collectives must be asked through this, so that all devices run the same ones.
    """
    if jax.lax.axis_size(DATA) == 1:  # XLA:CPU would make a collective of it
        return flag
    return jax.lax.pmax(flag.astype(np.int32), DATA) > 0


def whole(x: jax.Array) -> jax.Array:
    """`x` undivided on every tensor shard."""
    return jax.lax.with_sharding_constraint(x, P())
