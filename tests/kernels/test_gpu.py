"""The Mosaic GPU kernels in jax's GPU interpreter, which simulates shared memory, TMA and barriers on the CPU."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention import gpu, gpu_attend, tuned
from tests.kernels.cases import Case, Shape, check, cut, make_case

InterpretGPUParams: Any = getattr(plgpu, "InterpretGPUParams", None)
if InterpretGPUParams is None:
    pytest.skip("jax before 0.11 has no interpreter for Mosaic GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short rows have two splits, and long ones use the ring's stages again; no more, each takes seconds."""
    monkeypatch.setattr(tuned, "gpu_splits", lambda num_kv_heads: 2)
    monkeypatch.setattr(tuned, "GPU_MIN_SPLIT", 64)
    monkeypatch.setattr(tuned, "gpu_stages", lambda *sizes: 2)


@pytest.fixture
def fresh_interpreter():
    """What a kernel that raised leaves behind would make the next one fail."""
    yield
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.fixture
def wgmma_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race detector does not look at what wgmma reads: let it see loads of the operands.

    Those, unlike wgmma, need a fence before TMA may overwrite what they read.
    """
    wgmma = plgpu.wgmma

    def load_first(acc, a, b) -> None:
        for operand in (a, b):
            operand[...]
        plgpu.commit_smem()
        wgmma(acc, a, b)

    monkeypatch.setattr(plgpu, "wgmma", load_first)


def interpreted(detect_races: bool = False):
    """Jitted, because operation by operation XLA compiles for longer than the interpreter runs."""
    attend = functools.partial(gpu.paged_attention, interpret=InterpretGPUParams(detect_races=detect_races))
    return jax.jit(attend, static_argnames=("scale", "window", "soft_cap", "kv_scale"))


def bf16(**sizes) -> Shape:
    return Shape(dtype="bfloat16", **sizes)


INT8, FLOAT8 = (
    dict(kv_dtype=name, kv_scale=scale) for name, scale in (("int8", (0.03, 0.02)), ("float8_e4m3fn", (0.5, 2.0)))
)

DECODE = [  # rows as (keys before, new keys)
    (bf16(page_size=8, num_heads=1, num_kv_heads=1, head_dim=64), [(0, 1), (130, 1)]),
    (bf16(page_size=16, num_heads=4, num_kv_heads=1, head_dim=64, first_page=7), [(14, 1), (15, 1), (16, 1), (0, 0)]),
    (bf16(page_size=16, num_heads=16, num_kv_heads=2, head_dim=128, sinks=True), [(350, 1)]),
    (bf16(page_size=32, num_heads=6, num_kv_heads=2, head_dim=96, window=37, soft_cap=2.0), [(150, 1)]),
    (bf16(page_size=64, num_heads=8, num_kv_heads=1, head_dim=256, window=1), [(64, 1), (128, 1), (0, 0)]),
    (bf16(page_size=128, num_heads=2, num_kv_heads=2, head_dim=64, soft_cap=30.0, sinks=True), [(126, 1)]),
    (bf16(page_size=32, num_heads=4, num_kv_heads=1, head_dim=64, **INT8), [(70, 1)]),
    (bf16(page_size=16, num_heads=8, num_kv_heads=1, head_dim=128, sinks=True, **FLOAT8), [(64, 1)]),
]
PREFILL = [
    (bf16(page_size=8, num_heads=2, num_kv_heads=2, head_dim=64, width=5), [(0, 5), (6, 2), (3, 0)]),
    (bf16(page_size=16, num_heads=4, num_kv_heads=1, head_dim=64, width=40, first_page=3), [(0, 40), (30, 33)]),
    (bf16(page_size=16, num_heads=3, num_kv_heads=1, head_dim=128, width=48, window=20), [(90, 44)]),
    (
        bf16(page_size=64, num_heads=8, num_kv_heads=1, head_dim=64, width=9, sinks=True, soft_cap=1.0),
        [(60, 9), (5, 0)],
    ),
    (bf16(page_size=128, num_heads=1, num_kv_heads=1, head_dim=256, width=70, window=100), [(100, 70)]),
    (bf16(page_size=64, num_heads=2, num_kv_heads=1, head_dim=64, width=40, window=50, **FLOAT8), [(90, 38)]),
]


@pytest.mark.parametrize(("shape", "rows"), DECODE + PREFILL, ids=str)
def test_equals_obvious_attention(shape: Shape, rows: list[tuple[int, int]]) -> None:
    check(interpreted(), make_case(shape, rows), shape)


def test_tiles_and_decode_rows_in_one_call() -> None:
    shape = bf16(page_size=16, num_heads=4, num_kv_heads=2, head_dim=64, width=6, first_page=4)
    check(interpreted(), make_case(shape, [(20, 6), (0, 3)], [(31, 1), (0, 0), (0, 1)]), shape)


@pytest.mark.parametrize(
    ("shape", "row", "width"),
    [
        (bf16(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64), (9, 24), 12),
        (bf16(page_size=8, num_heads=4, num_kv_heads=1, head_dim=64), (37, 90), 32),
        (bf16(page_size=16, num_heads=4, num_kv_heads=1, head_dim=64, window=30), (70, 92), 32),
        (
            bf16(page_size=64, num_heads=2, num_kv_heads=1, head_dim=64, kv_dtype="int8", kv_scale=(0.5, 0.25)),
            (0, 13),
            8,
        ),
    ],
    ids=str,
)
def test_neighbouring_tiles_of_one_row(shape: Shape, row: tuple[int, int], width: int) -> None:
    """Later tiles need keys that the first one brings, as the pool rounds them."""
    case = make_case(shape, [row], width=-(-row[1] // width) * width)
    check(interpreted(), cut(case, width), shape)
    exact = dataclasses.replace(shape, kv_dtype=None, kv_scale=(1.0, 1.0))
    if shape.kv_dtype:
        apart = np.abs(make_case(exact, [row], width=len(case.q)).expected - case.expected)
        assert apart.max() > 0.1, "what is stored is so coarse that what was not yet stored would be told from it"


def test_the_tail_of_a_page_does_not_matter() -> None:
    """To the last bit: other blocks may be writing there while a page is read."""
    shape = bf16(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64)
    case = cut(make_case(shape, [(21, 16)], width=16), 8)
    run, outs = interpreted(), []
    for pool in (case.pool, case.expected_pool, np.nan_to_num(case.pool, nan=np.inf)):
        outs.append(run(case.q, case.k, case.v, jnp.asarray(pool), case.parts, np.int32(0), scale=0.3)[0])
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """To the last bit, though the other row has more splits."""
    shape = bf16(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64)
    case = make_case(shape, [(70, 1), (190, 1)])

    def first_row(case: Case) -> np.ndarray:
        pool = jnp.asarray(case.pool)
        return np.asarray(interpreted()(case.q, case.k, case.v, pool, case.parts, np.int32(0), scale=0.3)[0][0])

    alone = dataclasses.replace(case.parts[0], num_tokens=np.array([1, 0], np.int32))
    np.testing.assert_array_equal(first_row(case), first_row(dataclasses.replace(case, parts=(alone,))))


def test_pages_before_the_window_may_be_released() -> None:
    """Their entries in the table are the null page's then, which holds NaN."""
    shape = bf16(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64, window=20)
    case = make_case(shape, [(125, 1)])  # sees keys from 106, in page 6; its chunk starts with page 4
    case.parts[0].page_table[0, :6] = 0
    check(interpreted(), case, shape)


