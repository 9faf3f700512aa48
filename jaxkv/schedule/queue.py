"""Waiting sequences: who is next, and who may overtake.

Order is by rank: (priority * steps_per_priority_level + arrival step, arrival number), lowest first. A request that
waits `steps_per_priority_level` steps thereby draws level with newcomers of the next better priority: ageing without
touching the queue.

Who is first may be overtaken by at most `max_bypass` others; then everybody waits for it. It is overtaken when it does
not fit yet, so that small requests are not stuck behind a big one, and when the caller prefers another one of its equals:
those that follow it with the same priority (and were not preempted, unless it was).
"""

import bisect
import enum
from collections.abc import Callable, Iterator

from jaxkv.schedule.sequence import Sequence

Choice = Callable[[list[Sequence]], Sequence | None]


class Verdict(enum.Enum):
    """What became of an offered sequence."""

    ADMITTED = enum.auto()
    NOT_YET = enum.auto()  # others may overtake it
    GONE = enum.auto()  # it ended, or need not run now; whoever found out removed it from the queue


class WaitingQueue:
    """Waiting sequences, best rank first."""

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def push(self, seq: Sequence) -> None:
        seq.num_bypassed = 0
        bisect.insort(self._waiting, seq, key=_rank)

    def discard(self, seq: Sequence) -> None:
        """Removes a sequence if it waits."""
        index = bisect.bisect_left(self._waiting, seq.rank, key=_rank)
        if index < len(self._waiting) and self._waiting[index] is seq:
            del self._waiting[index]

    def offer(self, admit: Callable[[Sequence], Verdict], choose: Choice = lambda equals: equals[0]) -> None:
        """Offers sequences to `admit`, one after the other.

        Args:
            admit: decides about a sequence.
            choose: picks the next one of equals that are in order of rank; None ends the round.
        """
        refused: dict[Sequence, None] = {}
        while (equals := self._equals(refused)) and (seq := choose(equals)) is not None:
            match admit(seq):
                case Verdict.NOT_YET:
                    refused[seq] = None
                case Verdict.ADMITTED:
                    index = self._waiting.index(seq)  # among the first few
                    del self._waiting[index]
                    for other in self._waiting[:index]:
                        other.num_bypassed += 1

    def _equals(self, refused: dict[Sequence, None]) -> list[Sequence]:
        """Who may be next: equals of whoever is first, as far as overtaking is allowed."""
        equals: list[Sequence] = []
        priority, was_preempted, max_bypass = 0, False, self._max_bypass
        for seq in self._waiting[: max_bypass + 1]:
            if not refused or seq not in refused:
                if not equals:
                    priority, was_preempted = seq.request.priority, seq.num_preemptions > 0
                elif seq.request.priority != priority or (seq.num_preemptions > 0) is not was_preempted:
                    break
                equals.append(seq)
            if seq.num_bypassed >= max_bypass:
                break
        return equals


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
