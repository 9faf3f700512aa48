"""Which kernels a device gets, and what is said when it gets none."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ops
from jaxkv.ops import Shapes

BF16 = np.dtype(jnp.bfloat16)
SHAPES = Shapes(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_pages=512, dtype=BF16, kv_dtype=BF16
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    ops._by_platform.cache_clear()
    ops._say_refused.cache_clear()


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v5 lite", "tpu"), ("tpu", "TPU v6 lite", "tpu"), ("tpu", "TPU7x", "tpu"),
        ("gpu", "NVIDIA H100 80GB HBM3", "gpu"), ("gpu", "NVIDIA GH200 480GB", "gpu"),
    ],
)  # fmt: skip
def test_kernels_by_device(platform: str, kind: str, name: str) -> None:
    backend = ops.select(platform, kind)
    assert backend.name == name
    assert ops.fit(backend, SHAPES) == backend


def test_compiler_options_of_one_tpu() -> None:
    for quantised in (False, True):
        assert ops.select("tpu", "TPU7x", quantised=quantised).compiler_options == ops.TPU7X_OPTIONS
        assert ops.select("tpu", "TPU v6 lite", quantised=quantised).compiler_options == ()


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_take_the_reference_and_say_so_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = ops.select("gpu", kind)
    assert backend is ops.select("gpu", kind)
    assert backend == dataclasses.replace(
        ops.XLA, compiler_options=ops.GPU_OPTIONS, quantised_options=ops.GPU_QUANTISED_OPTIONS
    )
    assert ops.select("gpu", kind, quantised=True).compiler_options == ops.GPU_QUANTISED_OPTIONS
    assert [record.message for record in caplog.records] == [
        f"no paged-attention kernel for gpu {kind!r}: using the XLA reference path"
    ]
    assert ops.XLA.storage_dtype(BF16) == BF16  # the bits are for the CPU


@pytest.mark.parametrize(("platform", "kind"), [("tpu", "TPU v6 lite"), ("gpu", "NVIDIA H200")])
def test_what_a_kernel_refuses_runs_on_the_reference(
    platform: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd = dataclasses.replace(SHAPES, page_size=12)
    with caplog.at_level(logging.WARNING):
        found = [ops.fit(ops.select(platform, kind), odd) for _ in range(2)]
    assert [backend.name for backend in found] == ["xla", "xla"]
    (record,) = caplog.records
    assert "page_size=12" in record.message and "XLA reference path" in record.message


def test_tiles_are_narrowed_to_what_fits_on_the_chip() -> None:
    def refuses(shapes: Shapes, query_tile: int) -> str | None:
        return "too wide" if query_tile > 8 else None

    backend = dataclasses.replace(ops.XLA, name="narrow", refuses=refuses)
    assert ops.fit(backend, SHAPES).query_tile == 8
