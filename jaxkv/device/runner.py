"""Owns params, pool, row state and the compiled programs; executes step plans.

`dispatch` enqueues a plan and returns at once with an `InFlight`, whose `result` waits for the tokens. Several plans
may be in flight: the row state on the device carries what the next one needs.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv.config import GrammarSizes
from jaxkv.device import automata, kv_pool, page_transfer, row_state
from jaxkv.device.batch import ROW, TILE_COLUMNS, Buckets, MixedBatch, fit, pack_mixed, pad_pairs, pad_writes, spread
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.device.page_transfer import PagesInFlight, spread_pages
from jaxkv.device.program_cache import ProgramCache
from jaxkv.device.programs import DecodeOutput, MixedOutput
from jaxkv.device.row_state import NO_TOKEN
from jaxkv.device.sampler import Logprobs
from jaxkv.device.settings import Resolved
from jaxkv.device.step_programs import StepPrograms
from jaxkv.models import one_row
from jaxkv.models.quant import SCHEMES
from jaxkv.ops import Backend
from jaxkv.plan import NO_ROWS, PageAt, PromptScores, RowSetup, SampledTokens, StepPlan, StepResult
from jaxkv.sharding import DATA
from jaxkv.shards import Shards


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatched step whose tokens are on their way to the host."""

    plan: StepPlan
    output: MixedOutput | DecodeOutput
    batch: MixedBatch | None  # of a mixed step
    places: np.ndarray  # intp [num_decode_rows]: of the decode rows in the output
    query_tile: int
    wants_logprobs: bool  # some row of the plan asked for them

    def result(self) -> StepResult:
        """Waits for the step and translates it into the plan's order."""
        if isinstance(self.output, MixedOutput):
            assert self.batch is not None
            return _mixed_result(self.plan, self.output, self.batch, self.query_tile, self.wants_logprobs)
        return _decode_result(self.plan, self.output, self.places, self.wants_logprobs)