@pytest.mark.parametrize("kind", [{}, FLOAT8], ids=str)
def test_a_window_within_the_last_page(kind: dict) -> None:
    """Its page stands in for those before it in the chunk, too, and its tail holds NaN."""
    shape = bf16(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64, window=3, **kind)
    case = make_case(shape, [(148, 1)])  # sees keys 146 to 148; the page has 144 to 159, the chunk 128 to 191
    check(interpreted(), case, shape)


def test_heads_of_a_token_in_two_blocks() -> None:
    """128 queries a block hold 42.67 tokens of 3 heads."""
    shape = bf16(page_size=16, num_heads=3, num_kv_heads=1, head_dim=64, width=50)
    check(interpreted(), make_case(shape, [(0, 43)]), shape)


@pytest.mark.parametrize(("width", "kind"), [(1, {}), (40, {}), (40, FLOAT8)], ids=str)
def test_no_races(width: int, kind: dict, fresh_interpreter: None, wgmma_is_checked: None) -> None:
    """Chunks enough that the ring's stages are used again; new keys begin with a page, so that no tail is read."""
    shape = bf16(page_size=32, num_heads=2, num_kv_heads=1, head_dim=64, width=width, **kind)
    check(interpreted(detect_races=True), make_case(shape, [(288, width)]), shape)


