"""Runs a file of requests through the same application that serves HTTP, so that each answer is what the server would say."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.types import Message

from jaxkv.progress import Progress
from jaxkv.serve.app import make_app
from jaxkv.serve.batch_file import Answers, Line, read_lines
from jaxkv.serve.limits import ServeConfig
from jaxkv.serve.service import Service
from jaxkv.serve.sse import to_json

if TYPE_CHECKING:
    from jaxkv.api import LLM

_AHEAD = 4  # requests given to the engine, as a multiple of its rows: some to choose from when rows get free
_MAX_BODY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """How a batch went."""

    num_lines: int
    num_before: int  # answered by an earlier run
    num_failed: int  # of this run: refused, or no requests at all


def run_batch(
    llm: "LLM", source: Path, answers: Answers, *, names: tuple[str, ...], lenient: bool, progress: bool | None
) -> BatchResult:
    """Answers every line that has no answer yet.

    A request without a seed gets one from its line's number, so that its answer does not depend on what ran before.

    Args:
        llm: loaded.
        source: the input.
        answers: the output.
        names: what requests may call the model.
        lenient: fields that are not served are left out with a warning.
        progress: show a bar; None shows it on a terminal.

    Raises:
        RequestError: the output belongs to another input.
        OSError: a file cannot be read or written.
    """
    ids = {line.id for line in read_lines(source)}
    answers.check(ids)
    num_before = len(answers.done)
    config = ServeConfig(names=names, max_queue=2**31, max_body_bytes=_MAX_BODY_BYTES, lenient=lenient)
    app = make_app(Service(llm, config))
    with Progress("answering", total=len(ids), unit="requests", show=progress) as bar:
        bar.advance(num_before)
        todo = (line for line in read_lines(source) if line.id not in answers.done)
        num_failed = asyncio.run(_run_all(app, todo, answers, bar, num_workers=_AHEAD * llm.max_rows))
    return BatchResult(len(ids), num_before, num_failed)


async def _run_all(app: Starlette, todo: Iterator[Line], answers: Answers, bar: Progress, num_workers: int) -> int:
    num_failed = 0

    async def work() -> None:
        nonlocal num_failed
        for line in todo:  # shared: each worker takes the next one
            status, body = await _answer(app, line)
            answers.write(line, status, body)
            bar.advance(1)
            num_failed += status != 200

    async with app.router.lifespan_context(app), asyncio.TaskGroup() as group:
        for _ in range(num_workers):
            group.create_task(work())
    return num_failed


async def _answer(app: Starlette, line: Line) -> tuple[int | None, Any]:
    if line.fault is not None or line.body is None:
        return None, line.fault
    body = line.body if line.body.get("seed") is not None else {**line.body, "seed": line.number}
    return await _post(app, line.url, to_json(body))


async def _post(app: Starlette, path: str, body: bytes) -> tuple[int, Any]:
    """Asks the application without a socket."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [],
        "client": None, "server": None,
    }  # fmt: skip
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces = 0, []

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        return await asyncio.get_running_loop().create_future()  # nobody hangs up

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(b"".join(pieces))
