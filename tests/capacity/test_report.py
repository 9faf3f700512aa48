"""The arithmetic of `jaxkv plan`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv import sharding
from jaxkv.capacity.chips import CHIPS
from jaxkv.capacity.geometry import Layout, bound, tensor_sizes
from jaxkv.capacity.known import KNOWN
from jaxkv.capacity.report import Budget, advise, batch_sizes, bounds, larger_slice, rows_at, to_json
from jaxkv.models.quant import shardings
from jaxkv.models.registry import find_family
from jaxkv.paging import Paging
from jaxkv.sharding import RULES

BILLION = 1e9
SIZES = {  # numbers in the weights, as the model cards say
    "llama-2-7b": 6.74, "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.6,
    "mistral-7b": 7.25, "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.71, "tinyllama-1.1b": 1.1,
    "mistral-7b-v0.1": 7.24, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24, "gemma-3-270m": 0.268, "gemma-3-1b": 1.0, "phi-3-mini-4k": 3.82, "olmo-2-7b": 7.3,
    "olmoe-1b-7b": 6.92, "granite-3.1-8b": 8.17, "smollm3-3b": 3.08, "mixtral-8x7b": 46.7,
}  # fmt: skip


def layout(name: str = "llama-3.1-8b", tensor: int = 1, data: int = 1) -> Layout:
    cfg = find_family(KNOWN[name]).config_from_hf(KNOWN[name])
    return Layout(cfg=cfg, tensor=1, data=data, dtype_bytes=2, kv_dtype_bytes=2).with_tensor(tensor)


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_known_models_have_the_size_they_are_named_for(name: str, size: float) -> None:
    assert layout(name).num_weights / BILLION == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("name", KNOWN)
def test_every_number_is_counted(name: str) -> None:
    """The arithmetic against the parameters themselves, alone and split."""
    family = find_family(KNOWN[name])
    for tensor in tensor_sizes(layout(name).cfg, 2):
        one = layout(name, tensor=tensor)
        leaves = nnx.to_flat_state(nnx.state(family.build(one.cfg, np.dtype(np.float32), per_layer=False)))
        split = [any(RULES[axis] for axis in leaf.logical_axes) for _, leaf in leaves]
        sizes = [math.prod(leaf.shape) for _, leaf in leaves]
        assert one.num_weights == sum(sizes)
        here = sum(size // tensor if is_split else size for size, is_split in zip(sizes, split, strict=True))
        assert one.weight_bytes == 2 * here


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-2b", "qwen2.5-7b", "mixtral-8x7b"])
def test_every_byte_of_quantised_weights_is_counted(name: str) -> None:
    """The arithmetic against the arrays themselves, tied and not, with biases, with experts."""
    family, mesh = find_family(KNOWN[name]), sharding.make_mesh(2)
    one = dataclasses.replace(layout(name, tensor=2), quant="int8")
    state = nnx.state(family.build(one.cfg, np.dtype(jnp.bfloat16), per_layer=False, quant="int8"))
    arrays = [
        math.prod(where.shard_shape(array.shape)) * array.dtype.itemsize
        for _, leaf in nnx.to_flat_state(state)
        for array, where in zip(jax.tree.leaves(leaf), shardings(leaf, mesh), strict=True)
    ]
    assert one.weight_bytes == sum(arrays)
    unread = 0 if one.cfg.tied else (one.cfg.vocab_size // 2 - 1) * one.cfg.embed * 2
    assert one.decode(1, 0).weight_bytes == one.weight_bytes - unread - one._idle_expert_bytes(1)
    assert one.decode(1, 0).flops == layout(name, tensor=2).decode(1, 0).flops


def test_experts_and_windows_are_counted_as_they_are_read() -> None:
    assert layout("mixtral-8x7b").num_active_weights / BILLION == pytest.approx(12.8, rel=0.01)
    assert layout("qwen3-30b-a3b").num_active_weights / BILLION == pytest.approx(3.0, rel=0.02)
    assert layout("olmoe-1b-7b").num_active_weights / BILLION == pytest.approx(1.18, rel=0.01)
    mixtral = layout("mixtral-8x7b")
    expert = 3 * 4096 * 14336 * 32 * 2
    one, many = mixtral.decode(1, 0), mixtral.decode(256, 0)
    assert many.weight_bytes - one.weight_bytes == pytest.approx(6 * expert + 255 * 4096 * 2, rel=1e-6)
    assert one.flops == pytest.approx(2 * mixtral.num_active_weights, rel=1e-3)
    gemma = layout("gemma-3-1b")  # 22 layers of 26 have a window of 512 tokens
    layer = 2 * 256 * 2
    assert gemma.decode(1, 400).kv_bytes == 26 * 400 * layer
    assert gemma.decode(1, 4000).kv_bytes == (4 * 4000 + 22 * 512) * layer
    assert gemma.token_bytes == 26 * layer, "the pool keeps all"
    assert 8 in tensor_sizes(layout("mixtral-8x7b").cfg, 16) and 16 not in tensor_sizes(layout("mixtral-8x7b").cfg, 16)


def test_known_models_are_read_by_a_family() -> None:
    for config in KNOWN.values():
        find_family(config).config_from_hf(config)


def test_bytes_of_a_decode_step() -> None:
    work = layout(tensor=8).decode(rows=16, context_len=1000)
    assert layout(tensor=8).token_bytes == 2 * 32 * 128 * 2  # one KV head is left on each device
    assert work.kv_bytes == 16 * 1000 * 2 * 32 * 128 * 2
    assert work.logit_bytes == 16 * 128256 / 8 * 4
    table = 128256 * 4096 // 8
    assert work.weight_bytes == layout(tensor=8).weight_bytes - (table - 16 * 4096) * 2
    attention = 4 * 16 * 1000 * 32 * 128 * 32 / 8
    assert work.flops == pytest.approx(2 * 16 * 7.5e9 / 8 + attention, rel=0.01)
    assert layout().decode(16, 1000).link_bytes == 0


def test_copied_kv_heads_take_memory() -> None:
    assert layout(tensor=16).token_bytes == layout(tensor=8).token_bytes
    assert tensor_sizes(layout().cfg, 64) == [1, 2, 4, 8, 16, 32]


def test_small_batches_wait_for_memory_and_large_ones_for_arithmetic() -> None:
    chip = CHIPS["v6e"]
    rules = [bound(layout().decode(rows, 128), chip, 2).rules for rows in (1, 64, 4096)]
    assert rules == ["memory", "memory", "compute"]
    (one,) = bounds(layout(), chip, [1], 0)
    assert one.tokens_s == pytest.approx(chip.hbm_bytes_s / layout().decode(1, 0).bytes)


def test_budget() -> None:
    budget = Budget(usable=1000, weights=500, state=10, temp=20, page=9)
    assert (budget.free, budget.for_pages, budget.num_pages) == (500, 450, 49)
    assert budget.missing(49) == 0 and budget.missing(50) > 0
    greedy = dataclasses.replace(budget, temp=200)
    assert greedy.for_pages == 290 and greedy.missing(40) == 500 + 41 * 9 + 210 - 1000
    assert Budget(usable=10, weights=50, state=0, temp=0, page=9).num_pages == 0


def test_rows_that_fit() -> None:
    assert rows_at(100, Paging(page_size=16), data=2, context_len=33) == 100 // 3 * 2
    assert batch_sizes(1) == [1] and batch_sizes(5) == [1, 2, 4, 5]


def test_advice_names_the_nearest_setting() -> None:
    one = layout("llama-3.3-70b", tensor=4)
    budget = Budget(usable=31 * 2**30, weights=one.weight_bytes, state=0, temp=0, page=one.token_bytes * 16)
    found = advise(
        one,
        budget,
        num_devices=8,
        page_size=16,
        max_len=4096,
        dtypes={"bfloat16": 2, "float32": 4},
        kv_dtypes={"float8_e4m3fn": 1},
    )
    assert [advice.setting for advice in found] == ["--tensor 8", "--quant int8"]
    larger = larger_slice(one, budget, CHIPS["v6e"], page_size=16, max_len=4096)
    assert larger is not None and larger.setting == "a topology of 8 or more v6e chips"


def test_advice_quantises() -> None:
    """One device holds 8B in int8, and not in bfloat16."""
    one = layout()
    budget = Budget(usable=12 * 2**30, weights=one.weight_bytes, state=0, temp=0, page=one.token_bytes * 16)
    settings = {"num_devices": 1, "page_size": 16, "max_len": 4096, "dtypes": {}, "kv_dtypes": {}}
    assert [advice.setting for advice in advise(one, budget, **settings)] == ["--quant int8"]
    assert advise(dataclasses.replace(one, quant="int8"), budget, **settings) == []


def test_advice_shortens_rows() -> None:
    one = layout()
    budget = Budget(usable=17 * 10**9, weights=one.weight_bytes, state=0, temp=0, page=one.token_bytes * 16)
    found = advise(
        one, budget, num_devices=1, page_size=16, max_len=131072, dtypes={"bfloat16": 2}, kv_dtypes={"bfloat16": 2}
    )
    assert [advice.setting for advice in found] == [f"--max-len {budget.num_pages * 16}"]
    assert budget.num_pages > 100


def test_json_holds_what_is_computed() -> None:
    assert to_json({"a": (Budget(usable=10, weights=4, state=1, temp=1, page=1),)})["a"][0]["num_pages"] == 3
