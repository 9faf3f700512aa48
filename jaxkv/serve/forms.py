"""`response_format`, `tools` and `tool_choice` as a form of structured output."""

from typing import Any

from jaxkv import structured
from jaxkv.serve.errors import ApiError


def read_form(
    response_format: dict[str, Any] | None,
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel_tool_calls: bool | None,
) -> structured.JsonSchema | structured.JsonObject | structured.ToolCalls | None:
    """The form that the answer must have; None leaves it free.

    Args:
        response_format: OpenAI's, `{"type": "text" | "json_object" | "json_schema", ...}`.
        tools: OpenAI's, without `cache_control`.
        tool_choice: "none", "auto", "required", or `{"type": "function", "function": {"name": ...}}`.
        parallel_tool_calls: whether one answer may hold several calls; None may.

    Raises:
        ApiError: one is malformed, contradicts another, or cannot be enforced here.
        RequestError: a schema or tool is malformed.
    """
    if not tools:
        for name, value in (("tool_choice", tool_choice), ("parallel_tool_calls", parallel_tool_calls)):
            if value not in (None, "none"):
                raise ApiError(400, f"{name} needs tools", param=name)
    kind = None if response_format is None else response_format.get("type")
    if response_format is not None and kind not in ("text", "json_object", "json_schema"):
        message = f"response_format.type={kind!r} must be text, json_object or json_schema"
        raise ApiError(400, message, param="response_format.type")
    wants_json = kind in ("json_object", "json_schema")
    calls = tools if tool_choice != "none" else None
    if not wants_json and not calls:
        return None
    if wants_json and calls:
        raise ApiError(400, "response_format with tools: give one, or tool_choice='none'", param="response_format")
    if calls:
        return structured.ToolCalls(
            calls, choice=_choice(tool_choice), parallel=True if parallel_tool_calls is None else parallel_tool_calls
        )
    assert response_format is not None
    return structured.JsonObject() if kind == "json_object" else _schema(response_format)


def _schema(response_format: dict[str, Any]) -> structured.JsonSchema:
    given = response_format.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        message = "response_format.json_schema must be an object with a schema"
        raise ApiError(400, message, param="response_format.json_schema")
    strict = given.get("strict")
    if strict not in (None, True, False) or isinstance(strict, int) != isinstance(strict, bool):
        raise ApiError(400, f"strict={strict!r} must be true or false", param="response_format.json_schema.strict")
    # OpenAI's default is not strict; here what cannot be enforced is refused unless the client says that it may be dropped.
    return structured.JsonSchema(given["schema"], strict=strict is not False)


def _choice(tool_choice: str | dict[str, Any] | None) -> str:
    if tool_choice is None:
        return "auto"
    if isinstance(tool_choice, str):
        if tool_choice not in ("auto", "required"):
            raise ApiError(400, f"tool_choice={tool_choice!r} must be none, auto or required", param="tool_choice")
        return tool_choice
    function = tool_choice.get("function")
    if tool_choice.get("type") != "function" or not isinstance(function, dict):
        message = 'tool_choice must be a text or {"type": "function", "function": {"name": ...}}'
        raise ApiError(400, message, param="tool_choice")
    name = function.get("name")
    if not isinstance(name, str) or name in ("auto", "required"):
        raise ApiError(400, f"tool_choice: {name!r} is no function's name", param="tool_choice")
    return name
