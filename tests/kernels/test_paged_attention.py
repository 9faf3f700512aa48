"""The paged-attention reference against attention written the obvious way, in float64, one query at a time.

Axis letters as in `kernels_pallas.paged_attention.reference`. Every cell of the pool that no tile may read holds NaN: pages
of nobody, the null page, and the tail of each last page (behaviour 38).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import paged_attention, write_kv

attend = jax.jit(paged_attention, static_argnames="scale")
write = jax.jit(write_kv, donate_argnums=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 8
    num_queries: int = 1
    dtype: str = "float32"
    first_page: int = 0  # pages of the layers before

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Case:
    q: np.ndarray  # [N, Q, H, D]
    keys: list[np.ndarray]  # [kv_len, K, D] a tile
    values: list[np.ndarray]
    pool: np.ndarray  # [P, 2, K, S, D]
    page_table: np.ndarray  # [N, M]
    q_start: np.ndarray  # [N]
    kv_len: np.ndarray  # [N]


def make_case(shape: Shape, tiles: list[tuple[int, int]], poison: float = np.nan) -> Case:
    """A tile for each (tokens before it, tokens in it); (_, 0) is padding."""
    rng = np.random.default_rng(0)
    dtype, size, heads, dim = jnp.dtype(shape.dtype), shape.page_size, shape.num_kv_heads, shape.head_dim
    random = lambda *dims: rng.standard_normal(dims).astype(dtype)  # noqa: E731
    kv_len = np.array([start + num if num else 0 for start, num in tiles], np.int32)
    needed = -(-kv_len // size)
    free = rng.permutation(np.arange(1, needed.sum() + 4)).tolist()
    pool = np.full((shape.first_page + len(free) + 1, 2, heads, size, dim), poison, dtype)
    table = np.zeros((len(tiles), needed.max() + 2), np.int32)  # wider than any row needs, padded with the null page
    keys, values = [], []
    for n, length in enumerate(kv_len.tolist()):
        keys.append(random(length, heads, dim))
        values.append(random(length, heads, dim))
        for index in range(needed[n]):
            page = table[n, index] = free.pop()
            part = slice(index * size, min((index + 1) * size, length))
            filled = part.stop - part.start
            pool[shape.first_page + page, 0, :, :filled] = keys[n][part].swapaxes(0, 1)
            pool[shape.first_page + page, 1, :, :filled] = values[n][part].swapaxes(0, 1)
    q = random(len(tiles), shape.num_queries, shape.num_heads, dim)
    return Case(q, keys, values, pool, table, np.array([start for start, _ in tiles], np.int32), kv_len)


def attend_slowly(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One query `[H, D]` over all of `keys [kv_len, K, D]`, in float64."""
    groups = q.shape[0] // keys.shape[1]
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        scores = keys[:, head // groups].astype(np.float64) @ q[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, head // groups].astype(np.float64)
    return out


def run(case: Case, shape: Shape, scale: float = 0.3) -> np.ndarray:
    out = attend(
        case.q, case.pool, case.page_table, np.int32(shape.first_page), case.q_start, case.kv_len, scale=scale
    )  # fmt: skip
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    return np.asarray(out).astype(np.float64)


def check(case: Case, tiles: list[tuple[int, int]], out: np.ndarray, tolerance: float, scale: float = 0.3) -> None:
    assert np.isfinite(out).all()
    for n, (start, num) in enumerate(tiles):
        for i in range(num):
            seen = start + i + 1
            expected = attend_slowly(case.q[n, i], case.keys[n][:seen], case.values[n][:seen], scale)
            np.testing.assert_allclose(
                out[n, i], expected, atol=tolerance, rtol=tolerance, err_msg=f"tile {n} query {i}"
            )
        if num == 0:
            assert (out[n] == 0).all(), "a padding tile"


SHAPES = [
    Shape(page_size=1, num_heads=2, num_kv_heads=2),
    Shape(page_size=1, num_heads=4, num_kv_heads=1, num_queries=5, dtype="bfloat16"),
    Shape(page_size=8, num_heads=8, num_kv_heads=1, head_dim=16, num_queries=4, first_page=7),
    Shape(page_size=8, num_heads=3, num_kv_heads=3, dtype="bfloat16", first_page=100),
    Shape(page_size=16, num_heads=9, num_kv_heads=3, head_dim=64),
    Shape(page_size=16, num_heads=4, num_kv_heads=2, num_queries=16, first_page=30),
    Shape(page_size=16, num_heads=6, num_kv_heads=2, head_dim=64, num_queries=8, dtype="bfloat16"),
    Shape(page_size=32, num_heads=5, num_kv_heads=1, head_dim=4, num_queries=3),
    Shape(page_size=32, num_heads=14, num_kv_heads=2, head_dim=128),
    Shape(page_size=64, num_heads=4, num_kv_heads=4, head_dim=32, num_queries=2, first_page=5),
    Shape(page_size=64, num_heads=16, num_kv_heads=2, dtype="bfloat16", first_page=3),
    Shape(page_size=128, num_heads=2, num_kv_heads=1, num_queries=4),  # a page longer than a tile of keys
    Shape(page_size=48, num_heads=2, num_kv_heads=2),  # a page that does not divide a tile of keys
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_obvious_attention(shape: Shape) -> None:
    """Every length around a page's borders, tiles full and partly empty, and padding tiles between them."""
    size, most = shape.page_size, shape.num_queries
    ends = [0, 1, 2, size - 1, size, size + 1, 2 * size, 3 * size - 1, 4 * size + 1, 130]
    tiles = [(max(end - most, 0), min(end, most)) for end in ends]
    tiles += [(end, num) for end, num in ((0, 1), (size, max(most - 1, 1)), (5, 0), (max(size - 1, 0), most))]
    case = make_case(shape, tiles)
    check(case, tiles, run(case, shape), 2e-5 if shape.dtype == "float32" else 2e-2)


def test_only_padding_tiles() -> None:
    shape = Shape(page_size=8, num_heads=2, num_kv_heads=1, num_queries=2)
    case = dataclasses.replace(make_case(shape, [(0, 1), (4, 2)]), kv_len=np.zeros(2, np.int32))
    assert (run(case, shape) == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_lies_beyond_does_not_matter(poison: float) -> None:
    """Not even to the last bit."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2, num_queries=3)
    tiles = [(0, 3), (20, 1), (7, 2), (0, 0)]
    np.testing.assert_array_equal(run(make_case(shape, tiles, poison), shape), run(make_case(shape, tiles, 0.0), shape))


def test_large_scores_do_not_overflow() -> None:
    """One key wins outright, whatever the sign and size of the scores."""
    shape = Shape(page_size=8, num_heads=2, num_kv_heads=2)
    tiles = [(0, 1), (30, 1), (16, 1)]
    case = make_case(shape, tiles)
    for scale in (1e4, -1e4):
        check(case, tiles, run(case, shape, scale), 1e-3, scale)


def test_a_tile_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: what a row attends to must not change with the batch (a longer neighbour adds masked iterations)."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2)
    tiles = [(10, 1), (200, 1)]
    case = make_case(shape, tiles)
    alone = dataclasses.replace(
        case, kv_len=np.where([True, False], case.kv_len, 0).astype(np.int32)
    )  # fmt: skip
    np.testing.assert_array_equal(run(case, shape)[0], run(alone, shape)[0])


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_kv_changes_nothing_else(dtype: str) -> None:
    """Tokens land at their page and offset, rounded to the pool's dtype; many may share the null page."""
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((12, 2, 3, 4, 8)).astype(jnp.dtype(dtype))
    k, v = rng.standard_normal((2, 6, 3, 8)).astype(np.float32)
    page, offset = np.array([5, 11, 0, 5, 0, 0], np.int32), np.array([3, 0, 1, 0, 1, 2], np.int32)
    expected = pool.copy()
    for token in (0, 1, 3):
        expected[page[token], 0, :, offset[token]] = k[token].astype(pool.dtype)
        expected[page[token], 1, :, offset[token]] = v[token].astype(pool.dtype)
    written = np.asarray(write(jnp.asarray(pool), k, v, page, offset))
    assert written.dtype == pool.dtype
    np.testing.assert_array_equal(written[1:], expected[1:])


def test_write_then_attend() -> None:
    """The two agree on the layout: what was written is what is read."""
    shape = Shape(page_size=4, num_heads=2, num_kv_heads=1)
    tiles = [(8, 1)]
    case = make_case(shape, tiles)
    position = np.arange(9, dtype=np.int32)
    pool = write(
        jnp.full(case.pool.shape, np.nan, jnp.float32), case.keys[0], case.values[0],
        case.page_table[0, position // 4], position % 4,
    )  # fmt: skip
    check(case, tiles, run(dataclasses.replace(case, pool=np.asarray(pool)), shape), 2e-5)


def test_write_is_in_place() -> None:
    pool = jnp.zeros((4096, 2, 2, 8, 8), jnp.float32)
    kv, index = jnp.zeros((3, 2, 8), jnp.float32), jnp.zeros(3, jnp.int32)
    memory = write.lower(pool, kv, kv, index, index).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 100
    before = pool.unsafe_buffer_pointer()
    written = functools.reduce(lambda p, _: write(p, kv, kv, index, index), range(3), pool)
    assert written.unsafe_buffer_pointer() == before and pool.is_deleted()
