"""What open sessions keep: the pages of their tokens, by key.

A hold is not a reference. Its pages lie on the shelf when nobody uses them, where they are the last to go, so sessions can
never make a request wait or fail: under pressure their pages go (and are counted), and the next turn computes them again.
A page that is published later, or once more, under a held key is held too.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.cache.prefix_cache import TOKEN_DTYPE
from jaxkv.schedule.memory import Memory


@dataclasses.dataclass(frozen=True, eq=False)
class Hold:
    """The full pages of some tokens, in order."""

    keys: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True)
class Held:
    """What there is of a hold now, on the data shard that has most of it."""

    num_pages: int  # leading pages that a request would find
    num_shared: int  # of these, held by several


class Holds:
    """Takes and ends holds, on all data shards alike.

    Args:
        memories: of the shards.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories
        self._later: collections.deque[Hold] = collections.deque()

    def take(self, token_ids: Sequence[int], salt: str) -> Hold:
        """Holds the pages of `token_ids`, those not computed yet too."""
        keys = self._memories[0].page_keys(np.array(token_ids, TOKEN_DTYPE), salt)
        for memory in self._memories:
            memory.hold(keys)
        return Hold(tuple(keys))

    def end(self, hold: Hold) -> None:
        """Lets go of what `take` held; once."""
        for memory in self._memories:
            memory.let_go(hold.keys)

    def end_later(self, hold: Hold) -> None:
        """The same before the next step is planned: a garbage collector may call it at any moment."""
        self._later.append(hold)

    def settle(self) -> None:
        """Does what `end_later` was asked for."""
        while self._later:
            self.end(self._later.popleft())

    def look_up(self, hold: Hold) -> Held:
        """Which of its pages are there now; changes nothing."""
        return Held(*max(memory.look_up(hold.keys) for memory in self._memories))
