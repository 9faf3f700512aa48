"""The Mosaic GPU kernels through NVIDIA's and XLA's compilers, for H100 and H200, without a GPU."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.paged_attention import Tiles, gpu

pytestmark = pytest.mark.compile

PAGES, LAYERS, ROW_PAGES, TILES = 1 << 14, 3, 16, 4  # nothing of it is ever allocated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    head_dim: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    width: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    window: bool = False
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in dataclasses.astuple(self))

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        shape = (LAYERS * PAGES, 2, self.num_kv_heads, self.page_size, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.kv_dtype or self.dtype))

    @property
    def layer_bytes(self) -> int:
        return math.prod(self.pool.shape) * self.pool.dtype.itemsize // LAYERS


SIZES = [  # head dims, page sizes, dtypes, groups and widths in pairs
    Sizes(head_dim=32, page_size=16, num_heads=8, num_kv_heads=8, kv_dtype="float8_e4m3fn", width=8),
    Sizes(head_dim=64, page_size=64, num_heads=9, num_kv_heads=3, width=16, kv_dtype="int8"),
    Sizes(head_dim=64, page_size=8, num_heads=8, num_kv_heads=1, width=256, dtype="float16", sinks=True),
    Sizes(head_dim=64, page_size=16, num_heads=71, num_kv_heads=1, window=True),
    Sizes(head_dim=80, page_size=32, num_heads=32, num_kv_heads=32, width=64),
    Sizes(head_dim=96, page_size=128, num_heads=32, num_kv_heads=8, kv_dtype="float8_e4m3fn", sinks=True),
    Sizes(head_dim=128, page_size=16, num_heads=32, num_kv_heads=8, soft_cap=30.0),
    Sizes(head_dim=128, page_size=32, num_heads=8, num_kv_heads=1, width=512, kv_dtype="int8", window=True),
    Sizes(head_dim=128, page_size=256, num_heads=8, num_kv_heads=8, width=128),
    Sizes(head_dim=256, page_size=64, num_heads=16, num_kv_heads=2, soft_cap=50.0, window=True),
    Sizes(head_dim=256, page_size=16, num_heads=8, num_kv_heads=4, width=128, kv_dtype="int8"),
]


@functools.cache
def devices(name: str, number: int = 1) -> list[Any]:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin, though no GPU")
    target = (Path(__file__).parent / "targets" / f"{name}.txtpb").read_text()
    return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{number}", target_config=target).devices


@pytest.fixture(autouse=True)
def no_persistent_cache():
    """Programs for a device that is not there can be written to it and not read again; jax warns at each."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def layers(sizes: Sizes, q, k, v, pool, tiles: Tiles, sinks):
    """As models call it: a scan over layers with the pool of all of them as the carry."""

    def layer(carry, index):
        q, pool = carry
        out, pool = gpu.paged_attention(
            q,
            k,
            v,
            pool,
            (tiles,),
            index * PAGES,
            scale=0.1,
            window=index + 100 if sizes.window else None,
            soft_cap=sizes.soft_cap,
            sinks=sinks,
            kv_scale=(0.1, 0.2) if sizes.kv_dtype else (1.0, 1.0),
        )
        return (out, pool), None

    return jax.lax.scan(layer, (q, pool), jnp.arange(LAYERS, dtype=jnp.int32))[0]


def specs(sizes: Sizes, sharding: SingleDeviceSharding | None) -> tuple[Any, ...]:
    spec = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    tokens, dtype = TILES * sizes.width, jnp.dtype(sizes.dtype)
    kv = spec((tokens, sizes.num_kv_heads, sizes.head_dim), dtype)
    ints = functools.partial(spec, dtype=jnp.int32)
    tiles = Tiles(ints((TILES, ROW_PAGES)), *(ints((TILES,)) for _ in range(3)), width=sizes.width)  # type: ignore[arg-type]
    return (
        spec((tokens, sizes.num_heads, sizes.head_dim), dtype),
        kv,
        kv,
        spec(sizes.pool.shape, sizes.pool.dtype),
        tiles,
        spec((sizes.num_heads,), jnp.float32) if sizes.sinks else None,
    )


