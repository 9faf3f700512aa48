"""Pages below the device: which keys lie in host memory and which on disk, and what has to move.

    device pool      pages that sequences hold, and cached ones (`pages`, `shelf`)
    host memory      a budget of pages; what does not fit goes on to disk
    disk             a budget of pages, in files that survive a restart (`tier_files`)

A page that the device gives up *goes down* if somebody asked to keep it (`demote="retained"`), or in any case
(`"all"`). It stays below when it comes up again, so giving it up once more costs nothing. In each tier pages go as they do
on the device's shelf: first those nobody asked to keep, least recently used first, then the soonest deadline. A page that
nobody asked to keep never displaces one that somebody did.

A page on disk is read while its request waits: `is_ready` asks for it, and the request gets in once all it needs is in
host memory. What was read lies there beside the budget, at most as much as one sequence can hold. So do pages that wait to
be written (`max_outgoing`); a page for which there is no room there is lost, and counted.

This decides and executes nothing: `take_moves` hands out what is to be done, in order, as plain data, `heed` takes in what
became of it. No clock and no thread: the same calls give the same moves.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxkv.config import TierConfig
from jaxkv.eviction import LruOrder
from jaxkv.plan import MoveKind, MoveNews, PageAt, PageMove, PageNote
from jaxkv.shelf import Shelf


class OnDisk(NamedTuple):
    """A page that an earlier process left behind."""

    key: bytes
    ttl_s: float | None  # to be kept so many seconds from its last use on
    age_s: float  # since its last use


class Tier:
    """The keys of one tier, at most `num_pages`, in the order in which they go."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._shelf = Shelf(LruOrder())  # of numbers that stand for keys; those in use are not on it
        self._number_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._ttl_s: dict[bytes, float] = {}
        self._pins: dict[bytes, int] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, key: object) -> bool:
        return key in self._number_of

    def all_keys(self) -> list[bytes]:
        """All of them, in the order in which they came."""
        return list(self._number_of)

    def ttl_s(self, key: bytes) -> float | None:
        return self._ttl_s.get(key)

    def advance(self, now_s: float) -> None:
        """As `Shelf.advance`."""
        self._shelf.advance(now_s)

    def add(self, key: bytes, ttl_s: float | None, left_s: float | None = None) -> None:
        """A key that was not there is the most recently used one; `left_s` of its time are left, if not all."""
        assert len(self) < self.num_pages and key not in self
        self._num_added += 1
        self._number_of[key], self._key_of[self._num_added] = self._num_added, key
        if ttl_s is not None:
            self._ttl_s[key] = ttl_s
        if ttl_s is not None and (left_s is None or left_s > 0):
            self._shelf.retain(self._num_added, ttl_s if left_s is None else left_s)
        self._shelf.add(self._num_added)

    def touch(self, key: bytes, ttl_s: float | None = None) -> None:
        """It was used, and is to be kept for at least `ttl_s`, if that is given."""
        if ttl_s is not None:
            self._ttl_s[key] = max(ttl_s, self._ttl_s.get(key, 0.0))
        if key not in self._pins:
            self._shelf.remove(self._number_of[key])
            self._put_back(key)

    def pin(self, key: bytes) -> None:
        """It stays until `unpin` was called as often."""
        if not self._pins.get(key):
            self._shelf.remove(self._number_of[key])
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: bytes) -> None:
        """Harmless if it was removed meanwhile."""
        if key in self._pins:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._put_back(key)

    def pop(self, *, for_kept: bool) -> tuple[bytes, float | None] | None:
        """Takes out the page to lose, with its time to live; None if none may go.

        Args:
            for_kept: it makes room for a page that is to be kept; others displace only what nobody asked to keep.
        """
        if not len(self._shelf.order) and not (for_kept and len(self._shelf)):
            return None
        number = self._shelf.pop()
        self._shelf.forgotten(number)
        key = self._key_of.pop(number)
        del self._number_of[key]
        return key, self._ttl_s.pop(key, None)

    def remove(self, key: bytes) -> None:
        """It is gone; harmless if it was not there."""
        number = self._number_of.pop(key, None)
        if number is not None:
            self._shelf.remove(number)
            self._shelf.forgotten(number)
            del self._key_of[number]
            self._ttl_s.pop(key, None)
            self._pins.pop(key, None)

    def _put_back(self, key: bytes) -> None:
        number, ttl_s = self._number_of[key], self._ttl_s.get(key)
        if ttl_s is not None:
            self._shelf.retain(number, ttl_s)
        self._shelf.add(number)

    def check(self) -> None:
        """Asserts that the structures agree; for tests."""
        self._shelf.check()
        assert len(self) <= self.num_pages
        assert {key: number for number, key in self._key_of.items()} == self._number_of
        assert len(self._shelf) + len(self._pins) == len(self)
        assert self._ttl_s.keys() <= self._number_of.keys() >= self._pins.keys()


@dataclasses.dataclass
class TierCounts:
    """Pages that changed their tier so far."""

    num_demoted: int = 0  # device -> host memory or disk
    num_dropped: int = 0  # lost on the way down: no room, or the disk refused
    num_host_hits: int = 0  # host memory -> device
    num_disk_hits: int = 0  # disk -> device
    num_disk_written: int = 0
    num_disk_unreadable: int = 0  # files that were torn, foreign or gone


