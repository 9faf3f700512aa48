"""Pages below the device: which keys lie in host memory and which on disk, and what has to move.

    device pool      pages that sequences hold, and cached ones (`pages`, `shelf`)
    host memory      a budget of pages; what does not fit goes on to disk
    disk             a budget of pages, in files that survive a restart (`tier_files`)

A page that the device gives up *goes down* if somebody asked to keep it or an open session holds it
(`demote="retained"`), or in any case (`"all"`). It stays below when it comes up again, so giving it up once more costs
nothing. What only a session holds counts below as a page that nobody asked to keep: sessions end without a word, and what
they leave must not outlive pages with a time to live. Which pages go is a `Tier`'s; one that nobody asked to keep never
displaces one that somebody did.

A page on disk is read while its request waits: `is_ready` asks for it, and the request gets in once all it needs is in
host memory. What was read lies there beside the budget, at most as much as one sequence can hold. So do pages that wait to
be written (`max_outgoing`); a page for which there is no room there is lost, and counted.

This decides and executes nothing: `take_moves` hands out what is to be done, in order, as plain data, `heed` takes in what
became of it. No clock and no thread: the same calls give the same moves.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxkv.cache.staging import Staging
from jaxkv.cache.tier import OnDisk, Tier
from jaxkv.config import TierConfig
from jaxkv.plan import MoveKind, MoveNews, PageAt, PageMove, PageNote


@dataclasses.dataclass
class TierCounts:
    """Pages that changed their tier so far."""

    num_demoted: int = 0  # device -> host memory or disk
    num_dropped: int = 0  # lost on the way down: no room, or the disk refused
    num_host_hits: int = 0  # host memory -> device
    num_disk_hits: int = 0  # disk -> device
    num_disk_written: int = 0
    num_disk_unreadable: int = 0  # files that were torn, foreign or gone


class PageTiers:
    """Decides what lies where below the device, for all data shards.

    Args:
        config: budgets; without any, nothing is ever kept.
    """

    def __init__(self, config: TierConfig) -> None:
        self._config = config
        self.host = Tier(config.host_pages)
        self.disk = Tier(config.disk_pages)
        self.counts = TierCounts()
        self._outgoing: dict[bytes, float | None] = {}  # in host memory until written -> time to live
        self._staged = Staging(config.max_staged)  # read from disk into host memory
        self._links: dict[bytes, tuple[bytes, int]] = {}  # of keys in `host` and `_outgoing`: parent, index
        self._moves: list[PageMove] = []
        self._pinned: list[bytes] = []  # of `host`, for the newest plan
        self._used: list[bytes] = []  # of `_staged`, by the newest plan

    @property
    def is_on(self) -> bool:
        return self._config.is_on

    @property
    def num_outgoing(self) -> int:
        """Pages in host memory that wait to be written."""
        return len(self._outgoing)

    @property
    def num_staged(self) -> int:
        """Pages in host memory that were read from disk, or are being read."""
        return len(self._staged)

    @property
    def is_reading(self) -> bool:
        """Whether a page was asked for and has not come yet."""
        return self._staged.is_reading

    def restore(self, found: Iterable[OnDisk], now_s: float) -> None:
        """Takes in what earlier processes left on disk; what the budget does not hold goes, oldest first."""
        self.advance(now_s)
        for page in sorted(found, key=lambda page: (-page.age_s, page.key)):
            if not self._disk_has_room(for_kept=True):
                self._emit(MoveKind.UNLINK, page.key)
                continue
            self.disk.add(page.key, page.ttl_s, None if page.ttl_s is None else page.ttl_s - page.age_s)

    def advance(self, now_s: float) -> None:
        """Time goes on."""
        self.host.advance(now_s)
        self.disk.advance(now_s)

    def start_round(self, *, is_wanted: bool) -> None:
        """A step is about to be planned: the one before was dispatched, and its moves were executed.

        Args:
            is_wanted: some sequence waits, and may want what was read from disk.
        """
        self._staged.start_round()
        for key in self._pinned:
            self.host.unpin(key)
        for key in self._used:
            self._unstage(key)
        self._pinned, self._used = [], []
        if not is_wanted:
            for key in self._staged.landed():
                self._unstage(key)

    def take_moves(self) -> list[PageMove]:
        """What is to be done, in this order, before the newest plan is dispatched."""
        moves, self._moves = self._moves, []
        return moves

    # --- down --------------------------------------------------------------------------------------------------------

    def demote(
        self, key: bytes, at: PageAt, link: tuple[bytes, int], ttl_s: float | None, *, is_held: bool = False
    ) -> None:
        """The device gives a page up.

        Args:
            key: of its content.
            at: where it is; it will be overwritten by the plan in the making.
            link: key of the page before it, and its index.
            ttl_s: somebody asked to keep it so long; None: nobody did.
            is_held: an open session holds it.
        """
        is_wanted = ttl_s is not None or is_held or self._config.demote == "all"
        if not self._config.is_on or not is_wanted or self._is_below(key, link, ttl_s):
            return
        if self._host_has_room(for_kept=ttl_s is not None):
            self._emit(MoveKind.DOWN, key, at)
            self.host.add(key, ttl_s)
            self._links[key] = link
        elif self._may_go_out(for_kept=ttl_s is not None):
            self._emit(MoveKind.DOWN, key, at)
            self._links[key] = link
            self._send_out(key, ttl_s)
        else:
            self.counts.num_dropped += 1
            return
        self.counts.num_demoted += 1

    def save(self, key: bytes, at: PageAt | None, link: tuple[bytes, int], ttl_s: float | None) -> bool:
        """Writes a page to disk now, wherever it is; False if there is no room for it at present.

        Args:
            key: of its content.
            at: where the device has it; None: it is known to be below.
            link: key of the page before it, and its index.
            ttl_s: how long it is to be kept there, from its last use on.
        """
        if key in self.disk or key in self._outgoing:
            self._keep_on_disk(key, link, ttl_s)
            return True
        is_here = self._is_here(key)
        if (at is None and not is_here) or not self._may_go_out(for_kept=True):
            return False  # or it made room for a page saved just before
        if not is_here:
            self._emit(MoveKind.DOWN, key, at)
        self._links[key] = link
        self._send_out(key, ttl_s)
        return True

    def _is_below(self, key: bytes, link: tuple[bytes, int], ttl_s: float | None) -> bool:
        if key in self.host:
            self.host.touch(key, ttl_s)
        elif key in self._outgoing or key in self.disk:
            self._keep_on_disk(key, link, ttl_s)
        else:
            return False
        return True

    def _keep_on_disk(self, key: bytes, link: tuple[bytes, int], ttl_s: float | None) -> None:
        """A page that is there, or on its way, was used and is to be kept for at least `ttl_s`; its file must say so."""
        before = self._outgoing[key] if key in self._outgoing else self.disk.ttl_s(key)
        after = _longer(before, ttl_s)
        if key in self._outgoing:
            self._outgoing[key] = after
        else:
            self.disk.touch(key, ttl_s)
        if after != before:
            self._emit(MoveKind.KEEP, key, note=PageNote(*link, after))

    def _host_has_room(self, *, for_kept: bool) -> bool:
        if len(self.host) < self.host.num_pages:
            return True
        if (victim := self.host.pop(for_kept=for_kept)) is None:
            return False
        key, ttl_s = victim
        if key in self.disk:
            self._keep_on_disk(key, self._links[key], ttl_s)
            self._forget_bytes(key)
        elif key not in self._outgoing:
            if self._may_go_out(for_kept=ttl_s is not None):
                self._send_out(key, ttl_s)
            else:
                self._forget_bytes(key)
                self.counts.num_dropped += 1
        return True

    def _may_go_out(self, *, for_kept: bool) -> bool:
        return len(self._outgoing) < self._config.max_outgoing and self._disk_has_room(for_kept=for_kept)

    def _disk_has_room(self, *, for_kept: bool) -> bool:
        """Makes room for one page more, besides those on their way."""
        if not self.disk.num_pages:
            return False
        while len(self.disk) + len(self._outgoing) >= self.disk.num_pages:
            if (victim := self.disk.pop(for_kept=for_kept)) is None:
                return False
            self._emit(MoveKind.UNLINK, victim[0])
        return True

    def _send_out(self, key: bytes, ttl_s: float | None) -> None:
        parent, index = self._links[key]
        self._outgoing[key] = ttl_s
        self._emit(MoveKind.WRITE, key, note=PageNote(parent, index, ttl_s))

    # --- up ----------------------------------------------------------------------------------------------------------

    def run(self, keys: Sequence[bytes]) -> list[bytes]:
        """The leading ones of `keys` that are below; it looks only."""
        if not self._config.is_on:
            return []
        found = []
        for key in keys:
            if not (self._is_here(key) or key in self.disk):
                break
            found.append(key)
        return found

    def is_ready(self, keys: Sequence[bytes]) -> bool:
        """Whether these keys from `run` are all in host memory; if not, they are read, as soon as there is room."""
        for key in keys:
            self._staged.want(key)
        missing = [key for key in keys if not self._is_here(key)]
        new = [key for key in missing if key not in self._staged]
        # One that made room for another shard's may be gone by now; the next round looks anew.
        if all(key in self.disk for key in new) and (stale := self._staged.to_make_room(len(new))) is not None:
            for key in stale:
                self._unstage(key)
            for key in new:
                self._staged.add(key)
                self.disk.pin(key)  # until it was read
                self._emit(MoveKind.READ, key)
        return not missing

    def promote(self, keys: Sequence[bytes], pages: Sequence[PageAt]) -> None:
        """Copies pages up that are ready; until the next round none of them goes away.

        `hold` was called on them before the pages were allocated.
        """
        for key, page in zip(keys, pages, strict=True):
            if key in self.host or key in self._outgoing:
                self.counts.num_host_hits += 1
            else:
                self.counts.num_disk_hits += 1
                if key in self.disk:
                    self.disk.touch(key)
            self._emit(MoveKind.UP, key, page)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Pages that will be promoted by the plan in the making; what it takes to make room for them leaves them alone."""
        for key in keys:
            if key in self.host:
                self.host.pin(key)
                self._pinned.append(key)
            elif key in self._staged:
                self._used.append(key)

    def ttl_s(self, key: bytes) -> float | None:
        """How long a page that came up is to be kept."""
        return _longer(_longer(self.host.ttl_s(key), self.disk.ttl_s(key)), self._outgoing.get(key))

    def _is_here(self, key: bytes) -> bool:
        """Whether host memory has it, whatever for."""
        return key in self.host or key in self._outgoing or self._staged.has_landed(key)

    def _unstage(self, key: bytes) -> None:
        if self._staged.remove(key):
            self._forget_bytes(key)

    # --- what became of it -------------------------------------------------------------------------------------------

    def heed(self, news: Iterable[MoveNews]) -> None:
        """Takes in what became of moves."""
        for one in news:
            match one.kind:
                case MoveKind.WRITE:
                    self._heed_write(one.key, one.is_done)
                case MoveKind.READ:
                    self._heed_read(one.key, one.is_done)
                case _:  # a DOWN was lost: the device failed meanwhile
                    self.host.remove(one.key)
                    self._outgoing.pop(one.key, None)
                    self._forget_bytes(one.key)

    def _heed_write(self, key: bytes, is_done: bool) -> None:
        if key not in self._outgoing:
            return  # it was lost before
        ttl_s = self._outgoing.pop(key)
        if is_done:
            self.counts.num_disk_written += 1
            self.disk.add(key, ttl_s)
        elif key not in self.host:
            self.counts.num_dropped += 1
        self._forget_bytes(key)

    def _heed_read(self, key: bytes, is_done: bool) -> None:
        self.disk.unpin(key)
        if is_done:
            self._staged.land(key)
        else:
            self._staged.remove(key)
            self.disk.remove(key)
            self.counts.num_disk_unreadable += 1

    def clear_host(self) -> None:
        """Forgets what host memory keeps; what waits to be written is still written. Files stay."""
        for key in self._staged.landed():  # the others when they have
            self._unstage(key)
        self._pinned, self._used = [], []
        for key in self.host.all_keys():
            self.host.remove(key)
            self._forget_bytes(key)

    def reset(self) -> None:
        """Host memory is not to be trusted, and moves may be lost: the device failed, or a step was interrupted."""
        for key in self._staged:
            self.disk.unpin(key)
        for key in self.host.all_keys():
            self.host.remove(key)
        for held in (self._staged, self._outgoing, self._links, self._pinned, self._used):
            held.clear()
        self._moves = [move for move in self._moves if move.kind is MoveKind.UNLINK]  # else the budget would not hold

    def forget_all(self) -> None:
        """Other weights: no key will be asked for again. Files stay for those who have these weights."""
        self.clear_host()
        for key in self.disk.all_keys():
            self.disk.remove(key)

    def _forget_bytes(self, key: bytes) -> None:
        """Host memory may let go of a page that nothing here needs any more."""
        if key in self.host or key in self._outgoing:
            return
        self._links.pop(key, None)
        if key not in self._staged:
            self._emit(MoveKind.DROP, key)

    def _emit(self, kind: MoveKind, key: bytes, at: PageAt | None = None, note: PageNote | None = None) -> None:
        self._moves.append(PageMove(kind, key, at, note))

    def check(self) -> None:
        """Asserts that the structures agree and budgets hold; for tests."""
        self.host.check()
        self.disk.check()
        assert len(self.disk) + len(self._outgoing) <= self.disk.num_pages or not self._outgoing
        assert len(self._outgoing) <= self._config.max_outgoing
        self._staged.check()
        assert not any(key in self.disk for key in self._outgoing)
        assert self._links.keys() == {*self.host.all_keys(), *self._outgoing}


def _longer(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)
