"""Who of equals that wait is next, on which data shard, and who had better wait a step for a prefix.

next     the one with most tokens cached, so that what it reuses is not lost to another one before; then one of the
         group (`prompt_cache_key`) that got in last
where    where most of it can be reused, then its group's home, then where most pages are free
not yet  who lacks a page that is being computed in this very step: one step later it can be shared
"""

from collections.abc import Iterable

from jaxkv.cache.homes import group_of
from jaxkv.config import SchedulerConfig
from jaxkv.schedule.memory import Reuse
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.sequence import Sequence


class Placement:
    """Decides for one plan.

    Args:
        config: limits.
        roster: who is there; it is only looked at.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._memories = roster.memories
        self._cached_len: dict[Sequence, int] = {}  # leading pages that waiting sequences could reuse on some shard
        self._filling: dict[tuple[int, bytes], None] = {}  # (shard, key) of the pages that this plan's chunks fill
        self._busy: dict[int, None] = {}  # shards with a chunk in this plan

    def note_chunk(self, shard: int, keys: list[bytes]) -> None:
        """A chunk of the plan fills the pages with these keys."""
        self._busy[shard] = None
        self.note_filled(shard, keys)

    def note_filled(self, shard: int, keys: Iterable[bytes]) -> None:
        """The plan fills the pages with these keys from lower tiers."""
        for key in keys:
            self._filling[shard, key] = None

    def choose(self, equals: list[Sequence]) -> Sequence:
        """Who is next of sequences in order of rank."""
        if len(equals) == 1:
            return equals[0]
        known = self._cached_len
        if unknown := [seq for seq in equals if seq not in known]:
            known.update(zip(unknown, self._memories[0].cached_lens(unknown), strict=True))
            for memory in self._memories[1:]:
                for seq, num_pages in zip(unknown, memory.cached_lens(unknown), strict=True):
                    known[seq] = max(num_pages, known[seq])
        lens = [known[seq] for seq in equals]
        longest = max(lens)
        group = self._roster.newest_group
        if group is not None:
            for seq, num_pages in zip(equals, lens, strict=True):
                if num_pages == longest and group_of(seq.request) == group:
                    return seq
        return equals[lens.index(longest)]

    def offers(self, seq: Sequence, shards: list[int], parent: Sequence | None) -> list[tuple[int, Reuse]]:
        """What `seq` could reuse on each of the shards, the best one first; `parent` is whom it forks from."""
        of_parent = None if parent is None else self._roster.rows.shards.of(parent.row)
        offers = [(i, self._memories[i].find_reuse(seq, parent if i == of_parent else None)) for i in shards]
        if len(offers) == 1:
            return offers
        home = self._roster.homes.of(group_of(seq.request))
        return sorted(offers, key=lambda o: (-o[1].num_tokens, o[0] != home, -self._memories[o[0]].num_available))

    def is_worth_waiting(self, seq: Sequence, shard: int, reuse: Reuse) -> bool:
        """Another sequence fills the next page that `seq` lacks in this very plan.

        If only another shard fills it than the one where `seq` would go, it waits for that one if that is further, or
        if its own has other prompts to work on: the shards step together, and one that idles may as well compute the
        same as another one.
        """
        if not self._filling or seq.num_bypassed >= self._config.max_bypass:
            return False
        if (shard, reuse.next_key) in self._filling or any((shard, key) in self._filling for key in reuse.lower_keys):
            return True
        least = reuse.num_tokens + (shard not in self._busy)
        others = [other for other in self._busy if other != shard and self._roster.rows.num_free_on(other)]
        found = [(other, self._memories[other].find_reuse(seq, None)) for other in others]
        return any((other, there.next_key) in self._filling and there.num_tokens >= least for other, there in found)
