"""Random lives of random requests: whatever happens, every output is what the request would make alone.

The fake device computes each token from K/V that it reads through page tables, so a wrong page, a stale cell, a lost
or doubled token cannot stay hidden. Small pools make preemption common, few letters make shared prefixes common.
"""

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st

from jaxkv.config import SchedulerConfig
from jaxkv.errors import CapacityError
from jaxkv.request import FinishReason
from tests.fake_model import generate_alone, make_request
from tests.fake_runner import Loop

MAX_LEN = 36
BASE = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1]  # what most prompts begin with
MODEL_STOPS = (3, 4, 5)
WINDOWS = [(None,)] * 3 + [(7,), (None, 5), (None, 1), (None, 4, 4, 4), (None, None, 3, 11)]  # of groups of layers


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    num_shards, align = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    windows = draw(st.sampled_from(WINDOWS))
    rows_each = draw(st.integers(1, 5 if num_shards == 1 else 3))
    return SchedulerConfig(
        max_len=MAX_LEN,
        max_rows=rows_each * num_shards,
        num_shards=num_shards,
        page_size=draw(st.sampled_from([1, 3, 4, 16])),
        num_pages=draw(st.integers(4, 60)) * len(windows),
        token_budget=align + draw(st.integers(0, 20)),
        chunk_align=align,
        decode_steps=draw(st.integers(1, 5)),
        prefix_cache=draw(st.sampled_from([True, True, False])),
        eviction=draw(st.sampled_from(["lru", "cost", "adaptive"])),
        attention_len=draw(st.sampled_from([1, 8, 4096])),
        max_bypass=draw(st.integers(0, 3)),
        steps_per_priority_level=draw(st.integers(1, 20)),
        reserve_steps=draw(st.sampled_from([0, 0, 4])),
        windows=windows,
    )


@st.composite
def asks(draw: st.DrawFn) -> dict:
    """Keyword arguments of `make_request`."""
    prompt = BASE[: draw(st.integers(0, len(BASE)))] + draw(st.lists(st.integers(0, 2), max_size=6))
    max_tokens = draw(st.integers(0, 20))
    scored = max_tokens == 0 or draw(st.integers(0, 4)) == 0
    return {
        "prompt": prompt or [0],
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, min(max_tokens, 4))),
        "prompt_logprobs": 0 if scored else None,
        "n": draw(st.sampled_from([1, 1, 2, 3])) if max_tokens else 1,
        "eos": MODEL_STOPS,
        "stop_token_ids": draw(st.sampled_from([(), (6,), (7, 8)])),
        "ignore_eos": draw(st.booleans()),
        "priority": draw(st.sampled_from([0, 0, 1, -1])),
        "salt": draw(st.sampled_from(["", "", "tenant"])),
        "key": draw(st.sampled_from(["", "", "a", "b"])),
        "marks": draw(st.sampled_from([(), ((1, 3.0),), ((4, 9.0), (16, 2.0)), ((3, 1.0), (8, 2.0), (12, 4.0))])),
        "seed": draw(st.integers(0, 3)),
    }


