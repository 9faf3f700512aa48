"""Sessions: prompts that grow turn by turn, fork, and are cut back, for agents and conversations.

    with llm.session([{"role": "system", "content": "..."}]) as session:
        session.chat("Plan the work.")
        workers = [session.fork() for _ in range(3)]
        turns = [worker.start(f"Do part {i}.") for i, worker in enumerate(workers)]  # they run in one batch
        answers = [turn.result() for turn in turns]

A session is a transcript and a hold on its pages in the prefix cache; there is no other state, so whatever is lost to
others is computed again and the tokens stay the same. Forks share every full page. Of the last, partly filled page
each computes its own tokens again, at most `page_size - 1`: they go into the same chunk as the next turn's new tokens,
where copying a page would take a step's time and memory for as long as the session lives.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from jaxkv.cache_control import Caching
from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.outputs import OutputBuilder
from jaxkv.request import FinishReason, RequestOutput, SamplingParams
from jaxkv.schedule.holds import Hold
from jaxkv.sessions.transcript import ChatTranscript, TextTranscript, Transcript
from jaxkv.stream import TextStream


class Submit(Protocol):
    """Queues a prompt; `LLM` knows how."""

    def __call__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int,
        caching: Caching,
        timeout_s: float | None,
        *,
        stream: bool,
    ) -> OutputBuilder: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionReport:
    """What a session's next turn finds, if nothing is lost until then."""

    num_tokens: int  # of the session now
    # Leading ones whose K/V are there, in whole pages: `cached_tokens` of a turn that adds to them, which is more only
    # where somebody else went on with the same tokens.
    kept_tokens: int
    recomputed_tokens: int  # the others: not computed yet, lost, or in the last, partly filled page
    shared_pages: int  # of the pages that are there, those other open sessions hold too


class Turn:
    """A turn that was started; several run in one batch."""

    def __init__(self, session: "Session", builder: OutputBuilder) -> None:
        self._session = session
        self._builder = builder

    @property
    def output(self) -> RequestOutput | None:
        """The output, once the turn is over."""
        return self._builder.output

    def result(self) -> RequestOutput:
        """Runs the engine until the turn is over, and every other request with it.

        An interruption (Ctrl-C) cancels the turn; what was generated until then is part of the session.
        """
        try:
            while self._builder.output is None:
                self._session.step()
        except BaseException:
            self.cancel()
            raise
        self._session.settle()
        return self._builder.output

    def cancel(self) -> None:
        """Ends the turn if it runs; what was generated until then is part of the session."""
        self._session.cancel(self._builder)


