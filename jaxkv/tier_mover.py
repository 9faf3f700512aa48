"""Moves pages between the device and the lower tiers, as the scheduler says."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxkv.cache.tier_store import Arriving, TierStore
from jaxkv.plan import MoveKind, PageAt, PageMove
from jaxkv.schedule.scheduler import Scheduler


class Pool(Protocol):
    """The part of a runner that pages leave and enter through."""

    @property
    def max_moved(self) -> int:
        """Pages a call may move."""
        ...

    def read_pages(self, pages: Sequence[PageAt]) -> Arriving:
        """A copy of some pages, on its way to the host."""
        ...

    def write_pages(self, pages: Sequence[PageAt], kv: Sequence[np.ndarray]) -> None:
        """Overwrites pages."""
        ...


class TierMover:
    """Carries out what the scheduler's tiers decided, and reports back.

    Args:
        scheduler: decides.
        pool: the device's pages.
        store: everything below.
    """

    def __init__(self, scheduler: Scheduler, pool: Pool, store: TierStore) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self.store = store

    def report(self) -> None:
        """Tells the scheduler what became of moves; call it before planning."""
        if news := self.store.take_news():
            self._scheduler.tiers.heed(news)

    def move(self) -> None:
        """Carries out what was decided with the newest plan; call it before that is dispatched."""
        for kind, moves in itertools.groupby(gather(self._scheduler.tiers.take_moves()), key=lambda move: move.kind):
            match kind:
                case MoveKind.DOWN:
                    self._down(list(moves))
                case MoveKind.UP:
                    self._up(list(moves))
                case _:
                    for move in moves:
                        self._elsewhere(move)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to report, or nothing to wait for, or time is up."""
        self.store.wait(timeout_s)

    def _down(self, moves: list[PageMove]) -> None:
        for some in _rounds(moves, self._pool.max_moved):
            self.store.land([move.key for move in some], self._pool.read_pages(_places(some)))

    def _up(self, moves: list[PageMove]) -> None:
        for some in _rounds(moves, self._pool.max_moved):
            self._pool.write_pages(_places(some), [self.store.get(move.key) for move in some])

    def _elsewhere(self, move: PageMove) -> None:
        match move.kind:
            case MoveKind.DROP:
                self.store.drop(move.key)
            case MoveKind.UNLINK:
                self.store.unlink(move.key)
            case MoveKind.READ:
                self.store.read(move.key)
            case MoveKind.KEEP:
                assert move.note is not None, move
                self.store.keep(move.key, move.note)
            case _:
                assert move.note is not None, move
                self.store.write(move.key, move.note)


def gather(moves: list[PageMove]) -> list[PageMove]:
    """Pages going down next to each other, as far as that changes nothing: a call of the device moves up to 64.

    One may pass what happens below to other pages, but not an `UP`, which may overwrite its memory.
    """
    gathered: list[PageMove] = []
    downs: list[PageMove] = []
    others: dict[bytes, None] = {}  # keys of `rest`
    rest: list[PageMove] = []

    def settle() -> None:
        gathered.extend([*downs, *rest])
        for held in (downs, rest, others):
            held.clear()

    for move in moves:
        if move.kind is MoveKind.UP or (move.kind is MoveKind.DOWN and move.key in others):
            settle()  # one that was dropped and goes down again must not be dropped after that
        if move.kind is MoveKind.DOWN:
            downs.append(move)
        elif move.kind is MoveKind.UP:
            gathered.append(move)
        else:
            rest.append(move)
            others[move.key] = None
    settle()
    return gathered


def _rounds(moves: list[PageMove], size: int) -> list[list[PageMove]]:
    return [moves[start : start + size] for start in range(0, len(moves), size)]


def _places(moves: list[PageMove]) -> list[PageAt]:
    return [move.at for move in moves if move.at is not None]
