"""The mesh and the one table from logical axes to mesh axes."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.errors import ConfigError

# logical axis -> mesh axis; everything else is replicated
RULES: dict[str | None, str | None] = {
    "kv_heads": "tensor",
    "ffn": "tensor",
    "vocab": "tensor",
    "layers": None,
    None: None,
}


def make_mesh(tensor: int) -> Mesh:
    """A mesh of the first `tensor` devices.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices = jax.devices()
    if not 1 <= tensor <= len(devices):
        raise ConfigError(
            f"tensor={tensor} needs that many devices, but {len(devices)} {devices[0].platform} device(s) are visible"
        )
    return Mesh(np.asarray(devices[:tensor]), ("tensor",))


def named(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Sharding of an array whose dimensions have these logical names."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
