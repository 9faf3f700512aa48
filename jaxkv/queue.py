"""Waiting sequences: who is next, and who may overtake.

Order is by rank: (priority * steps_per_priority_level + arrival step, arrival number), lowest first. A request that
waits `steps_per_priority_level` steps thereby draws level with newcomers of the next better priority: ageing without
touching the queue.

Who is first but does not fit yet may be overtaken by at most `max_bypass` others; then everybody waits until it fits.
So small requests are not stuck behind a big one, and a stream of small ones cannot starve it.
"""

import bisect
import enum
from collections.abc import Callable, Iterator

from jaxkv.sequence import Sequence


class Verdict(enum.Enum):
    """What became of an offered sequence."""

    ADMITTED = enum.auto()
    NOT_YET = enum.auto()  # others may overtake it
    GONE = enum.auto()  # it ended; whoever ended it removed it from the queue
    CLOSED = enum.auto()  # nobody can be admitted any more in this step


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

    def offer(self, admit: Callable[[Sequence], Verdict]) -> None:
        """Offers sequences to `admit`, best rank first, as far as overtaking is allowed."""
        overtaken: list[Sequence] = []
        while len(overtaken) < len(self._waiting):
            seq = self._waiting[len(overtaken)]
            match admit(seq):
                case Verdict.CLOSED:
                    return
                case Verdict.GONE:
                    continue
                case Verdict.NOT_YET:
                    overtaken.append(seq)
                case Verdict.ADMITTED:
                    del self._waiting[len(overtaken)]
                    for other in overtaken:
                        other.num_bypassed += 1
            if len(overtaken) > self._max_bypass or any(seq.num_bypassed >= self._max_bypass for seq in overtaken):
                return


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
