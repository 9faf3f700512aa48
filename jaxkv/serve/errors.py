"""`ApiError`: a refusal with an HTTP status, and the two shapes in which the APIs write it."""

import dataclasses
import re
from typing import Any

from jaxkv.errors import CapacityError, JaxkvError, RequestError

# Anthropic's names for what a status means; OpenAI's are almost one.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_FIELD = re.compile(r"[a-z][a-z_]*(?=[=\[.:]| is | has | must )")

# What the runtime calls a thing -> the field it comes from; None: from no single one.
_PARAMS = {
    "prompt_len": None,
    "text": None,
    "timeout_s": "timeout",
    "ttl": "cache_control",
    "breakpoints": "cache_control",
}


@dataclasses.dataclass
class ApiError(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: what is wrong, and the way out.
        param: the field it is about.
        code: OpenAI's short name of the case.
        headers: to send along.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        message = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": message}}


def refusal(error: JaxkvError) -> ApiError:
    """What the runtime refused, as the client sees it; its messages begin with the name of the field, where there is one."""
    if not isinstance(error, (RequestError, CapacityError)):
        return ApiError(500, str(error))
    found = _FIELD.match(str(error))
    param = _PARAMS.get(found[0], found[0]) if found else None
    code = "context_length_exceeded" if "exceeds max_len" in str(error) else None
    return ApiError(400, str(error), param=param, code=code)
