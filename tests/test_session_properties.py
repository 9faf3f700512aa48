"""Random lives of many sessions in a pool that is too small: tokens are right, promises hold, pages come back."""

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st
import pytest

from jaxkv.request import RequestOutput
from jaxkv.sessions.session import Session, Turn
from tests.fake_model import VOCAB
from tests.session_stage import PAGE, check_alone, check_idle, fake_llm, params

MAX_SESSIONS = 6
ROOM = 24  # tokens a session is cut to before it could grow past `max_len`

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=9)
picks = st.integers(0, 99)


class SessionMachine(hypothesis.stateful.RuleBasedStateMachine):
    """The model of a session is the list of its tokens."""

    @hypothesis.stateful.initialize(
        num_pages=st.sampled_from([18, 24, 41]),
        eviction=st.sampled_from(["lru", "cost", "adaptive"]),
        num_shards=st.sampled_from([1, 2]),
        overlap=st.booleans(),
        token_budget=st.sampled_from([8, 64]),
    )
    def start(self, num_pages: int, eviction: str, num_shards: int, overlap: bool, token_budget: int) -> None:
        self.llm = fake_llm(
            overlap=overlap, num_pages=num_pages, eviction=eviction, num_shards=num_shards, token_budget=token_budget,
            decode_steps=2,
        )  # fmt: skip
        self.said: dict[Session, list[int]] = {}
        self.turns: dict[Session, tuple[Turn, int]] = {}  # with the tokens to generate

    def _pick(self, pick: int, *, idle: bool) -> Session | None:
        sessions = [session for session in self.said if (session in self.turns) is not idle]
        return sessions[pick % len(sessions)] if sessions else None

    def _take_in(self, session: Session, output: RequestOutput) -> None:
        _, max_tokens = self.turns.pop(session)
        check_alone(output, params(max_tokens))
        said, got = list(output.prompt_token_ids), output.outputs[0]
        assert said[: len(self.said[session])] == self.said[session]
        assert got.finish_reason != "error", got
        ended = got.finish_reason == "stop"
        self.said[session] = [*said, *(got.token_ids[:-1] if ended else got.token_ids)]
        assert session.token_ids == self.said[session]

    def _check_report(self, session: Session) -> None:
        report = session.report()
        assert report.num_tokens == len(self.said[session]) == report.kept_tokens + report.recomputed_tokens
        assert report.kept_tokens % PAGE == 0 and 0 <= report.shared_pages <= report.kept_tokens // PAGE

    @hypothesis.stateful.precondition(lambda self: len(self.said) < MAX_SESSIONS)
    @hypothesis.stateful.rule(prefix=tokens)
    def open(self, prefix: list[int]) -> None:
        self.said[self.llm.session(prefix)] = list(prefix)

    @hypothesis.stateful.precondition(lambda self: len(self.said) < MAX_SESSIONS)
    @hypothesis.stateful.rule(pick=picks)
    def fork(self, pick: int) -> None:
        if (session := self._pick(pick, idle=True)) is not None:
            self.said[session.fork()] = list(self.said[session])

    @hypothesis.stateful.rule(pick=picks, more=tokens, max_tokens=st.integers(1, 6))
    def begin(self, pick: int, more: list[int], max_tokens: int) -> None:
        if (session := self._pick(pick, idle=True)) is None:
            return
        if len(self.said[session]) > 40:
            session.truncate(ROOM)
            self.said[session] = self.said[session][:ROOM]
        self.turns[session] = (session.start([*more, 1], params(max_tokens)), max_tokens)

    @hypothesis.stateful.rule(pick=picks, more=tokens)
    def alone(self, pick: int, more: list[int]) -> None:
        """With nobody else there, a turn finds what the report promised."""
        if self.turns or (session := self._pick(pick, idle=True)) is None or len(self.said[session]) > 40:
            return
        promised = session.report()
        self.turns[session] = (session.start([*more, 1], params(3)), 3)
        turn = self.turns[session][0]
        output = turn.result()
        assert output.cached_tokens >= promised.kept_tokens  # more where others said the same next
        self._take_in(session, output)

    @hypothesis.stateful.rule(num=st.integers(1, 4))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.llm._engine.step()
        for session in [session for session, (turn, _) in self.turns.items() if turn.output is not None]:
            output = self.turns[session][0].output
            assert output is not None
            self._take_in(session, output)

    @hypothesis.stateful.rule(pick=picks)
    def finish(self, pick: int) -> None:
        if (session := self._pick(pick, idle=False)) is not None:
            self._take_in(session, self.turns[session][0].result())

    @hypothesis.stateful.rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if (session := self._pick(pick, idle=False)) is not None:
            turn = self.turns[session][0]
            turn.cancel()
            assert turn.output is not None
            self._take_in(session, turn.output)

    @hypothesis.stateful.rule(pick=picks, cut=picks, tail=tokens)
    def cut(self, pick: int, cut: int, tail: list[int]) -> None:
        if (session := self._pick(pick, idle=True)) is None:
            return
        num = cut % (min(len(self.said[session]), ROOM) + 1)
        report = session.replace_tail(tail, num) if tail else session.truncate(num)
        self.said[session] = [*self.said[session][:num], *tail]
        assert session.token_ids == self.said[session] and report == session.report()

    @hypothesis.stateful.rule(pick=picks, running=st.booleans(), drop=st.booleans())
    def close(self, pick: int, running: bool, drop: bool) -> None:
        if (session := self._pick(pick, idle=not running)) is None:
            return
        del self.said[session]
        turn, max_tokens = self.turns.pop(session, (None, 0))
        if turn is not None or not drop:
            session.close()
        if turn is not None:
            assert turn.output is not None
            check_alone(turn.output, params(max_tokens))

    @hypothesis.stateful.rule(clear=st.booleans(), start=st.integers(0, 20))
    def others(self, clear: bool, start: int) -> None:
        """Strangers need the memory, or the cache is emptied."""
        if clear and not self.turns:
            self.llm.clear_prefix_cache()
        else:
            asked = params(2)
            prompt = [(start + 3 * i) % VOCAB for i in range(30)]
            check_alone(self.llm.generate([prompt], asked, progress=False)[0], asked)

    @hypothesis.stateful.invariant()
    def holds(self) -> None:
        if not hasattr(self, "llm"):
            return
        scheduler = self.llm._engine.scheduler
        scheduler.check()
        config = scheduler.config
        assert scheduler.stats().pages_held <= config.num_shards * (config.num_pages - 1) * 3 // 4
        for session in self.said:
            if session not in self.turns:
                self._check_report(session)

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        for session in list(self.turns):
            self._take_in(session, self.turns[session][0].result())
        for session in self.said:
            session.close()
        self.llm.generate([[1, 2, 3]], params(1), progress=False)  # dropped sessions let go
        check_idle(self.llm)


TestSessions = SessionMachine.TestCase
TestSessions.settings = hypothesis.settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.exhaustive
class TestSessionsForLong(SessionMachine.TestCase):
    """A hundred thousand operations."""

    settings = hypothesis.settings(max_examples=1250, stateful_step_count=80, deadline=None)
