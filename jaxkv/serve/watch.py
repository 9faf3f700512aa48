"""What the dashboard and traces show: state of the engine thread, taken only while somebody looks."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np

from jaxkv.recorder import Recorder, Timeline
from jaxkv.schedule.page_map import SchedulerView, SequenceView
from jaxkv.serve.metrics import Metrics
from jaxkv.serve.service import Service

LINGER_S = 15.0  # seconds after the last look for which the engine goes on recording
MAX_RECENT = 40  # ended requests that are listed


class Watch:
    """Turns the recording on with the first look, and off when nobody looked for a while.

    Args:
        service: whose engine it looks at.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._off: asyncio.TimerHandle | None = None
        self._until_s = 0.0  # of the event loop's clock

    async def state(self) -> dict[str, Any]:
        """All that one refresh of the page needs."""
        recorder, view = await self._service.engine.call(lambda: (self._service.llm.record(), self._service.llm.look()))
        self.keep(LINGER_S)
        return _state(self._service, recorder, view)

    async def timelines(self, request_id: str | None = None) -> dict[str, Any]:
        """What the recording has: of one request, or of all, with the steps."""

        def take() -> dict[str, Any]:
            recorder = self._service.llm.record()
            assert recorder is not None
            chosen = [each for each in recorder.timelines() if request_id in (None, each.request_id)]
            steps = [dataclasses.asdict(step) for step in recorder.steps] if request_id is None else []
            return {"timelines": [dataclasses.asdict(each) for each in chosen], "steps": steps}

        self.keep(LINGER_S)
        return await self._service.engine.call(take)

    def keep(self, seconds: float) -> None:
        """The recording goes on for at least so long."""
        loop = asyncio.get_running_loop()
        self._until_s = max(self._until_s, loop.time() + seconds)
        if self._off is None:
            self._off = loop.call_at(self._until_s, self._look_away)

    def close(self) -> None:
        """Ends the recording; the engine thread has ended."""
        if self._off is not None:
            self._off.cancel()
        self._service.llm.record(False)

    def _look_away(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._off = loop.call_at(self._until_s, self._look_away)
            return
        self._off = None
        self._service.engine.post(lambda: self._service.llm.record(False))


def _state(service: Service, recorder: Recorder | None, view: SchedulerView) -> dict[str, Any]:
    assert recorder is not None
    now_s, stats = time.monotonic(), service.engine.stats
    shown = dataclasses.asdict(stats)
    return {
        "model": service.name,
        "now_s": now_s,
        "max_rows": service.llm.max_rows,
        "page_size": service.llm.page_size,
        "max_len": service.llm.max_len,
        "pages": _runs(view.pages),
        "running": [_sequence(each, now_s) for each in view.running],
        "waiting": [_sequence(each, now_s) for each in view.waiting],
        "stats": {name: shown[name] for name in (
            "num_requests", "num_running", "num_waiting", "pages_free", "pages_cached", "pages_used", "num_steps",
            "num_prompt_tokens", "num_hit_tokens", "num_preemptions", "num_compiles", "utilisation",
        )},
        "num_tokens": recorder.num_tokens,
        "latencies": _latencies(service.metrics),
        "recent": [_ended(each, now_s) for each in list(recorder.timelines())[-MAX_RECENT:][::-1] if each.reason],
    }  # fmt: skip


def _runs(pages: np.ndarray) -> list[int]:
    """Run lengths: value, count, value, count, ..."""
    starts = np.flatnonzero(np.concatenate([[True], pages[1:] != pages[:-1]]))
    counts = np.diff(np.append(starts, len(pages)))
    return np.stack([pages[starts], counts], axis=1).ravel().tolist()


def _sequence(view: SequenceView, now_s: float) -> dict[str, Any]:
    state = dataclasses.asdict(view)
    state["age_s"] = round(now_s - state.pop("arrival_s"), 3)
    return state


def _ended(timeline: Timeline, now_s: float) -> dict[str, Any]:
    return {
        "request_id": timeline.request_id, "child": timeline.child, "prompt_len": timeline.prompt_len,
        "reason": timeline.reason, "ago_s": round(now_s - timeline.spans[-1].end_s, 1),
        "took_s": round(timeline.spans[-1].end_s - timeline.spans[0].start_s, 3),
        "num_preemptions": timeline.num_preemptions,
    }  # fmt: skip


def _latencies(metrics: Metrics) -> dict[str, list[float]]:
    """Sum in seconds and count, ever since: two looks give the mean between them."""
    names = {"first_token": "time_to_first_token_seconds", "inter_token": "inter_token_latency_seconds"}
    return {short: list(metrics.histograms[name].totals) for short, name in names.items()}
