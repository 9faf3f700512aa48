"""What the next step computes: `StepPlan`s from the roster.

The order makes room for whoever runs before anybody else gets in (behaviour 12):

    1. decode rows: one token each. If their pages do not fit, the worst-ranked sequences are preempted. This comes
       before anything is placed, so a victim never has to be taken out of a half-made plan.
    2. chunks of running sequences that are behind, then of waiting ones, as far as the token budget goes. Decode rows take
       nothing of it: the programs have room of their own for them, and tiles left empty would be computed all the same.
    3. if no chunk came of that: as many tokens a decode row as `decode_steps` and free pages allow.

Every data shard has pages and a token budget of its own. Who of those that wait is next, and where it goes, is
`placement`'s; a decode row grows, and preempts, on its own shard.
"""

import dataclasses

import numpy as np

from jaxkv.config import SchedulerConfig
from jaxkv.grammar.compiled import OnDevice, OnHost
from jaxkv.grammar_layout import GrammarPlace, host_row
from jaxkv.plan import NO_ROWS, PageCopy, StepPlan
from jaxkv.request import FinishReason
from jaxkv.schedule.draft import Draft
from jaxkv.schedule.jumps import find_jumps, give_forced, try_jump
from jaxkv.schedule.memory import Reuse
from jaxkv.schedule.queue import Verdict
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.rows import DecodeBatch
from jaxkv.schedule.sequence import Ending, Sequence


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
        self._draft = Draft(config, roster, step_id)
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
        jumps = find_jumps(self._rows, batch)
        batch, num_steps = self._reserve(batch, 1 if behind or jumps or self._may_admit() else max_steps)
        if behind or jumps or self._may_admit():  # asked again: a preemption made room, maybe for others
            jumped = [try_jump(jumps.get(row), self._draft) for row in batch.rows.tolist()]
            batch = batch.select(~np.array(jumped, bool))
            for seq in behind:
                if seq.is_placed:  # not preempted just now
                    self._draft.add_chunk(seq)
            self._admit_waiting()
            if not self._draft.chunks:
                batch, num_steps = self._reserve(batch, max_steps)
        if not self._draft.chunks and not len(batch):
            return None
        return self._finish(batch, num_steps)

    def chunk_ends(self) -> list[tuple[Sequence, int]]:
        """Sequences with a chunk in the plan, with the position after it; but for jumps, whose tokens are not known yet."""
        return [(seq, end) for seq, end in self._draft.chunked.items() if end <= seq.num_tokens]

    def _finish(self, batch: DecodeBatch, num_steps: int) -> Flight:
        mask_rows, masks = self._host_masks(batch)
        plan = StepPlan(
            step_id=self._step_id,
            setups=tuple(self._draft.setups),
            page_writes=tuple(self._draft.writes),
            page_copies=tuple(self._draft.copies),
            chunks=tuple(self._draft.chunks),
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
            chunk_sequences=tuple(self._draft.chunked),
            admitted=tuple(self._admitted),
        )

    def _host_masks(self, batch: DecodeBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows that sample a token under a grammar matched on the host, and what it may be."""
        if not self._rows.num_on_host:
            return NO_ROWS, None
        sequences = self._rows.sequences[batch.rows[self._rows.on_host[batch.rows]]].tolist()
        sequences += [
            s for s, c in zip(self._draft.chunked, self._draft.chunks, strict=True) if s.is_on_host and c.samples
        ]
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
                    self._draft.append_page(row, group, pages, next(of_shard))
        self._rows.capacity[rows] += lacking * self._config.page_size

    def _extend(self, behind: list[Sequence]) -> None:
        """Takes the pages of the next chunks in groups with a window, which have pages of some chunks only.

        Pages that left the window make up for them, except those that others share: then the worst-ranked sequences go.
        """
        for seq in behind:
            while seq.is_placed:
                if self._draft.try_take(seq, min(seq.num_tokens, seq.num_computed + self._config.paging.max_chunk)):
                    break
                shard = self._shards.of(seq.row)
                assert self._rows.num_placed_on(shard) > 1, "admitted though it can never be finished"
                self._roster.preempt(self._roster.worst_on(shard))

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
        self._open = [i for i in range(self._shards.num) if self._rows.num_free_on(i) and self._draft.room(i)]
        if not self._open:
            self._refused_for_pages_only = False
            return None
        return self._draft.placement.choose(equals)

    def _admit(self, seq: Sequence) -> Verdict:
        if seq.last_step_id > self._committed_id:  # preempted with tokens in flight: these must be known first
            self._refused_for_pages_only = False
            return Verdict.NOT_YET
        if self._parent_to_fork(seq) is None:
            give_forced(seq, self._roster)
        if self._config.paging.num_needed(seq.num_tokens) > self._config.num_pages - 1:
            self._end_for_lack_of_pages(seq, seq.num_tokens)
            return Verdict.GONE
        offers = self._draft.placement.offers(seq, self._open, self._parent_to_fork(seq))
        if self._draft.placement.is_worth_waiting(seq, *offers[0]) or not self._is_up(offers[0][1]):
            self._refused_for_pages_only = False
            return Verdict.NOT_YET
        if seq.is_held and not self._roster.may_compute_ahead(seq, offers[0][1].num_tokens):
            self._roster.set_aside(seq)
            return Verdict.GONE
        if not self._roster.pin_grammar(seq):
            return Verdict.NOT_YET
        is_first = seq.child == 0 and seq.cached_tokens is None
        placed = (o for o in offers if self._is_up(o[1]) and self._roster.try_place(seq, *o))
        shard, reuse = next(placed, (0, None))
        if reuse is None:
            self._roster.unpin_grammar(seq)
            return Verdict.NOT_YET
        self._draft.placement.note_filled(shard, reuse.lower_keys)
        self._refused_for_pages_only = False
        if is_first:
            self._admitted.append(seq.request.request_id)
        self._set_up(seq, reuse)
        self._draft.add_chunk(seq)
        return Verdict.ADMITTED

    def _is_up(self, reuse: Reuse) -> bool:
        """What comes from lower tiers is in host memory; else it is being read from disk, and worth waiting for."""
        return not reuse.lower_keys or self._roster.tiers.is_ready(reuse.lower_keys)

    def _parent_to_fork(self, seq: Sequence) -> Sequence | None:
        """Child 0, if the whole prompt is in its pages before this step starts, and `seq` has made nothing yet."""
        parent = seq.parent
        if parent is None or not parent.is_placed or parent in self._draft.chunked or seq.num_tokens > seq.prompt_len:
            return None
        return parent if parent.num_computed >= seq.prompt_len else None

    def _set_up(self, seq: Sequence, reuse: Reuse) -> None:
        self._draft.put_in_row(seq, seq.tokens[: seq.num_tokens].copy(), self._place_grammar(seq))
        if reuse.copy_from:
            targets = [pages[len(reuse.pages)] for pages in seq.tables]
            self._draft.copies.extend(PageCopy(seq.row, *pair) for pair in zip(reuse.copy_from, targets, strict=True))

    def _place_grammar(self, seq: Sequence) -> tuple[GrammarPlace | None, int, int]:
        """Where its grammar lies, and state and counter after the output known so far (behaviour 11)."""
        match seq.grammar:
            case OnDevice() as grammar:
                return self._roster.grammars.place_of(grammar), *seq.place_in_grammar()
            case OnHost() as grammar:
                seq.matcher = grammar.start(seq.tokens[seq.prompt_len : seq.num_tokens].tolist())
                return host_row(seq.row), 0, 0
        return None, 0, 0
