"""A device made of plain Python, for scheduler tests.

It computes the model of `fake_model` *through page tables*, from a pool that begins as garbage. A wrong page, a stale
cell, a wrong position, a lost or doubled token changes everything after it; comparing with `generate_alone` finds it.
The fake also asserts the contract of `plan.py` that a real runner relies on.
"""

import collections
import copy
import dataclasses
import typing
from collections.abc import Sequence

import numpy as np

from jaxkv.cache.tier_store import TierStore
from jaxkv.config import SchedulerConfig
from jaxkv.events import Committed, Finished, NewTokens, Scores
from jaxkv.grammar.compiled import CompiledGrammar
from jaxkv.plan import Chunk, PageAt, PromptScores, RowSetup, SampledTokens, StepPlan, StepResult
from jaxkv.request import FinishReason, Request
from jaxkv.schedule.scheduler import Scheduler
from jaxkv.tier_mover import TierMover
from tests.fake_model import MASK, extend, generate_alone, kv_of, logprob, sample, weight


@dataclasses.dataclass
class _Row:
    setup: RowSetup
    tables: dict[int, dict[int, int]]  # group of layers -> index -> page
    num_kv: int | None = None  # positions with K/V; None until the first chunk
    tokens: list[int] = dataclasses.field(default_factory=list)
    decodes: bool = False
    done: bool = False


@dataclasses.dataclass
class FakePages:
    """What `read_pages` took a copy of."""

    kv: np.ndarray

    def result(self) -> np.ndarray:
        return self.kv


