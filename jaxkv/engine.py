"""The loop: plan, dispatch, commit, and hand what became known to the requests.

With overlap, step N + 1 is planned and dispatched before the tokens of step N are read: the device never waits for the
host. Without, each step is read before the next is planned; the tokens are the same (behaviour 18).
"""

import collections
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Iterator

import jax

from jaxkv.cache.tier_store import TierStore
from jaxkv.device.runner import InFlight, Runner
from jaxkv.errors import RequestError
from jaxkv.events import Committed, Finished
from jaxkv.grammar.compiled import CompiledGrammar
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.outputs import OutputBuilder
from jaxkv.recorder import Recorder
from jaxkv.request import FinishReason, Request, SamplingParams
from jaxkv.schedule.admission import check_whole
from jaxkv.schedule.scheduler import Scheduler, SchedulerStats
from jaxkv.tier_mover import TierMover
from jaxkv.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A step waits so long if there is nothing else to do, for deadlines, and who calls `step`, must not wait longer.
MAX_WAIT_S = 0.05  # for pages from disk
GRAMMAR_WAIT_S = 0.002


class Engine:
    """Owns the steps in flight and the outputs in the making. Not thread-safe.

    Args:
        scheduler: plans.
        runner: executes.
        tokenizer: None leaves texts empty.
        overlap: dispatch a step before the one before it was read.
        store: holds pages below the device; None: there are none.
        grammars: compiles structured outputs; None refuses them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        overlap: bool,
        store: TierStore | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.mover = TierMover(scheduler, runner, store or TierStore(None))
        self.runner = runner
        self._tokenizer = tokenizer
        self._max_behind = 1 if overlap else 0
        self._flights: collections.deque[tuple[InFlight, float]] = collections.deque()  # with the time of dispatch
        self._builders: dict[str, OutputBuilder] = {}
        self._finished: collections.deque[Finished] = collections.deque()  # endings no builder has taken in yet
        self._aborts: collections.deque[str] = collections.deque()  # asked for while a step was running
        self._is_stepping = False
        self._grammars = grammars
        self.recorder: Recorder | None = None  # hears of every step while somebody looks
        self._compiling: dict[str, concurrent.futures.Future[CompiledGrammar]] = {}  # by request, in order of arrival

    def compile(self, params: SamplingParams) -> "concurrent.futures.Future[CompiledGrammar] | None":
        """Starts to compile what `params` ask for, off this thread, or finds it compiled; None if the output is free.

        Safe in any thread, as `await_grammar` is.

        Raises:
            RequestError: this engine has no tokenizer to do it for.
        """
        if params.structured is None and params.suppress_eos_until is None:
            return None
        if self._grammars is None:
            raise RequestError("structured and suppress_eos_until need a tokenizer, and this model has none")
        if params.structured is None:
            return self._grammars.watch_json()
        return self._grammars.submit(params.structured, params.allowed_token_ids, params.stop_token_ids)

    def await_grammar(self, prompt_len: int, params: SamplingParams) -> None:
        """Compiles what `params` ask for and waits for it.

        Args:
            prompt_len: tokens in the prompt.
            params: may ask for a structure.

        Raises:
            RequestError: the structure cannot be enforced, or an output cannot be whole within its tokens.
        """
        if (future := self.compile(params)) is not None:
            check_whole(prompt_len, params, future.result().min_tokens, self.scheduler.config)

    def add(self, request: Request, prompt: str | None, *, stream: bool = False) -> OutputBuilder:
        """Queues a checked request; its output appears in the returned builder as `step` runs.

        While its grammar is being compiled the request's prompt is computed; what is wrong with the grammar ends it with an
        error in the next step. `await_grammar` raises instead.

        Raises:
            RequestError: the id is in use, or the prompt is too long.
            CapacityError: the prompt can never fit.
        """
        if request.request_id in self._builders:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another one")
        builder = OutputBuilder(request, self._tokenizer, prompt, stream=stream)
        future = self.compile(request.params)
        self.scheduler.add(request, stream=stream, held=future is not None)
        self._builders[request.request_id] = builder
        if future is not None:
            self._compiling[request.request_id] = future
        return builder

    def abort(self, request_id: str) -> None:
        """Cancels a request; its pages are free at once, its partial output completes in the builder.

        Within a step (a garbage-collected stream may end anywhere) it takes effect at the beginning of the next one.
        """
        if self._is_stepping:
            self._aborts.append(request_id)
            return
        self.scheduler.abort(request_id)
        self._deliver()

    @property
    def overlaps(self) -> bool:
        """Whether a step is dispatched before the one before it was read."""
        return self._max_behind > 0

    @property
    def num_unfinished(self) -> int:
        """Requests whose output is not complete."""
        return len(self._builders)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._builders)

    def step(self) -> None:
        """Dispatches one step if there is work, and takes in what is ready to be read."""
        with self._failing_together():
            self._step()

    def move_pages(self) -> None:
        """Carries out what was decided between steps about pages below the device, and takes in what became of it."""
        with self._failing_together():
            self.mover.report()
            self.mover.move()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Whatever fails in here ends every request; a device's failure goes no further."""
        self._is_stepping = True
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            self._fail_all(f"the device failed: {error}")
        except BaseException as error:  # Ctrl-C or a bug, somewhere between planning and delivering
            self._fail_all(f"the engine was interrupted: {error!r}")
            raise
        finally:
            self._is_stepping = False

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def _take_grammars(self) -> None:
        """Requests whose grammar is compiled join the queue; those that it cannot serve end, and nobody else does."""
        for request_id, future in [*self._compiling.items()]:
            if not future.done():
                continue
            del self._compiling[request_id]
            builder = self._builders[request_id]
            request = builder.request
            try:
                builder.grammar = future.result()
                check_whole(
                    len(request.prompt_token_ids), request.params, builder.grammar.min_tokens, self.scheduler.config
                )
            except Exception as error:
                message = str(error)
                if not isinstance(error, RequestError):
                    log.exception("request %s: its grammar failed", request_id)
                    message = f"the grammar failed: {error!r}"
                for child in range(request.params.n):
                    self.scheduler.finish(request_id, child, reason=FinishReason.ERROR, error=message)
            else:
                self.scheduler.set_grammar(request_id, builder.grammar)

    def _step(self) -> None:
        while self._aborts:
            self.scheduler.abort(self._aborts.popleft())
        self._take_grammars()
        self.scheduler.expire(time.monotonic())
        self.mover.report()
        plan = self.scheduler.plan(time.monotonic())
        self.mover.move()
        if plan is None and not self._flights and self._compiling:  # nothing else to do
            concurrent.futures.wait(
                self._compiling.values(), timeout=GRAMMAR_WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
        if plan is not None:
            self._flights.append((self.runner.dispatch(plan), time.monotonic()))
        elif not self._flights and self.scheduler.tiers.is_reading:
            self.mover.wait(MAX_WAIT_S)
        behind = self._max_behind if plan is not None else 0
        while len(self._flights) > behind:
            in_flight, dispatched_s = self._flights.popleft()
            committed = self.scheduler.commit(in_flight.result())
            self._finished.extend(committed.finished)
            self._take_in(committed, dispatched_s)
            self._deliver()
        self._deliver()

    def _take_in(self, committed: Committed, dispatched_s: float) -> None:
        now = time.monotonic()
        if self.recorder is not None:
            self.recorder.note(committed, dispatched_s, now)
        for request_id in committed.admitted:
            if request_id in self._builders:
                self._builders[request_id].admitted(dispatched_s)
        for seq, chunk in committed.chunks:
            if chunk.samples and seq.child == 0 and (builder := self._builders.get(seq.request.request_id)) is not None:
                builder.prompt_computed(seq.cached_tokens, seq.cache_written_tokens)
        for scores in committed.scores:
            self._builders[scores.request_id].score(scores)
        for tokens in committed.watched_tokens():
            builder = self._builders.get(tokens.request_id)
            if builder is None:
                continue
            try:
                match = builder.feed(tokens, now)
            except Exception as error:
                message = _fail_text(builder, tokens.child, error)
                self.scheduler.finish(tokens.request_id, tokens.child, reason=FinishReason.ERROR, error=message)
                continue
            if match is not None:
                self.scheduler.finish(
                    tokens.request_id, tokens.child, num_output=match.num_tokens, stop_reason=match.stop
                )

    def _deliver(self) -> None:
        """Hands endings to their builders; one stays queued until its builder has it."""
        self._finished.extend(self.scheduler.take_finished())
        now = time.monotonic()
        while self._finished:
            event = self._finished[0]
            if self.recorder is not None:
                self.recorder.end(event, now)
            builder = self._builders[event.request_id]
            try:
                builder.finish(event, now)
            except Exception as error:
                _fail_text(builder, event.child, error)
                builder.finish(event, now)
            if event.is_last:
                del self._builders[event.request_id]
                self._compiling.pop(event.request_id, None)
            self._finished.popleft()

    def _fail_all(self, error: str) -> None:
        """The donated pool is gone, or host and device disagree: end every request, start with an empty pool."""
        log.error("%d request(s) end with an error: %s", len(self._builders), error)
        self._flights.clear()
        self.scheduler.fail_all(error)
        self._deliver()
        for builder in self._builders.values():  # whose endings were lost on the way
            builder.end_rest(error, time.monotonic())
        self._builders.clear()
        self._compiling.clear()
        self.runner.reset()
        self.mover.store.reset()


def _fail_text(builder: OutputBuilder, child: int, error: Exception) -> str:
    """This completion's text cannot be made: it alone ends (behaviour 24). Returns what its error will say."""
    log.exception("request %s: output text failed", builder.request.request_id)
    message = f"output text failed: {error}"
    builder.fail(child, message)
    return message
