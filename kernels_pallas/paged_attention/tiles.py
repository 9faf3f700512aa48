"""What every back end of paged attention takes: query tiles, and how values are stored in the pool.

Axis letters: N tiles, Q queries of a tile, M pages per tile's row, S tokens per page.
"""

import dataclasses

import jax
import jax.numpy as jnp

INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """N runs of at most Q neighbouring tokens, each of one row. A decode row is a tile of one token.

    Tiles of one row stand side by side in order of position, all of them full but the last one, and in one part of a call.
    Nobody else owns the pages that they write.
    """

    page_table: jax.Array  # int32 [N, M]: pages of the tile's row, within a layer
    start: jax.Array  # int32 [N]: position of the first token
    num_tokens: jax.Array  # int32 [N]: real tokens, the first ones; 0 for a padding tile
    row_start: jax.Array  # int32 [N]: `start` of the row's first tile; the keys before are in the pool already
    width: int = dataclasses.field(metadata={"static": True})  # Q

    @property
    def size(self) -> int:
        """Tokens including padding, N * Q."""
        return self.start.shape[0] * self.width

    @property
    def kv_len(self) -> jax.Array:
        """int32 [N]: keys that the last token sees; 0 for a padding tile."""
        return jnp.where(self.num_tokens > 0, self.start + self.num_tokens, 0)

    def places(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Where the tokens' K/V belong: page within a layer and offset in it, int32 [N * Q]; padding: null page 0."""
        token = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        position = self.start[:, None] + token
        index = jnp.minimum(position // page_size, self.page_table.shape[1] - 1)
        page = jnp.where(token < self.num_tokens[:, None], jnp.take_along_axis(self.page_table, index, axis=1), 0)
        return page.reshape(-1), (position % page_size).reshape(-1)


def to_stored(x: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
    """`x / scale` as the pool's dtype: rounded and saturated for int8, saturated for float8."""
    if dtype == jnp.int8:
        x = jnp.round(x.astype(jnp.float32) / scale)
        return jnp.clip(x, -INT8_MAX, INT8_MAX).astype(dtype)
    if dtype == jnp.float8_e4m3fn:
        most = float(jnp.finfo(dtype).max)
        return jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype)
    assert scale == 1.0, "only int8 and float8 pools have scales"
    return x.astype(dtype)
