"""Who holds which page and who runs or waits, as plain data for people to look at."""

import dataclasses

import numpy as np

from jaxkv.schedule.roster import Roster
from jaxkv.schedule.sequence import Sequence

FREE, CACHED, FIRST_OWNER = 0, 1, 2  # values of `SchedulerView.pages`; FIRST_OWNER + i: held by `running[i]`
MAX_WAITING = 200  # waiting sequences that are listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceView:
    """One unfinished completion."""

    request_id: str
    child: int
    row: int | None  # None: it waits
    prompt_len: int
    num_tokens: int  # known: prompt and output
    num_computed: int  # positions whose K/V are there or in flight
    max_total_len: int
    num_pages: int
    cached_tokens: int
    num_preemptions: int
    arrival_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerView:
    """The pool and everyone in it, at one moment."""

    pages: np.ndarray  # int32 [num_shards * (pages of a shard without its null page)]
    running: tuple[SequenceView, ...]  # by row
    waiting: tuple[SequenceView, ...]  # best first, at most MAX_WAITING


def look(roster: Roster) -> SchedulerView:
    """Copies what is to be seen; a page that several hold is shown with the last of them."""
    running = roster.rows.placed()
    shards = []
    for shard, memory in enumerate(roster.memories):
        states = memory.is_cached().astype(np.int32)  # FREE or CACHED
        for index, seq in enumerate(running):
            if roster.rows.shards.of(seq.row) == shard:
                states[seq.held_pages] = FIRST_OWNER + index
        shards.append(states[1:])
    waiting = [seq for seq, _ in zip(roster.waiting, range(MAX_WAITING), strict=False)]
    return SchedulerView(
        pages=np.concatenate(shards),
        running=tuple(map(_view, running)),
        waiting=tuple(map(_view, waiting)),
    )


def _view(seq: Sequence) -> SequenceView:
    return SequenceView(
        request_id=seq.request.request_id,
        child=seq.child,
        row=seq.row if seq.is_placed else None,
        prompt_len=seq.prompt_len,
        num_tokens=seq.num_tokens,
        num_computed=seq.num_computed,
        max_total_len=seq.max_total_len,
        num_pages=len(seq.held_pages),
        cached_tokens=seq.cached_tokens or 0,
        num_preemptions=seq.num_preemptions,
        arrival_s=seq.request.arrival_s,
    )
