"""From what was asked for to final numbers, and what memory allows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ops, sharding
from jaxkv.device import kv_pool
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.device.settings import EngineConfig, Resolved, resolve
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.models.config import LayerKind
from jaxkv.models.rope import Rope
from tests import tiny

GB = 10**9


def resolved(monkeypatch: pytest.MonkeyPatch, free: int = GB, data: int = 1, **fields):
    monkeypatch.setattr(kv_pool, "free_memory_bytes", lambda mesh: free)
    mesh = sharding.make_mesh(data=data)
    return resolve(EngineConfig(**fields), tiny.config(), jnp.dtype(jnp.float32), mesh, ops.CPU)


def test_the_pool_takes_its_share_of_free_memory(monkeypatch) -> None:
    result = resolved(monkeypatch, free=4_000_000, memory_fraction=0.5)
    page_bytes = 2 * 2 * 2 * 8 * 4 * 16  # K and V, layers, KV heads, head dim, bytes, tokens
    assert result.pool.page_bytes == page_bytes
    assert result.pool.num_pages == 2_000_000 // page_bytes
    assert result.scheduler.num_pages == result.pool.num_pages


def test_a_float8_cache_holds_four_times_the_tokens_of_float32(monkeypatch) -> None:
    wide, narrow = (resolved(monkeypatch, free=4_000_000, kv_dtype=kv).pool for kv in ("auto", "float8_e4m3fn"))
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.float8_e4m3fn)
    assert wide.page_bytes == 4 * narrow.page_bytes and narrow.storage_dtype.itemsize == 1
    with pytest.raises(ConfigError, match=r"kv_dtype='int3' is not one of auto, float32"):
        EngineConfig(kv_dtype="int3")


def test_a_little_less_memory_changes_no_shape() -> None:
    """Else a second start would find none of the programs that the first one kept."""
    assert kv_pool._five_bits(20_300_000_000) == kv_pool._five_bits(20_100_000_000) == 18 << 30
    assert [kv_pool._five_bits(n) for n in (0, 31, 33, 63)] == [0, 31, 32, 62]
    assert kv_pool.free_memory_bytes(sharding.make_mesh()) % (1 << 25) == 0  # of at least half a GiB


def test_no_more_pages_than_all_rows_could_use(monkeypatch) -> None:
    assert resolved(monkeypatch, max_rows=3, max_len=100).pool.num_pages == 3 * 7 + 1


def test_max_len_shrinks_to_the_pool(monkeypatch, caplog) -> None:
    assert resolved(monkeypatch, num_pages=4).scheduler.max_len == 64
    assert "lowered to 64" in caplog.text


def test_a_max_len_beyond_the_trained_one_is_said(monkeypatch, caplog) -> None:
    assert resolved(monkeypatch, max_len=1000).scheduler.max_len == 1000
    assert "512 positions" in caplog.text


@pytest.mark.parametrize(("budget", "tile"), [(None, 32), (79, 32), (31, 16), (5, 4), (1, 1)])
def test_odd_budgets_choose_a_tile_that_fits(monkeypatch, budget, tile: int) -> None:
    result = resolved(monkeypatch, token_budget=budget, max_rows=64)
    assert result.backend.query_tile == result.scheduler.chunk_align == tile


def test_odd_sizes_work_or_are_refused(monkeypatch) -> None:
    result = resolved(monkeypatch, token_budget=2000, page_size=48, max_rows=7)
    assert result.scheduler.page_size == 48 and result.buckets.decode_rows[-1] == 7
    assert resolved(monkeypatch, decode_steps=10**6, max_len=64).scheduler.decode_steps == 64


@pytest.mark.parametrize(
    "fields",
    [{"max_len": 0}, {"num_pages": 2.5}, {"memory_fraction": 1.5}, {"num_pages": 4, "memory_fraction": 0.5},
     {"memory_fraction": "0.5"}, {"seed": None}, {"seed": True}, {"max_rows": True}, {"overlap": "no"},
     {"kv_dtype": "int8"}, {"kv_dtype": ["float32"]}],
)  # fmt: skip
def test_impossible_settings_are_refused(fields) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineConfig(**fields)


def test_too_little_memory_says_what_is_missing(monkeypatch) -> None:
    with pytest.raises(CapacityError, match="raise memory_fraction"):
        resolved(monkeypatch, free=10_000)


def test_a_pool_beyond_free_memory_is_refused_with_what_would_fit(monkeypatch) -> None:
    """Behaviour 37: bytes wanted, bytes free, and the largest sizes that fit."""
    monkeypatch.setattr(kv_pool, "free_memory_bytes", lambda mesh: 1_000_000)
    dtype = jnp.dtype(jnp.float32)
    spec = PoolSpec(
        num_layers=2, num_pages=1000, num_kv_heads=2, page_size=16, head_dim=8, dtype=dtype, storage_dtype=dtype
    )
    with pytest.raises(CapacityError, match=r"4,096,000 bytes.*1,000,000 are free.*num_pages=243, max_len=3888"):
        kv_pool.allocate(spec, sharding.make_mesh(1))


def test_rotary_phases_stay_exact_at_128k() -> None:
    """Behaviour 39: float32 phases, checked against float64."""
    rope = Rope(head_dim=128, base=500000.0)
    positions = np.array([0, 1, 4095, 131071])
    cos, sin = rope.phases(jnp.asarray(positions, jnp.int32))
    freq = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    angle = positions[:, None] * freq[None, :].astype(np.float32).astype(np.float64)
    assert cos.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cos)[:, 0], np.cos(angle), atol=0.02)
    np.testing.assert_allclose(np.asarray(sin)[:3, 0], np.sin(angle)[:3], atol=2e-3)


def test_data_shards_get_their_share(monkeypatch) -> None:
    """Rows and pages of the settings are those of all shards; the budget of a step is each shard's own."""
    result = resolved(monkeypatch, data=4, max_rows=8, num_pages=40, max_len=100)
    assert (result.scheduler.max_rows, result.scheduler.num_shards) == (8, 4)
    assert result.scheduler.num_pages == result.pool.num_pages == 11 and result.pool.num_shards == 4
    assert result.pool.pool_bytes == 44 * result.pool.page_bytes and result.pool.shape[0] == 4 * 2 * 11
    assert result.buckets.decode_rows == (1, 2) and result.scheduler.token_budget == 512
    assert resolved(monkeypatch, data=4).scheduler.max_rows == 4 * ops.CPU.max_rows
    by_memory = resolved(monkeypatch, free=4_000_000, data=2, memory_fraction=0.5)
    assert by_memory.pool.num_pages == 1_000_000 // by_memory.pool.page_bytes
    assert resolved(monkeypatch, data=2, num_pages=8).scheduler.max_len == 64, "a sequence lives on one shard"


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [("max_rows", 6, "use 4 or 8"), ("num_pages", 101, "100 or 104"), ("max_rows", 3, "use 4")],
)
def test_what_data_shards_cannot_share_is_refused(monkeypatch, field: str, value: int, way_out: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value} .*data=4 .*{way_out}"):
        resolved(monkeypatch, data=4, **{field: value})


