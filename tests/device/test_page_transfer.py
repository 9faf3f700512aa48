"""Pages that leave and enter a pool by id: the same numbers in every layout, dtype and split over devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ops, sharding
from jaxkv.device import kv_pool, page_transfer
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.plan import PageAt
from kernels_pallas.paged_attention import tpu
from tests import tiny
from tests.device import stage

TPU = dataclasses.replace(
    ops.XLA, storage_dtype=tpu.storage_dtype, storage_shape=tpu.storage_shape, pack=tpu.pack, unpack=tpu.unpack
)
MOVES = dataclasses.replace(stage.BUCKETS, page_moves=(1, 4))


def make_spec(backend: ops.Backend, dtype: Any, head_dim: int = 8, **changes: Any) -> PoolSpec:
    return PoolSpec(
        **dict(
            num_layers=3, num_pages=5, num_kv_heads=2, page_size=4, head_dim=head_dim, dtype=jnp.dtype(dtype),
            storage_dtype=backend.storage_dtype(jnp.dtype(dtype)), storage_shape=backend.storage_shape,
            pack=backend.pack, unpack=backend.unpack,
        ) | changes
    )  # fmt: skip


def random_pages(spec: PoolSpec, num: int) -> np.ndarray:
    shape = (num, *page_transfer.canonical_shape(spec))
    bits = page_transfer.canonical_dtype(spec)
    return np.random.default_rng(0).integers(0, np.iinfo(bits).max // 3, shape, bits)  # no NaN: those have many bits


@pytest.mark.parametrize("backend", [ops.CPU, ops.XLA, TPU], ids=["cpu", "xla", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("copies", [1, 2])
def test_what_is_written_is_read_and_nothing_else_changes(backend: ops.Backend, dtype: str, head_dim: int, copies: int):
    spec = make_spec(backend, dtype, head_dim, kv_copies=copies)
    kv = random_pages(spec, 2)
    pool = jnp.ones(spec.shape, spec.storage_dtype)
    ids = np.array([3, 1], np.int32)
    after = page_transfer.write_pages(pool, ids, jnp.asarray(kv), spec)
    read = np.asarray(page_transfer.read_pages(after, ids, spec))
    np.testing.assert_array_equal(read, kv)
    # By the plain definition: layer l's page p is entry l * P + p.
    layers = np.asarray(after).reshape(spec.num_layers, spec.num_pages, *spec.shape[1:])
    for page, index in ((3, 0), (1, 1)):
        for layer in range(spec.num_layers):
            plain = spec.unpack(jnp.asarray(layers[layer, page])[None], head_dim)[0]
            np.testing.assert_array_equal(np.asarray(plain).view(kv.dtype)[:, ::copies], kv[index, layer])
            np.testing.assert_array_equal(np.asarray(plain).view(kv.dtype)[:, copies - 1 :: copies], kv[index, layer])
    others = np.delete(layers, [1, 3], axis=1)
    np.testing.assert_array_equal(others, np.ones_like(others))


@pytest.mark.parametrize("page_bytes", [1, 10**6, 10**9])
def test_a_call_moves_no_more_than_it_may(page_bytes: int):
    table = page_transfer.sizes(page_bytes)
    assert table[0] == 1 and (len(table) == 1 or table[-1] * page_bytes <= page_transfer.MOVE_BYTES)


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_pages_move_between_meshes(tensor: int, data: int):
    """Read from one runner, written into another with other devices: the same pages. Four have copies of two heads."""
    model = tiny.model(tiny.config(vocab_size=96))
    runner = stage.make_runner(model, tensor=tensor, data=data, buckets=MOVES, num_pages=16)
    pages = [PageAt(data - 1, 3), PageAt(0, 7), PageAt(data - 1, 5)]
    kv = np.random.default_rng(1).integers(0, 2**29, (3, *runner.page_shape), np.uint32)
    runner.write_pages(pages, list(kv))
    np.testing.assert_array_equal(runner.read_pages(pages).result(), kv)
    plain = stage.make_runner(model, buckets=MOVES, num_pages=16)
    assert plain.page_shape == runner.page_shape
    plain.write_pages([PageAt(0, 1)], [runner.read_pages([pages[1]]).result()[0]])
    np.testing.assert_array_equal(plain.read_pages([PageAt(0, 1)]).result()[0], kv[1])


def test_no_recompiles_and_the_pool_is_donated():
    runner = stage.make_runner(buckets=MOVES, num_pages=16)
    for size in MOVES.page_moves:
        runner._warm_moves(size)
    traces = dict(runner.num_traces)
    for num in (1, 2, 3, 4):
        before = runner._pool
        runner.write_pages([PageAt(0, i + 1) for i in range(num)], [np.ones(runner.page_shape, np.uint32)] * num)
        assert before.is_deleted()
        assert runner.read_pages([PageAt(0, i + 1) for i in range(num)]).result().shape[0] == num
    assert dict(runner.num_traces) == traces


def test_a_read_sees_what_is_there_before_later_steps():
    """Enqueued before a step that overwrites the page, although it is looked at afterwards."""
    mine = stage.make_runner(buckets=MOVES, num_pages=16)
    mine.write_pages([PageAt(0, 2)], [np.full(mine.page_shape, 7, np.uint32)])
    early = mine.read_pages([PageAt(0, 2)])
    for value in range(5):
        mine.write_pages([PageAt(0, 2)], [np.full(mine.page_shape, value, np.uint32)])
    assert (early.result() == 7).all()


def test_shardings_are_the_pools_own():
    mesh = sharding.make_mesh(2, 2)
    spec = make_spec(ops.CPU, "float32", num_shards=2)
    assert page_transfer.host_sharding(spec, mesh).memory_kind in (None, "unpinned_host", "device")
    pool = kv_pool.allocate(spec, mesh)
    assert jax.tree.leaves(pool)[0].sharding.spec == sharding.spec(*kv_pool.AXES)
