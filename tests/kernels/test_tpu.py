"""The TPU kernel in the interpreters: equal to attention written the obvious way, and free of races.

`interpret=True` runs the kernel as an XLA program; `pltpu.InterpretParams` emulates memories, copies and semaphores.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # for jax 0.10: see `races_found`
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import tpu, tpu_kernel, tuned
from tests.kernels.cases import Attention, Case, Shape, check, cut, make_case, tiles_around_pages


def interpreted(interpret: bool | pltpu.InterpretParams = True) -> Attention:
    """The kernel as the cases want it: for a pool as the reference has it."""
    run = functools.partial(tpu.paged_attention, interpret=interpret)
    run = jax.jit(run, static_argnames=("scale", "soft_cap", "kv_scale"), donate_argnums=3)

    def attend(q, k, v, pool, *args, **options):
        out, after = run(q, k, v, tpu.pack(pool), *args, **options)
        return out, tpu.unpack(after, q.shape[2])

    return attend


# Pairwise: page sizes 8 to 128, G 1 to 8, dtypes, widths within and beyond a page, D around the 64 and 128 lanes.
SHAPES = [
    Shape(page_size=8, num_heads=8, num_kv_heads=1, head_dim=16, dtype="bfloat16", first_page=7),
    Shape(page_size=8, num_heads=4, num_kv_heads=2, width=20, window=5, kv_dtype="int8", kv_scale=(0.03, 0.02)),
    Shape(page_size=8, num_heads=2, num_kv_heads=2, width=3, dtype="bfloat16", soft_cap=0.7, sinks=True, window=100),
    Shape(page_size=16, num_heads=9, num_kv_heads=3, head_dim=64, sinks=True),
    Shape(page_size=16, num_heads=4, num_kv_heads=1, head_dim=96, width=32, dtype="bfloat16", first_page=30),
    Shape(page_size=16, num_heads=4, num_kv_heads=2, width=8, kv_dtype="float8_e4m3fn", kv_scale=(0.5, 2.0), window=1),
    Shape(page_size=32, num_heads=14, num_kv_heads=2, head_dim=128, width=5, window=37),
    Shape(page_size=32, num_heads=8, num_kv_heads=1, dtype="bfloat16", kv_dtype="int8", kv_scale=(0.0313, 0.0217)),
    Shape(page_size=64, num_heads=4, num_kv_heads=4, head_dim=32, width=2, first_page=5, soft_cap=30.0),
    Shape(page_size=64, num_heads=2, num_kv_heads=1, head_dim=256, width=9, kv_dtype="float8_e4m3fn"),
    Shape(page_size=128, num_heads=4, num_kv_heads=2, width=40, dtype="bfloat16", window=130),
    Shape(page_size=128, num_heads=8, num_kv_heads=8, kv_dtype="bfloat16", window=3, sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_obvious_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one key tile and over several, heads together and one by one; tiles and decode rows in one call, for some."""
    if shape.page_size in (16, 64):
        monkeypatch.setattr(tuned, "TPU_KEY_TILE", 2 * shape.page_size)
        monkeypatch.setattr(tuned, "TPU_ROWS_TOGETHER", 8)
    parts = [tiles_around_pages(shape.page_size, shape.width)]
    if shape.width > 30:
        parts.append([(70, 1), (0, 1), (0, 0), (shape.page_size, 1)])
    check(interpreted(), make_case(shape, *parts), shape)


