"""Tokens that a grammar leaves no choice about: computed in a chunk, instead of one decode step each."""

import dataclasses

import numpy as np

from jaxkv.grammar.compiled import OnDevice
from jaxkv.plan import Chunk
from jaxkv.schedule.draft import Draft
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.rows import DecodeBatch, Rows
from jaxkv.schedule.sequence import Sequence

MIN_SAVED = 2  # decode steps that a jump must save: it costs a row's setup, and a chunk beside the other rows' step


@dataclasses.dataclass(frozen=True, eq=False)
class Jump:
    """Forced tokens after the known ones; the first `num_in_flight` of them are on their way already."""

    seq: Sequence
    forced: tuple[int, ...]
    num_in_flight: int


def find_jumps(rows: Rows, batch: DecodeBatch) -> dict[int, Jump]:
    """By row: who has enough forced tokens ahead that a chunk saves decode steps.

    Tokens in flight are the first of the forced ones, for the masks leave no others; so nobody has to wait for them.
    """
    jumps: dict[int, Jump] = {}
    if not rows.num_may_jump:
        return jumps
    may_jump = batch.rows[rows.may_jump[batch.rows]]
    for row, seq in zip(may_jump.tolist(), rows.sequences[may_jump], strict=True):
        forced = seq.forced_tokens()
        num_in_flight = seq.num_computed - (seq.num_tokens - 1)
        if len(forced) - num_in_flight >= MIN_SAVED:
            jumps[row] = Jump(seq, forced, num_in_flight)
    return jumps


def try_jump(jump: Jump | None, draft: Draft) -> bool:
    """Computes forced tokens in a chunk, instead of a decode step; False if there is no budget or no page for it.

    The row is set up anew: its grammar's state, counts and recent tokens move on by more than a step.
    """
    if jump is None or not jump.seq.is_placed:
        return False
    seq, row, roster, config = jump.seq, jump.seq.row, draft.roster, draft.config
    start = seq.num_computed
    most = len(jump.forced) - jump.num_in_flight + 1  # in the chunk: the newest token, and forced ones
    num = min(most, draft.room(config.shards.of(row)))
    if num <= MIN_SAVED or not draft.try_take(seq, start + num):
        return False
    forced = jump.forced[: jump.num_in_flight + num - 1]
    token_ids = np.concatenate([seq.tokens[: seq.num_tokens], np.array(forced, np.int32)]).astype(np.int32)
    assert isinstance(seq.grammar, OnDevice)
    draft.writes = [write for write in draft.writes if write.row != row]
    draft.put_in_row(seq, token_ids, (roster.grammars.place_of(seq.grammar), *seq.place_in_grammar(forced)))
    draft.put_chunk(seq, Chunk(row=row, start=start, token_ids=token_ids[start:].copy(), samples=True))
    roster.num_forced_tokens += num - 1
    return True


def give_forced(seq: Sequence, roster: Roster) -> None:
    """Forced tokens of a sequence that waits join those that its chunk computes anyway."""
    if len(forced := seq.forced_tokens()) > 0:
        seq.give(forced)
        roster.num_forced_tokens += len(forced)
