"""What a GPU or TPU makes of the kernels: parity, bandwidth, FLOP/s, and steps of an 8B model against their floors.

    python scripts/device_check.py --out device.json

Takes some 8 minutes on one H200 and writes one JSON file. Every part stands alone: one that fails leaves its error in the
file, one for which no time is left says so. Fractions are of what this device was measured to do in the same run: a
copy's bytes a second, a bf16 product's FLOP/s. `--tiny` runs the same code at toy sizes, on any machine.
"""

import argparse
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the oracle in tests/kernels

from jaxkv import ops, sharding
from jaxkv.capacity.known import KNOWN
from jaxkv.device import kv_pool
from jaxkv.device.row_state import RowState
from jaxkv.device.settings import EngineConfig, resolve
from jaxkv.device.step_programs import StepPrograms
from jaxkv.models.registry import find_family
from jaxkv.ops import Backend
from kernels_pallas.paged_attention import Tiles
from tests.kernels import cases

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64  # of the attention parts: Llama 3.1 8B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is."""

    copy_bytes: int
    matmul: int  # of a square product
    rows: tuple[int, ...]  # of the decode parts
    context_len: int
    max_tokens: int  # of K/V in the engine part: with more rows, each holds fewer
    layers: int  # of the attention parts: one call visits them all
    prompt_len: int
    query_tile: int
    model: str
    model_layers: int | None = None  # None: all
    page_sizes: tuple[int, ...] = (16, 32, 64, 128)


FULL = Sizes(
    copy_bytes=4 << 30, matmul=8192, rows=(1, 16, 64, 256), context_len=4096, max_tokens=1 << 19, layers=4, prompt_len=8192,
    query_tile=128, model="llama-3.1-8b",
)  # fmt: skip
TINY = Sizes(
    copy_bytes=1 << 20, matmul=128, rows=(1, 3), context_len=100, max_tokens=150, layers=2, prompt_len=128, query_tile=32,
    model="smollm2-135m", model_layers=2, page_sizes=(16,),
)  # fmt: skip


def best_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the fastest call, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return min(times)


