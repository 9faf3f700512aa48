"""The paged-attention reference against attention written the obvious way, in float64, one query at a time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import Tiles, paged_attention, reference, storage_dtype
from tests.kernels.cases import Case, Shape, check, make_case, tiles_around_pages

attend = jax.jit(paged_attention, static_argnames=("scale", "soft_cap", "kv_scale", "max_single"), donate_argnums=3)


def as_values(q, k, v, pool, *args, **options):
    """The reference stores bf16 and float8 as bits; the cases speak of values."""
    bits = storage_dtype(pool.dtype)
    out, after = attend(q, k, v, pool.view(bits), *args, **options)
    return out, after.view(pool.dtype)


SHAPES = [
    Shape(page_size=1, num_heads=2, num_kv_heads=2),
    Shape(page_size=1, num_heads=4, num_kv_heads=1, width=5, dtype="bfloat16"),
    Shape(page_size=8, num_heads=8, num_kv_heads=1, head_dim=16, width=4, first_page=7),
    Shape(page_size=8, num_heads=3, num_kv_heads=3, dtype="bfloat16", first_page=100),
    Shape(page_size=8, num_heads=4, num_kv_heads=2, width=4, window=5),
    Shape(page_size=8, num_heads=4, num_kv_heads=2, width=4, window=100, soft_cap=0.7, sinks=True),
    Shape(page_size=16, num_heads=9, num_kv_heads=3, head_dim=64),
    Shape(page_size=16, num_heads=2, num_kv_heads=2, width=2, dtype="bfloat16"),  # few queries, multiplied as bf16
    Shape(page_size=16, num_heads=4, num_kv_heads=2, width=16, first_page=30, window=1),
    Shape(page_size=16, num_heads=6, num_kv_heads=2, head_dim=64, width=8, dtype="bfloat16", sinks=True),
    Shape(page_size=16, num_heads=4, num_kv_heads=2, width=8, kv_dtype="int8", kv_scale=(0.03, 0.02)),
    Shape(page_size=16, num_heads=4, num_kv_heads=2, kv_dtype="float8_e4m3fn", kv_scale=(0.5, 2.0)),
    Shape(page_size=32, num_heads=5, num_kv_heads=1, head_dim=4, width=3, soft_cap=30.0),
    Shape(page_size=32, num_heads=14, num_kv_heads=2, head_dim=128, window=37),
    Shape(page_size=64, num_heads=4, num_kv_heads=4, head_dim=32, width=2, first_page=5),
    Shape(page_size=64, num_heads=16, num_kv_heads=2, dtype="bfloat16", first_page=3),
    Shape(page_size=128, num_heads=2, num_kv_heads=1, width=4),  # a page longer than a tile of keys
    Shape(page_size=48, num_heads=2, num_kv_heads=2),  # a page that does not divide a tile of keys
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("max_single", [1, 4])
def test_equals_obvious_attention(shape: Shape, max_single: int) -> None:
    """Tiles and decode rows in one call."""
    tiles = tiles_around_pages(shape.page_size, shape.width)
    attention = functools.partial(as_values, max_single=max_single)
    check(attention, make_case(shape, tiles, [(70, 1), (0, 1), (0, 0), (shape.page_size, 1)]), shape)


@pytest.mark.parametrize("shape", [
    Shape(page_size=16, num_heads=6, num_kv_heads=2, head_dim=64, width=8, dtype="bfloat16"),
    Shape(page_size=16, num_heads=4, num_kv_heads=2, width=4, window=70, sinks=True),
], ids=str)  # fmt: skip
def test_rows_of_very_different_lengths(shape: Shape) -> None:
    """So many that the longer ones go on by themselves, in whatever order they come."""
    rng = np.random.default_rng(0)
    tiles = [(int(start), int(rng.integers(1, shape.width + 1))) for start in rng.geometric(1 / 200, 37) - 1]
    rows = [(int(start), 1) for start in rng.geometric(1 / 200, 13) - 1]
    check(as_values, make_case(shape, [(0, 0), *tiles], rows + [(0, 0)] * 20), shape)


@pytest.mark.parametrize("window", [None, 70])
def test_keys_are_visited_where_there_are_any(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for all rows to the end of the longest one, in whatever order they come."""
    visited: list[int] = []

    def products(q: jax.Array, *args: Any) -> jax.Array:
        jax.debug.callback(lambda: visited.append(q.shape[0]))
        return reference_products(q, *args)

    reference_products = reference._products
    monkeypatch.setattr(reference, "_products", products)
    rng = np.random.default_rng(1)
    lengths = rng.permutation([*rng.integers(900, 1000, 16), *rng.integers(1, 100, 16)]).tolist()
    shape = Shape(page_size=16, num_heads=2, num_kv_heads=1, window=window)
    fresh = jax.jit(lambda *args, **options: paged_attention(*args, **options), static_argnames=("scale", "kv_scale"))
    check(fresh, make_case(shape, [(length - 1, 1) for length in lengths]), shape)
    jax.effects_barrier()
    # All 32 visit the first tile of 128 keys, then the long half goes on to the eighth. The windows of that half begin at
    # 830 and later, in the seventh.
    assert sorted(visited) == [16] * (7 if window is None else 2) + [32]


