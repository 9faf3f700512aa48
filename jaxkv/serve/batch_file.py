"""The two files of a batch: lines that ask and lines that answer, in OpenAI's format.

An answer is one write of one whole line, in the order in which requests end. Its id names the line that it answers, by number and
content, so that a run that was killed goes on where it stopped: what is answered stays, half a line is cut off, and an
output that answers another input is refused.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from jaxkv.errors import RequestError
from jaxkv.serve.sse import to_json

URLS = ("/v1/chat/completions", "/v1/completions")


class Line(NamedTuple):
    """One line of the input."""

    number: int  # from 1
    id: str  # of its answer
    custom_id: str | None  # None: the line has none
    url: str = ""
    body: dict[str, Any] | None = None
    fault: str | None = None  # why it cannot be a request


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file, those included that are none; blank lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    first: dict[str, int] = {}  # custom_id -> number
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            line = _read_line(number, text)
            if line.custom_id is not None and line.custom_id in first and line.fault is None:
                line = line._replace(fault=f"custom_id is that of line {first[line.custom_id]} too; each needs its own")
            elif line.custom_id is not None:
                first[line.custom_id] = number
            yield line


def _read_line(number: int, text: bytes) -> Line:
    name = f"batch_req_{number}_{hashlib.sha256(text.strip()).hexdigest()[:12]}"
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return Line(number, name, None, fault=f"the line is not JSON: {error}")
    if not isinstance(value, dict):
        return Line(number, name, None, fault="the line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, name, None, fault="custom_id must be text")
    url, body = value.get("url"), value.get("body")
    fault = None
    if value.get("method") != "POST":
        fault = f"method={value.get('method')!r} must be 'POST'"
    elif url not in URLS:
        fault = f"url={url!r} must be {' or '.join(URLS)}"
    elif not isinstance(body, dict):
        fault = "body must be a JSON object"
    elif body.get("stream"):
        fault = "body.stream: a batch has no streams; leave it out"
    elif unknown := value.keys() - {"custom_id", "method", "url", "body"}:
        fault = f"{sorted(unknown)} are not fields of a batch's line"
    if fault is not None:
        return Line(number, name, custom_id, fault=fault)
    return Line(number, name, custom_id, str(url), body)


class Answers:
    """The output file, while this process alone writes it.

    Args:
        path: made if it is missing; else its answers are kept.

    Attributes:
        done: ids that are answered.

    Raises:
        RequestError: another process writes it, or it holds something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RequestError(
                    f"{path} is being written by another process; wait for it, or choose another -o"
                ) from error
            self.done = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> set[str]:
        """The ids of all whole lines; what a killed process began to write is cut off."""
        done, end = set[str](), 0
        with open(self._path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                done.add(self._id_of(text, number))
                end += len(text)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        return done

    def _id_of(self, text: bytes, number: int) -> str:
        try:
            return json.loads(text)["id"]
        except (ValueError, KeyError, TypeError) as error:
            message = f"{self._path}:{number} is no answer of a batch; choose another -o, or remove the file"
            raise RequestError(message) from error

    def check(self, ids: set[str]) -> None:
        """Refuses to go on with an output that answers something else.

        Args:
            ids: of all lines of the input.

        Raises:
            RequestError: it does.
        """
        if strangers := sorted(self.done - ids):
            raise RequestError(
                f"{self._path} has answers to other requests than the input's (such as {strangers[0]}); "
                "choose another -o, or remove the file"
            )

    def write(self, line: Line, status: int | None, body: Any) -> None:
        """Adds an answer.

        Args:
            line: that it answers.
            status: of HTTP; None: the line was no request, and `body` says why.
            body: the answer's JSON.
        """
        response, error = {"status_code": status, "request_id": line.id, "body": body}, None
        if status is None:
            response, error = None, {"code": "invalid_line", "message": f"line {line.number}: {body}"}
        answer = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        data = memoryview(to_json(answer) + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        self.done.add(line.id)

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
