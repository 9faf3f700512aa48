"""What the next step computes: `StepPlan`s from the roster.

The order makes room for whoever runs before anybody else gets in (behaviour 12):

    1. decode rows: one token each. If their pages do not fit, the worst-ranked sequences are preempted. This comes
       before anything is placed, so a victim never has to be taken out of a half-made plan.
    2. chunks of running sequences that are behind, then of waiting ones, in what is left of the token budget.
    3. if no chunk came of that: as many tokens a decode row as `decode_steps` and free pages allow.

Every data shard has pages and a token budget of its own. Who of those that wait is next, and where it goes, is
`placement`'s; a decode row grows, and preempts, on its own shard.
"""

import dataclasses

import numpy as np

from jaxkv.config import SchedulerConfig
from jaxkv.grammar.compiled import OnDevice, OnHost
from jaxkv.grammar_layout import GrammarPlace, host_row
from jaxkv.plan import NO_ROWS, Chunk, PageCopy, PageWrite, RowSetup, StepPlan
from jaxkv.request import FinishReason
from jaxkv.schedule.memory import Reuse
from jaxkv.schedule.placement import Placement
from jaxkv.schedule.queue import Verdict
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.rows import DecodeBatch
from jaxkv.schedule.sequence import Ending, Sequence

MIN_SAVED = 2  # decode steps that a jump must save: it costs a row's setup, and a chunk beside the other rows' step


@dataclasses.dataclass(frozen=True, eq=False)
class Flight:
    """A dispatched step: what is needed to understand its result when it comes back."""

    plan: StepPlan
    rows: np.ndarray  # intp [num_decode_rows]
    sequences: np.ndarray  # object [num_decode_rows]: who had the rows
    epochs: np.ndarray  # int64 [num_decode_rows]
    promised: np.ndarray  # int64 [num_decode_rows]: tokens each row makes unless the device finds it done
    chunk_sequences: tuple[Sequence, ...]  # one per plan.chunks
    admitted: tuple[str, ...]  # requests for which this is the first step


@dataclasses.dataclass(frozen=True, eq=False)
class _Jump:
    """Forced tokens after the known ones; the first `num_in_flight` of them are on their way already."""

    seq: Sequence
    forced: tuple[int, ...]
    num_in_flight: int


