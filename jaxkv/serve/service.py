"""`Service`: what all routes share. It lets requests in, runs them, and tells metrics, traces and the log how they ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxkv.cache_control import Caching
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.outputs import Piece
from jaxkv.request import Request, RequestOutput, SamplingParams
from jaxkv.serve.engine_thread import EngineThread, Handle
from jaxkv.serve.errors import ApiError, refusal
from jaxkv.serve.limits import Gate, ServeConfig
from jaxkv.serve.metrics import Metrics
from jaxkv.serve.tracing import Tracer
from jaxkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxkv.api import LLM

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_AWAITED_BYTES = 64 << 10  # of a body that others may wait for: some milliseconds of work


class Service:
    """One model, served.

    Args:
        llm: given to a thread of its own in `start`.
        config: how to behave.
    """

    def __init__(self, llm: "LLM", config: ServeConfig) -> None:
        self.llm = llm
        self.config = config
        self.created = int(time.time())
        self.gate = Gate(llm.max_rows, config.max_queue)
        self.metrics = Metrics(llm, config.names[0])
        self.engine = EngineThread(llm, self._note)
        self.metrics.attach(self.engine)
        self._tracer = Tracer()

    @property
    def name(self) -> str:
        """Of the model."""
        return self.config.names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError where the model has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send token ids as the prompt of /v1/completions")
        return self.llm.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises ApiError, 404, if a request is for another model."""
        if name is not None and name not in self.config.names:
            message = f"model {name[:200]!r} is not served here; it is {' or '.join(self.config.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        """Runs what takes the processor for a while (JSON, templates, tokens) beside the event loop.

        Raises:
            ApiError: what the runtime refused, as an answer.
        """
        try:
            return await asyncio.to_thread(work, *args)
        except JaxkvError as error:
            raise refusal(error) from error

    async def make(self, work: Callable[["Service", bytes], Result], body: bytes) -> Result:
        """Runs, as `in_thread`, what makes requests of a body; `begin` is to follow without an `await` between.

        Raises:
            ApiError: what the runtime refused, as an answer.
        """
        if len(body) > MAX_AWAITED_BYTES:
            return await self.in_thread(work, self, body)
        with self.engine.coming():
            return await self.in_thread(work, self, body)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        caching: Caching,
        priority: int,
        timeout_s: float | None,
    ) -> Request:
        """A checked request; safe in any thread. What its output is to look like is compiled from now on; `begin` waits.

        Raises:
            RequestError: it is refused.
        """
        limits = [seconds for seconds in (timeout_s, self.config.timeout_s) if seconds is not None]
        if not -(2**31) <= priority < 2**31:
            raise RequestError(f"priority={priority} must be a whole number of 32 bits; lower runs first")
        return self.llm.prepare(
            prompt, params, caching, priority=priority, timeout_s=min(limits, default=None), wait=False
        )

    async def begin(
        self,
        requests: Sequence[Request],
        *,
        texts: Sequence[str | None],
        stream: bool,
        headers: Mapping[str, str],
        user: str | None = None,
    ) -> list[Handle]:
        """Queues requests; whoever gets handles from this calls `end`, whatever happens.

        Args:
            requests: of one HTTP request, from `prepare`.
            texts: their prompts, where they are texts.
            stream: their pieces are wanted as they come.
            headers: of the HTTP request, which may carry the trace it belongs to.
            user: whom the client says it asks for.

        Raises:
            ApiError: one is refused, and none goes on.
        """
        num = sum(request.params.n for request in requests)
        self.gate.enter(num)
        context = self._tracer.context(headers)
        handles = [
            Handle(request, text, stream=stream, context=context) for request, text in zip(requests, texts, strict=True)
        ]
        try:
            await self.engine.submit(handles)
            for request in requests:
                await self._await_structure(request)
        except BaseException as error:
            self.end(handles)
            if isinstance(error, JaxkvError):
                raise refusal(error) from error
            raise
        for handle in handles:
            self._log_start(handle, user)
            self._accept(handle)
        return handles

    async def _await_structure(self, request: Request) -> None:
        """Waits for the compiled grammar on the event loop, for that takes up to seconds, and threads are few.

        Meanwhile the engine computes the request's prompt.

        Raises:
            RequestError: the structure cannot be enforced.
        """
        compiling = self.llm.compiling(request)
        if compiling is not None:
            ended = asyncio.wrap_future(compiling)
            await asyncio.wait([ended])  # not `await ended`, which if cancelled would cancel what others wait for
            ended.result()
            self.llm.check_structure(request)

    def end(self, handles: Sequence[Handle]) -> None:
        """Cancels what still runs, and makes room."""
        self.engine.cancel(handles)
        self.gate.leave(sum(handle.request.params.n for handle in handles))

    def stop(self) -> None:
        """Ends what runs; each request gives the text that it has."""
        self.engine.cancel_all()

    def _note(self, handle: Handle, pieces: list[Piece], output: RequestOutput | None) -> None:
        news = (pieces, output, time.monotonic())
        if handle.early_news is None:
            self._note_accepted(handle, *news)
        else:
            handle.early_news.append(news)

    def _accept(self, handle: Handle) -> None:
        """The request will not be refused any more: from now on, and as far as it came by now, it counts."""
        early, handle.early_news = handle.early_news or [], None
        for news in early:
            self._note_accepted(handle, *news)

    def _note_accepted(self, handle: Handle, pieces: list[Piece], output: RequestOutput | None, now_s: float) -> None:
        self.metrics.note(handle, pieces, output, now_s)
        if output is None:
            return
        self._tracer.record(handle, output, self.name)
        if output.metrics is not None:
            self.gate.took(output.metrics.e2e_s)
        reasons = ",".join(str(completion.finish_reason) for completion in output.outputs)
        num = sum(len(completion.token_ids) for completion in output.outputs)
        log.info("%s: %d tokens, %s", output.request_id, num, reasons)

    def _log_start(self, handle: Handle, user: str | None) -> None:
        request = handle.request
        log.info("%s: prompt of %d tokens%s", request.request_id, len(request.prompt_token_ids), _of(user))
        if self.config.log_prompts:
            text = handle.text
            if text is None and self.llm.tokenizer is not None:
                text = self.llm.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            log.info("%s: %r", request.request_id, text)


def _of(user: str | None) -> str:
    return "" if user is None else f" for user {user[:64]!r}"
