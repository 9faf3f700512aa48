"""Cases that every back end of paged attention must get right, and attention written the obvious way.

Axis letters as in `kernels_pallas.paged_attention.reference`. Every cell of the pool that no tile may read holds NaN: pages
of nobody, the null page, and the tail of each last page (behaviour 38).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.tiles import Tiles, to_stored

SCALE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 8
    width: int = 1  # Q
    dtype: str = "float32"  # of q, k, v
    kv_dtype: str | None = None  # of the pool, if another
    first_page: int = 0  # pages of the layers before
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kv_scale: tuple[float, float] = (1.0, 1.0)

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in dataclasses.astuple(self))

    @property
    def pool_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.kv_dtype or self.dtype)

    @property
    def tolerance(self) -> float:
        """Of outputs of order one; a quantised pool is compared after its own rounding."""
        return 2e-5 if self.dtype == "float32" else 2e-2


@dataclasses.dataclass(frozen=True)
class Case:
    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, K, D]
    v: np.ndarray  # [T, K, D]
    pool: np.ndarray  # [P, 2, K, S, D], without the new tokens
    parts: tuple[Tiles, ...]
    sinks: np.ndarray | None  # float32 [H]
    expected: np.ndarray  # float64 [T, H, D]
    expected_pool: np.ndarray  # as `pool`, with the new tokens

    def options(self, shape: Shape) -> dict[str, Any]:
        named = {"window": shape.window, "soft_cap": shape.soft_cap, "kv_scale": shape.kv_scale}
        return named | {"scale": SCALE, "sinks": self.sinks}


def make_case(shape: Shape, *parts: list[tuple[int, int]], poison: float = np.nan, width: int | None = None) -> Case:
    """A case with a part for each list of (tokens before the tile, tokens in it); (_, 0) is padding.

    The first part is as wide as the shape says, a second one 1 token (decode rows).
    """
    rng = np.random.default_rng(0)
    dtype, size, heads, dim = jnp.dtype(shape.dtype), shape.page_size, shape.num_kv_heads, shape.head_dim
    random = lambda *dims: rng.standard_normal(dims).astype(dtype)  # noqa: E731
    widths = [width or shape.width, 1][: len(parts)]
    ends = [start + num if num else 0 for tiles in parts for start, num in tiles]
    needed = [-(-end // size) for end in ends]
    free = rng.permutation(np.arange(1, sum(needed) + 4)).tolist()
    fill = 127 if shape.pool_dtype == jnp.int8 else poison  # int8 has no NaN
    pool = np.full((shape.first_page + len(free) + 1, 2, heads, size, dim), fill).astype(shape.pool_dtype)
    sinks = rng.standard_normal(shape.num_heads).astype(np.float32) if shape.sinks else None
    after, most = pool.copy(), max(needed) + 2  # tables wider than any row needs, padded with the null page
    qs, ks, vs, outs, made = [], [], [], [], []
    for tiles, q_width in zip(parts, widths, strict=True):
        table = np.zeros((len(tiles), most), np.int32)
        for n, (start, num) in enumerate(tiles):
            end = start + num if num else 0
            keys, values = random(end, heads, dim), random(end, heads, dim)
            scaled = zip((keys, values), shape.kv_scale, strict=True)
            stored = [np.asarray(to_stored(x, s, shape.pool_dtype)) for x, s in scaled]
            for index in range(-(-end // size)):
                page = table[n, index] = free.pop()
                for which in (0, 1):
                    for position in range(index * size, min((index + 1) * size, end)):
                        at = (shape.first_page + page, which, slice(None), position % size)
                        after[at] = stored[which][position]
                        if position < start:
                            pool[at] = stored[which][position]
            seen = [x.astype(np.float64) * s for x, s in zip(stored, shape.kv_scale, strict=True)]
            q = random(q_width, shape.num_heads, dim)
            new = np.zeros((2, q_width, heads, dim), dtype)
            new[0, :num], new[1, :num] = keys[end - num : end], values[end - num : end]
            out = np.zeros((q_width, shape.num_heads, dim))
            for i in range(num):
                out[i] = attend_slowly(q[i], seen[0][: start + i + 1], seen[1][: start + i + 1], shape, sinks)
            for made_arrays, array in zip((qs, ks, vs, outs), (q, *new, out), strict=True):
                made_arrays.append(array)
        starts, nums = (np.array([tile[i] for tile in tiles], np.int32) for i in (0, 1))
        made.append(Tiles(table, starts, nums, starts, width=q_width))  # type: ignore[arg-type] # numpy stands in for jax
    q, k, v, out = (np.concatenate(arrays) for arrays in (qs, ks, vs, outs))
    return Case(q, k, v, pool, tuple(made), sinks, out, after)


def attend_slowly(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, shape: Shape, sinks: np.ndarray | None
) -> np.ndarray:
    """One query `[H, D]` over all of `keys [kv_len, K, D]` that its window shows, in float64."""
    groups = q.shape[0] // keys.shape[1]
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        first = 0 if shape.window is None else max(len(keys) - shape.window, 0)
        scores = keys[first:, head // groups] @ q[head].astype(np.float64) * SCALE
        if shape.soft_cap is not None:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        all_scores = scores if sinks is None else np.append(scores, sinks[head])
        weights = np.exp(scores - all_scores.max())
        out[head] = weights / np.exp(all_scores - all_scores.max()).sum() @ values[first:, head // groups]
    return out


Attention = Callable[..., tuple[Any, Any]]  # as kernels_pallas.paged_attention.reference.paged_attention


def check(attention: Attention, case: Case, shape: Shape, tolerance: float | None = None) -> np.ndarray:
    """Runs `attention` on the case and compares output and pool with what they must be; returns the output."""
    out, pool = attention(
        case.q, case.k, case.v, jnp.asarray(case.pool), case.parts, np.int32(shape.first_page), **case.options(shape)
    )
    out, pool = np.asarray(out), np.asarray(pool)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape and pool.dtype == case.pool.dtype
    tolerance = tolerance or shape.tolerance
    assert np.isfinite(out.astype(np.float64)).all(), "also for padding"
    real = np.concatenate([(np.arange(p.width) < p.num_tokens[:, None]).reshape(-1) for p in case.parts])
    np.testing.assert_allclose(
        out.astype(np.float64)[real], case.expected[real], atol=tolerance, rtol=tolerance, err_msg=str(shape)
    )
    null = shape.first_page  # may hold anything
    for part in (slice(0, null), slice(null + 1, None)):
        np.testing.assert_array_equal(pool[part].astype(np.float32), case.expected_pool[part].astype(np.float32))
    return out


def tiles_around_pages(page_size: int, width: int) -> list[tuple[int, int]]:
    """Lengths around every border of a page, tiles full and partly empty, and padding tiles between them."""
    size = page_size
    ends = [0, 1, 2, size - 1, size, size + 1, 2 * size, 3 * size - 1, 4 * size + 1, 130]
    tiles = [(max(end - width, 0), min(end, width)) for end in ends]
    return tiles + [(end, num) for end, num in ((0, 1), (size, max(width - 1, 1)), (5, 0), (max(size - 1, 0), width))]


def cut(case: Case, width: int) -> Case:
    """The same case with each wider tile cut into several of `width` tokens, as a prefill longer than a tile is."""
    return dataclasses.replace(case, parts=tuple(_cut(part, width) for part in case.parts))


def _cut(part: Tiles, width: int) -> Tiles:
    if part.width <= width:
        return part
    times, remainder = divmod(part.width, width)
    assert remainder == 0
    begin = np.arange(times, dtype=np.int32) * width
    start = (part.start[:, None] + begin).reshape(-1)
    num_tokens = np.clip(part.num_tokens[:, None] - begin, 0, width).reshape(-1)
    table, row_start = (np.repeat(x, times, axis=0) for x in (part.page_table, part.row_start))
    return Tiles(table, start, num_tokens, row_start, width=width)  # type: ignore[arg-type]