def test_meshes() -> None:
    mesh = sharding.make_mesh(4, 2)
    assert mesh.axis_names == ("data", "tensor") and dict(mesh.shape) == {"data": 2, "tensor": 4}
    assert sharding.make_mesh().devices.tolist() == [jax.devices()[:1]]
    assert sharding.make_mesh(3, 2).devices.tolist() == [jax.devices()[:3], jax.devices()[3:6]]


def test_meshes_beyond_the_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data=3 x tensor=5 needs 15 devices, but 8 cpu device\(s\)"):
        sharding.make_mesh(5, 3)
    with pytest.raises(ConfigError, match="data=0"):
        sharding.make_mesh(1, 0)
    with pytest.raises(ConfigError, match=r"tensor=2\.0 must be a whole number"):
        sharding.make_mesh(2.0)
    with pytest.raises(ConfigError, match=f"tensor={len(jax.devices()) + 1}"):
        sharding.make_mesh(len(jax.devices()) + 1)


def with_windows(monkeypatch: pytest.MonkeyPatch, **fields) -> Resolved:
    """Settings for seven layers of which the third sees everything and the others 64 tokens."""
    monkeypatch.setattr(kv_pool, "free_memory_bytes", lambda mesh: GB)
    kinds = tuple(LayerKind(rope=None, window=None if layer == 2 else 64) for layer in range(7))
    model = dataclasses.replace(tiny.config(), num_layers=7, kinds=kinds, max_len=1000)
    return resolve(EngineConfig(**fields), model, jnp.dtype(jnp.float32), sharding.make_mesh(), ops.CPU)


def test_layers_with_windows_have_pages_of_their_own(monkeypatch) -> None:
    found = with_windows(monkeypatch, num_pages=10, token_budget=64, max_rows=2)
    assert found.pool.groups is not None and found.pool.num_layers == 1 and found.pool.num_groups == 7
    assert found.scheduler.windows == (None, *[64] * 6)
    assert found.pool.num_pages == 10 * 7 + 1, "ten pages of all layers are seventy of one"
    # 70 pages are 10 in each group; with 12 kept in a window at most, more than 160 tokens would need an eleventh.
    assert found.scheduler.max_len == 160
    longer = with_windows(monkeypatch, num_pages=20, token_budget=64, max_rows=2).scheduler
    assert longer.max_len == 1000 and longer.paging.num_needed(1000) == 63 + 6 * 12 <= 140
    at_most = with_windows(monkeypatch, token_budget=64, max_rows=2).pool
    assert at_most.num_pages == 2 * (63 + 6 * 12) + 1, "never more than rows can use"


def test_windows_do_not_matter_with_lower_tiers_or_short_sequences(monkeypatch) -> None:
    for fields in ({"host_cache_bytes": 1 << 20}, {"max_len": 64}):
        found = with_windows(monkeypatch, num_pages=10, **fields)
        assert (found.scheduler.windows, found.pool.num_layers, found.pool.num_pages) == ((None,), 7, 11)
