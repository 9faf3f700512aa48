"""Continuous batching on the host: which tokens of which requests the next step computes.

    scheduler.add(request)                    queue it
    plan = scheduler.plan(now_s)              what the next step computes; None: nothing to do now
    (dispatch the plan)                       in the order of planning, before planning again
    events = scheduler.commit(result)         in the order of planning; any number of steps may be in flight

`plan` may be called before earlier steps are committed: a decode row that lives makes exactly the tokens it was
promised, so the host knows lengths and pages ahead of the tokens themselves.

No clock, no jax, no sets: the same calls give the same plans on every host (behaviour 17).
"""

import collections

import numpy as np

from jaxkv.cache.tiers import PageTiers
from jaxkv.config import SchedulerConfig
from jaxkv.events import Committed, Finished, NewTokens, Scores
from jaxkv.grammar.compiled import CompiledGrammar
from jaxkv.plan import Chunk, PromptScores, SampledTokens, StepPlan, StepResult
from jaxkv.request import FinishReason, Request
from jaxkv.schedule.admission import check_cached, check_fits
from jaxkv.schedule.deadlines import Deadlines
from jaxkv.schedule.holds import Holds
from jaxkv.schedule.memory import Reuse
from jaxkv.schedule.page_map import SchedulerView, look
from jaxkv.schedule.planner import Flight, Planner
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.sequence import Ending, Sequence
from jaxkv.schedule.stats import SchedulerStats as SchedulerStats
from jaxkv.schedule.stats import take_stats


