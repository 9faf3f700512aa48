"""Where requests with one `prompt_cache_key` live: the data shard on which the last of them got a row.

Pages are shared on one shard only, so requests that belong together do well to stay together, also before anything of
them is cached. Keys of one `cache_salt` mean nothing under another.
"""

import collections

from jaxkv.request import Request

MAX_HOMES = 4096  # groups remembered; those not heard of for longest are forgotten

Group = tuple[str, str]  # salt, key


def group_of(request: Request) -> Group | None:
    """The request's group; None if it has no key."""
    return (request.cache_salt, request.cache_key) if request.cache_key else None


class Homes:
    """Group -> data shard."""

    def __init__(self) -> None:
        self._shard_of: collections.OrderedDict[Group, int] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._shard_of)

    def of(self, group: Group | None) -> int | None:
        """The group's shard, if it is known."""
        return None if group is None else self._shard_of.get(group)

    def note(self, group: Group, shard: int) -> None:
        """One of the group got a row on `shard`."""
        self._shard_of[group] = shard
        self._shard_of.move_to_end(group)
        if len(self._shard_of) > MAX_HOMES:
            self._shard_of.popitem(last=False)