class SchedulerMachine(hypothesis.stateful.RuleBasedStateMachine):
    """Adds, aborts, steps, overlaps, preempts, forks; checks after every operation."""

    @hypothesis.stateful.initialize(config=configs(), depth=st.integers(1, 3))
    def start(self, config: SchedulerConfig, depth: int) -> None:
        self.loop = Loop(config, depth=depth)
        self.num_added = 0

    @hypothesis.stateful.rule(
        ask=asks(), deadline_s=st.sampled_from([None, None, 1.0, 2.0]), held=st.sampled_from([False, False, True])
    )
    def add(self, ask: dict, deadline_s: float | None, held: bool) -> None:
        if held:
            ask |= {"min_tokens": 0}  # a grammar's business
        if not self.loop.config.prefix_cache:
            ask |= {"key": "", "marks": ()}
        try:
            self.loop.add(make_request(str(self.num_added), deadline_s=deadline_s, **ask), held=held)
        except CapacityError:
            num_tokens = len(ask["prompt"]) + min(1, ask["max_tokens"])
            assert self.loop.config.paging.num_needed(num_tokens) > self.loop.config.num_pages - 1
        self.num_added += 1

    @hypothesis.stateful.precondition(lambda self: self.loop.held)
    @hypothesis.stateful.rule()
    def grammar_is_ready(self) -> None:
        self.loop.release()

    @hypothesis.stateful.rule(num=st.integers(1, 6))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.loop.step()

    @hypothesis.stateful.precondition(lambda self: len(self.loop.results) < self.loop.depth)
    @hypothesis.stateful.rule()
    def dispatch(self) -> None:
        self.loop.dispatch()

    @hypothesis.stateful.rule()
    def commit(self) -> None:
        self.loop.commit()

    @hypothesis.stateful.precondition(lambda self: self.num_added)
    @hypothesis.stateful.rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = str(data.draw(st.integers(0, self.num_added - 1)))
        self.loop.scheduler.abort(request_id)
        assert not self.loop.scheduler._roster.sequences(request_id)

    @hypothesis.stateful.rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        """The caller ends a completion, a few tokens back."""
        ready = [key for key, tokens in sorted(self.loop.streamed.items()) if tokens and key not in self.loop.finished]
        if ready:
            request_id, child = data.draw(st.sampled_from(ready))
            num_output = data.draw(st.integers(1, len(self.loop.streamed[request_id, child])))
            self.loop.scheduler.finish(request_id, child, num_output=num_output, stop_reason="stop")

    @hypothesis.stateful.rule(now_s=st.sampled_from([0.5, 1.5, 2.5]))
    def expire(self, now_s: float) -> None:
        self.loop.scheduler.expire(now_s)

    @hypothesis.stateful.rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.now_s += seconds

    @hypothesis.stateful.rule(namespace=st.sampled_from([None, b"a", b"b"]))
    def clear_cache(self, namespace: bytes | None) -> None:
        self.loop.scheduler.clear_cache(namespace)
        assert self.loop.scheduler.stats().pages_cached == 0

    @hypothesis.stateful.rule()
    def drain(self) -> None:
        self.loop.drain()

    @hypothesis.stateful.invariant()
    def holds(self) -> None:
        scheduler = self.loop.scheduler
        scheduler.check()
        stats = scheduler.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_used == (
            (self.loop.config.num_pages - 1) * self.loop.config.num_shards
        )
        assert 0 <= stats.utilisation <= 1
        assert 0 <= stats.pages_retained <= stats.pages_cached

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.drain()
        self.loop.check_against_alone()
        stats = self.loop.scheduler.stats()
        assert (stats.pages_used, stats.num_waiting, stats.num_running) == (0, 0, 0)
        self._check_usage()
        num_completions = sum(request.params.n for request in self.loop.requests.values())
        assert len(self.loop.finished) == num_completions, "everybody hears back, once"
        for (request_id, child), finished in self.loop.finished.items():
            if finished.reason is FinishReason.ERROR:
                self._check_error(request_id, child, len(finished.token_ids))

    def _check_usage(self) -> None:
        """Every prompt token is read, written or neither, once: the outputs add up to the totals."""
        num_cached = num_written = 0
        for request_id, request in self.loop.requests.items():
            (last,) = [done for (name, _), done in self.loop.finished.items() if name == request_id and done.is_last]
            assert min(last.cached_tokens, last.cache_written_tokens) >= 0
            assert last.cached_tokens + last.cache_written_tokens <= len(request.prompt_token_ids)
            num_cached += last.cached_tokens
            num_written += last.cache_written_tokens
        stats = self.loop.scheduler.stats()
        assert (stats.num_cached_tokens, stats.num_written_tokens) == (num_cached, num_written)
        num_prompt = sum(len(self.loop.requests[name].prompt_token_ids) for name in self.loop.admitted)
        assert num_cached + num_written + stats.num_uncached_tokens == num_prompt

    def _check_error(self, request_id: str, child: int, num_output: int) -> None:
        """Only what cannot go on even alone may end with an error."""
        config, request = self.loop.config, self.loop.requests[request_id]
        room = (config.num_pages - 1) * config.page_size
        num_tokens = len(request.prompt_token_ids) + num_output
        if config.has_windows:
            assert config.paging.num_needed(num_tokens) > config.num_pages - 1
        else:
            assert num_tokens == room + 1, "it used the whole pool, and one token more is known"
        assert num_output < len(generate_alone(request, child, config.max_len, config.windows).token_ids)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis.settings(max_examples=150, stateful_step_count=30, deadline=None)