def two_tiles(begin: int) -> tuple[Shape, Case]:
    """Of one row: each writes where the other may read."""
    shape = bf16(page_size=64, num_heads=2, num_kv_heads=1, head_dim=64)
    return shape, cut(make_case(shape, [(begin, 70)], width=80), 40)


def test_no_races_between_tiles(fresh_interpreter: None, wgmma_is_checked: None) -> None:
    shape, case = two_tiles(64)
    check(interpreted(detect_races=True), case, shape)


def test_reading_what_another_tile_stores_is_seen(fresh_interpreter: None, wgmma_is_checked: None) -> None:
    """The negative control: the second tile believes that what the first one brings is in the pool already."""
    shape, case = two_tiles(64)
    (part,) = case.parts
    wrong = dataclasses.replace(case, parts=(dataclasses.replace(part, row_start=part.start),))
    with pytest.raises(Exception, match="RACE DETECTED"):
        check(interpreted(detect_races=True), wrong, shape)


@pytest.mark.parametrize("tail_is_excused", [True, False])
def test_only_a_tail_is_read_while_it_is_written(
    tail_is_excused: bool, monkeypatch: pytest.MonkeyPatch, fresh_interpreter: None, wgmma_is_checked: None
) -> None:
    """Of the page in which the new keys begin; `test_the_tail_of_a_page_does_not_matter` shows that it is then ignored."""
    from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState

    shape, case = two_tiles(75)
    page, tail = int(case.parts[0].page_table[0, 1]), 75 % 64
    check_read = RaceDetectionState.check_read

    def without_tail(self, thread, clock, key, where, source_info=None) -> None:
        if len(where) == 5 and where[0] == page:  # of the pool, which alone has five axes and is read
            where = (*where[:3], slice(where[3].start, tail, 1), where[4])
        check_read(self, thread, clock, key, where, source_info)

    if tail_is_excused:
        monkeypatch.setattr(RaceDetectionState, "check_read", without_tail)
    with contextlib.nullcontext() if tail_is_excused else pytest.raises(Exception, match="RACE DETECTED"):
        check(interpreted(detect_races=True), case, shape)


@pytest.mark.parametrize("name", ["queries_here", "keys_here", "values_here", "used", "cleared", "new_here"])
def test_a_missing_wait_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_interpreter: None, wgmma_is_checked: None
) -> None:
    """The negative control of `test_no_races`, for each barrier."""
    shared, wait, skipped = gpu_attend.Shared, plgpu.barrier_wait, []

    def remember(**scratch):
        skipped.append(scratch[name])
        return shared(**scratch)

    def wait_unless_skipped(barrier) -> None:
        if not any(getattr(barrier, "ref", barrier) is ref for ref in skipped):
            wait(barrier)

    monkeypatch.setattr(gpu_attend, "Shared", remember)
    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_skipped)
    shape = bf16(page_size=64, num_heads=2, num_kv_heads=1, head_dim=64, width=40)
    with pytest.raises(Exception, match="RACE DETECTED"):
        check(interpreted(detect_races=True), make_case(shape, [(192, 40)]), shape)


SERVED = dict(head_dim=128, page_size=16, num_heads=8, num_kv_heads=2, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "other",
    [
        dict(compute_capability="8.0"),
        dict(compute_capability="10.0"),
        dict(dtype=jnp.float32, kv_dtype=jnp.float32),
        dict(kv_dtype=jnp.float16),
        dict(page_size=48),
        dict(page_size=4),
        dict(head_dim=72),
        dict(head_dim=16),
        dict(head_dim=512),
        dict(head_dim=80, kv_dtype=jnp.int8),
        dict(num_heads=9),
        dict(num_kv_heads=1, head_dim=48),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(other: dict) -> None:
    assert gpu.supported(compute_capability="9.0", **SERVED) is None
    reason = gpu.supported(**dict(compute_capability="9.0") | SERVED | other)
    name, value = next(iter(other.items()))
    assert reason and f"{name}={value if isinstance(value, str | int) else jnp.dtype(value)}" in reason


def test_unsupported_shapes_raise() -> None:
    shape = Shape(page_size=16, num_heads=2, num_kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"dtype=float32: wgmma .* or use the XLA path"):
        check(gpu.paged_attention, make_case(shape, [(0, 1)]), shape)
