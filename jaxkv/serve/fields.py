"""Reads a request's JSON into a checked model: each field is known, known and refused with a reason, or an error."""

import logging
from typing import Any, ClassVar, NamedTuple, TypeVar

import pydantic
import pydantic_core

from jaxkv.serve.errors import ApiError

log = logging.getLogger(__name__)


class Refused(NamedTuple):
    """A field of the API that is not served."""

    why: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, and so are let through; null always is


class Fields(pydantic.BaseModel):
    """The fields of one route. Null is the same as not given."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    refused: ClassVar[dict[str, Refused]] = {}


Model = TypeVar("Model", bound=Fields)

_UNION_TAGS = ("str", "int", "float", "bool")


def parse(model: type[Model], body: bytes, *, lenient: bool) -> Model:
    """Reads a request.

    Args:
        model: of the route.
        body: JSON.
        lenient: fields that are refused or unknown are left out with a warning in the log.

    Raises:
        ApiError: 400, with the field it is about.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}; it must be a JSON object")
    return check(model, value, lenient=lenient)


def check(model: type[Model], value: dict[str, Any], *, lenient: bool) -> Model:
    """Reads a request from its JSON object; otherwise as `parse`."""
    given = {name: item for name, item in value.items() if item is not None}
    for name in list(given):
        refused = model.refused.get(name)
        if refused is None and name in model.model_fields:
            continue
        item = given.pop(name)
        if refused is not None and any(type(item) is type(each) and item == each for each in refused.neutral):
            continue
        message = f"{name} is not supported: {refused.why}" if refused else f"{name} is not a field of this API"
        if not lenient:
            code = "unsupported_parameter" if refused else "unknown_parameter"
            raise ApiError(400, message, param=name, code=code)
        log.warning("left out: %s", message)
    try:
        return model.model_validate(given)
    except pydantic.ValidationError as error:
        raise _first(error) from error


def _first(error: pydantic.ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    for part in first["loc"]:
        if isinstance(part, str) and where and (part in _UNION_TAGS or "[" in part):
            break  # which alternative of a union was tried
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None, code=code)