class Check:
    """The parts, and what they need to know of each other."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        device = jax.devices()[0]
        self.backend: Backend = ops.select(device.platform, device.device_kind)
        self.copy_bytes_s = self.flop_s = float("nan")

    def limits(self) -> dict[str, Any]:
        """What the device does at best: a copy reads and writes; a square bf16 product."""
        source = jnp.ones(self.sizes.copy_bytes // 4, jnp.float32)
        copy = jax.jit(lambda x: x + 1)
        self.copy_bytes_s = 2 * source.nbytes / best_s(lambda: copy(source))
        matrix = jnp.ones((self.sizes.matmul,) * 2, jnp.bfloat16)
        product = jax.jit(lambda a: a @ a)
        self.flop_s = 2 * self.sizes.matmul**3 / best_s(lambda: product(matrix))
        return {"copy_bytes_s": self.copy_bytes_s, "matmul_flop_s": self.flop_s}

    def parity(self) -> list[dict[str, Any]]:
        """The kernels against attention written the obvious way in float64."""
        return [self._parity_of(shape) for shape in parity_shapes(self.sizes.page_sizes)]

    def _parity_of(self, shape: cases.Shape) -> dict[str, Any]:
        name, backend = str(shape), self.backend
        refused = backend.refuses(
            ops.Shapes(
                num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                page_size=shape.page_size, max_pages=64, dtype=np.dtype(shape.dtype), kv_dtype=shape.pool_dtype,
            ),
            shape.width,
        )  # fmt: skip
        if refused is not None:
            return {"case": name, "refused": refused}
        case = cases.make_case(
            shape, cases.tiles_around_pages(shape.page_size, shape.width), [(200, 1), (0, 1), (0, 0)]
        )
        one_row = cases.make_case(shape, [(37, 3 * shape.width - 1)], width=3 * shape.width)  # of three tiles
        if backend.storage_shape(*case.pool.shape[:1], *case.pool.shape[2:]) != case.pool.shape:
            return {"case": name, "refused": "the pool is stored in another layout here"}
        run = jax.jit(backend.paged_attention, static_argnames=("scale", "soft_cap", "kv_scale"), donate_argnums=3)

        def attention(q: Any, k: Any, v: Any, pool: jax.Array, *args: Any, **options: Any) -> tuple[Any, Any]:
            out, after = run(q, k, v, pool.view(backend.storage_dtype(pool.dtype)), *args, **options)
            return out, after.view(pool.dtype)

        try:
            for each in (case, cases.cut(one_row, shape.width)):
                cases.check(attention, each, shape)
        except AssertionError as error:
            return {"case": name, "equal": False, "difference": str(error)[:500]}
        return {"case": name, "equal": True}

    def decode_attention(self) -> list[dict[str, Any]]:
        """Bytes of K/V read a second, as a fraction of the copy's."""
        return [self._decode_attention(rows) for rows in self.sizes.rows]

    def _decode_attention(self, rows: int) -> dict[str, Any]:
        tiles = np.full(rows, self.sizes.context_len - 1, np.int32), np.ones(rows, np.int32)
        seconds = self._attention_s(*tiles, width=1)
        num_bytes = rows * self.sizes.context_len * 2 * NUM_KV_HEADS * HEAD_DIM * 2
        rate = num_bytes / seconds
        return {
            "rows": rows, "context_len": self.sizes.context_len, "layer_us": seconds * 1e6, "bytes_s": rate,
            "of_copy": rate / self.copy_bytes_s,
        }  # fmt: skip

    def prefill_attention(self) -> dict[str, Any]:
        """FLOP/s of a causal prompt (half of all pairs), as a fraction of the product's."""
        length, width = self.sizes.prompt_len, self.sizes.query_tile
        starts = np.arange(0, length, width, dtype=np.int32)
        seconds = self._attention_s(starts, np.full(len(starts), width, np.int32), width=width, one_row=True)
        rate = 4 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2 / seconds
        return {"tokens": length, "layer_ms": seconds * 1e3, "flop_s": rate, "of_matmul": rate / self.flop_s}

    def _attention_s(self, start: np.ndarray, num: np.ndarray, *, width: int, one_row: bool = False) -> float:
        """Seconds a layer: all layers in one program, the pool carried through them in place."""
        pages_each = -(-int((start + num).max()) // PAGE_SIZE)
        num_rows = 1 if one_row else len(start)
        num_pages = num_rows * pages_each + 1
        table = np.random.default_rng(0).permutation(np.arange(1, num_pages)).reshape(num_rows, pages_each)
        table = np.repeat(table, len(start), axis=0) if one_row else table
        row_start = np.zeros_like(start) if one_row else start
        tiles = Tiles(*(jnp.asarray(x, jnp.int32) for x in (table, start, num, row_start)), width=width)
        dtype, layers = np.dtype(jnp.bfloat16), self.sizes.layers
        shape = self.backend.storage_shape(layers * num_pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
        q = jnp.ones((len(start) * width, NUM_HEADS, HEAD_DIM), dtype)
        kv = q[:, :NUM_KV_HEADS]

        def run(pool: jax.Array, q: jax.Array, kv: jax.Array, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
            def layer(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
                pool, q = carry
                out, pool = self.backend.paged_attention(
                    q, kv, kv, pool, (tiles,), index * num_pages, scale=HEAD_DIM**-0.5
                )
                return (pool, out), None

            return jax.lax.scan(layer, (pool, q), jnp.arange(layers, dtype=jnp.int32))[0]

        program = jax.jit(run, donate_argnums=0)
        state = [jnp.zeros(shape, self.backend.storage_dtype(dtype))]

        def once() -> jax.Array:
            state[0], out = program(state[0], q, kv, tiles)
            return out

        return best_s(once) / layers

    def engine(self) -> list[dict[str, Any]]:
        """Decode steps of a model with weights of zeros, against the bytes that a step must move at the copy's speed."""
        config = dict(KNOWN[self.sizes.model])
        if self.sizes.model_layers:
            config["num_hidden_layers"] = self.sizes.model_layers
        return [self._engine_at(config, rows) for rows in self.sizes.rows]

    def _engine_at(self, config: dict[str, Any], rows: int) -> dict[str, Any]:
        family, mesh, dtype = find_family(config), sharding.make_mesh(), np.dtype(jnp.bfloat16)
        cfg = family.config_from_hf(config)
        steps, length = 8, min(self.sizes.context_len, self.sizes.max_tokens // rows)
        max_len = length + 16 * steps
        pages = -(-max_len // PAGE_SIZE)
        settings = EngineConfig(
            max_len=max_len, max_rows=rows, page_size=PAGE_SIZE, num_pages=rows * pages, decode_steps=steps
        )
        resolved = resolve(settings, cfg, jnp.dtype(dtype), mesh, self.backend)
        model = family.build(cfg, dtype, per_layer=resolved.backend.per_layer)
        programs = StepPrograms(
            model, resolved.pool, mesh, resolved.backend, max_rows=rows, max_len=max_len, max_steps=steps,
            vocab_size=cfg.vocab_size, grammars=resolved.scheduler.grammars,
        )  # fmt: skip
        params = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))]
        carry = [kv_pool.allocate(resolved.pool, mesh), running(programs.init_state(), rows, pages, length, max_len)]
        ids, tables = np.arange(rows, dtype=np.int32), programs.init_tables()

        def once() -> jax.Array:
            carry[0], carry[1], out = programs.decode(params, *carry, tables, ids, np.int32(steps))
            return out.counts

        seconds = best_s(once) / steps
        assert int(np.asarray(carry[1].position[0])) > length, "rows must have run"
        kv_bytes = rows * length * resolved.pool.token_bytes
        weight_bytes = sum(p.nbytes for p in params) - (0 if cfg.tied else cfg.vocab_size * cfg.embed * dtype.itemsize)
        floor = (weight_bytes + kv_bytes + rows * cfg.vocab_size * 4) / self.copy_bytes_s
        return {
            "model": self.sizes.model, "rows": rows, "context_len": length, "attention": resolved.backend.name,
            "step_ms": seconds * 1e3, "floor_ms": floor * 1e3, "of_floor": seconds / floor, "tokens_s": rows / seconds,
        }  # fmt: skip


def running(state: RowState, rows: int, pages: int, length: int, max_len: int) -> RowState:
    """Rows that hold `length` tokens each, with pages of their own."""
    table = np.zeros(state.page_table.shape, np.int32)
    table[:rows, :pages] = np.arange(1, rows * pages + 1).reshape(rows, pages)
    live = np.arange(rows + 1) < rows
    put = lambda value, like: jax.device_put(jnp.asarray(value, like.dtype), like.sharding)  # noqa: E731
    params = dataclasses.replace(
        state.params,
        max_total_len=put(np.where(live, max_len, 0), state.params.max_total_len),
        min_total_len=put(np.where(live, max_len, 0), state.params.min_total_len),  # no stop id ends a row early
    )
    return dataclasses.replace(
        state, params=params, page_table=put(table, state.page_table), done=put(~live, state.done),
        position=put(np.where(live, length, 0), state.position),
    )  # fmt: skip


def parity_shapes(page_sizes: tuple[int, ...]) -> list[cases.Shape]:
    """Every page size with something else that differs: heads, widths, windows, caps, sinks, narrow pools."""
    wide: list[dict[str, Any]] = [
        dict(num_heads=32, num_kv_heads=8, head_dim=128, width=1),
        dict(num_heads=32, num_kv_heads=8, head_dim=128, width=64, window=37),
        dict(num_heads=8, num_kv_heads=8, head_dim=64, width=1, soft_cap=30.0),
        dict(num_heads=8, num_kv_heads=1, head_dim=256, width=16, sinks=True),
        dict(num_heads=16, num_kv_heads=4, head_dim=128, width=32, kv_dtype="float8_e4m3fn"),
        dict(num_heads=16, num_kv_heads=4, head_dim=128, width=1, kv_dtype="int8", kv_scale=(0.03125, 0.015625)),
    ]
    return [cases.Shape(page_size=size, dtype="bfloat16", **each) for size in page_sizes for each in wide]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="file to write")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: shows that the script runs, measures nothing")
    parser.add_argument("--budget-s", type=float, default=460, metavar="S", help="no part starts later (default: 460)")
    args = parser.parse_args()
    begin, check = time.perf_counter(), Check(TINY if args.tiny else FULL)
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "tiny": args.tiny,
        "attention": check.backend.name,
    }  # fmt: skip
    failed = False
    for part in (check.limits, check.parity, check.decode_attention, check.prefill_attention, check.engine):
        name, at = part.__name__, time.perf_counter() - begin
        print(f"{at:6.1f} s  {name}", file=sys.stderr, flush=True)
        try:
            result[name] = part() if at < args.budget_s else {"skipped": f"{at:.0f} s had passed"}
        except Exception:  # the other parts are worth having
            failed = True
            result[name] = {"error": traceback.format_exc(limit=8)}
        args.out.write_text(json.dumps(result, indent=1))
    failed |= any(not each.get("equal", True) for each in result["parity"] if isinstance(each, dict))
    print(json.dumps({key: value for key, value in result.items() if key != "parity"}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
