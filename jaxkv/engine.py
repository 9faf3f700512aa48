"""The loop: plan, dispatch, commit, and hand what became known to the requests.

With overlap, step N + 1 is planned and dispatched before the tokens of step N are read: the device never waits for the
host. Without, each step is read before the next is planned; the tokens are the same (behaviour 18).
"""

import collections
import logging
import time

import jax

from jaxkv.errors import RequestError
from jaxkv.events import Committed, Finished
from jaxkv.outputs import OutputBuilder
from jaxkv.request import FinishReason, Request
from jaxkv.runner import InFlight, Runner
from jaxkv.scheduler import Scheduler, SchedulerStats
from jaxkv.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """Owns the steps in flight and the outputs in the making. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self._max_behind = 1 if overlap else 0
        self._flights: collections.deque[InFlight] = collections.deque()
        self._builders: dict[str, OutputBuilder] = {}

    def add(self, request: Request, prompt: str | None, *, stream: bool = False) -> OutputBuilder:
        """Queues a checked request; its output appears in the returned builder as `step` runs.

        Raises:
            RequestError: the id is in use, or the prompt is too long.
            CapacityError: the prompt can never fit.
        """
        if request.request_id in self._builders:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another one")
        builder = OutputBuilder(request, self._tokenizer, prompt, stream=stream)
        self.scheduler.add(request, stream=stream)
        self._builders[request.request_id] = builder
        return builder

    def abort(self, request_id: str) -> None:
        """Cancels a request; its pages are free at once, its partial output completes in the builder."""
        self.scheduler.abort(request_id)
        self._finish(self.scheduler.take_finished())

    @property
    def has_unfinished(self) -> bool:
        return bool(self._builders)

    def step(self) -> None:
        """Dispatches one step if there is work, and takes in what is ready to be read."""
        self.scheduler.expire(time.monotonic())
        try:
            plan = self.scheduler.plan()
            if plan is not None:
                self._flights.append(self.runner.dispatch(plan))
            behind = self._max_behind if plan is not None else 0
            while len(self._flights) > behind:
                self._take_in(self.scheduler.commit(self._flights.popleft().result()))
        except jax.errors.JaxRuntimeError as error:
            self._fail_all(f"the device failed: {error}")
        except BaseException as error:  # Ctrl-C or a bug, somewhere between planning and committing
            self._fail_all(f"the engine was interrupted: {error!r}")
            raise
        self._finish(self.scheduler.take_finished())

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def _take_in(self, committed: Committed) -> None:
        now = time.monotonic()
        for request_id in committed.admitted:
            if request_id in self._builders:
                self._builders[request_id].admitted(now)
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
        self._finish(committed.finished)

    def _finish(self, events: tuple[Finished, ...]) -> None:
        now = time.monotonic()
        for event in events:
            builder = self._builders[event.request_id]
            try:
                builder.finish(event, now)
            except Exception as error:
                _fail_text(builder, event.child, error)
                builder.finish(event, now)
            if event.is_last:
                del self._builders[event.request_id]

    def _fail_all(self, error: str) -> None:
        """The donated pool is gone, or host and device disagree: end every request, start with an empty pool."""
        log.error("%d request(s) end with an error: %s", len(self._builders), error)
        self._flights.clear()
        self.scheduler.fail_all(error)
        self._finish(self.scheduler.take_finished())
        self.runner.reset()


def _fail_text(builder: OutputBuilder, child: int, error: Exception) -> str:
    """This completion's text cannot be made: it alone ends (behaviour 24). Returns what its error will say."""
    log.exception("request %s: output text failed", builder.request.request_id)
    message = f"output text failed: {error}"
    builder.fail(child, message)
    return message
