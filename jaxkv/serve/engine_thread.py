"""The one thread that owns the `LLM`, and what the event loop holds of its requests.

Commands go to the thread through an inbox and are carried out before its next step, so a cancelled request computes at most
the step that is running. What a step made known comes back in one call for all requests: at 256 rows a call each would
cost more than the step's own host work.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxkv.outputs import OutputBuilder, Piece
from jaxkv.request import Request, RequestOutput

if TYPE_CHECKING:
    from jaxkv.api import LLM, Stats

log = logging.getLogger(__name__)

_LOOP_TURNS = 3  # of the event loop, from a connection that waits to a request being made: accept, read, begin
SNAPSHOT_S = 0.1  # seconds between looks at the engine's numbers while it is busy

Result = TypeVar("Result")
OnNews = Callable[["Handle", list[Piece], RequestOutput | None], None]  # the output with the last pieces


class Handle:
    """One request of the engine, on the event loop.

    Args:
        request: from `LLM.prepare`.
        text: its prompt, where it was given as text.
        stream: pieces are wanted as they come.
        context: whatever whoever hears of its end wants to know.

    Attributes:
        output: set when it is over.
        early_news: what came, and when, while it may still be refused; then it never counts. None: it is accepted.
    """

    def __init__(self, request: Request, text: str | None, *, stream: bool, context: Any = None) -> None:
        self.request = request
        self.text = text
        self.stream = stream
        self.context = context
        self.output: RequestOutput | None = None
        self.early_news: list[tuple[list[Piece], RequestOutput | None, float]] | None = []
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()

    async def pieces(self) -> list[Piece]:
        """What came since the last call, waiting for some; empty once all was taken."""
        while not self._pieces and self.output is None:
            self._news.clear()
            await self._news.wait()
        pieces, self._pieces = self._pieces, []
        return pieces

    async def result(self) -> RequestOutput:
        """The whole output, once the request is over."""
        while self.output is None:
            self._news.clear()
            await self._news.wait()
        return self.output

    def receive(self, pieces: list[Piece], output: RequestOutput | None) -> None:
        self._pieces += pieces
        self.output = output
        self._news.set()


class EngineThread:
    """Runs the engine for callers on one event loop.

    Args:
        llm: owned by the thread from `start` to `close`, except for what `LLM` says is safe in any thread.
        on_news: hears on the event loop what a step brought each request, before the request itself does.
    """

    def __init__(self, llm: "LLM", on_news: OnNews) -> None:
        self._llm = llm
        self._on_news = on_news
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._active: dict[str, tuple[Handle, OutputBuilder]] = {}  # touched by the thread only
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._is_closing = False
        self._num_coming = 0  # requests being made, see `coming`; changed on the event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._snapshot_s = time.monotonic()
        self.stats: Stats = llm.stats()  # at most SNAPSHOT_S and a step old

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it ends only in `close`, or by a fault of ours."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread; its news go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """In here requests are made that are submitted right after: an engine that begins to work waits for them."""
        assert self._loop is not None
        self._num_coming += 1
        try:
            yield
        finally:  # after what runs until the next `await`, which submits them
            self._loop.call_soon(self._came)

    async def submit(self, handles: Sequence[Handle]) -> None:
        """Queues all of these requests, or none.

        Raises:
            RequestError: one is refused.
            CapacityError: one can never fit.
        """
        try:
            await self.call(functools.partial(self._add_all, handles))
        except asyncio.CancelledError:
            self.cancel(handles)  # whether or not they were added by now: this comes after it in the inbox
            raise

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ends requests before the next step; those that are over are left alone."""
        ids = [handle.request.request_id for handle in handles if handle.output is None]
        if ids:
            self._inbox.put(functools.partial(self._abort_all, ids))

    def cancel_all(self) -> None:
        """Ends every request before the next step."""
        self._inbox.put(lambda: self._abort_all(list(self._active)))

    async def call(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in the thread between two steps, and returns what it returns."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._inbox.put(functools.partial(_carry_out, work, future))
        return await asyncio.wrap_future(future)

    def post(self, work: Callable[[], object]) -> None:
        """Runs `work` in the thread between two steps; nobody waits for it."""
        self._inbox.put(work)

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        self._inbox.put(self._begin_closing)
        if self._thread.is_alive():
            self._thread.join()

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception as error:  # the engine has ended its requests; the server lives on
                log.error("a step failed: %s", type(error).__name__)
                log.debug("a step failed", exc_info=error)
                self._report()

    def _turn(self) -> None:
        self._carry_out_commands()
        if self._llm.is_busy and not self._is_closing:
            self._llm.step()
        self._report()

    def _carry_out_commands(self) -> None:
        """All that are there; waits for one where there is nothing else to do."""
        was_idle = not self._llm.is_busy
        if was_idle and self._inbox.empty():
            self._look()
            self._inbox.get()()
        self._drain()
        if was_idle and self._llm.is_busy:
            self._gather()

    def _drain(self) -> None:
        try:
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _gather(self) -> None:
        """Nothing runs yet: what arrives together with the first request joins its step.

        Else the first of a burst has a step of its own, and the others make one more: a step costs the same for one prompt
        as for as many as it has room for.
        """
        num_before = 0
        while not self._is_closing and len(self._active) < self._llm.max_rows:
            if self._num_coming:
                self._inbox.get()()  # `submit`, or `_came`
            elif len(self._active) != num_before:  # there may be more that the event loop has not looked at
                num_before = len(self._active)
                self._turn_loop()
            else:
                return

    def _turn_loop(self) -> None:
        """Lets the event loop read what its sockets have, and begin with it, while commands are carried out."""
        assert self._loop is not None
        turned = threading.Event()
        self._loop.call_soon_threadsafe(self._turn_again, _LOOP_TURNS, turned)
        while not turned.is_set():
            self._inbox.get()()

    def _add_all(self, handles: Sequence[Handle]) -> None:
        added: list[str] = []
        try:
            for handle in handles:
                builder = self._llm.enqueue(handle.request, handle.text, stream=handle.stream)
                added.append(handle.request.request_id)
                self._active[handle.request.request_id] = handle, builder
        except Exception:
            self._abort_all(added)
            raise

    def _abort_all(self, ids: list[str]) -> None:
        for request_id in ids:
            self._llm.abort(request_id)

    def _begin_closing(self) -> None:
        self._abort_all(list(self._active))
        self._is_closing = True

    def _report(self) -> None:
        """Sends the news of all requests to the event loop, in one call."""
        news: list[tuple[Handle, list[Piece], RequestOutput | None]] = []
        for request_id, (handle, builder) in list(self._active.items()):
            pieces = builder.take_pieces() if handle.stream else []
            if pieces or builder.output is not None:
                news.append((handle, pieces, builder.output))
            if builder.output is not None:
                del self._active[request_id]
        if time.monotonic() - self._snapshot_s >= SNAPSHOT_S:
            self._look()
        if news:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _look(self) -> None:
        self.stats, self._snapshot_s = self._llm.stats(), time.monotonic()

    # --- on the event loop -------------------------------------------------------------------------------------------

    def _came(self) -> None:
        self._num_coming -= 1
        self._inbox.put(_nothing)

    def _turn_again(self, num: int, turned: threading.Event) -> None:
        assert self._loop is not None
        if num > 1:
            self._loop.call_soon(self._turn_again, num - 1, turned)
        else:
            self._inbox.put(turned.set)

    def _deliver(self, news: list[tuple[Handle, list[Piece], RequestOutput | None]]) -> None:
        for handle, pieces, output in news:
            self._on_news(handle, pieces, output)
            handle.receive(pieces, output)


def _nothing() -> None:
    """Wakes the thread up."""


def _carry_out(work: Callable[[], Result], future: "concurrent.futures.Future[Result]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