class FakeRunner:
    """Executes plans at once, in order, as a device stream would; the caller decides when to look at the results."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        # Garbage, not zeros: reading what was never written must not look like anything.
        # The pages of all data shards, one after the other: a row that sees another shard's finds out.
        shape = (config.num_shards * config.num_pages, config.page_size)
        self.kv = np.random.default_rng(0).integers(0, 2**64, shape, np.uint64)
        self.rows: list[_Row | None] = [None] * config.max_rows
        self.num_computed = 0  # positions whose K/V were computed, over all steps
        self._next_step = 0
        self._seen: collections.deque[tuple[StepPlan, StepPlan]] = collections.deque()

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        self._check(plan)
        self._seen.append((plan, copy.deepcopy(plan)))
        for setup in plan.setups:
            assert setup.max_total_len <= self.config.max_len
            tables = {group: {} for group in range(len(self.config.windows))}
            self.rows[setup.row] = _Row(setup, tables, tokens=setup.token_ids.tolist())
        for write in plan.page_writes:
            row = self._row(write.row)
            group, index = divmod(write.index, self.config.max_pages)
            pages = row.tables[group]
            assert not pages or index == max(pages) + 1, "page lists only grow at their end"
            assert pages or index == 0 or self.config.windows[group] is not None, "only windows begin later"
            assert 0 < write.page < self.config.num_pages, write
            assert index * self.config.page_size < row.setup.max_total_len, "a page that can never be needed"
            pages[index] = self._first_page(write.row) + write.page
        if plan.page_copies:
            pairs = np.array([copy[1:] for copy in plan.page_copies])
            sources, targets = (pairs + [[self._first_page(copy.row)] for copy in plan.page_copies]).T.tolist()
            assert len({*targets}) == len(targets)
            self.kv[targets] = self.kv[sources]
        chunks = [self._run_chunk(chunk) for chunk in plan.chunks]
        tokens = np.full((len(plan.decode_rows), plan.num_steps), -7, np.int32)
        logprobs = np.full(tokens.shape, np.nan, np.float32)
        counts = np.zeros(len(plan.decode_rows), np.int32)
        for index, row in enumerate(plan.decode_rows.tolist()):
            for step in range(plan.num_steps):
                sampled = self._decode(self._row(row))
                if sampled is None:
                    break
                tokens[index, step], logprobs[index, step] = sampled
                counts[index] += 1
        return StepResult(
            step_id=plan.step_id,
            decode_tokens=tokens,
            decode_counts=counts,
            chunks=tuple(sampled for sampled, _ in chunks),
            prompt_scores=tuple(scores for _, scores in chunks),
            decode_logprobs=logprobs,
        )

    max_moved = 3  # pages a call of the next two may move

    def read_pages(self, pages: Sequence[PageAt]) -> "FakePages":
        """Copies of pages; looked at later, as they are now."""
        assert 0 < len(pages) <= self.max_moved and all(0 < page.page < self.config.num_pages for page in pages)
        places = [page.shard * self.config.num_pages + page.page for page in pages]
        return FakePages(self.kv[places].reshape(-1, 1, 1, 1, self.config.page_size, 1))

    def write_pages(self, pages: Sequence[PageAt], kv: Sequence[np.ndarray]) -> None:
        assert 0 < len(pages) == len(kv) <= self.max_moved and len({*pages}) == len(pages)
        for page, content in zip(pages, kv, strict=True):
            assert 0 < page.page < self.config.num_pages
            self.kv[page.shard * self.config.num_pages + page.page] = content.reshape(-1)

    def check_unchanged(self) -> None:
        """The oldest plan is as it was when it was dispatched (behaviour 16)."""
        now, then = self._seen.popleft()
        assert repr(plain(now)) == repr(plain(then))

    def _check(self, plan: StepPlan) -> None:
        assert plan.step_id == self._next_step and not plan.is_empty
        self._next_step += 1
        rows = plan.decode_rows.tolist() + [chunk.row for chunk in plan.chunks]
        assert len({*rows}) == len(rows), "a row is computed twice"
        assert plan.decode_rows.dtype == np.int32
        assert 1 <= plan.num_steps <= self.config.decode_steps
        if plan.chunks:
            assert plan.num_steps == 1
            align, tokens = self.config.chunk_align, [0] * self.config.num_shards
            for chunk in plan.chunks:
                tokens[self.config.shards.of(chunk.row)] += -(-len(chunk.token_ids) // align) * align
            assert max(tokens) <= self.config.token_budget, (tokens, self.config.token_budget)

    def _first_page(self, row: int) -> int:
        return self.config.shards.of(row) * self.config.num_pages

    def _row(self, row: int) -> _Row:
        found = self.rows[row]
        assert found is not None, f"row {row} was never set up"
        return found

    def _run_chunk(self, chunk: Chunk) -> tuple[SampledTokens | None, PromptScores | None]:
        row, end = self._row(chunk.row), chunk.start + len(chunk.token_ids)
        assert not row.decodes and len(chunk.token_ids) >= 1
        assert row.num_kv in (None, chunk.start), "chunks leave no gap"
        assert chunk.token_ids.tolist() == row.tokens[chunk.start : end]
        assert end == len(row.tokens) or len(chunk.token_ids) % self.config.chunk_align == 0
        scores = []
        for index, position in enumerate(range(chunk.start, end)):
            context = self._write(row, position, row.tokens[position])
            if chunk.prompt_logprobs is not None:
                assert chunk.next_token_ids is not None and len(chunk.next_token_ids) == len(chunk.token_ids)
                scores.append(logprob(context, int(chunk.next_token_ids[index])))
        sampled = None
        if chunk.samples:
            assert end == len(row.tokens), "only the last chunk samples"
            row.decodes = True
            token = self._emit(row, context)
            sampled = SampledTokens(np.array([token], np.int32), np.array([logprob(context, token)], np.float32))
        if chunk.prompt_logprobs is None:
            return sampled, None
        top = np.zeros((len(scores), chunk.prompt_logprobs))
        return sampled, PromptScores(np.array(scores, np.float32), top.astype(np.int32), top.astype(np.float32))

    def _decode(self, row: _Row) -> tuple[int, float] | None:
        assert row.decodes, "the row's prompt is not computed yet"
        if row.done:
            return None
        position = len(row.tokens) - 1
        assert row.num_kv == position
        context = self._write(row, position, row.tokens[-1])
        token = self._emit(row, context)
        return token, logprob(context, token)

    def _context(self, row: _Row, end: int) -> int:
        """Reads what position `end` sees of the K/V before it through the page tables."""
        size, total = self.config.page_size, 0
        for group, window in enumerate(self.config.windows):
            start = 0 if window is None else max(end - window + 1, 0)
            first = start // size
            pages = [row.tables[group][index] for index in range(first, -(-end // size))]
            kv = self.kv[pages].reshape(-1)[start - first * size : end - first * size].tolist()
            total += sum(value * weight(start + index) for index, value in enumerate(kv))
        return total & MASK

    def _write(self, row: _Row, position: int, token: int) -> int:
        page, offset = divmod(position, self.config.page_size)
        context = self._context(row, position)
        new = kv_of(context, token, position, self.config.windows)
        for group, kv in enumerate(new):
            self.kv[row.tables[group][page], offset] = kv
        row.num_kv = position + 1
        self.num_computed += 1
        return extend(context, sum(new), position)

    def poison(self, pages: Sequence[int]) -> None:
        """Overwrites pages whose content is worth nothing: whoever reads them finds out."""
        self.kv[list(pages)] = np.random.default_rng(len(pages)).integers(0, 2**64, self.config.page_size, np.uint64)

    def _emit(self, row: _Row, context: int) -> int:
        setup, num_output = row.setup, len(row.tokens) - row.setup.prompt_len
        token = sample(setup, (setup.seed, setup.child), num_output, context)
        row.tokens.append(token)
        stops = token in setup.stop_ids and num_output >= setup.params.min_tokens
        row.done = stops or len(row.tokens) >= setup.max_total_len
        return token


def plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


# --- scheduler and runner together -----------------------------------------------------------------------------------


class Loop:
    """A scheduler, a fake runner and the steps in flight between them; collects and checks what comes out."""

    def __init__(
        self, config: SchedulerConfig, *, depth: int = 2, namespace: bytes = b"", store: TierStore | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0  # what the engine's clock would say; stands still
        self.depth = depth  # steps in flight; 1 is the plain loop
        self.scheduler = Scheduler(config, namespace)
        self.runner = FakeRunner(config)
        self.mover = TierMover(self.scheduler, self.runner, store or TierStore(None))
        self.requests: dict[str, Request] = {}
        self.streamed: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
        self.scores: dict[str, list[float]] = collections.defaultdict(list)
        self.finished: dict[tuple[str, int], Finished] = {}
        self.admitted: list[str] = []
        self.plans: list[StepPlan] = []
        self.results: collections.deque[StepResult] = collections.deque()
        self.held: collections.deque[str] = collections.deque()  # requests whose grammar is being compiled

    def add(self, request: Request, *, held: bool = False) -> None:
        self.scheduler.add(request, stream=True, held=held)
        self.requests[request.request_id] = request
        if held:
            self.held.append(request.request_id)

    def release(self) -> None:
        """The grammar of the request that is held for longest is compiled; it allows everything."""
        self.scheduler.set_grammar(self.held.popleft(), typing.cast(CompiledGrammar, "anything"))

    def dispatch(self) -> StepPlan | None:
        """Plans and runs one step, without looking at its result."""
        self.mover.report()
        plan = self.scheduler.plan(self.now_s)
        self.mover.move()
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.runner.run(plan))
        if self.config.has_windows:
            self._poison_free_pages()
        self._take(self.scheduler.take_finished())
        return plan

    def commit(self) -> Committed | None:
        """Looks at the oldest result."""
        if not self.results:
            return None
        committed = self.scheduler.commit(self.results.popleft())
        self.runner.check_unchanged()
        self.admitted += committed.admitted
        for tokens in committed.watched_tokens():
            self._take_tokens(tokens)
        for scores in committed.scores:
            self._take_scores(scores)
        self._take(committed.finished)
        return committed

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop: keep `depth` steps in flight."""
        plan = self.dispatch()
        is_moving = plan is not None or self.results or self.held or not self.scheduler.has_unfinished
        if not is_moving and self.scheduler.tiers.is_reading:
            self.mover.wait(10.0)
            is_moving = self.mover.store.is_busy
        assert is_moving, "nothing moves any more"
        if plan is None or len(self.results) >= self.depth:
            self.commit()
        return plan

    def fail(self) -> None:
        """The device fails: what was planned is lost, and so are its pages."""
        self.results.clear()
        self.scheduler.fail_all("the device failed")
        step = self.scheduler.stats().num_steps
        self.runner = FakeRunner(self.config)
        self.runner._next_step = step
        self.mover = TierMover(self.scheduler, self.runner, self.mover.store)
        self.mover.store.reset()
        self._take(self.scheduler.take_finished())

    def drain(self, max_turns: int = 10_000) -> None:
        """Runs until everything is finished and nothing is in flight."""
        while self.held:
            self.release()
        for _ in range(max_turns):
            self._take(self.scheduler.take_finished())
            if not self.scheduler.has_unfinished and not self.results:
                self.scheduler.check()
                return
            self.step()
        raise AssertionError("never ends")

    def outputs(self) -> dict[tuple[str, int], list[int]]:
        return {key: finished.token_ids.tolist() for key, finished in sorted(self.finished.items())}

    def check_against_alone(self) -> None:
        """Every finished completion is what it would have been alone, or the beginning of it if it was cut short."""
        for (request_id, child), finished in self.finished.items():
            request = self.requests[request_id]
            alone = generate_alone(request, child, self.config.max_len, self.config.windows)
            tokens = finished.token_ids.tolist()
            assert tokens == alone.token_ids[: len(tokens)], (request_id, child, finished)
            streamed = self.streamed[request_id, child]
            assert streamed[: len(tokens)] == tokens and streamed == alone.token_ids[: len(streamed)]
            np.testing.assert_allclose(self.logprobs[request_id, child], alone.logprobs[: len(streamed)], rtol=1e-6)
            is_whole = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if is_whole and not isinstance(finished.stop_reason, str):
                assert tokens == streamed == alone.token_ids
                assert (finished.reason, finished.stop_reason) == (alone.reason, alone.stop_reason), (request_id, child)
                if child == 0 and request.params.prompt_logprobs is not None:
                    np.testing.assert_allclose(self.scores[request_id], alone.scores, rtol=1e-6)

    def _poison_free_pages(self) -> None:
        """Of what left windows, a sequence that still reads it must not find what it wrote."""
        for shard, memory in enumerate(self.scheduler._roster.memories):
            self.runner.poison([shard * self.config.num_pages + page for page in memory._allocator._free])

    def _take_tokens(self, tokens: NewTokens) -> None:
        key = tokens.request_id, tokens.child
        assert len(tokens.token_ids) >= 1 and tokens.logprobs is not None
        assert len(tokens.logprobs) == len(tokens.token_ids)
        assert key not in self.finished, "tokens after the end"
        self.streamed[key] += tokens.token_ids.tolist()
        self.logprobs[key] += tokens.logprobs.tolist()

    def _take_scores(self, scores: Scores) -> None:
        assert scores.start == len(self.scores[scores.request_id]), "a position was scored twice, or never"
        self.scores[scores.request_id] += scores.logprobs.tolist()

    def _take(self, finished: tuple[Finished, ...]) -> None:
        for event in finished:
            key = event.request_id, event.child
            assert key not in self.finished, "ended twice"
            self.finished[key] = event


