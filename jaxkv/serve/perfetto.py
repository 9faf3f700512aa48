"""Timelines as a trace that https://ui.perfetto.dev and chrome://tracing open (the Trace Event Format, in JSON)."""

from typing import Any

_STEPS, _REQUESTS = 1, 2  # "processes" of the trace


def trace(recorded: dict[str, Any], model: str) -> dict[str, Any]:
    """Writes what `Watch.timelines` returns as a trace.

    Args:
        recorded: timelines and steps.
        model: its name, for the title.

    Returns:
        One line for the engine's steps, one for each completion; times in microseconds from the first event.
    """
    starts = [each["spans"][0]["start_s"] for each in recorded["timelines"]] + [
        step["start_s"] for step in recorded["steps"]
    ]
    zero_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = [
        _name("process_name", _STEPS, 0, "engine steps"),
        _name("process_name", _REQUESTS, 0, f"requests of {model}"),
    ]
    end_s = zero_s
    for step in recorded["steps"]:
        rows, tokens, chunk = step["num_decode_rows"], step["num_decode_tokens"], step["num_prefill_tokens"]
        name = "mixed" if rows and chunk else "prefill" if chunk else "decode"
        details = {"step": step["step_id"], "decode_rows": rows, "decode_tokens": tokens, "prefill_tokens": chunk}
        start_s, end_s = max(step["start_s"], end_s), step["end_s"]  # with overlap the next one begins before this ends
        events.append(_span(name, _STEPS, 1, start_s - zero_s, end_s - zero_s, details))
    for line, timeline in enumerate(recorded["timelines"], 1):
        title = timeline["request_id"] + (f"/{timeline['child']}" if timeline["child"] else "")
        events.append(_name("thread_name", _REQUESTS, line, title))
        for span in timeline["spans"]:
            details = {"request": title, "tokens": span["num_tokens"], "steps": span["num_steps"]}
            if timeline["reason"] is not None:
                details["ended"] = timeline["reason"]
            events.append(
                _span(span["kind"], _REQUESTS, line, span["start_s"] - zero_s, span["end_s"] - zero_s, details)
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(kind: str, process: int, line: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": line, "args": {"name": name}}


def _span(name: str, process: int, line: int, start_s: float, end_s: float, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": "jaxkv", "pid": process, "tid": line, "ts": round(start_s * 1e6, 1),
        "dur": round(max(end_s - start_s, 0.0) * 1e6, 1), "args": details,
    }  # fmt: skip
