"""Finds stop strings in text that arrives token by token.

What is found depends on the text alone, not on where tokens or calls end: of all occurrences the one that begins
first wins, and of those that begin there the longest. So a shorter or later match waits while an earlier or longer
one can still complete; with stops "\\n" and "\\n\\n" a newline is decided by the character after it.
"""

import bisect
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """A stop string that ended the output."""

    stop: str
    num_tokens: int  # tokens of the output up to and including the one in which the stop string ends


class StopMatcher:
    """Watches one output.

    Text is held back only while it is the beginning of a stop string.

    Args:
        stops: non-empty texts; none at all lets everything pass.
        include_in_output: the text ends with the stop string instead of before it.
        min_tokens: the text of this many first tokens is not searched; a stop string can only begin after it.

    Attributes:
        match: set once a stop string was found; nothing comes out after that.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._max_len = max((len(stop) for stop in stops), default=0)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._num_tokens = 0
        self._held = ""  # characters searched but not returned
        self._num_returned = 0  # searched characters returned so far
        self._ends: list[int] = []  # searched characters up to the end of each token after min_tokens
        self.match: StopMatch | None = None

    @property
    def is_holding(self) -> bool:
        """Whether some text was searched but not returned."""
        return bool(self._held)

    def feed(self, piece: str) -> str:
        """Takes the text that one token added (maybe none); returns the text that can be shown now."""
        self._num_tokens += 1
        if self.match is not None:
            return ""
        if not self._stops or self._num_tokens <= self._min_tokens:
            return piece
        self._held += piece
        self._ends.append(self._num_returned + len(self._held))
        return self._release(final=False)

    def flush(self, piece: str = "") -> str:
        """Ends the output for another reason (end of sequence, length); `piece` is what `Detokenizer.flush` gave.

        Returns the text still held, up to a stop string if one turns out to have matched.
        """
        if self.match is not None:
            return ""
        if not self._ends:  # nothing was searched
            return piece
        self._held += piece
        self._ends[-1] += len(piece)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        text = self._held
        found, open_at = None, len(text)
        if not self._first_chars.isdisjoint(text):  # for most tokens nothing can begin
            found = self._first_match(text)
            open_at = len(text) if final else self._first_prefix(text)
        if found is None or open_at <= found[0]:
            cut = open_at  # something may still begin there
        else:
            start, stop = found
            end = start + len(stop)
            token = bisect.bisect_left(self._ends, self._num_returned + end)
            self.match = StopMatch(stop, self._min_tokens + token + 1)
            cut = end if self._include else start
        self._held = text[cut:]
        self._num_returned += cut
        return text[:cut]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop string): the earliest one, then the longest."""
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _first_prefix(self, text: str) -> int:
        """Where the longest suffix begins that more text could complete to a stop string; the end if there is none."""
        for start in range(max(0, len(text) - self._max_len + 1), len(text)):
            if text[start] not in self._first_chars:
                continue
            suffix = text[start:]
            if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                return start
        return len(text)
