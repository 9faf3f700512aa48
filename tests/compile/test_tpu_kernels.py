"""The TPU kernel through the TPU compiler, for every generation it is meant for, without a TPU."""

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.paged_attention import Tiles, tpu

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]

CHIPS = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}  # and their topologies of one chip
LAYERS, LAYER_BYTES = 4, 512 << 20  # nothing of it is ever allocated; a pool of a few MiB would be placed in VMEM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    head_dim: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    width: int = 1
    num_tiles: int = 16
    table_pages: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: bool = False
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in dataclasses.astuple(self))

    @property
    def problem(self) -> tpu.Problem:
        names = [field.name for field in dataclasses.fields(tpu.Problem)]
        same = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return tpu.Problem(**(same | {"dtype": jnp.dtype(self.dtype), "pool_dtype": jnp.dtype(self.kv_dtype)}))

    @property
    def num_pages(self) -> int:
        """Of a layer."""
        return LAYER_BYTES // self.problem.page_bytes

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        shape = tpu.storage_shape(LAYERS * self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.kv_dtype))


SIZES = [  # head dims, page sizes, dtypes, groups and widths in pairs
    Sizes(head_dim=64, page_size=8, num_heads=9, num_kv_heads=3),
    Sizes(head_dim=64, page_size=16, num_heads=32, num_kv_heads=8, width=32, kv_dtype="int8", sinks=True),
    Sizes(head_dim=64, page_size=32, num_heads=8, num_kv_heads=1, dtype="float32", kv_dtype="float32"),
    Sizes(head_dim=64, page_size=64, num_heads=4, num_kv_heads=4, width=128, kv_dtype="float8_e4m3fn"),
    Sizes(head_dim=64, page_size=128, num_heads=16, num_kv_heads=2, window=True),
    Sizes(head_dim=96, page_size=8, num_heads=32, num_kv_heads=8, kv_dtype="float8_e4m3fn", window=True),
    Sizes(head_dim=96, page_size=16, num_heads=8, num_kv_heads=8, width=64),
    Sizes(head_dim=96, page_size=128, num_heads=6, num_kv_heads=3, width=7, kv_dtype="int8"),
    Sizes(head_dim=128, page_size=8, num_heads=8, num_kv_heads=1, width=256, kv_dtype="int8", soft_cap=30.0),
    Sizes(head_dim=128, page_size=16, num_heads=32, num_kv_heads=8, num_tiles=256, table_pages=2048),
    Sizes(head_dim=128, page_size=32, num_heads=32, num_kv_heads=8, width=128, num_tiles=64),
    Sizes(head_dim=128, page_size=16, num_heads=32, num_kv_heads=32, kv_dtype="float8_e4m3fn", sinks=True),
    Sizes(head_dim=128, page_size=64, num_heads=14, num_kv_heads=2, width=32, dtype="float32", kv_dtype="float32"),
    Sizes(head_dim=128, page_size=128, num_heads=64, num_kv_heads=8, window=True, soft_cap=30.0, sinks=True),
    Sizes(head_dim=256, page_size=8, num_heads=2, num_kv_heads=1, dtype="float32", kv_dtype="float32", width=16),
    Sizes(head_dim=256, page_size=16, num_heads=16, num_kv_heads=8, kv_dtype="int8"),
    Sizes(head_dim=256, page_size=32, num_heads=8, num_kv_heads=4, width=32, kv_dtype="float8_e4m3fn", window=True),
    Sizes(head_dim=256, page_size=64, num_heads=16, num_kv_heads=16, soft_cap=50.0),
    Sizes(head_dim=256, page_size=128, num_heads=4, num_kv_heads=1, width=64),
]


@functools.cache
def chip_mesh(chip: str) -> Mesh:
    # A machine without a TPU has nobody to ask about it, and other tests' processes may hold the compiler's lock.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    return Mesh(np.array(devices[:1]), ("x",))


@pytest.fixture(autouse=True)
def _no_compilation_cache() -> Iterator[None]:
    """What a compiler without its device has made cannot be read back from the cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def layers(sizes: Sizes, q, k, v, pool, tiles: Tiles, window, sinks):
    """As models call it: in a scan over layers, with the pool of all of them as the carry."""
    attend = functools.partial(tpu.paged_attention, scale=0.1, soft_cap=sizes.soft_cap, window=window, sinks=sinks)

    def layer(carry, index):
        q, pool = carry
        return attend(q, k, v, pool, (tiles,), index * sizes.num_pages), None

    return jax.lax.scan(layer, (q, pool), jnp.arange(LAYERS, dtype=jnp.int32))[0]


def compiled(chip: str, sizes: Sizes) -> jax.stages.Compiled:
    mesh = chip_mesh(chip)
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    ints = functools.partial(shaped, dtype=jnp.int32)
    rows, tokens, dtype = sizes.num_tiles, sizes.num_tiles * sizes.width, jnp.dtype(sizes.dtype)
    q = shaped((tokens, sizes.num_heads, sizes.head_dim), dtype)
    k = v = shaped((tokens, sizes.num_kv_heads, sizes.head_dim), dtype)
    tiles = Tiles(ints((rows, sizes.table_pages)), *(ints((rows,)) for _ in range(3)), width=sizes.width)
    window = ints(()) if sizes.window else None
    sinks = shaped((sizes.num_heads,), jnp.float32) if sizes.sinks else None
    program = jax.jit(functools.partial(layers, sizes), donate_argnums=3)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # says which chip Pallas is to lower for
        return program.lower(q, k, v, shaped(sizes.pool.shape, sizes.pool.dtype), tiles, window, sinks).compile()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_and_leaves_the_pool_in_place(chip: str, sizes: Sizes) -> None:
    assert tpu.unsupported(sizes.problem) is None
    program = compiled(chip, sizes)
    text, memory = program.as_text(), program.memory_analysis()
    assert text and memory
    assert memory.alias_size_in_bytes == sizes.pool.size * sizes.pool.dtype.itemsize
    assert memory.temp_size_in_bytes < LAYER_BYTES
    assert pool_sized_results(text, sizes.pool) == ["custom-call"]
    assert "scatter" not in text
    assert vmem_bytes(text) <= sizes.problem.vmem_bytes


def pool_sized_results(hlo_text: str, pool: jax.ShapeDtypeStruct) -> list[str]:
    """Operations of which the pool is a result, but those that only pass it on."""
    shape = ",".join(map(str, pool.shape))
    results = [
        line.split(" = ", 1)[1] for line in hlo_text.splitlines() if re.search(rf"^[^=]* = [^=]*\[{shape}\]", line)
    ]
    operations = [match[1] for line in results if (match := re.search(r"[})\]] ([\w-]+)\(", line))]
    return [name for name in operations if name not in ("parameter", "get-tuple-element", "tuple", "bitcast", "while")]


def vmem_bytes(hlo_text: str) -> int:
    """What the kernel takes of VMEM, as its compiler has it."""
    (kernel,) = [line for line in hlo_text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    match = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', kernel)
    assert match
    return int(match[1])
