"""The loop by hand: requests are prepared, queued and computed step by step, as servers do it."""

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.cache_control import Caching
from jaxkv.chat_cache import read_marks
from jaxkv.device.settings import EngineConfig
from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import CompiledGrammar
from jaxkv.intake import Intake
from jaxkv.outputs import OutputBuilder
from jaxkv.recorder import Recorder
from jaxkv.request import Request, SamplingParams
from jaxkv.schedule.page_map import SchedulerView
from jaxkv.schedule.scheduler import SchedulerStats

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(SchedulerStats):
    """The scheduler's numbers (see there) and the device's."""

    num_compiles: int  # programs traced so far, by all names together
    pool_bytes: int
    page_bytes: int = 0  # of a page in host memory; on disk it takes 1 kB more


class RequestLoop:
    """A loaded model, its engine, and the loop that the caller turns.

    `lay_out_chat`, `prepare`, `compiling` and `check_structure` are safe in any thread, the rest is not.
    """

    def __init__(self, name: str, engine: Engine, intake: Intake, config: EngineConfig) -> None:
        self.name = name
        self.tokenizer = intake.tokenizer
        self._engine = engine
        self._intake = intake
        self._seed = config.seed
        self._numbers = itertools.count()

    def lay_out_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        caching: Caching,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], Caching]:
        """A conversation's token ids, and `caching` with the marks on its tools, messages and parts.

        Args:
            messages: as in `chat`.
            tools: as in `chat`.
            caching: what else is asked of the cache; the breakpoints of its `control` are indices of messages.
            documents, add_generation_prompt, variables: as in `Tokenizer.encode_chat`.

        Raises:
            RequestError: as `chat`.
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; pass token ids to generate")
        chat = read_marks(messages, tools, caching.control)
        token_ids = self.tokenizer.encode_chat(
            chat.messages, tools=chat.tools, documents=documents, add_generation_prompt=add_generation_prompt,
            variables=variables,
        )  # fmt: skip
        marks = chat.marks(token_ids, self.tokenizer)
        return token_ids, dataclasses.replace(caching, control=None, chat_marks=marks)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        caching: Caching | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Request:
        """Encodes and checks a request, without queueing it; arguments as in `generate`.

        Args:
            wait: for what its structured output is compiled to, to refuse what cannot be enforced. False only starts it:
                `compiling` says when it is there, `check_structure` what is wrong with it.

        Raises:
            RequestError: it is refused.
        """
        caching = caching or Caching()
        number = next(self._numbers)
        now = time.monotonic()
        token_ids = self._encode(prompt)
        params = self._intake.resolve(params)
        if wait:
            self._engine.await_grammar(len(token_ids), params)
        request = self._intake.make_request(
            f"request-{number}",
            token_ids,
            params,
            seed=int(np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)[0]),
            priority=priority,
            cache_salt=caching.salt,
            cache_key="" if caching.key is None else caching.key,
            marks=caching.marks(len(token_ids)),
            arrival_s=now,
            deadline_s=None if timeout_s is None else now + timeout_s,
        )
        if not wait:
            self._engine.compile(params)
        return request

    def compiling(self, request: Request) -> concurrent.futures.Future[CompiledGrammar] | None:
        """Done when the request's structured output can be enforced, or cannot; None: there is nothing to compile."""
        return self._engine.compile(request.params)

    def check_structure(self, request: Request) -> None:
        """Waits for `compiling`, and raises RequestError if it failed or the output cannot be whole in its tokens."""
        self._engine.await_grammar(len(request.prompt_token_ids), request.params)

    def enqueue(self, request: Request, prompt: str | None = None, *, stream: bool = False) -> OutputBuilder:
        """Queues what `prepare` made; its output grows in the returned builder as `step` runs.

        Raises:
            RequestError: the prompt is too long.
            CapacityError: the prompt can never fit.
        """
        return self._engine.add(request, prompt, stream=stream)

    def step(self) -> None:
        """Computes one step for all requests."""
        self._engine.step()

    def abort(self, request_id: str) -> None:
        """Cancels a request; its pages are free at once. Unknown or finished ones are left alone."""
        self._engine.abort(request_id)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do: unfinished requests, or a step that was not read."""
        return self._engine.has_unfinished or self._engine.scheduler.num_in_flight > 0

    def record(self, on: bool = True) -> Recorder | None:
        """Begins to note what each request does when (or goes on with it), or ends that and forgets it."""
        if not on:
            self._engine.recorder = None
        elif self._engine.recorder is None:
            self._engine.recorder = Recorder()
        return self._engine.recorder

    def look(self) -> SchedulerView:
        """Who holds which page, who runs and who waits."""
        return self._engine.scheduler.look()

    def stats(self) -> Stats:
        """Pages, utilisation, reuse, preemptions, steps, compiles."""
        runner = self._engine.runner
        return Stats(
            **dataclasses.asdict(self._engine.stats()),
            num_compiles=sum(runner.num_traces.values()),
            pool_bytes=runner.pool_spec.pool_bytes,
            page_bytes=runner.page_bytes,
        )

    @property
    def max_len(self) -> int:
        """Tokens a sequence may hold; already lowered to what the pool can hold."""
        return self._engine.scheduler.config.max_len

    @property
    def page_size(self) -> int:
        """Tokens a page holds, of one group of layers."""
        return self._engine.scheduler.config.page_size

    @property
    def num_pages(self) -> int:
        """Pages sequences can use, over all data shards.

        Where layers have sliding windows, a page holds K/V of one group of layers, and there are more pages than asked for.
        """
        config = self._engine.scheduler.config
        return (config.num_pages - 1) * config.num_shards

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return self._engine.runner.dtype.name

    @property
    def quant(self) -> str | None:
        """Of the weights' matrices: "int8"; None if they are of `dtype`, too."""
        return self._engine.runner.quant

    @property
    def kv_dtype(self) -> str:
        """Of K/V in the page pool."""
        return self._engine.runner.pool_spec.dtype.name

    @property
    def mesh(self) -> dict[str, int]:
        """Devices along each axis: `data` and `tensor`."""
        return dict(self._engine.runner.mesh.shape)

    @property
    def max_rows(self) -> int:
        """Sequences that run at once, over all data shards."""
        return self._engine.scheduler.config.max_rows

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        caching: Caching,
        timeout_s: float | None,
        *,
        stream: bool,
        settle: bool = True,
    ) -> OutputBuilder:
        """Queues a request; with `settle` it returns once the request cannot be refused any more."""
        request = self.prepare(prompt, params, caching, priority=priority, timeout_s=timeout_s, wait=False)
        builder = self.enqueue(request, prompt if isinstance(prompt, str) else None, stream=stream)
        try:
            if settle:
                self._settle(builder)
        except BaseException:
            self.abort(request.request_id)
            raise
        return builder

    def _settle(self, builder: OutputBuilder, on_step: Callable[[], None] = lambda: None) -> None:
        """Computes steps, of a queued request the prompt, until its structured output is compiled or its time is up.

        Raises:
            RequestError: it cannot be enforced.
        """
        compiling = self.compiling(builder.request)
        if compiling is None:
            return
        while not compiling.done():
            if builder.output is not None:
                return
            self.step()
            on_step()
        compiling.result()
        self.check_structure(builder.request)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; pass token ids instead of text")
        return self.tokenizer.encode(prompt)