def lower(sizes: Sizes, sharding: SingleDeviceSharding | None = None) -> jax.stages.Lowered:
    traced = jax.jit(functools.partial(layers, sizes), donate_argnums=3).trace(*specs(sizes, sharding))
    return traced.lower() if sharding else traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lowers(sizes: Sizes) -> None:
    """Needs no CUDA plugin. Includes that shared memory suffices: Mosaic GPU counts it when it lowers."""
    assert lower(sizes).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_in_place(sizes: Sizes) -> None:
    compiled = lower(sizes, SingleDeviceSharding(devices("h200")[0])).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == LAYERS * sizes.layer_bytes
    assert memory.temp_size_in_bytes < sizes.layer_bytes / 2
    hlo = compiled.as_text() or ""
    assert pool_sized_results(hlo, sizes) == ["custom-call, aliased"]
    assert " scatter(" not in hlo


def test_a_copy_of_the_pool_would_be_seen() -> None:
    """The negative control: without donation XLA must copy it."""
    sizes = SIZES[6]
    arguments = specs(sizes, SingleDeviceSharding(devices("h200")[0]))
    hlo = jax.jit(functools.partial(layers, sizes)).lower(*arguments).compile().as_text() or ""
    assert sorted(pool_sized_results(hlo, sizes)) == ["copy", "custom-call, aliased"]


def pool_sized_results(hlo: str, sizes: Sizes) -> list[str]:
    """Operations whose result has a layer's size or more, other than those that only hand it on."""
    found = []
    for results, operation, rest in re.findall(
        r"= (\(.*?\)|\S+) ([\w\-]+)\((.*)", hlo
    ):  # one array or a tuple of several
        shapes = re.findall(r"\w+\[([\d,]+)\]", results)
        most = max((math.prod(map(int, dims.split(","))) for dims in shapes), default=0)
        if most * sizes.pool.dtype.itemsize >= sizes.layer_bytes:
            found.append(operation + (", aliased" if "output_to_operand_aliasing" in rest else ""))
    passing = ("parameter", "get-tuple-element", "bitcast", "tuple", "while")
    return [operation for operation in found if operation not in passing]


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_hopper_is_supported(name: str) -> None:
    sizes = SIZES[6]
    (chip,) = devices(name)
    assert gpu.supported(
        compute_capability=chip.compute_capability,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        dtype=sizes.dtype,
        kv_dtype=sizes.pool.dtype,
    ) is None  # fmt: skip
    lower(sizes, SingleDeviceSharding(chip)).compile()


def test_heads_shared_between_two_devices() -> None:
    """Under shard_map each keeps its half of the pool in place, and nothing is sent."""
    sizes = Sizes(head_dim=128, page_size=16, num_heads=16, num_kv_heads=4, sinks=True)
    mesh = Mesh(np.array(devices("h200", 2)), ("tp",))
    heads, everywhere = P(None, "tp"), P()
    pool = P(None, None, "tp")
    tiles = Tiles(*(everywhere,) * 4, width=sizes.width)  # type: ignore[arg-type]
    program = jax.shard_map(
        functools.partial(layers, sizes),
        mesh=mesh,
        in_specs=(heads, heads, heads, pool, tiles, P("tp")),
        out_specs=(heads, pool),
        check_vma=False,
    )
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), (heads, heads, heads, pool, tiles, P("tp")))
    arguments = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        specs(sizes, None),
        shardings,
    )
    compiled = jax.jit(program, donate_argnums=3).lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == LAYERS * sizes.layer_bytes // 2
    half = dataclasses.replace(sizes, num_kv_heads=2)
    hlo = compiled.as_text() or ""
    assert pool_sized_results(hlo, half) == ["custom-call, aliased"]
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)(-start)?\(", hlo)
