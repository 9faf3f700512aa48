"""Who is let in: bodies of bounded size, known keys, a queue with an end, nobody while the server is draining."""

import dataclasses
import hmac
import math
from collections.abc import Sequence

from starlette.requests import Request

from jaxkv.serve.errors import ApiError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How the server behaves."""

    names: tuple[str, ...]  # of the model, as clients may call it; the first is the one in answers
    api_keys: tuple[str, ...] = ()  # one of them must come with each request; none: anyone may ask
    max_queue: int = 256  # sequences that may wait for a row; more are refused with 429
    max_body_bytes: int = 16 * 2**20
    timeout_s: float | None = None  # most seconds a request may take, and the default
    drain_s: float = 60.0  # seconds that running requests have left after SIGTERM
    lenient: bool = False  # fields that are not served are left out with a warning, instead of refused
    log_prompts: bool = False  # texts may be logged; otherwise only lengths are


class Gate:
    """Counts the sequences that are inside.

    Args:
        max_rows: sequences that run at once.
        max_queue: sequences that may wait.
    """

    def __init__(self, max_rows: int, max_queue: int) -> None:
        self._max_rows, self._max_queue = max_rows, max_queue
        self._mean_s = 1.0  # a request takes, lately
        self.num_inside = 0
        self.is_draining = False

    def enter(self, num: int) -> None:
        """Lets `num` sequences in.

        Raises:
            ApiError: 429 with Retry-After if there is no room, 503 if the server is about to end, 400 if `num` are
                too many at any time.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; ask another one", headers={"Retry-After": "1"})
        room = self._max_rows + self._max_queue
        if num > room:
            raise ApiError(400, f"the request asks for {num} completions; this server takes {room} at once")
        if self.num_inside + num > room:
            wait = {"Retry-After": str(self.retry_after_s)}
            raise ApiError(429, f"{self.num_inside} sequences run or wait, of at most {room}; try later", headers=wait)
        self.num_inside += num

    def leave(self, num: int) -> None:
        """Undoes `enter`."""
        self.num_inside -= num

    def took(self, seconds: float) -> None:
        """Notes how long a request took."""
        self._mean_s += 0.1 * (seconds - self._mean_s)

    @property
    def retry_after_s(self) -> int:
        """When half of those that wait will have got a row, whole seconds from 1 to 60."""
        num_waiting = max(self.num_inside - self._max_rows, 0)
        return min(max(math.ceil(0.5 * num_waiting / self._max_rows * self._mean_s), 1), 60)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, read no further than allowed.

    Raises:
        ApiError: 413.
    """
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    pieces, num = [], 0
    async for piece in request.stream():
        num += len(piece)
        if num > max_bytes:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Compares the key that came along with every known one, in a time that says nothing about them.

    Raises:
        ApiError: 401.
    """
    if not keys:
        return
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get("x-api-key") or (bearer.strip() if kind.lower() == "bearer" else "")
    matches = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in keys]
    if not any(matches):
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