class Planner:
    """Makes one plan; a new one is made for every step.

    Args:
        config: limits.
        roster: who is there; the planner places, preempts and ends through it.
        step_id: of the step to plan.
        committed_id: newest step whose result is known.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, step_id: int, committed_id: int) -> None:
        self._config = config
        self._roster = roster
        self._rows = roster.rows
        self._memories = roster.memories
        self._shards = config.shards
        self._step_id = step_id
        self._committed_id = committed_id
        self._budgets = [config.token_budget] * config.num_shards  # tokens left on each
        self._setups: list[RowSetup] = []
        self._writes: list[PageWrite] = []
        self._copies: list[PageCopy] = []
        self._chunks: list[Chunk] = []
        self._chunked: dict[Sequence, int] = {}  # -> position after its chunk
        self._placement = Placement(config, roster)
        self._open: list[int] = []  # shards with a row and budget for one more
        self._admitted: list[str] = []
        self._refused_for_pages_only = True

    def make(self) -> Flight | None:
        """Plans the step; None if there is nothing to compute now."""
        behind = self._rows.behind()
        if self._config.has_windows:
            self._extend(behind)
        max_steps = 1 if self._rows.num_on_host else self._config.decode_steps
        batch = self._rows.without_awaited(self._rows.decode_batch(), self._committed_id)
        jumps = self._find_jumps(batch)
        batch, num_steps = self._reserve(batch, 1 if behind or jumps or self._may_admit() else max_steps)
        if behind or jumps or self._may_admit():  # asked again: a preemption made room, maybe for others
            for shard, num in enumerate(self._shards.sums(batch.rows, np.ones_like(batch.rows))):
                self._budgets[shard] -= num
            batch = batch.select(~np.array([self._try_jump(jumps.get(row)) for row in batch.rows.tolist()], bool))
            for seq in behind:
                if seq.is_placed:  # not preempted just now
                    self._add_chunk(seq)
            self._admit_waiting()
            if not self._chunks:
                batch, num_steps = self._reserve(batch, max_steps)
        if not self._chunks and not len(batch):
            return None
        return self._finish(batch, num_steps)

    def chunk_ends(self) -> list[tuple[Sequence, int]]:
        """Sequences with a chunk in the plan, with the position after it; but for jumps, whose tokens are not known yet."""
        return [(seq, end) for seq, end in self._chunked.items() if end <= seq.num_tokens]

    def _finish(self, batch: DecodeBatch, num_steps: int) -> Flight:
        mask_rows, masks = self._host_masks(batch)
        plan = StepPlan(
            step_id=self._step_id,
            setups=tuple(self._setups),
            page_writes=tuple(self._writes),
            page_copies=tuple(self._copies),
            chunks=tuple(self._chunks),
            grammar_loads=self._roster.grammars.take_loads(),
            mask_rows=mask_rows,
            masks=masks,
            decode_rows=batch.rows.astype(np.int32),
            num_steps=num_steps,
        )
        return Flight(
            plan=plan,
            rows=batch.rows,
            sequences=self._rows.sequences[batch.rows],
            epochs=self._rows.epoch[batch.rows],
            promised=batch.advance(num_steps, self._step_id),
            chunk_sequences=tuple(self._chunked),
            admitted=tuple(self._admitted),
        )

    def _host_masks(self, batch: DecodeBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows that sample a token under a grammar matched on the host, and what it may be."""
        if not self._rows.num_on_host:
            return NO_ROWS, None
        sequences = self._rows.sequences[batch.rows[self._rows.on_host[batch.rows]]].tolist()
        sequences += [s for s, c in zip(self._chunked, self._chunks, strict=True) if s.is_on_host and c.samples]
        if not sequences:
            return NO_ROWS, None
        masks = self._roster.host_masks.fill([(seq.matcher, seq.request.stop_ids) for seq in sequences])
        return np.array([seq.row for seq in sequences], np.int32), masks

    # --- decode rows -------------------------------------------------------------------------------------------------

    def _reserve(self, batch: DecodeBatch, num_steps: int) -> tuple[DecodeBatch, int]:
        """Takes the pages for a decode step: with fewer tokens a row if they do not fit, then with fewer rows."""
        if num_steps > 1:
            num_steps = min(num_steps, max(batch.max_remaining(), 1))
        while True:
            lacking = batch.pages_lacking(num_steps, self._config.page_size)
            num_lacking = self._shards.sums(batch.rows, lacking * len(self._config.windows))
            short = [shard for shard, num in enumerate(num_lacking) if num > self._memories[shard].num_available]
            if not short:
                if any(num_lacking):
                    self._grow(batch.rows, lacking, num_lacking)
                return batch, num_steps
            if num_steps > 1:
                num_steps //= 2
            else:
                batch = self._make_room(batch, short[0])

    def _grow(self, rows: np.ndarray, lacking: np.ndarray, num_lacking: list[int]) -> None:
        new_pages = [iter(memory.take(num)) for memory, num in zip(self._memories, num_lacking, strict=True)]
        grown = np.flatnonzero(lacking)
        rows, lacking = rows[grown], lacking[grown]
        for row, num, seq in zip(rows.tolist(), lacking.tolist(), self._rows.sequences[rows], strict=True):
            of_shard = new_pages[self._shards.of(row)]
            for _ in range(num):
                for group, pages in enumerate(seq.tables):
                    self._append(row, group, pages, next(of_shard))
        self._rows.capacity[rows] += lacking * self._config.page_size

    def _append(self, row: int, group: int, pages: list[int], page: int) -> None:
        self._writes.append(PageWrite(row, group * self._config.max_pages + len(pages), page))
        pages.append(page)

    def _extend(self, behind: list[Sequence]) -> None:
        """Takes the pages of the next chunks in groups with a window, which have pages of some chunks only.

        Pages that left the window make up for them, except those that others share: then the worst-ranked sequences go.
        """
        for seq in behind:
            while seq.is_placed:
                if self._try_take(seq, min(seq.num_tokens, seq.num_computed + self._config.paging.max_chunk)):
                    break
                shard = self._shards.of(seq.row)
                assert self._rows.num_placed_on(shard) > 1, "admitted though it can never be finished"
                self._roster.preempt(self._roster.worst_on(shard))

    def _try_take(self, seq: Sequence, num_tokens: int) -> bool:
        """Takes the pages that `num_tokens` tokens lack, in every group; False if there are too few."""
        memory = self._roster.memory_of(seq)
        lacking = [max(memory.num_pages(num_tokens) - len(pages), 0) for pages in seq.tables]
        if sum(lacking) > memory.num_available:
            return False
        new = iter(memory.take(sum(lacking)))
        for group, (pages, num) in enumerate(zip(seq.tables, lacking, strict=True)):
            for _ in range(num):
                self._append(seq.row, group, pages, next(new))
        self._rows.capacity[seq.row] = min(map(len, seq.tables)) * self._config.page_size
        return True

    def _make_room(self, batch: DecodeBatch, shard: int) -> DecodeBatch:
        """Preempts the shard's worst sequence; a sole one ends, unless tokens in flight may end it by themselves."""
        victim = self._roster.worst_on(shard)
        row = victim.row
        if self._rows.num_placed_on(shard) > 1:
            self._roster.preempt(victim)
        elif self._rows.last_step[row] <= self._committed_id:
            self._end_for_lack_of_pages(victim, victim.num_computed + 1)
        return batch.select(batch.rows != row)

    def _end_for_lack_of_pages(self, seq: Sequence, num_tokens: int) -> None:
        config = self._config
        self._roster.end(
            seq,
            Ending(
                FinishReason.ERROR,
                error=f"{num_tokens} tokens need {config.paging.num_needed(num_tokens)} pages of {config.page_size}, "
                f"{config.pool_name} has {config.num_pages - 1}; lower max_tokens or raise num_pages",
            ),
        )

    # --- chunks ------------------------------------------------------------------------------------------------------

    def _room(self, shard: int) -> int:
        """Tokens the next chunk on a shard may have: what is left of its budget, in whole tiles."""
        room = min(max(self._budgets[shard], 0), self._config.paging.max_chunk)
        return room // self._config.chunk_align * self._config.chunk_align

    def _add_chunk(self, seq: Sequence) -> None:
        """Computes as many of the tokens that `seq` lacks as the budget allows."""
        row, start, num_tokens = seq.row, seq.num_computed, seq.num_tokens
        shard = self._shards.of(row)
        end = min(num_tokens, start + self._room(shard))
        if end == start:
            return
        is_last = end == num_tokens
        samples = is_last and num_tokens < seq.max_total_len
        scores = seq.num_unscored > 0 and end > seq.num_scored and start < seq.prompt_len - 1
        self._chunks.append(
            Chunk(
                row=row,
                start=start,
                token_ids=seq.tokens[start:end].copy(),
                samples=samples,
                prompt_logprobs=seq.request.params.prompt_logprobs if scores else None,
                next_token_ids=_next_token_ids(seq, start, end) if scores else None,
            )
        )
        self._chunked[seq] = end
        self._placement.note_chunk(shard, self._memories[shard].keys_filled(seq, start, end))
        self._budgets[shard] -= -(-(end - start) // self._config.chunk_align) * self._config.chunk_align
        self._rows.computed[row] = end
        self._rows.last_step[row] = self._step_id
        if samples:
            self._rows.start_decoding(row)

    # --- tokens that a grammar leaves no choice about ------------------------------------------------------------------

    def _find_jumps(self, batch: DecodeBatch) -> dict[int, "_Jump"]:
        """By row: who has enough forced tokens ahead that a chunk saves decode steps.

        Tokens in flight are the first of the forced ones, for the masks leave no others; so nobody has to wait for them.
        """
        jumps: dict[int, _Jump] = {}
        if not self._rows.num_may_jump:
            return jumps
        rows = batch.rows[self._rows.may_jump[batch.rows]]
        for row, seq in zip(rows.tolist(), self._rows.sequences[rows], strict=True):
            forced = seq.forced_tokens()
            num_in_flight = seq.num_computed - (seq.num_tokens - 1)
            if len(forced) - num_in_flight >= MIN_SAVED:
                jumps[row] = _Jump(seq, forced, num_in_flight)
        return jumps

    def _try_jump(self, jump: "_Jump | None") -> bool:
        """Computes forced tokens in a chunk, instead of a decode step; False if there is no budget or no page for it.

        The row is set up anew: its grammar's state, counts and recent tokens move on by more than a step.
        """
        if jump is None or not jump.seq.is_placed:
            return False
        seq, row = jump.seq, jump.seq.row
        shard, start = self._shards.of(row), seq.num_computed
        align = self._config.chunk_align
        budget = self._budgets[shard] + 1  # with the row's decode token
        room = min(budget, self._config.paging.max_chunk) // align * align
        num = min(len(jump.forced) - jump.num_in_flight + 1, room)  # in the chunk: the newest token, and forced ones
        if num <= MIN_SAVED or not self._try_take(seq, start + num):
            return False
        forced = jump.forced[: jump.num_in_flight + num - 1]
        token_ids = np.concatenate([seq.tokens[: seq.num_tokens], np.array(forced, np.int32)]).astype(np.int32)
        assert isinstance(seq.grammar, OnDevice)
        self._writes = [write for write in self._writes if write.row != row]
        self._put_in_row(seq, token_ids, (self._roster.grammars.place_of(seq.grammar), *seq.place_in_grammar(forced)))
        self._chunks.append(Chunk(row=row, start=start, token_ids=token_ids[start:].copy(), samples=True))
        self._chunked[seq] = start + num
        self._budgets[shard] += 1 - -(-num // align) * align
        self._rows.computed[row] = start + num
        self._rows.last_step[row] = self._step_id
        self._roster.num_forced_tokens += num - 1
        return True

    def _give_forced(self, seq: Sequence) -> None:
        """Forced tokens of a sequence that waits join those that its chunk computes anyway."""
        if self._parent_to_fork(seq) is None and len(forced := seq.forced_tokens()) > 0:
            seq.give(forced)
            self._roster.num_forced_tokens += len(forced)

    # --- waiting sequences -------------------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        return len(self._roster.waiting) > 0 and self._rows.any_free and not self._roster.is_stalled

    def _admit_waiting(self) -> None:
        if not self._may_admit():
            return
        self._roster.waiting.offer(self._admit, self._choose)
        self._roster.is_stalled = self._refused_for_pages_only

    def _choose(self, equals: list[Sequence]) -> Sequence | None:
        """Who is next; None if nobody can get in any more."""
        self._open = [i for i in range(self._shards.num) if self._rows.num_free_on(i) and self._room(i)]
        if not self._open:
            self._refused_for_pages_only = False
            return None
        return self._placement.choose(equals)

    def _admit(self, seq: Sequence) -> Verdict:
        if seq.last_step_id > self._committed_id:  # preempted with tokens in flight: these must be known first
            self._refused_for_pages_only = False
            return Verdict.NOT_YET
        self._give_forced(seq)
        if self._config.paging.num_needed(seq.num_tokens) > self._config.num_pages - 1:
            self._end_for_lack_of_pages(seq, seq.num_tokens)
            return Verdict.GONE
        offers = self._placement.offers(seq, self._open, self._parent_to_fork(seq))
        if self._placement.is_worth_waiting(seq, *offers[0]) or not self._is_up(offers[0][1]):
            self._refused_for_pages_only = False
            return Verdict.NOT_YET
        if not self._roster.pin_grammar(seq):
            return Verdict.NOT_YET
        is_first = seq.child == 0 and seq.cached_tokens is None
        placed = (o for o in offers if self._is_up(o[1]) and self._roster.try_place(seq, *o))
        shard, reuse = next(placed, (0, None))
        if reuse is None:
            self._roster.unpin_grammar(seq)
            return Verdict.NOT_YET
        self._placement.note_filled(shard, reuse.lower_keys)
        self._refused_for_pages_only = False
        if is_first:
            self._admitted.append(seq.request.request_id)
        self._set_up(seq, reuse)
        self._add_chunk(seq)
        return Verdict.ADMITTED

    def _is_up(self, reuse: Reuse) -> bool:
        """What comes from lower tiers is in host memory; else it is being read from disk, and worth waiting for."""
        return not reuse.lower_keys or self._roster.tiers.is_ready(reuse.lower_keys)

    def _parent_to_fork(self, seq: Sequence) -> Sequence | None:
        """Child 0, if the whole prompt is in its pages before this step starts, and `seq` has made nothing yet."""
        parent = seq.parent
        if parent is None or not parent.is_placed or parent in self._chunked or seq.num_tokens > seq.prompt_len:
            return None
        return parent if parent.num_computed >= seq.prompt_len else None

    def _set_up(self, seq: Sequence, reuse: Reuse) -> None:
        self._put_in_row(seq, seq.tokens[: seq.num_tokens].copy(), self._place_grammar(seq))
        if reuse.copy_from:
            targets = [pages[len(reuse.pages)] for pages in seq.tables]
            self._copies.extend(PageCopy(seq.row, *pair) for pair in zip(reuse.copy_from, targets, strict=True))

    def _put_in_row(
        self, seq: Sequence, token_ids: np.ndarray, in_grammar: tuple[GrammarPlace | None, int, int]
    ) -> None:
        """Writes all that the device knows about a row: request, tokens, pages, place in the grammar."""
        request, row = seq.request, seq.row
        place, state, count = in_grammar
        self._setups.append(
            RowSetup(
                row=row,
                params=request.params,
                seed=request.seed,
                child=seq.child,
                prompt_len=seq.prompt_len,
                max_total_len=seq.max_total_len,
                stop_ids=request.stop_ids,
                bad_words_ids=request.bad_words_ids,
                token_ids=token_ids,
                grammar=place,
                grammar_state=state,
                grammar_count=count,
            )
        )
        for group, pages in enumerate(seq.tables):
            start, left = group * self._config.max_pages, seq.num_left[group]
            self._writes.extend(PageWrite(row, start + index, pages[index]) for index in range(left, len(pages)))

    def _place_grammar(self, seq: Sequence) -> tuple[GrammarPlace | None, int, int]:
        """Where its grammar lies, and state and counter after the output known so far (behaviour 11)."""
        match seq.grammar:
            case OnDevice() as grammar:
                return self._roster.grammars.place_of(grammar), *seq.place_in_grammar()
            case OnHost() as grammar:
                seq.matcher = grammar.start(seq.tokens[seq.prompt_len : seq.num_tokens].tolist())
                return host_row(seq.row), 0, 0
        return None, 0, 0


def _next_token_ids(seq: Sequence, start: int, end: int) -> np.ndarray:
    """The token after each of positions `[start, end)`; 0 where none is known."""
    next_ids = np.zeros(end - start, np.int32)
    known = seq.tokens[start + 1 : min(end + 1, seq.num_tokens)]
    next_ids[: len(known)] = known
    return next_ids