def run(loop: Loop, *requests: Request) -> Loop:
    """Adds requests, finishes everything and checks it; returns the loop."""
    for request in requests:
        loop.add(request)
    loop.drain()
    loop.check_against_alone()
    return loop


# --- for benchmarks --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A step in flight whose result is there."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


class CheapRunner:
    """Makes the promised number of random tokens in next to no time: what remains is the scheduler's own cost."""

    def __init__(self, max_rows: int, max_steps: int, *, low: int = 100, high: int = 30_000) -> None:
        self._tokens = np.random.default_rng(0).integers(low, high, (64, max_rows, max_steps)).astype(np.int32)
        self._len, self._max_len = np.zeros((2, max_rows), np.int64)

    def dispatch(self, plan: StepPlan) -> _Ready:
        """As a `Runner`'s, for an `Engine`."""
        return _Ready(self.run(plan))

    def run(self, plan: StepPlan) -> StepResult:
        for setup in plan.setups:
            self._len[setup.row], self._max_len[setup.row] = len(setup.token_ids), setup.max_total_len
        rows = plan.decode_rows
        counts = np.minimum(plan.num_steps, self._max_len[rows] - self._len[rows])
        self._len[rows] += counts
        sampled = []
        for chunk in plan.chunks:
            self._len[chunk.row] += chunk.samples
            sampled.append(SampledTokens(np.array([7], np.int32)) if chunk.samples else None)
        return StepResult(
            step_id=plan.step_id,
            decode_tokens=self._tokens[plan.step_id % 64, : len(rows), : plan.num_steps],
            decode_counts=counts.astype(np.int32),
            chunks=tuple(sampled),
            prompt_scores=(None,) * len(sampled),
        )
