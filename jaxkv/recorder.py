"""What each request did when, for as long as somebody looks: queued, prefill chunks, decode, preempted.

Times are `time.monotonic()` seconds. A step lasts from its dispatch until its tokens are known; with overlap two of them
lie on top of each other, so a request's spans are cut where the next one begins.
"""

import collections
import dataclasses
from collections.abc import Iterator

from jaxkv.events import Committed, Finished
from jaxkv.schedule.sequence import Sequence

MAX_ENDED = 512  # completions that are remembered after their end
MAX_STEPS = 20_000  # steps that are remembered: some minutes


@dataclasses.dataclass
class Span:
    """A stretch of a completion's life."""

    kind: str  # queued, prefill, decode or preempted
    start_s: float
    end_s: float
    num_tokens: int = 0  # computed (prefill) or made (decode)
    num_steps: int = 1


@dataclasses.dataclass
class Timeline:
    """One completion."""

    request_id: str
    child: int
    prompt_len: int
    spans: list[Span]
    num_preemptions: int = 0
    reason: str | None = None  # why it ended


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the engine."""

    step_id: int
    start_s: float
    end_s: float
    num_decode_rows: int
    num_decode_tokens: int
    num_prefill_tokens: int


class Recorder:
    """Hears of every step; the engine tells it."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], tuple[Sequence, Timeline]] = {}
        self._ended: dict[tuple[str, int], Timeline] = {}  # oldest first
        self.steps: collections.deque[Step] = collections.deque(maxlen=MAX_STEPS)
        self.num_tokens = 0  # made since the recording began

    def note(self, committed: Committed, dispatched_s: float, now_s: float) -> None:
        """Takes a step."""
        for seq, chunk in committed.chunks:
            self._span(seq, "prefill", dispatched_s, now_s, len(chunk.token_ids))
        for seq, count in zip(committed.sequences, committed.counts.tolist(), strict=True):
            if count:
                self._span(seq, "decode", dispatched_s, now_s, count)
        for seq, timeline in self._running.values():
            if seq.num_preemptions > timeline.num_preemptions:
                timeline.num_preemptions = seq.num_preemptions
                timeline.spans.append(Span("preempted", max(timeline.spans[-1].end_s, dispatched_s), now_s))
        num_made = int(committed.counts.sum())
        self.num_tokens += num_made + len(committed.sampled)
        num_prefill = sum(len(chunk.token_ids) for _, chunk in committed.chunks)
        self.steps.append(Step(committed.step_id, dispatched_s, now_s, len(committed.sequences), num_made, num_prefill))

    def end(self, event: Finished, now_s: float) -> None:
        """Takes the end of a completion; of one that never ran nothing is known."""
        key = event.request_id, event.child
        if key not in self._running:
            return
        _, timeline = self._running.pop(key)
        timeline.reason = str(event.reason)
        if timeline.spans[-1].kind == "preempted":
            timeline.spans[-1].end_s = now_s
        self._ended[key] = timeline
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def timelines(self) -> Iterator[Timeline]:
        """Those of completions that ended, oldest first, then of those that run."""
        yield from self._ended.values()
        yield from (timeline for _, timeline in self._running.values())

    def _span(self, seq: Sequence, kind: str, start_s: float, end_s: float, num_tokens: int) -> None:
        key = seq.request.request_id, seq.child
        if key in self._ended:  # a step that was in flight when it ended
            return
        if key not in self._running:
            queued = Span("queued", min(seq.request.arrival_s, start_s), start_s)
            timeline = Timeline(*key, seq.prompt_len, [queued], num_preemptions=seq.num_preemptions)
            self._running[key] = seq, timeline
        spans = self._running[key][1].spans
        last = spans[-1]
        if last.kind == "preempted":
            last.end_s = max(start_s, last.start_s)
        if last.kind == kind == "decode":
            last.end_s, last.num_tokens, last.num_steps = end_s, last.num_tokens + num_tokens, last.num_steps + 1
        else:
            spans.append(Span(kind, max(start_s, last.end_s), end_s, num_tokens))
