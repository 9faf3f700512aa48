"""What the scheduler counts, and how it looks now."""

import dataclasses

from jaxkv.schedule.roster import Roster


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """A snapshot over all data shards. Pages are counted without the null pages: free + cached + used = total."""

    num_requests: int  # unfinished
    num_waiting: int  # sequences
    num_running: int  # sequences with a row
    num_in_flight: int  # steps
    pages_free: int
    pages_cached: int  # nobody holds them, but a prefix hit could take them back
    pages_used: int
    pages_in_windows: int  # of these, those of layers that see a window only
    num_left_windows: int  # pages given back because they left their window, while the sequence went on
    tokens_held: int  # K/V positions in used pages, computed or in flight; shared ones once, each group of layers' own
    utilisation: float  # tokens_held / tokens that used pages could hold; 1.0 when none is used
    num_steps: int  # planned so far
    num_prompt_tokens: int  # of sequences that got a row so far
    num_hit_tokens: int  # of these, reused
    num_preemptions: int
    num_forced_tokens: int  # output tokens that a grammar left no choice about and that no decode step made
    # Prompt tokens of requests that got a row and ended: the three of `RequestOutput`, summed up.
    num_cached_tokens: int
    num_written_tokens: int
    num_uncached_tokens: int
    pages_retained: int  # of the cached pages, those before their deadline, by the clock of the newest plan
    num_retained_evictions: int  # pages lost before their deadline, for nothing else was left
    pages_held: int  # by open sessions, in use or not
    num_held_evictions: int  # pages lost while a session held them, for nothing else was left
    # Pages below the device, see `tiers`. In host memory there are besides those that wait to be written, or were read.
    pages_on_host: int = 0
    pages_on_disk: int = 0
    pages_in_transit: int = 0
    num_demoted_pages: int = 0  # device -> host memory or disk
    num_dropped_pages: int = 0  # lost on the way down: no room, or the disk refused
    num_host_hit_pages: int = 0  # host memory -> device
    num_disk_hit_pages: int = 0  # disk -> device
    num_disk_written_pages: int = 0
    num_unreadable_pages: int = 0  # files that were torn, foreign or gone when they were to be read


def take_stats(roster: Roster, *, num_steps: int, num_in_flight: int) -> SchedulerStats:
    """A snapshot.

    Args:
        roster: who and what is there.
        num_steps: planned so far.
        num_in_flight: of these, not committed.
    """
    rows, page_size = roster.rows, roster.config.page_size
    counts, tiers = [memory.counts for memory in roster.memories], roster.tiers.counts
    num_used = sum(each.referenced for each in counts)
    room = num_used * page_size
    held = room - _num_unfilled(roster)
    return SchedulerStats(
        num_requests=roster.num_requests,
        num_waiting=len(roster.waiting),
        num_running=rows.num_placed,
        num_in_flight=num_in_flight,
        pages_free=sum(each.free for each in counts),
        pages_cached=sum(each.cached for each in counts),
        pages_used=num_used,
        pages_in_windows=sum(map(len, _pages_in_windows(roster))),
        num_left_windows=sum(memory.num_left_windows for memory in roster.memories),
        tokens_held=held,
        utilisation=held / room if room else 1.0,
        num_steps=num_steps,
        num_prompt_tokens=roster.num_prompt_tokens,
        num_hit_tokens=roster.num_hit_tokens,
        num_preemptions=roster.num_preemptions,
        num_forced_tokens=roster.num_forced_tokens,
        num_cached_tokens=roster.usage.num_cached,
        num_written_tokens=roster.usage.num_written,
        num_uncached_tokens=roster.usage.num_uncached,
        pages_retained=sum(memory.num_retained for memory in roster.memories),
        num_retained_evictions=sum(memory.num_retained_evictions for memory in roster.memories),
        pages_held=sum(memory.num_held for memory in roster.memories),
        num_held_evictions=sum(memory.num_held_evictions for memory in roster.memories),
        pages_on_host=len(roster.tiers.host),
        pages_on_disk=len(roster.tiers.disk),
        pages_in_transit=roster.tiers.num_outgoing + roster.tiers.num_staged,
        num_demoted_pages=tiers.num_demoted,
        num_dropped_pages=tiers.num_dropped,
        num_host_hit_pages=tiers.num_host_hits,
        num_disk_hit_pages=tiers.num_disk_hits,
        num_disk_written_pages=tiers.num_disk_written,
        num_unreadable_pages=tiers.num_disk_unreadable,
    )


def _num_unfilled(roster: Roster) -> int:
    """Positions in used pages that are not computed yet; nobody shares their pages."""
    rows, page_size = roster.rows, roster.config.page_size
    if not roster.config.has_windows:
        return int((rows.capacity - rows.computed)[rows.known > 0].sum())
    return sum(max(len(pages) * page_size - seq.num_computed, 0) for seq in rows.placed() for pages in seq.tables)


def _pages_in_windows(roster: Roster) -> list[set[int]]:
    """Of each data shard, used pages of groups with a window."""
    windows = roster.config.windows
    return [
        {
            page
            for seq in roster.rows.placed_on(shard)
            for pages, num_left, window in zip(seq.tables, seq.num_left, windows, strict=True)
            if window is not None
            for page in pages[num_left:]
        }
        for shard in range(roster.config.num_shards)
    ]