class Scheduler:
    """The host tower's public face.

    Args:
        config: limits; all numbers are final.
        namespace: what K/V depend on besides tokens, see `prefix_cache.namespace`.
    """

    def __init__(self, config: SchedulerConfig, namespace: bytes = b"") -> None:
        self.config = config
        self._roster = Roster(config, namespace)
        self.holds = Holds(self._roster.memories)
        self._flights: collections.deque[Flight] = collections.deque()
        self._num_planned = 0
        self._committed_id = -1
        self._just_chunked: list[tuple[Sequence, int]] = []  # sequences with a chunk in the newest plan, and its end
        self._deadlines = Deadlines(self._is_alive)

    @property
    def tiers(self) -> PageTiers:
        """Pages below the device: what is to move, and what became of it."""
        return self._roster.tiers

    @property
    def has_unfinished(self) -> bool:
        return self._roster.num_requests > 0

    @property
    def num_in_flight(self) -> int:
        """Steps planned but not committed."""
        return len(self._flights)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request, *, stream: bool = False, held: bool = False) -> None:
        """Queues a request.

        Args:
            request: checked against the model by the caller.
            held: its output has a grammar, which comes with `set_grammar`; until then its prompt is computed into the
                prefix cache, if there is one, and no more.
            stream: report its tokens after every step (`Committed.watched`), not only when it ends. Requests with
                stop strings or log-probabilities are reported in any case.

        Raises:
            RequestError: its id is in use, its prompt is empty or longer than `max_len`.
            CapacityError: its prompt can never fit into the pool.
        """
        params = request.params
        check_cached(request, self.config)
        check_fits(len(request.prompt_token_ids), params, self.config)
        watched = stream or params.needs_every_token
        self._roster.add(request, self._num_planned, watched, held)
        if request.deadline_s is not None:
            arrival = self._roster.sequences(request.request_id)[0].rank[1]
            self._deadlines.add(request.request_id, arrival, request.deadline_s, self._roster.num_requests)

    def set_grammar(self, request_id: str, grammar: CompiledGrammar) -> None:
        """A held request's grammar is ready: it joins the queue, ranked by its arrival. Every plan must be dispatched."""
        self._note_dispatched()
        self._roster.release_held(request_id, grammar)

    def abort(self, request_id: str) -> None:
        """Ends what is left of a request; unknown or finished ones are left alone. Pages are free at once."""
        self._end_request(request_id, Ending(FinishReason.ABORT))

    def expire(self, now_s: float) -> None:
        """Ends requests whose deadline is not after `now_s` (the caller's clock); they keep their partial output."""
        for request_id in self._deadlines.pop_due(now_s):
            self._end_request(request_id, Ending(FinishReason.ABORT))

    def finish(
        self,
        request_id: str,
        child: int,
        *,
        num_output: int | None = None,
        reason: FinishReason = FinishReason.STOP,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> bool:
        """Ends one completion for a reason only the caller can see, such as a stop string.

        Args:
            request_id: of an unfinished request, else nothing happens.
            child: index of the completion.
            num_output: output tokens to keep; None keeps all.
            reason: why.
            stop_reason: the stop string that matched.
            error: what happened, with `FinishReason.ERROR`.

        Returns:
            Whether it was unfinished until now.
        """
        group = self._roster.sequences(request_id)
        if not group or group[child].ending is not None:
            return False
        seq = group[child]
        if num_output is not None:
            assert 0 <= num_output <= seq.num_tokens - seq.prompt_len, (num_output, seq)
            seq.num_tokens = seq.prompt_len + num_output
        self._roster.end(seq, Ending(reason, stop_reason, error))
        return True

    def fail_all(self, error: str) -> None:
        """Ends everything after the device failed: steps in flight are lost, cached pages are not to be trusted."""
        self._flights.clear()
        self._just_chunked = []
        self._committed_id = self._num_planned - 1
        self._roster.clear_cache(None)
        self.tiers.reset()
        for seq in self._roster.all_sequences():
            self._roster.end(seq, Ending(FinishReason.ERROR, error=error))
        self._roster.grammars.clear()

    def clear_cache(self, namespace: bytes | None = None) -> None:
        """Forgets every cached page, for new weights (behaviour 7); give their namespace."""
        self._roster.clear_cache(namespace)

    def take_finished(self) -> tuple[Finished, ...]:
        """What ended since the last `commit` or `take_finished`."""
        return self._roster.take_finished()

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step; every plan before it must have been dispatched. None: nothing can be computed now.

        Args:
            now_s: the caller's clock, for pages that are kept until a deadline; it decides nothing else.
        """
        self.holds.settle()
        for memory in self._roster.memories:
            memory.advance(now_s)
        self.tiers.advance(now_s)
        self.tiers.start_round(is_wanted=len(self._roster.waiting) > 0)
        self._note_dispatched()
        self._roster.leave_windows()
        planner = Planner(self.config, self._roster, self._num_planned, self._committed_id)
        flight = planner.make()
        if flight is None:
            return None
        self._just_chunked = planner.chunk_ends()
        self._flights.append(flight)
        self._num_planned += 1
        return flight.plan

    def commit(self, result: StepResult) -> Committed:
        """Takes in what the oldest step in flight produced."""
        flight = self._flights.popleft()
        plan = flight.plan
        assert result.step_id == plan.step_id, (result.step_id, plan.step_id)
        self._committed_id = plan.step_id
        sampled, scores = [], []
        for chunk, seq, tokens, chunk_scores in zip(
            plan.chunks, flight.chunk_sequences, result.chunks, result.prompt_scores, strict=True
        ):
            scores += _commit_scores(seq, chunk, chunk_scores)  # first: the sample may end the sequence
            sampled += self._commit_sample(seq, chunk, tokens)
            if seq.ending is None and not chunk.samples and chunk.start + len(chunk.token_ids) == seq.max_total_len:
                self._end_scored(seq)
        counts, watched = self._commit_decode(flight, result)
        if plan.masks is not None:
            self._advance_matchers(flight, result)
        return Committed(
            step_id=plan.step_id,
            sequences=flight.sequences,
            token_ids=result.decode_tokens,
            counts=counts,
            watched=watched,
            result=result,
            chunks=tuple(zip(flight.chunk_sequences, plan.chunks, strict=True)),
            sampled=tuple(sampled),
            scores=tuple(scores),
            admitted=flight.admitted,
            finished=self._roster.take_finished(),
        )

    def find_reuse(self, request: Request) -> Reuse:
        """What `request` would find cached if it were admitted now, on the data shard that has most of it.

        Looks only: nothing is taken, counted or moved in the order of eviction.
        """
        seq = Sequence(request, 0, (0, 0), self.config.max_len, watched=False)
        return max((memory.find_reuse(seq, None) for memory in self._roster.memories), key=lambda each: each.num_tokens)

    def save(self, request: Request, ttl_s: float | None) -> tuple[int, int]:
        """Writes the full pages of a request's prompt to disk, as far as they are known; see `Memory.save`."""
        seq = Sequence(request, 0, (0, 0), self.config.max_len, watched=False)
        return max((memory.save(seq, ttl_s) for memory in self._roster.memories), key=lambda each: each[1])

    def num_on_disk(self, request: Request) -> int:
        """How many leading pages of a request's prompt are on disk."""
        seq = Sequence(request, 0, (0, 0), self.config.max_len, watched=False)
        self._roster.memories[0].cached_lens([seq])  # makes its keys
        return next((i for i, key in enumerate(seq.page_keys) if key not in self.tiers.disk), len(seq.page_keys))

    def stats(self) -> SchedulerStats:
        """Counters and gauges, made when asked."""
        return take_stats(self._roster, num_steps=self._num_planned, num_in_flight=len(self._flights))

    def look(self) -> SchedulerView:
        """The pool and everyone in it, for people to look at."""
        return look(self._roster)

    def check(self) -> None:
        """Asserts that every structure tells the same story; for tests."""
        self._roster.check()

    def _is_alive(self, request_id: str, arrival: int) -> bool:
        """Whether the request that arrived so is not over; its id may have been used again."""
        group = self._roster.sequences(request_id)
        return bool(group) and group[0].rank[1] == arrival

    def _end_request(self, request_id: str, ending: Ending) -> None:
        for seq in self._roster.sequences(request_id):
            if seq.ending is None:
                self._roster.end(seq, ending)

    def _note_dispatched(self) -> None:
        """The newest plan was dispatched: its chunks' pages may be shared, computed prompts may be forked."""
        for seq, end in self._just_chunked:
            if seq.ending is None and seq.is_placed:
                self._roster.memory_of(seq).publish(seq, end)
                self._roster.is_stalled = False  # with what it can share now, somebody may need fewer pages
                if seq.is_held and self._roster.target(seq, end) == end:
                    self._roster.set_aside(seq)
            if end >= seq.prompt_len:
                self._roster.release_forks(seq)
        self._just_chunked = []

    def _commit_sample(self, seq: Sequence, chunk: Chunk, tokens: SampledTokens | None) -> list[NewTokens]:
        assert (tokens is not None) == chunk.samples, (seq, tokens)
        if tokens is None or seq.ending is not None:
            return []
        # A jump's chunk has tokens that are known only now that all steps before it are committed.
        num_known = seq.num_tokens - chunk.start
        assert (seq.tokens[chunk.start : seq.num_tokens] == chunk.token_ids[:num_known]).all(), "not the forced tokens"
        ids = np.concatenate([chunk.token_ids[num_known:], tokens.token_ids])
        ids = ids[: self._deliver(seq, ids.tolist())]
        if seq.given:
            ids, seq.given = np.concatenate([np.array(seq.given, np.int32), ids]), []
        logprobs, top_ids, top_logprobs = tokens.logprobs, tokens.top_ids, tokens.top_logprobs
        return [NewTokens(seq.request.request_id, seq.child, ids, logprobs, top_ids, top_logprobs)]

    def _commit_decode(self, flight: Flight, result: StepResult) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many tokens of each decode row count, and which rows with tokens are watched."""
        columns, rows, tokens, counts = self._roster.rows, flight.rows, result.decode_tokens, result.decode_counts
        live = columns.epoch[rows] == flight.epochs
        watched = columns.watched[rows]
        if live.all():
            one_by_one = columns.append(rows, tokens, counts)
        else:
            one_by_one = ~live
            one_by_one[live] = columns.append(rows[live], tokens[live], counts[live])
        short = counts != flight.promised
        if one_by_one.any():
            counts = counts.copy()
            for place in np.flatnonzero(one_by_one).tolist():
                seq = flight.sequences[place]
                watched[place] = seq.watched
                counts[place] = self._deliver(seq, tokens[place, : counts[place]].tolist())
        assert all(seq.ending for seq in flight.sequences[short]), "a live row made fewer tokens than promised"
        return counts, np.flatnonzero(watched & (counts > 0))

    def _advance_matchers(self, flight: Flight, result: StepResult) -> None:
        """Rows matched on the host take in their token, unless it ended them or they left their row (behaviour 20)."""
        sampled = [(seq, t) for seq, t in zip(flight.chunk_sequences, result.chunks, strict=True) if t is not None]
        tokens = [(seq, int(t.token_ids[0])) for seq, t in sampled]
        here = np.flatnonzero(self._roster.rows.epoch[flight.rows] == flight.epochs)
        here = here[self._roster.rows.on_host[flight.rows[here]] & (result.decode_counts[here] > 0)]
        tokens += zip(flight.sequences[here], result.decode_tokens[here, 0].tolist(), strict=True)
        for seq, token in tokens:
            if seq.matcher is None or seq.ending is not None:
                continue
            if not seq.matcher.error:
                seq.matcher.consume(token)
            if seq.matcher.error:
                self._roster.end(seq, Ending(FinishReason.ERROR, error=f"the grammar failed: {seq.matcher.error}"))

    def _end_scored(self, seq: Sequence) -> None:
        """All of a prompt that is only to be scored came back."""
        if seq.is_placed:
            self._roster.memory_of(seq).publish(seq, seq.num_computed)
        self._roster.end(seq, Ending(FinishReason.LENGTH))

    def _deliver(self, seq: Sequence, token_ids: list[int]) -> int:
        """Adds tokens to one sequence and ends it where they do; returns how many count."""
        if seq.ending is not None:
            return 0
        num, ending = seq.judge(token_ids)
        seq.append(token_ids[:num])
        if ending is not None:
            self._roster.end(seq, ending)
        return num


def _commit_scores(seq: Sequence, chunk: Chunk, scores: PromptScores | None) -> list[Scores]:
    """Scores of positions that were not delivered before (a preempted sequence computes some of them again)."""
    if seq.ending is not None or chunk.prompt_logprobs is None:
        return []
    assert scores is not None, seq
    start, end = seq.num_scored, min(chunk.start + len(chunk.token_ids), seq.prompt_len - 1)
    assert chunk.start <= start < end, (chunk.start, start, end)
    seq.num_scored = end
    part = slice(start - chunk.start, end - chunk.start)
    return [
        Scores(seq.request.request_id, start, scores.logprobs[part], scores.top_ids[part], scores.top_logprobs[part])
    ]
