"""The OpenAPI document of the server, made from the same models that check its requests."""

import functools
from typing import Any

import jaxkv
from jaxkv.serve.anthropic_fields import CountFields, MessagesFields
from jaxkv.serve.fields import Fields
from jaxkv.serve.openai_fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_FAILURES = {
    "400": "The request is refused; the message says why.",
    "401": "The API key is missing or wrong.",
    "404": "The model is not served here.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to try again.",
    "503": "The server is shutting down.",
}
_TOO_LATE = {"504": "The time for the request was over before its answer was complete."}


@functools.cache
def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    schemas: dict[str, Any] = {"OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}

    def post(summary: str, model: type[Fields], answer: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
        schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__name__}.{{model}}")
        for name, part in schema.pop("$defs", {}).items():
            schemas[f"{model.__name__}.{name}"] = part
        schemas[model.__name__] = schema
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        error = "AnthropicError" if issubclass(model, CountFields) else "OpenAIError"
        failures = _FAILURES | (_TOO_LATE if model is MessagesFields else {})  # OpenAI's answers have a reason for it
        responses = _responses(answer, error, failures, streams=streams)
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": body},
                "responses": responses,
            }
        }

    texts = {"type": "array", "items": {"type": "object"}}
    choices = {"choices": texts, "usage": {"type": "object"}}
    paths = {
        "/v1/chat/completions": post("Answer a chat", ChatFields, _object(**choices), streams=True),
        "/v1/completions": post("Continue prompts", CompletionFields, _object(**choices), streams=True),
        "/v1/messages": post("Answer a chat", MessagesFields, _object(content=texts), streams=True),
        "/v1/messages/count_tokens": post("Count", CountFields, _object(input_tokens={"type": "integer"})),
        "/tokenize": post("Text or chat to tokens", TokenizeFields, _object(tokens={"type": "array"})),
        "/detokenize": post("Tokens to text", DetokenizeFields, _object(prompt={"type": "string"})),
        "/v1/models": _get("What is served", _object(data=texts)),
        "/tokenizer_info": _get("The tokenizer", _object(vocab_size={"type": "integer"})),
        "/health": _get("Whether requests are taken", _object(status={"type": "string"})),
        "/version": _get("Of jaxkv", _object(version={"type": "string"})),
    }
    info = {"title": "jaxkv", "version": jaxkv.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _get(summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(answer, "OpenAIError", _FAILURES, streams=False)}}


def _responses(answer: dict[str, Any], error: str, failures: dict[str, str], *, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for what events hold
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    told = {status: {"description": text, "content": failed} for status, text in failures.items()}
    return {"200": {"description": "The answer.", "content": content}, **told}
