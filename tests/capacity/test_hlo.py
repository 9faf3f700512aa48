"""Reading compiled programs, on a short program by hand."""

import pytest

from jaxkv.capacity import hlo, traffic

TEXT = """\
HloModule jit_decode, input_output_alias={ {0}: (2, {}, may-alias), {1}: (1, {}, may-alias) }, entry_computation_layout={()}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_slice (w: bf16[3,4,8], i: s32[]) -> bf16[4,8] {
  %w = bf16[3,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,4,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %layer = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} bitcast(%slice)
}

%body (carry: (s32[], bf16[30,2,4,8], bf16[3,4,8])) -> (s32[], bf16[30,2,4,8], bf16[3,4,8]) {
  %carry = (s32[], bf16[30,2,4,8]{3,2,1,0}, /*index=2*/bf16[3,4,8]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry), index=0
  %pool = bf16[30,2,4,8]{3,2,1,0} get-tuple-element(%carry), index=1
  %weights = bf16[3,4,8]{2,1,0} get-tuple-element(%carry), index=2
  %layer.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} fusion(%weights, %i.1), kind=kLoop, calls=%fused_slice
  %kernel = (bf16[4,8]{1,0}, bf16[30,2,4,8]{3,2,1,0}) custom-call(%layer.1, %pool), output_to_operand_aliasing={{1}: (1, {})}
  %out = bf16[4,8]{1,0} get-tuple-element(%kernel), index=0
  %start = bf16[4,8]{1,0} all-reduce-start(%out), to_apply=%add
  %done = bf16[4,8]{1,0} all-reduce-done(%start)
  %again = bf16[4,8]{1,0} all-reduce(%done), to_apply=%add
  %new = bf16[30,2,4,8]{3,2,1,0} get-tuple-element(%kernel), index=1
  ROOT %tuple = (s32[], bf16[30,2,4,8]{3,2,1,0}, bf16[3,4,8]{2,1,0}) tuple(%i.1, %new, %weights)
}

%condition (carry.1: (s32[], bf16[30,2,4,8], bf16[3,4,8])) -> pred[] {
  %carry.1 = (s32[], bf16[30,2,4,8]{3,2,1,0}, bf16[3,4,8]{2,1,0}) parameter(0)
  %limit = s32[] constant(3)
  %i.2 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%i.2, %limit), direction=LT
}

ENTRY %main (p0: bf16[3,4,8], p1: s32[], p2: bf16[30,2,4,8]) -> (bf16[30,2,4,8], s32[]) {
  %p0 = bf16[3,4,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[30,2,4,8]{3,2,1,0} parameter(2)
  EXTRA
  %init = (s32[], bf16[30,2,4,8]{3,2,1,0}, bf16[3,4,8]{2,1,0}) tuple(%p1, %p2, %p0)
  %loop = (s32[], bf16[30,2,4,8]{3,2,1,0}, bf16[3,4,8]{2,1,0}) while(%init), condition=%condition, body=%body
  %pool.1 = bf16[30,2,4,8]{3,2,1,0} get-tuple-element(%loop), index=1
  ROOT %result = (bf16[30,2,4,8]{3,2,1,0}, s32[]) tuple(%pool.1, %p1)
}
"""
POOL = 30 * 2 * 4 * 8
LAYER = POOL // 3


def parse(extra: str = "") -> hlo.Module:
    return hlo.parse(TEXT.replace("  EXTRA\n", f"  {extra}\n" if extra else ""))


def test_finds_loop_aliases_and_collectives() -> None:
    module = parse()
    assert module.aliases == {0: 2, 1: 1}
    loop = hlo.layer_loop(module, 3, POOL)
    assert loop is not None and (loop.body, loop.trips) == ("body", 3)
    assert hlo.layer_loop(module, 4, POOL) is None and hlo.layer_loop(module, 3, POOL + 1) is None
    assert hlo.collectives(module, loop.body) == {"all-reduce": 2}
    assert module.fused == {"fused_slice"}


def test_only_the_kernel_makes_a_pool() -> None:
    assert hlo.large_results(parse(), LAYER, (2, 4, 8)) == {"custom-call[aliased]": 1}
    copied = parse("%copied = bf16[30,2,4,8]{3,2,1,0} copy(%p2)")
    assert hlo.large_results(copied, LAYER, (2, 4, 8)) == {"custom-call[aliased]": 1, "copy": 1}
    assert hlo.scatters(copied, LAYER) == 0
    scattered = parse("%s = bf16[30,2,4,8]{3,2,1,0} scatter(%p2, %p1, %p0), to_apply=%add")
    assert hlo.scatters(scattered, LAYER) == 1


def test_arguments_that_are_laid_out_anew() -> None:
    assert hlo.copied_arguments(parse()) == 0
    assert hlo.copied_arguments(parse("%copied = bf16[3,4,8]{0,1,2} copy(%p0)")) == 3 * 4 * 8 * 2
    prefetched = """%start.1 = (bf16[3,4,8]{2,1,0:S(1)}, bf16[3,4,8]{2,1,0}, u32[]{:S(2)}) copy-start(%p0)
  %done.1 = bf16[3,4,8]{2,1,0:S(1)} copy-done(%start.1)"""
    assert hlo.copied_arguments(parse(prefetched)) == 0, "read once, where it is used"
    assert hlo.copied_arguments(parse(prefetched + "\n  %copied = bf16[3,4,8]{0,1,2} copy(%done.1)")) == 192
    assert hlo.copied_arguments(parse("%copied = f32[3,4,8]{0,1,2} copy(%activations)")) == 0


def test_counts_bytes() -> None:
    module = parse()
    layer = 4 * 8 * 2  # a layer's weights, or one of the small arrays
    # sliced weights; the kernel's result (what it takes lies on the chip); two all-reduces in and out
    body = layer + 4 + layer + 4 * layer
    loop = hlo.layer_loop(module, 3, POOL)
    assert traffic.step_bytes(module, loop, POOL) == pytest.approx(3 * body, abs=3 * 8)
    copied = parse("%copied = bf16[30,2,4,8]{3,2,1,0} copy(%p2)")
    assert traffic.step_bytes(copied, hlo.layer_loop(copied, 3, POOL), POOL) == traffic.step_bytes(
        module, loop, POOL
    ) + 2 * (POOL * 2)


@pytest.mark.parametrize(
    ("shape", "num_bytes", "spaces"),
    [
        ("bf16[16,4096]{1,0:T(8,128)(2,1)S(1)}", [16 * 4096 * 2], [1]),
        ("(f8e4m3fn[3]{0}, pred[], s4[8])", [3, 1, 4], [0, 0, 0]),
        ("u32[]{:S(2)}", [4], [2]),
    ],
)
def test_shapes(shape: str, num_bytes: list[int], spaces: list[int]) -> None:
    found = hlo.arrays(shape)
    assert [array.num_bytes for array in found] == num_bytes
    assert [array.space for array in found] == spaces