class Runner:
    """The device tower's one mutable object."""

    def __init__(
        self,
        model: nnx.Module,
        pool_spec: PoolSpec,
        mesh: Mesh,
        backend: Backend,
        buckets: Buckets,
        *,
        max_rows: int,
        max_len: int,
        max_steps: int,
        vocab_size: int,
        grammars: GrammarSizes = GrammarSizes(),  # noqa: B008 (frozen)
        cache: ProgramCache | None = None,
    ):
        """
        Args:
            model: module with placed parameters; `hidden` and `logits` as in `models.decoder`.
            pool_spec: geometry of the pool.
            mesh: `(data, tensor)`.
            max_rows: rows that run at once; the mesh's data shards share them evenly.
            max_len: tokens a row may hold.
            max_steps: most decode steps of one plan.
            vocab_size: width of the logits.
            grammars: sizes of the tables of grammars.
            cache: where step programs are kept between processes.

        Raises:
            CapacityError: the pool does not fit.
        """
        self.mesh, self.backend, self.buckets = mesh, backend, buckets
        self._take_params(model)
        self.shards = Shards(mesh.shape[DATA], max_rows // mesh.shape[DATA])
        assert self.shards.num_rows == max_rows and self.shards.num == pool_spec.num_shards
        self._vocab_size = vocab_size
        self.pool_spec = pool_spec
        self._wants_logprobs = np.zeros(max_rows, bool)  # by row
        self._programs = StepPrograms(
            model, pool_spec, mesh, backend,
            max_rows=max_rows, max_len=max_len, max_steps=max_steps, vocab_size=vocab_size, grammars=grammars,
        )  # fmt: skip
        if cache is not None:
            self._programs.keep_in(cache)
        self.reset()

    def _take_params(self, model: nnx.Module) -> None:
        # A flat list crosses the jit boundary several times faster than a tree of nnx objects.
        self._params = self._one_row_params = jax.tree.leaves(nnx.state(model))
        if self.backend.one_row_bits and self.mesh.size == 1:
            leaves = jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
            self._one_row_params = jax.tree.leaves([one_row.as_bits(leaf) for leaf in leaves])

    @classmethod
    def build(
        cls,
        model: nnx.Module,
        resolved: Resolved,
        mesh: Mesh,
        *,
        vocab_size: int,
        cache: ProgramCache | None = None,
    ) -> "Runner":
        """A runner with the resolved numbers."""
        config = resolved.scheduler
        return cls(
            model,
            resolved.pool,
            mesh,
            resolved.backend,
            resolved.buckets,
            max_rows=config.max_rows,
            max_len=config.max_len,
            max_steps=config.decode_steps,
            vocab_size=vocab_size,
            grammars=config.grammars,
            cache=cache,
        )

    def reset(self) -> None:
        """An empty pool and no rows: at the start, and after a failed step took the donated ones with it."""
        self._pool = self._state = self._tables = None  # free the old ones first
        self._pool = kv_pool.allocate(self.pool_spec, self.mesh)
        self._state = self._programs.init_state()
        self._tables = self._programs.init_tables()

    @property
    def dtype(self) -> np.dtype:
        """Of weights and activations."""
        return self._params[0].dtype

    @property
    def quant(self) -> str | None:
        """Of the weights' matrices, see `models.quant`; None: as `dtype`."""
        return next((scheme for scheme in SCHEMES if any(p.dtype == scheme for p in self._params)), None)

    @property
    def num_traces(self) -> collections.Counter[str]:
        """Program name -> times traced."""
        return self._programs.num_traces

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Enqueues a plan. Returns before it has run."""
        assert not plan.is_empty
        self._apply_deltas(plan)
        if plan.chunks:
            assert plan.num_steps == 1
            batch = pack_mixed(plan, self.buckets, self.backend.query_tile, self.shards)
            places = batch.row_places
            self._pool, self._state, output = self._programs.mixed(
                self._params, self._pool, self._state, self._tables, batch.token_ids, batch.next_token_ids, batch.tiles,
                batch.decode_rows,
            )  # fmt: skip
        else:
            rows = spread(plan.decode_rows, self.shards, self.buckets.decode_rows)
            batch, places = None, rows.places
            self._pool, self._state, output = self._programs.decode(
                self._decode_params(rows.size), self._pool, self._state, self._tables, rows.padded_rows(),
                np.int32(plan.num_steps),
            )  # fmt: skip
        computed = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        wants = bool(self._wants_logprobs[computed].any())
        in_flight = InFlight(plan, output, batch, places, self.backend.query_tile, wants)
        for array in (output.token_ids, output.counts, *(jax.tree.leaves(output.logprobs) if wants else ())):
            array.copy_to_host_async()
        return in_flight

    def _decode_params(self, size: int) -> list[jax.Array]:
        """What a decode step of `size` rows takes."""
        return self._one_row_params if size == 1 else self._params

    def read_pages(self, pages: Sequence[PageAt]) -> PagesInFlight:
        """Takes a copy of some pages, as steps dispatched so far leave them; at most `max_moved` at once."""
        ids, places = spread_pages(pages, self.shards, self.buckets.page_moves)
        array = self._programs.read_pages(self._pool, ids)
        array.copy_to_host_async()
        return PagesInFlight(array, places)

    def write_pages(self, pages: Sequence[PageAt], kv: Sequence[np.ndarray]) -> None:
        """Puts canonical pages into the pool, for steps dispatched from now on; at most `max_moved` at once."""
        ids, places = spread_pages(pages, self.shards, self.buckets.page_moves)
        # Fresh for every call: the device may still read it (behaviour 16).
        data = np.zeros((len(ids), *self.page_shape), page_transfer.canonical_dtype(self.pool_spec))
        for place, page in zip(places.tolist(), kv, strict=True):
            data[place] = page
        self._pool = self._programs.write_pages(self._pool, ids, data)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Of a page outside the pool."""
        return page_transfer.canonical_shape(self.pool_spec)

    @property
    def page_bytes(self) -> int:
        """Of a page outside the pool."""
        return page_transfer.page_bytes(self.pool_spec)

    @property
    def max_moved(self) -> int:
        """Pages that one call of `read_pages` or `write_pages` may move; 0 where there are no lower tiers."""
        return max(self.buckets.page_moves, default=0)

    def _apply_deltas(self, plan: StepPlan) -> None:
        for load in plan.grammar_loads:
            for piece in automata.pieces(load):
                self._tables = self._programs.load_grammar(self._tables, piece)
        if plan.masks is not None:
            self._tables = self._programs.set_masks(self._tables, *self._pad_masks(plan.mask_rows, plan.masks))
        for setups in _rounds(plan.setups, self.buckets.setups):
            self._state = self._programs.set_rows(self._state, *self._pack_setups(setups, self.buckets.setups))
        for setup in plan.setups:
            self._wants_logprobs[setup.row] = setup.params.logprobs is not None
            if _uses_counts(setup):
                size = fit(len(setup.token_ids), self.buckets.count_tokens)
                self._state = self._programs.set_counts(self._state, *self._pack_counts(setup, size))
        for writes in _rounds(plan.page_writes, self.buckets.page_writes):
            self._state = self._programs.set_pages(
                self._state, pad_writes(writes, self.shards, self.buckets.page_writes)
            )
        for copies in _rounds(plan.page_copies, self.buckets.page_copies):
            self._pool = self._programs.copy_pages(self._pool, pad_pairs(copies, self.shards, self.buckets.page_copies))

    def _pack_setups(self, setups: Sequence[RowSetup], table: tuple[int, ...]) -> tuple[Any, ...]:
        to = spread(np.array([setup.row for setup in setups], np.int32), self.shards, table)
        return to.padded_rows(), *row_state.pack_setups(setups, to.places, self.shards.num * to.size, self._vocab_size)

    def _pack_counts(self, setup: RowSetup | None, size: int) -> tuple[np.ndarray, np.ndarray, np.int32]:
        """The rows, one a shard, are null rows but on the setup's shard."""
        rows = np.full(self.shards.num, self.shards.rows_each, np.int32)
        token_ids = np.full(size, NO_TOKEN, np.int32)
        if setup is None:
            return rows, token_ids, np.int32(0)
        rows[self.shards.of(setup.row)] = setup.row % self.shards.rows_each
        token_ids[: len(setup.token_ids)] = setup.token_ids
        return rows, token_ids, np.int32(setup.prompt_len)

    def _pad_masks(self, rows: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both as long as there are rows, so that one program serves every number of them."""
        num_rows = self.shards.num_rows
        all_rows = np.full(num_rows, -1, np.int32)
        all_masks = np.zeros((num_rows, automata.mask_width(self._vocab_size)), np.uint32)
        all_rows[: len(rows)], all_masks[: len(rows), : masks.shape[1]] = rows, masks
        return all_rows, all_masks

    @property
    def num_programs(self) -> int:
        """How many programs `warm_up` compiles."""
        return sum(1 for _ in self._warm_up_steps())

    def warm_up(self, on_program: Callable[[], None] = lambda: None) -> None:
        """Compiles every program for every bucket by running it on padding; afterwards nothing compiles again."""
        for step in self._warm_up_steps():
            jax.block_until_ready(step())
            on_program()

    def _warm_up_steps(self) -> Iterator[Callable[[], Any]]:
        b, shards = self.buckets, self.shards

        yield functools.partial(self._warm_tables, "load_grammar", automata.nothing(self._vocab_size))
        yield functools.partial(self._warm_tables, "set_masks", *self._pad_masks(NO_ROWS, np.zeros((0, 0), np.uint32)))

        def update(name: str, *args: Any) -> Callable[[], Any]:
            def step() -> Any:
                self._state = getattr(self._programs, name)(self._state, *args)
                return self._state.done

            return step

        for size in b.setups:
            yield update("set_rows", *self._pack_setups((), (size,)))
        for size in b.page_writes:
            yield update("set_pages", pad_writes((), shards, (size,)))
        for size in b.count_tokens:
            yield update("set_counts", *self._pack_counts(None, size))
        for size in b.page_copies:
            yield functools.partial(self._warm_copy, size)
        for size in b.page_moves:
            yield functools.partial(self._warm_moves, size)
        for size in b.decode_rows:
            rows = spread(NO_ROWS, shards, (size,)).padded_rows()
            yield functools.partial(self._warm_step, "decode", self._decode_params(size), rows, np.int32(1))
        for num_tiles in b.mixed_tiles:
            to = spread(NO_ROWS, shards, (num_tiles,))
            tokens, tiles = to.full(0, self.backend.query_tile).reshape(-1), to.full(0, TILE_COLUMNS)
            tiles[:, ROW] = shards.rows_each
            for size in b.mixed_rows:
                rows = spread(NO_ROWS, shards, (size,)).padded_rows()
                yield functools.partial(self._warm_step, "mixed", self._params, tokens, tokens, tiles, rows)

    def _warm_copy(self, size: int) -> Any:
        self._pool = self._programs.copy_pages(self._pool, pad_pairs((), self.shards, (size,)))
        return ()

    def _warm_moves(self, size: int) -> Any:
        null = [PageAt(0, 0)] * size
        self.write_pages(null, list(self.read_pages(null).result()))
        return ()

    def _warm_tables(self, name: str, *args: Any) -> Any:
        self._tables = getattr(self._programs, name)(self._tables, *args)
        return self._tables.masks

    def _warm_step(self, name: str, params: list[jax.Array], *args: Any) -> Any:
        program = getattr(self._programs, name)
        self._pool, self._state, output = program(params, self._pool, self._state, self._tables, *args)
        return output.counts


def _rounds(items: tuple[Any, ...], table: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """`items` in pieces no larger than the largest bucket."""
    for start in range(0, len(items), table[-1]):
        yield items[start : start + table[-1]]


def _uses_counts(setup: RowSetup) -> bool:
    p = setup.params
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _to_numpy(logprobs: Logprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chosen, ids of the likeliest, and theirs; waits for them."""
    return np.asarray(logprobs.chosen), np.asarray(logprobs.top_ids), np.asarray(logprobs.top)


def _decode_result(plan: StepPlan, output: DecodeOutput, places: np.ndarray, wants: bool) -> StepResult:
    steps = plan.num_steps
    chosen, top_ids, top = _to_numpy(output.logprobs) if wants else (None, None, None)

    def by_row(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[:steps, places].swapaxes(0, 1)

    return StepResult(
        step_id=plan.step_id,
        decode_tokens=np.asarray(output.token_ids)[:steps, places].T,
        decode_counts=np.asarray(output.counts)[places],
        decode_logprobs=by_row(chosen),
        decode_top_ids=by_row(top_ids),
        decode_top_logprobs=by_row(top),
    )


def _mixed_result(plan: StepPlan, output: MixedOutput, batch: MixedBatch, query_tile: int, wants: bool) -> StepResult:
    rows = batch.row_places
    token_ids, counts = np.asarray(output.token_ids), np.asarray(output.counts)
    chosen, top_ids, top = _to_numpy(output.logprobs) if wants else (None, None, None)
    wants_scores = any(chunk.prompt_logprobs is not None for chunk in plan.chunks)
    prompt_scores = _to_numpy(output.prompt_scores) if wants_scores else ()

    def at(array: np.ndarray | None, index: int) -> np.ndarray | None:
        return None if array is None else array[index : index + 1]

    chunks: list[SampledTokens | None] = []
    scores: list[PromptScores | None] = []
    for chunk, first, end in zip(plan.chunks, batch.first_tiles.tolist(), batch.end_places.tolist(), strict=True):
        sampled = SampledTokens(token_ids[end : end + 1], at(chosen, end), at(top_ids, end), at(top, end))
        chunks.append(sampled if chunk.samples else None)
        part = slice(first * query_tile, first * query_tile + len(chunk.token_ids))
        scores.append(
            PromptScores(*(array[part] for array in prompt_scores)) if chunk.prompt_logprobs is not None else None
        )
    return StepResult(
        step_id=plan.step_id,
        decode_tokens=token_ids[rows, None],
        decode_counts=counts[rows],
        chunks=tuple(chunks),
        prompt_scores=tuple(scores),
        decode_logprobs=None if chosen is None else chosen[rows, None],
        decode_top_ids=None if top_ids is None else top_ids[rows, None],
        decode_top_logprobs=None if top is None else top[rows, None],
    )
