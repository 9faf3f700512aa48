"""When the requests of a trace come: clients in a closed loop, each of which sends on as soon as it was answered.

A request comes once those that it follows are answered and `think` more answers, to whomever, were given since: a count
instead of a clock, so that a replay is the same on every machine. If nobody is being answered, the thinkers who would come
first come at once.
"""

from collections.abc import Sequence

from jaxkv.bench.traces import TraceRequest
from jaxkv.errors import ConfigError


class Arrivals:
    """Who of a trace comes now.

    Args:
        requests: the trace's.
        think: answers between a request and those that it follows; 0: it comes at once.
    """

    def __init__(self, requests: Sequence[TraceRequest], think: int = 0) -> None:
        if think < 0:
            raise ConfigError(f"think={think} must be >= 0 answers")
        self._think = think
        self._num_missing = [len(request.after) for request in requests]
        self._followers: list[list[int]] = [[] for _ in requests]
        for index, request in enumerate(requests):
            for before in request.after:
                self._followers[before].append(index)
        self._due_at = {index: 0 for index, num in enumerate(self._num_missing) if not num}  # in answers given
        self._num_answered = 0
        self._num_open = 0  # came, and are not answered

    @property
    def is_over(self) -> bool:
        """Everybody is answered."""
        return not self._num_open and not self._due_at

    def take(self) -> list[int]:
        """Indices of those that come now, in the order in which they come."""
        now = self._num_answered
        if not self._num_open and self._due_at:
            now = max(now, min(self._due_at.values()))
        coming = sorted((at, index) for index, at in self._due_at.items() if at <= now)
        for _, index in coming:
            del self._due_at[index]
        self._num_open += len(coming)
        return [index for _, index in coming]

    def answered(self, index: int) -> None:
        """A request that came is answered."""
        self._num_answered += 1
        self._num_open -= 1
        for follower in self._followers[index]:
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                self._due_at[follower] = self._num_answered + self._think
