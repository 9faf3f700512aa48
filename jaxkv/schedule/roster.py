"""Every unfinished sequence, and the only ways its life can turn: add, place, preempt, end; set aside, released.

A sequence is in exactly one place: held back (a fork whose parent's prompt is not computed yet; one whose grammar is being
compiled and whose prompt is in the cache), waiting in the queue, or placed in a row. Only placed sequences hold pages.
"""

import collections
import dataclasses

from jaxkv.cache.homes import Group, Homes, group_of
from jaxkv.cache.tiers import PageTiers
from jaxkv.config import SchedulerConfig
from jaxkv.errors import RequestError
from jaxkv.events import Finished
from jaxkv.grammar.compiled import CompiledGrammar, OnDevice, OnHost
from jaxkv.grammar.host_masks import HostMasks
from jaxkv.grammar.room import GrammarRoom
from jaxkv.request import FinishReason, Request
from jaxkv.schedule.memory import Memory, Reuse
from jaxkv.schedule.queue import WaitingQueue
from jaxkv.schedule.rows import Rows
from jaxkv.schedule.sequence import Ending, Sequence


@dataclasses.dataclass
class Usage:
    """What became of the prompt tokens of requests that ran and ended, each request counted once."""

    num_cached: int = 0  # read from the cache
    num_written: int = 0  # published first
    num_uncached: int = 0  # the rest

    def add(self, first: Sequence) -> None:
        """Counts a request by its first completion, which computes the prompt."""
        num_cached, num_written = first.cached_tokens or 0, first.cache_written_tokens
        self.num_cached += num_cached
        self.num_written += num_written
        self.num_uncached += first.prompt_len - num_cached - num_written


