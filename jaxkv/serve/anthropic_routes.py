"""POST /v1/messages and /v1/messages/count_tokens."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxkv.request import Request as EngineRequest
from jaxkv.serve.anthropic_fields import CountFields, MessagesFields
from jaxkv.serve.anthropic_replies import events, reply
from jaxkv.serve.fields import parse
from jaxkv.serve.limits import read_body
from jaxkv.serve.service import Service
from jaxkv.serve.sse import EventStream, until_disconnect


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    fields, made = await service.make(_prepare, body)
    user = None if fields.metadata is None else fields.metadata.user_id
    handles = await service.begin([made], texts=[None], stream=fields.stream, headers=request.headers, user=user)
    (handle,) = handles
    if fields.stream:
        return EventStream(events(handle, service.name), lambda: service.end(handles))
    try:
        output = await until_disconnect(request.receive, handle.result())
    finally:
        service.end(handles)
    return JSONResponse(reply(output, service.name))


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    return JSONResponse({"input_tokens": await service.in_thread(_count, service, body)})


def _prepare(service: Service, body: bytes) -> tuple[MessagesFields, EngineRequest]:
    fields = parse(MessagesFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    params = fields.params()
    ids, caching = service.llm.lay_out_chat(fields.chat(), fields.shown_tools(), fields.caching())
    return fields, service.prepare(ids, params, caching, fields.priority, fields.timeout)


def _count(service: Service, body: bytes) -> int:
    fields = parse(CountFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    ids, _ = service.llm.lay_out_chat(fields.chat(), fields.shown_tools(), fields.caching())
    return len(ids)
