"""Which requests have run out of time."""

import heapq
from collections.abc import Callable


class Deadlines:
    """Requests by the time at which they are to end.

    Args:
        is_alive: whether the request with an id and an arrival number is not over; its id may have been used again.
    """

    def __init__(self, is_alive: Callable[[str, int], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[float, int, str]] = []  # (when, arrival number, request id)

    def __len__(self) -> int:
        """Entries, those of requests that are over among them."""
        return len(self._heap)

    def add(self, request_id: str, arrival: int, deadline_s: float, num_alive: int) -> None:
        """A request is to end at `deadline_s`; `num_alive` are not over."""
        heapq.heappush(self._heap, (deadline_s, arrival, request_id))
        if len(self._heap) > 2 * num_alive + 64:  # mostly of requests that are over
            self._heap = [entry for entry in self._heap if self._is_alive(entry[2], entry[1])]
            heapq.heapify(self._heap)

    def pop_due(self, now_s: float) -> list[str]:
        """Takes out requests that are not over and whose time is, by the same clock."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._heap)
            if self._is_alive(request_id, arrival):
                due.append(request_id)
        return due