class Roster:
    """Owns queue, rows and memory, and keeps them telling the same story.

    Args:
        config: limits.
        namespace: what K/V depend on besides tokens (`prefix_cache.namespace`).
    """

    def __init__(self, config: SchedulerConfig, namespace: bytes = b"") -> None:
        self.config = config
        self._requests: dict[str, list[Sequence]] = {}
        self._num_arrived = 0
        self._finished: list[Finished] = []
        self.tiers = PageTiers(config.tiers)
        self.memories = [Memory(config, namespace, self.tiers, shard) for shard in range(config.num_shards)]
        self.waiting = WaitingQueue(config.max_bypass)
        self.rows = Rows(
            config.shards, max_len=config.max_len, page_size=config.page_size, max_steps=config.decode_steps
        )
        # Whoever waits was refused for lack of pages, and none came back since: no use asking again.
        self.is_stalled = False
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of sequences placed for the first time
        self.num_hit_tokens = 0  # of these, reused
        self.num_forced_tokens = 0  # of outputs, that no decode step had to make
        self.usage = Usage()
        self.grammars = GrammarRoom(config.grammars, config.max_rows)
        self.host_masks = HostMasks()
        self.homes = Homes()
        self.newest_group: Group | None = None  # of the sequence that got a row last
        self._pages_ahead: dict[Sequence, int] = {}  # that held sequences computed, or are computing

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def sequences(self, request_id: str) -> list[Sequence]:
        """The request's completions, finished ones included; empty when it is unknown or over."""
        return self._requests.get(request_id, [])

    def all_sequences(self) -> list[Sequence]:
        """Every unfinished sequence, in order of arrival."""
        return [seq for group in self._requests.values() for seq in group if seq.ending is None]

    def take_finished(self) -> tuple[Finished, ...]:
        """What ended since the last call."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def add(self, request: Request, step_id: int, watched: bool, held: bool = False) -> None:
        """Queues a request's first completion; the others follow when its prompt is computed.

        A held one is queued for its prompt only, as far as the cache can keep it; `release_held` does the rest.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id!r} is already running; choose another")
        level = request.priority * self.config.steps_per_priority_level + step_id
        group = [
            Sequence(request, child, (level, self._num_arrived + child), self.config.max_len, watched)
            for child in range(request.params.n)
        ]
        self._num_arrived += len(group)
        self._requests[request.request_id] = group
        group[0].forks = group[1:]
        for child in group[1:]:
            child.parent = group[0]
        group[0].is_held = held
        if not held or self.config.prefix_cache:
            self._queue(group[0])

    def release_held(self, request_id: str, grammar: CompiledGrammar) -> None:
        """Queues a held request now that its grammar is there; one that ended meanwhile is left alone.

        It finds in the cache what it computed so far.
        """
        group = self._requests.get(request_id, [])
        if group and group[0].is_held and group[0].ending is None:
            self.set_aside(group[0])
            self._pages_ahead.pop(group[0], None)
            group[0].is_held = False
            self._queue(group[0])
        for seq in group:
            seq.grammar = grammar

    def target(self, seq: Sequence, start: int) -> int:
        """Position up to which to compute `seq` now, from `start`: its end, or while it is held what the cache can keep."""
        if not seq.is_held:
            return seq.num_tokens
        page_size, align = self.config.page_size, self.config.chunk_align
        num_tokens = max((seq.prompt_len - 1) // page_size * page_size - start, 0)
        return start + num_tokens // align * align

    def may_compute_ahead(self, held: Sequence, num_cached: int) -> bool:
        """Whether there is something to compute for a held sequence, and not too much computed for such already.

        Half of all pages: whoever computes more ahead loses the first of it before anybody reads it.
        """
        end = self.target(held, num_cached)
        total = self.config.paging.num_needed(end) + sum(self._pages_ahead.values())
        return end > num_cached and total <= (self.config.num_pages - 1) * self.config.num_shards // 2

    def set_aside(self, held: Sequence) -> None:
        """Takes a held sequence out of row or queue: it has computed what it may."""
        if held.is_placed:
            self._vacate(held)
        self.waiting.discard(held)
        self.is_stalled = False

    def release_forks(self, parent: Sequence) -> None:
        """Queues the children that waited for `parent`: its prompt is computed, or it ended."""
        forks, parent.forks = parent.forks, []
        for child in forks:
            if child.ending is None:
                self._queue(child)

    def memory_of(self, seq: Sequence) -> Memory:
        """Where a running sequence's pages are."""
        return self.memories[self.rows.shards.of(seq.row)]

    def try_place(self, seq: Sequence, shard: int, reuse: Reuse) -> bool:
        """Gives a waiting sequence pages and a row, if there is room; the queue lets go of it by itself."""
        # Running rows must be able to grow for a while, else the newcomer would be thrown out again at once.
        num_steps = self.rows.num_placed_on(shard) * self.config.reserve_steps
        keep_free = -(-num_steps // self.config.page_size) * len(self.config.windows)
        if not self.memories[shard].try_attach(seq, reuse, keep_free):
            return False
        self.rows.place(seq, shard, reuse.num_tokens)
        if seq.is_held:
            self._pages_ahead[seq] = len(seq.held_pages)
        if seq.cached_tokens is None:
            self.num_prompt_tokens += seq.prompt_len
            self.num_hit_tokens += min(reuse.num_tokens, seq.prompt_len)
        self.newest_group = group_of(seq.request)
        if self.newest_group is not None:
            self.homes.note(self.newest_group, shard)
        seq.note_read(reuse.num_tokens, self.config.page_size)
        return True

    def leave_windows(self) -> None:
        """Running sequences give back the pages that they do not see any more."""
        if not self.config.has_windows:
            return
        for row, position in self.rows.leaving():
            seq = self.rows.sequences[row]
            self.rows.leaves_at[row] = self.memory_of(seq).leave_windows(seq, position)
            self.is_stalled = False

    def pin_grammar(self, seq: Sequence) -> bool:
        """Makes room for the sequence's grammar on the device, if it needs any; `_vacate` gives it back."""
        return not isinstance(seq.grammar, OnDevice) or self.grammars.pin(seq.grammar)

    def unpin_grammar(self, seq: Sequence) -> None:
        if isinstance(seq.grammar, OnDevice):
            self.grammars.unpin(seq.grammar)

    def worst_on(self, shard: int) -> Sequence:
        """The data shard's running sequence to preempt first: lowest (aged) priority, then last to arrive."""
        return max(self.rows.placed_on(shard), key=lambda seq: seq.rank)

    def preempt(self, seq: Sequence) -> None:
        """Takes row and pages away; the sequence waits again and will compute again what the cache loses until then."""
        self._publish_output(seq)
        self._vacate(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(seq)

    def end(self, seq: Sequence, ending: Ending) -> None:
        """The one way out, wherever the sequence is. Tokens of it still in flight will be dropped."""
        assert seq.ending is None, seq
        if seq.is_placed:
            if ending.reason is not FinishReason.ERROR:
                self._publish_output(seq)
            self._vacate(seq)
        self.waiting.discard(seq)
        self._pages_ahead.pop(seq, None)
        seq.ending = ending
        self.is_stalled = False
        self.release_forks(seq)
        request_id = seq.request.request_id
        group = self._requests[request_id]
        is_last = all(other.ending is not None for other in group)
        if is_last:
            del self._requests[request_id]
            if any(each.cached_tokens is not None for each in group):  # it ran
                self.usage.add(group[0])
        self._finished.append(
            Finished(
                request_id=request_id,
                child=seq.child,
                reason=ending.reason,
                token_ids=seq.output_token_ids,
                stop_reason=ending.stop_reason,
                error=ending.error,
                cached_tokens=group[0].cached_tokens or 0,
                cache_written_tokens=group[0].cache_written_tokens,
                num_preemptions=seq.num_preemptions,
                is_last=is_last,
            )
        )

    def clear_cache(self, namespace: bytes | None) -> None:
        """Forgets cached pages, also in host memory; what running sequences hold stays theirs but is never published."""
        if namespace is None:
            self.tiers.clear_host()
        else:
            self.tiers.forget_all()
        for memory in self.memories:
            memory.clear_cache(namespace)
        for seq in self.all_sequences():
            seq.page_keys = []
            if seq.is_placed:
                seq.may_publish = False
        self.is_stalled = False

    def check(self) -> None:
        """Asserts that queue, rows and memory agree; for tests."""
        placed = self.rows.placed()
        for shard, memory in enumerate(self.memories):
            memory.check(self.rows.placed_on(shard))
        self.rows.check()
        self.tiers.check()
        assert len(placed) == self.rows.num_placed
        for seq in placed:
            assert seq.is_placed and self.rows.sequences[seq.row] is seq and seq.ending is None, seq
            num_pages = min(map(len, seq.tables))
            assert self.rows.capacity[seq.row] == num_pages * self.config.page_size >= seq.num_computed, seq
            assert max(seq.num_tokens, seq.num_computed) <= seq.max_total_len, seq
        waiting = list(self.waiting)
        assert [seq.rank for seq in waiting] == sorted({seq.rank for seq in waiting})
        for seq in waiting:
            assert not seq.is_placed and not seq.tables and seq.ending is None, seq
        pins = collections.Counter(seq.grammar.key for seq in placed if isinstance(seq.grammar, OnDevice))
        self.grammars.check(dict(pins))
        assert (
            self.rows.num_on_host == sum(isinstance(seq.grammar, OnHost) for seq in placed) == self.rows.on_host.sum()
        )
        assert self.rows.num_may_jump == sum(seq.may_jump for seq in placed) == self.rows.may_jump.sum()
        held = [seq for seq in self.all_sequences() if seq.is_held and not seq.is_placed and seq not in waiting]
        assert all(seq.is_held for seq in self._pages_ahead)
        held += [fork for seq in self.all_sequences() for fork in seq.forks if fork.ending is None]
        assert len(placed) + len(waiting) + len(held) == len(self.all_sequences())

    def _publish_output(self, seq: Sequence) -> None:
        """Makes what a sequence generated findable when it leaves: before, nobody could ask for it.

        The K/V of the last known token may be missing: the device does not compute them after a stop.
        """
        if seq.num_tokens > seq.prompt_len and self.rows.decoding[seq.row]:
            self.memory_of(seq).publish(seq, seq.num_tokens - 1)

    def _vacate(self, seq: Sequence) -> None:
        self.memory_of(seq).release(seq)
        self.rows.remove(seq)
        self.unpin_grammar(seq)
        seq.matcher = None

    def _queue(self, seq: Sequence) -> None:
        self.waiting.push(seq)
        self.is_stalled = False