@pytest.mark.parametrize(("page_size", "width"), [(8, 20), (16, 6), (32, 32)])
def test_a_prefill_of_several_tiles(page_size: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one row read what those before them wrote, in the page they share and in others."""
    monkeypatch.setattr(tuned, "TPU_KEY_TILE", 2 * page_size)
    shape = Shape(page_size=page_size, num_heads=4, num_kv_heads=2, first_page=3, window=30 if width == 20 else None)
    rows = [(0, 4 * width), (3, 2 * width + 1), (5 * page_size - 1, 4 * width - 1), (0, 0), (page_size, width)]
    check(interpreted(), cut(make_case(shape, rows, width=4 * width), width), shape)


def test_what_lies_beyond_does_not_matter() -> None:
    """Not even to the last bit."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2, width=3)
    tiles, run = [(0, 3), (20, 1), (7, 2), (0, 0)], interpreted()
    clean, *poisoned = (
        check(run, make_case(shape, tiles, poison=poison), shape) for poison in (0.0, np.nan, np.inf, -np.inf, 3e38)
    )
    for out in poisoned:
        np.testing.assert_array_equal(out, clean)


def test_a_tile_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, also where its first pages were fetched by the tile before it."""
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2)
    case, run = make_case(shape, [(200, 1), (30, 1), (600, 1)]), interpreted()
    part = case.parts[0]

    def middle_row(num_tokens: list[int]) -> np.ndarray:
        parts = (dataclasses.replace(part, num_tokens=np.array(num_tokens, np.int32)),)
        return np.asarray(run(case.q, case.k, case.v, jnp.asarray(case.pool), parts, np.int32(0), scale=0.3)[0][1])

    np.testing.assert_array_equal(middle_row([1, 1, 1]), middle_row([0, 1, 0]))


def test_pages_before_the_window_may_be_released() -> None:
    """Their entries in the table are the null page's then, which holds NaN."""
    shape = Shape(page_size=16, num_heads=2, num_kv_heads=1, window=20)
    case = make_case(shape, [(125, 1)])  # sees keys from 106, in page 6
    case.parts[0].page_table[0, :6] = 0
    check(interpreted(), case, shape)


def test_narrow_heads_share_lanes() -> None:
    pages = jnp.arange(3 * 2 * 2 * 8 * 64, dtype=jnp.float32).reshape(3, 2, 2, 8, 64)
    for head_dim in (5, 64):
        stored = tpu.pack(pages[..., :head_dim])
        assert stored.shape == tpu.storage_shape(3, 2, 8, head_dim) == (3, 1, 2, 8, 128)
        np.testing.assert_array_equal(tpu.unpack(stored, head_dim), pages[..., :head_dim])
    assert tpu.storage_shape(3, 2, 8, 96) == (3, 2, 2, 8, 128) and tpu.storage_shape(3, 2, 8, 256)[4] == 256


def problem(**changes) -> tpu.Problem:
    usual = dict(num_tiles=4, width=1, table_pages=64, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
    dtypes = dict(dtype=jnp.dtype(jnp.bfloat16), pool_dtype=jnp.dtype(jnp.bfloat16))
    return tpu.Problem(**(usual | dtypes | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 12}, "num_heads=12"),
        ({"dtype": jnp.dtype(jnp.float16)}, "dtype=float16"),
        ({"pool_dtype": jnp.dtype(jnp.float8_e5m2)}, "float8_e5m2"),
        ({"page_size": 12}, "page_size=12"),
        ({"width": 1024}, "width=1024"),
        ({"table_pages": 65536}, "table_pages=65536"),  # a million tokens: 3 KiB too much for the compiler
    ],
)
def test_refuses_by_name(changes: dict, said: str) -> None:
    assert tpu.unsupported(problem()) is None
    assert said in (tpu.unsupported(problem(**changes)) or "")


def test_refuses_a_pool_of_another_shape_or_page_size() -> None:
    shape = Shape(page_size=8, num_heads=4, num_kv_heads=2)
    case = make_case(shape, [(0, 1)])
    with pytest.raises(ValueError, match="storage_shape"):
        tpu.paged_attention(case.q, case.k, case.v, jnp.asarray(case.pool), case.parts, 0, scale=1.0)
    small = jnp.zeros(tpu.storage_shape(3, 2, 4, 8), jnp.float32)
    with pytest.raises(ValueError, match="page_size=4 is not a multiple of 8"):
        tpu.paged_attention(case.q, case.k, case.v, small, case.parts, 0, scale=1.0)


def test_cost_counts_keys_that_are_read() -> None:
    full, half, few = (tpu.cost(problem(), kv_len) for kv_len in (None, 512, 1))
    assert full.flops == 2 * half.flops == 4 * 4 * 32 * 128 * 1024
    assert full.bytes_accessed - half.bytes_accessed == 4 * 512 * 2 * 8 * 128 * 2
    assert few.bytes_accessed > 4 * 2 * 8 * 16 * 128 * 2, "a page at least"


@pytest.fixture
def interpreter() -> Iterator[Callable[[str], pltpu.InterpretParams]]:
    """Emulation with memory that starts as NaN, in which accesses without an order are noticed. A copy happens when it is
    waited for ("on_wait") or when it is started ("eager"): a kernel must not care."""
    yield lambda mode: pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)  # type: ignore[arg-type]
    pltpu.reset_tpu_interpret_mode_state()


def races_found() -> bool:
    """jax 0.12 raises; 0.10 prints and sets a flag."""
    return bool(getattr(interpret_pallas_call.races, "races_found", False))


def chunked(width: int) -> tuple[Shape, Case]:
    """Rows of two tiles in one and in several key tiles, a row of one tile, and padding: all that may follow upon each other."""
    shape = Shape(page_size=8, num_heads=2, num_kv_heads=1, first_page=2)
    return shape, cut(make_case(shape, [(2, 2 * width), (17, 2 * width - 1), (9, 1)], width=3 * width), width)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("width", [1, 12])
def test_no_races(width: int, mode: str, interpreter: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "TPU_KEY_TILE", 16)
    shape, case = chunked(width)
    check(interpreted(interpreter(mode)), case, shape)
    assert not races_found()


@pytest.mark.parametrize(
    ("left_out", "mode", "width"),
    [
        ("_finish_reads", "on_wait", 1),
        ("_finish_reads", "on_wait", 12),
        ("_finish_writes", "on_wait", 1),
        ("_finish_writes", "on_wait", 12),
        ("_reads_what_was_written", "eager", 1),
        ("_reads_what_was_written", "eager", 12),
    ],
)
def test_a_missing_wait_is_noticed(
    left_out: str, mode: str, width: int, interpreter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "TPU_KEY_TILE", 16)
    monkeypatch.setattr(tpu_kernel, left_out, lambda *_: jnp.bool_(False))
    shape, case = chunked(width)
    try:
        check(interpreted(interpreter(mode)), case, shape)
        noticed = races_found()
    except AssertionError:
        noticed = True  # by its numbers
    except Exception as error:  # a callback's: some type of XLA's
        noticed = "RACE DETECTED" in str(error)
    assert noticed