class Session:
    """A prompt that grows; `LLM.session` makes it. Not thread-safe.

    It keeps its pages while it is open (up to three quarters of the pool for all sessions together): they are the last
    to be evicted. `close` it, or leave its `with` block, to let them go.

    Args:
        engine: runs its turns.
        submit: queues them.
        transcript: what was said so far.
        caching: salt and key of its requests.
    """

    def __init__(self, engine: Engine, submit: Submit, transcript: Transcript, caching: Caching) -> None:
        self._engine = engine
        self._submit = submit
        self._transcript = transcript
        self._caching = caching
        self._running: OutputBuilder | None = None
        self._is_closed = False
        self._hold = Hold()
        self._keep(transcript.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far; of a turn that runs, nothing."""
        self.settle()
        return list(self._transcript.token_ids)

    @property
    def messages(self) -> list[Any]:
        """The messages of a chat session, answers included.

        Raises:
            RequestError: it is no chat session.
        """
        self.settle()
        return self._chat("messages").messages

    @property
    def is_running(self) -> bool:
        """Whether a turn was started and is not over."""
        self.settle()
        return self._running is not None

    # --- turns -------------------------------------------------------------------------------------------------------

    def start(
        self, more: Any = "", params: SamplingParams | None = None, *, priority: int = 0, timeout_s: float | None = None
    ) -> Turn:
        """Begins a turn and returns at once: start several sessions' turns, then ask each for its `result`.

        Args:
            more: what comes next: text or token ids; in a chat session the user's text, a message, or messages (results
                of tools for instance).
            params: as in `LLM.generate`; one completion a turn, `fork` for more.
            priority: as in `LLM.generate`; so is `timeout_s`.

        Raises:
            RequestError: the turn is refused; the session is as before.
            CapacityError: it can never fit.
        """
        return Turn(self, self._begin(more, params, priority, timeout_s, stream=False))

    def generate(
        self, more: Any = "", params: SamplingParams | None = None, *, priority: int = 0, timeout_s: float | None = None
    ) -> RequestOutput:
        """Appends text or token ids and goes on from there; arguments and errors as of `start`.

        What was generated becomes part of the session, but for the model's own end token. A turn that failed
        (`FinishReason.ERROR`) leaves the session as it was.
        """
        if isinstance(self._transcript, ChatTranscript):
            raise RequestError("this is a chat session; use chat")
        return self.start(more, params, priority=priority, timeout_s=timeout_s).result()

    def chat(
        self, more: Any = "", params: SamplingParams | None = None, *, priority: int = 0, timeout_s: float | None = None
    ) -> RequestOutput:
        """Appends a message and answers it; arguments and errors as of `start`."""
        self._chat("chat")
        return self.start(more, params, priority=priority, timeout_s=timeout_s).result()

    def stream(
        self, more: Any = "", params: SamplingParams | None = None, *, priority: int = 0, timeout_s: float | None = None
    ) -> TextStream:
        """As `generate` or `chat`, but the text as it grows; closing the stream ends the turn, what came of it stays."""
        return TextStream(self._engine, self._begin(more, params, priority, timeout_s, stream=True))

    def prefill(self) -> SessionReport:
        """Computes what is not computed yet, so that forks find it; one token is generated and dropped."""
        self._check_idle()
        if not (token_ids := self._transcript.token_ids):
            return self.report()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        builder = self._submit(token_ids, params, 0, self._caching, None, stream=False)
        try:
            while builder.output is None:
                self._engine.step()
        except BaseException:
            self._engine.abort(builder.request.request_id)
            raise
        return self.report()

    # --- forks and cuts ----------------------------------------------------------------------------------------------

    def fork(self) -> "Session":
        """Another session with the same beginning, whose pages both share; neither sees what becomes of the other."""
        self._check_idle()
        return Session(self._engine, self._submit, self._transcript.copy(), self._caching)

    def truncate(
        self, num_tokens: int | None = None, *, messages: int | None = None, turns: int | None = None
    ) -> SessionReport:
        """Forgets everything after a point.

        Args:
            num_tokens: tokens to keep, not in a chat session.
            messages: messages to keep, in a chat session.
            turns: turns to keep there, each beginning with the user's message, and what stands before the first.

        Raises:
            RequestError: not exactly one of them is given, or there is not as much; the session is as before.
        """
        return self._cut(None, num_tokens, messages, turns)

    def replace_tail(
        self, tail: Any, num_tokens: int | None = None, *, messages: int | None = None, turns: int | None = None
    ) -> SessionReport:
        """Puts something else in the place of everything after a point: a summary of it, say.

        Args:
            tail: as `more` of `start`.
            num_tokens: tokens to keep before it; so are `messages` and `turns`, as in `truncate`.

        Raises:
            RequestError: as in `truncate`, or the tail is malformed; the session is as before.
        """
        return self._cut(tail, num_tokens, messages, turns)

    def report(self) -> SessionReport:
        """What the next turn would find now."""
        self._check_open()
        self.settle()
        num_tokens = len(self._transcript.token_ids)
        page_size = self._engine.scheduler.config.page_size
        held = self._engine.scheduler.holds.look_up(self._hold)
        kept = min(held.num_pages, num_tokens // page_size) * page_size
        return SessionReport(
            num_tokens=num_tokens, kept_tokens=kept, recomputed_tokens=num_tokens - kept, shared_pages=held.num_shared
        )

    def close(self) -> None:
        """Cancels the turn that runs, and lets the pages go; they stay cached for as long as there is room."""
        if self._is_closed:
            return
        if self._running is not None:
            self.cancel(self._running)
        self._is_closed = True
        self._engine.scheduler.holds.end(self._hold)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self._is_closed = True
            self._engine.scheduler.holds.end_later(self._hold)

    # --- for turns ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One engine step."""
        self._engine.step()

    def settle(self) -> None:
        """Takes in the turn that ended."""
        if self._running is None or (output := self._running.output) is None:
            return
        self._running = None
        if output.outputs[0].finish_reason is not FinishReason.ERROR:
            self._transcript.answer(output.outputs[0])
        if not self._is_closed:
            self._keep(self._transcript.token_ids)

    def cancel(self, builder: OutputBuilder) -> None:
        """Ends a turn of this session if it runs."""
        if builder.output is None:
            self._engine.abort(builder.request.request_id)
        self.settle()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begin(
        self, more: Any, params: SamplingParams | None, priority: int, timeout_s: float | None, *, stream: bool
    ) -> OutputBuilder:
        self._check_idle()
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n={params.n}: a session's turn has one completion; fork it for others")
        prompt = self._transcript.prompt(more)
        caching = dataclasses.replace(self._caching, chat_marks=prompt.marks)
        self._running = self._submit(prompt.token_ids, params, priority, caching, timeout_s, stream=stream)
        self._keep(prompt.token_ids)
        return self._running

    def _cut(self, tail: Any, num_tokens: int | None, messages: int | None, turns: int | None) -> SessionReport:
        self._check_idle()
        if sum(value is not None for value in (num_tokens, messages, turns)) != 1:
            raise RequestError("give exactly one of num_tokens, messages and turns: where the session is to be cut")
        after = self._transcript.copy()
        if isinstance(after, ChatTranscript):
            if num_tokens is not None:
                raise RequestError(
                    f"num_tokens={num_tokens}: a chat session is cut between messages; use messages or turns"
                )
            num = messages if turns is None else after.num_messages_of(turns)
            assert num is not None
            after.truncate(num)
        else:
            assert isinstance(after, TextTranscript)
            if num_tokens is None:
                raise RequestError("only chat sessions have messages and turns; use num_tokens")
            after.truncate(num_tokens)
        if tail is not None:
            after.append(tail)
        self._transcript = after
        self._keep(after.token_ids)
        return self.report()

    def _keep(self, token_ids: Sequence[int]) -> None:
        """Holds the pages of these tokens and no others: first the new ones, so that shared ones stay held."""
        holds, before = self._engine.scheduler.holds, self._hold
        self._hold = holds.take(token_ids, self._caching.salt)
        holds.end(before)

    def _chat(self, what: str) -> ChatTranscript:
        if not isinstance(self._transcript, ChatTranscript):
            raise RequestError(f"{what}: only a session that began with messages has them; use generate and token_ids")
        return self._transcript

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("the session is closed; begin another one")

    def _check_idle(self) -> None:
        self._check_open()
        self.settle()
        if self._running is not None:
            raise RequestError("a turn of this session is running; wait for its result, cancel it, or close its stream")
