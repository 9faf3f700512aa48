"""A tiny model on a real runner, and hand-written plans for it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv import ops, sharding
from jaxkv.checkpoint.pieces import is_stacked, piece_name
from jaxkv.device.batch import Buckets
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.device.runner import InFlight, Runner
from jaxkv.models.decoder import Decoder
from jaxkv.models.groups import LayerGroups
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.registry import FAMILIES
from jaxkv.plan import Chunk, PageCopy, PageWrite, StepPlan, StepResult
from tests import tiny
from tests.device.sampling import Row

V = 98  # no multiple of 32, but of two devices
MAX_ROWS, MAX_LEN, MAX_STEPS = 4, 96, 8
PAGE, TILE = 8, 8  # tokens
NUM_PAGES = 4096  # so large that a copy of the pool shows among the temporaries
MODEL = tiny.config(vocab_size=V)
# One shape a program, so that a test run compiles two large programs and not twenty.
BUCKETS = Buckets(
    decode_rows=(MAX_ROWS,), mixed_rows=(MAX_ROWS,), mixed_tiles=(12,), setups=(MAX_ROWS,), page_writes=(64,),
    page_copies=(MAX_ROWS,), count_tokens=(MAX_LEN,),
)  # fmt: skip


def make_runner(
    model: Decoder | None = None,
    *,
    tensor: int = 1,
    data: int = 1,
    buckets: Buckets = BUCKETS,
    backend: ops.Backend = ops.CPU,
    groups: LayerGroups | None = None,
    **changes: Any,
) -> Runner:
    """A runner for `model` (a random one if None), with its layers in one group or in `groups`; `changes` to its sizes."""
    mesh = sharding.make_mesh(tensor, data)
    sizes = dict(max_rows=MAX_ROWS, max_len=MAX_LEN, max_steps=MAX_STEPS, num_pages=NUM_PAGES, page_size=PAGE) | changes
    model = _place(model or tiny.model(MODEL), mesh)
    cfg = model.cfg
    spec = PoolSpec(
        num_layers=groups.size if groups else cfg.num_layers, groups=groups,
        num_pages=sizes.pop("num_pages"), num_kv_heads=cfg.num_kv_heads,
        page_size=sizes.pop("page_size"), head_dim=cfg.head_dim,
        dtype=model.embed[...].dtype, storage_dtype=backend.storage_dtype(model.embed[...].dtype),
        storage_shape=backend.storage_shape, pack=backend.pack, unpack=backend.unpack, kv_copies=cfg.kv_copies,
        num_shards=data,
    )  # fmt: skip
    return Runner(
        model, spec, mesh, dataclasses.replace(backend, query_tile=TILE), buckets,
        vocab_size=cfg.vocab_size, **sizes,
    )  # fmt: skip


def _place(model: Decoder, mesh: Mesh) -> Any:
    """The model with its weights split over the mesh, KV heads copied if there are too few, as the loader does."""
    family, cfg = FAMILIES[0], copy_kv_heads(model.cfg, mesh.shape[sharding.TENSOR])
    graph, state = nnx.split(family.build(cfg, model.embed[...].dtype, per_layer=isinstance(model.layers, nnx.List)))
    values = dict(nnx.to_flat_state(nnx.state(model)))

    def place(path: tuple, leaf: Any) -> Any:
        value, copy = values[path][...], family.copy_heads.get(piece_name(path)[0])
        if copy is not None and cfg.kv_copies > 1:
            value = (
                jax.vmap(lambda v: copy(v, cfg.kv_copies))(value) if is_stacked(leaf) else copy(value, cfg.kv_copies)
            )
        return leaf.replace(jax.device_put(value, sharding.named(mesh, leaf.logical_axes)))

    return nnx.merge(graph, nnx.from_flat_state([(path, place(path, leaf)) for path, leaf in nnx.to_flat_state(state)]))


def poison(runner: Runner) -> None:
    """An empty runner whose pool holds NaN wherever nothing was written (behaviour 38)."""
    runner.reset()
    # Computed, not sent: an array that aliases numpy's memory cannot be donated.
    pool = runner._pool
    assert pool is not None
    runner._pool = jnp.full(pool.shape, jnp.nan, pool.dtype, device=pool.sharding)


class Stage:
    """Writes plans for a runner: rows get pages of their own, page tables included.

    Every call makes and dispatches one step, unless it says otherwise.
    """

    def __init__(self, runner: Runner) -> None:
        poison(runner)
        self.runner = runner
        self._next_page = 1
        self._step_id = 0
        self._pending: dict[str, Any] = {}
        self.pages: dict[int, list[int]] = {}
        self._rows: dict[int, Row] = {}

    def place(self, at: int, row: Row, max_total_len: int | None = None) -> None:
        """Sets `row` up in row `at`, with pages for all it can hold; sent with the next step."""
        setup = row.setup(at)
        total = min(max_total_len or setup.max_total_len, MAX_LEN)
        setup = dataclasses.replace(setup, max_total_len=total)
        num_pages = -(-total // PAGE)
        self.pages[at] = list(range(self._next_page, self._next_page + num_pages))
        self._next_page += num_pages
        self._rows[at] = row
        self._add("setups", setup)
        for index, page in enumerate(self.pages[at]):
            self._add("page_writes", PageWrite(at, index, page))

    def copy(self, row: int, source: int, target: int) -> None:
        """Copies a page with the next step, on the row's shard."""
        self._add("page_copies", PageCopy(row, source, target))

    def chunk(self, at: int, start: int = 0, end: int | None = None, prompt_logprobs: int | None = None) -> Chunk:
        """Positions `[start, end)` of the row's known tokens; the last one samples."""
        row = self._rows[at]
        known = np.array(row.prompt + row.output, np.int32)
        end = len(known) if end is None else end
        scores = None if prompt_logprobs is None else np.append(known[start + 1 : end + 1], np.int32(0))[: end - start]
        return Chunk(at, start, known[start:end], end == len(known), prompt_logprobs, scores)

    def dispatch(self, *chunks: Chunk, decode: tuple[int, ...] = (), steps: int = 1) -> InFlight:
        """Sends a step off."""
        pending = {name: tuple(items) for name, items in self._pending.items()}
        self._pending = {}
        self._step_id += 1
        return self.runner.dispatch(
            StepPlan(
                step_id=self._step_id, chunks=chunks, decode_rows=np.array(decode, np.int32), num_steps=steps, **pending
            )
        )

    def run(self, *chunks: Chunk, decode: tuple[int, ...] = (), steps: int = 1) -> StepResult:
        return self.dispatch(*chunks, decode=decode, steps=steps).result()

    def prefill(self, at: int, row: Row, **kwargs: Any) -> int:
        """Places a row and computes its known tokens in one chunk; returns the token it samples."""
        self.place(at, row, **kwargs)
        return sampled(self.run(self.chunk(at)))[0]

    def _add(self, name: str, item: Any) -> None:
        self._pending.setdefault(name, []).append(item)


def sampled(result: StepResult) -> list[int]:
    """The tokens that chunks sampled."""
    return [int(tokens.token_ids[0]) for tokens in result.chunks if tokens is not None]


def decoded(result: StepResult) -> list[list[int]]:
    """The tokens of decode rows."""
    rows = zip(result.decode_tokens.tolist(), result.decode_counts.tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows]