@dataclasses.dataclass
class _Staged:
    """A page that is being read from disk, or was."""

    has_landed: bool = False
    wanted_in: int = 0  # newest round in which a waiting request asked for it


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
        self._staged: dict[bytes, _Staged] = {}  # read from disk into host memory
        self._links: dict[bytes, tuple[bytes, int]] = {}  # of keys in `host` and `_outgoing`: parent, index
        self._moves: list[PageMove] = []
        self._pinned: list[bytes] = []  # of `host`, for the newest plan
        self._used: list[bytes] = []  # of `_staged`, by the newest plan
        self._round = 0

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
        return any(not staged.has_landed for staged in self._staged.values())

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
        self._round += 1
        for key in self._pinned:
            self.host.unpin(key)
        for key in self._used:
            self._unstage(key)
        self._pinned, self._used = [], []
        if self._staged and not is_wanted:
            for key in [key for key, staged in self._staged.items() if staged.has_landed]:
                self._unstage(key)

    def take_moves(self) -> list[PageMove]:
        """What is to be done, in this order, before the newest plan is dispatched."""
        moves, self._moves = self._moves, []
        return moves

    # --- down --------------------------------------------------------------------------------------------------------

    def demote(self, key: bytes, at: PageAt, link: tuple[bytes, int], ttl_s: float | None) -> None:
        """The device gives a page up.

        Args:
            key: of its content.
            at: where it is; it will be overwritten by the plan in the making.
            link: key of the page before it, and its index.
            ttl_s: somebody asked to keep it so long; None: nobody did.
        """
        if not self._config.is_on or (ttl_s is None and self._config.demote != "all") or self._is_below(key, ttl_s):
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
        if key in self.disk:
            self.disk.touch(key, ttl_s)
            return True
        if key in self._outgoing:
            self._outgoing[key] = _longer(self._outgoing[key], ttl_s)
            return True
        is_here = key in self.host or self._has_landed(key)
        if (at is None and not is_here) or not self._may_go_out(for_kept=True):
            return False  # or it made room for a page saved just before
        if not is_here:
            self._emit(MoveKind.DOWN, key, at)
        self._links[key] = link
        self._send_out(key, ttl_s)
        return True

    def _is_below(self, key: bytes, ttl_s: float | None) -> bool:
        if key in self.host:
            self.host.touch(key, ttl_s)
        elif key in self._outgoing:
            self._outgoing[key] = _longer(self._outgoing[key], ttl_s)
        elif key in self.disk:
            self.disk.touch(key, ttl_s)
        else:
            return False
        return True

    def _host_has_room(self, *, for_kept: bool) -> bool:
        if len(self.host) < self.host.num_pages:
            return True
        if (victim := self.host.pop(for_kept=for_kept)) is None:
            return False
        key, ttl_s = victim
        if key in self.disk:
            self.disk.touch(key, ttl_s)
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
            if not (key in self.host or key in self._outgoing or key in self.disk or self._has_landed(key)):
                break
            found.append(key)
        return found

    def is_ready(self, keys: Sequence[bytes]) -> bool:
        """Whether these keys from `run` are all in host memory; if not, they are read, as soon as there is room."""
        missing = []
        for key in keys:
            if (staged := self._staged.get(key)) is not None:
                staged.wanted_in = self._round
            if not (key in self.host or key in self._outgoing or self._has_landed(key)):
                missing.append(key)
        new = [key for key in missing if key not in self._staged]
        if new and self._stage_has_room(len(new)):
            for key in new:
                self._staged[key] = _Staged(wanted_in=self._round)
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

    def _has_landed(self, key: bytes) -> bool:
        staged = self._staged.get(key)
        return staged is not None and staged.has_landed

    def _stage_has_room(self, num: int) -> bool:
        """Makes room for `num` more pages; what a waiting request asked for a moment ago stays."""
        lacking = len(self._staged) + num - self._config.max_staged
        if lacking <= 0:
            return True
        stale = [
            key for key, staged in self._staged.items() if staged.has_landed and staged.wanted_in < self._round - 1
        ]
        if len(stale) < lacking:
            return False
        for key in stale[:lacking]:
            self._unstage(key)
        return True

    def _unstage(self, key: bytes) -> None:
        if self._staged.pop(key, None) is not None:
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
            self._staged[key].has_landed = True
        else:
            del self._staged[key]
            self.disk.remove(key)
            self.counts.num_disk_unreadable += 1

    def clear_host(self) -> None:
        """Forgets what host memory keeps; what waits to be written is still written. Files stay."""
        for key in [key for key, staged in self._staged.items() if staged.has_landed]:  # the others when they have
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
        for held in (self._staged, self._outgoing, self._links, self._pinned, self._used, self._moves):
            held.clear()

    def forget_all(self) -> None:
        """Other weights: no key will be asked for again. Files stay for those who have these weights."""
        self.clear_host()
        for key in self.disk.all_keys():
            self.disk.remove(key)

    def _forget_bytes(self, key: bytes) -> None:
        """Host memory may let go of a page that nothing here needs any more."""
        if key in self.host or key in self._outgoing or key in self._staged:
            return
        self._links.pop(key, None)
        self._emit(MoveKind.DROP, key)

    def _emit(self, kind: MoveKind, key: bytes, at: PageAt | None = None, note: PageNote | None = None) -> None:
        self._moves.append(PageMove(kind, key, at, note))

    def check(self) -> None:
        """Asserts that the structures agree and budgets hold; for tests."""
        self.host.check()
        self.disk.check()
        assert len(self.disk) + len(self._outgoing) <= self.disk.num_pages or not self._outgoing
        assert len(self._outgoing) <= self._config.max_outgoing and len(self._staged) <= self._config.max_staged
        assert not any(key in self.disk for key in self._outgoing)
        assert self._links.keys() == {*self.host.all_keys(), *self._outgoing}


def _longer(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)