def test_only_padding_tiles() -> None:
    shape = Shape(page_size=8, num_heads=2, num_kv_heads=1, width=2)
    case = make_case(shape, [(0, 0), (4, 0), (3, 2)])
    case = dataclasses.replace(case, parts=(dataclasses.replace(case.parts[0], num_tokens=np.zeros(3, np.int32)),))
    out, _ = as_values(case.q, case.k, case.v, jnp.asarray(case.pool), case.parts, np.int32(0), scale=1.0)
    assert (np.asarray(out) == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_lies_beyond_does_not_matter(poison: float) -> None:
    """Not even to the last bit."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2, width=3)
    tiles = [(0, 3), (20, 1), (7, 2), (0, 0)]
    poisoned, clean = (make_case(shape, tiles, poison=value) for value in (poison, 0.0))
    np.testing.assert_array_equal(check(as_values, poisoned, shape), check(as_values, clean, shape))


@pytest.mark.parametrize("scale", [1e6, -1e6])
def test_large_scores_do_not_overflow(scale: float) -> None:
    """One key wins outright, whatever the sign and size of the scores."""
    shape = Shape(page_size=8, num_heads=2, num_kv_heads=2)
    case = make_case(shape, [(0, 1), (30, 1), (16, 1)])
    out, pool = as_values(case.q, case.k, case.v, jnp.asarray(case.pool), case.parts, np.int32(0), scale=scale)
    pool = np.asarray(pool)
    for n, length in enumerate((1, 31, 17)):
        table = np.asarray(case.parts[0].page_table)[n]
        keys, values = (pool[table, which].swapaxes(1, 2).reshape(-1, 2, 8)[:length] for which in (0, 1))
        scores = np.einsum("hd,shd->hs", case.q[n], keys) * scale
        np.testing.assert_allclose(np.asarray(out)[n], values[scores.argmax(1), [0, 1]], atol=1e-3, rtol=1e-3)


def test_a_tile_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, where rows are too few for `walk` to split them: what a row attends to must not change with the batch (a
    longer neighbour adds masked iterations)."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2)
    case = make_case(shape, [(10, 1), (200, 1)])

    def first_row(case: Case) -> np.ndarray:
        return np.asarray(
            as_values(case.q, case.k, case.v, jnp.asarray(case.pool), case.parts, np.int32(0), scale=0.3)[0][0]
        )

    alone = dataclasses.replace(case.parts[0], num_tokens=np.array([1, 0], np.int32))
    np.testing.assert_array_equal(first_row(case), first_row(dataclasses.replace(case, parts=(alone,))))


def test_pages_before_the_window_may_be_released() -> None:
    """Their entries in the table are the null page's then, which holds NaN."""
    shape = Shape(page_size=16, num_heads=2, num_kv_heads=1, window=20)
    case = make_case(shape, [(125, 1)])  # sees keys from 106, in page 6
    case.parts[0].page_table[0, :6] = 0
    check(as_values, case, shape)


def test_the_pool_stays_in_place() -> None:
    pool = jnp.zeros((4096, 2, 2, 8, 8), jnp.float32)
    kv, q = jnp.zeros((16, 2, 8), jnp.float32), jnp.zeros((16, 4, 8), jnp.float32)
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    parts = (Tiles(ints((16, 4)), ints(16), jnp.ones(16, jnp.int32), ints(16), width=1),)  # 16 rows: `walk` splits them
    memory = attend.lower(q, kv, kv, pool, parts, np.int32(0), scale=1.0).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 20
    before = pool.unsafe_buffer_pointer()
    after = functools.reduce(lambda p, _: attend(q, kv, kv, p, parts, np.int32(0), scale=1.0)[1], range(3), pool)
    assert after.unsafe_buffer_pointer() == before and pool.is_deleted()
