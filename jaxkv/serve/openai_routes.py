"""POST /v1/chat/completions and /v1/completions, GET /v1/models."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxkv.request import Request as EngineRequest
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.serve import openai_stream
from jaxkv.serve.engine_thread import Handle
from jaxkv.serve.fields import parse
from jaxkv.serve.limits import read_body
from jaxkv.serve.openai_fields import ChatFields, CompletionFields
from jaxkv.serve.openai_replies import LogprobWriter, check_outputs, head, message, usage
from jaxkv.serve.openai_stream import StreamPlan
from jaxkv.serve.sampling_fields import SamplingFields
from jaxkv.serve.service import Service
from jaxkv.serve.sse import EventStream, until_disconnect

MakeWriter = Callable[[], LogprobWriter]


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    fields, made = await service.make(_prepare_chat, body)
    writer = _writer(service, fields) if fields.logprobs else None
    if fields.stream:
        plan = StreamPlan(
            head=head("chat.completion.chunk", "chatcmpl", service.name),
            is_chat=True,
            with_usage=fields.wants_usage,
            writer=writer,
        )
        return await _stream(service, request, fields, [made], [None], plan)
    (output,) = await _run(service, request, fields, [made], [None])
    choices = []
    for completion in output.outputs:
        logprobs = writer().chat(completion.logprobs or ()) if writer else None
        choices.append(
            {
                "index": completion.index,
                "message": message(completion),
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
            }
        )
    return JSONResponse(
        {**head("chat.completion", "chatcmpl", service.name), "choices": choices, "usage": usage([output])}
    )


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    fields, made, texts = await service.make(_prepare_completions, body)
    writer = _writer(service, fields, echo=fields.echo) if fields.logprobs is not None else None
    if fields.stream:
        plan = StreamPlan(
            head=head("text_completion", "cmpl", service.name),
            is_chat=False,
            with_usage=fields.wants_usage,
            writer=writer,
            echoes=[_echo(service, one.prompt_token_ids, one.params) for one in made] if fields.echo else (),
        )
        return await _stream(service, request, fields, made, texts, plan)
    outputs = await _run(service, request, fields, made, texts)
    choices = [
        _completion_choice(service, one, output, which, fields.echo, writer)
        for one, output in zip(made, outputs, strict=True)
        for which in range(len(output.outputs))
    ]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return JSONResponse({**head("text_completion", "cmpl", service.name), "choices": choices, "usage": usage(outputs)})


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.config.names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "jaxkv", "root": service.name,
        "parent": None, "max_model_len": service.llm.max_len,
    }  # fmt: skip


def _prepare_chat(service: Service, body: bytes) -> tuple[ChatFields, EngineRequest]:
    fields = parse(ChatFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    messages = [each.for_template() for each in fields.messages]
    tools = None if fields.tool_choice == "none" else fields.tools
    ids, caching = service.llm.lay_out_chat(messages, tools, fields.caching(), **fields.layout())
    params = fields.params(service.llm.max_len - len(ids))
    return fields, service.prepare(ids, params, caching, fields.priority, fields.timeout)


def _prepare_completions(
    service: Service, body: bytes
) -> tuple[CompletionFields, list[EngineRequest], list[str | None]]:
    fields = parse(CompletionFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    prompts, params, caching = fields.prompts, fields.params(), fields.caching()
    made = [service.prepare(prompt, params, caching, fields.priority, fields.timeout) for prompt in prompts]
    return fields, made, [prompt if isinstance(prompt, str) else None for prompt in prompts]


async def _run(
    service: Service,
    request: Request,
    fields: SamplingFields,
    made: Sequence[EngineRequest],
    texts: Sequence[str | None],
) -> list[RequestOutput]:
    handles = await service.begin(made, texts=texts, stream=False, headers=request.headers, user=fields.user)
    try:
        outputs = await until_disconnect(request.receive, _results(handles))
    finally:
        service.end(handles)
    check_outputs(outputs)
    return outputs


async def _results(handles: Sequence[Handle]) -> list[RequestOutput]:
    return list(await asyncio.gather(*(handle.result() for handle in handles)))


async def _stream(
    service: Service,
    request: Request,
    fields: SamplingFields,
    made: Sequence[EngineRequest],
    texts: Sequence[str | None],
    plan: StreamPlan,
) -> Response:
    handles = await service.begin(made, texts=texts, stream=True, headers=request.headers, user=fields.user)
    return EventStream(openai_stream.events(plan, handles), lambda: service.end(handles))


def _writer(service: Service, fields: SamplingFields, *, echo: bool = False) -> MakeWriter:
    return lambda: LogprobWriter(
        service.llm.tokenizer,
        as_ids=fields.return_tokens_as_token_ids,
        skip_special_tokens=fields.skip_special_tokens is not False,
        continues=not echo,
    )


def _echo(service: Service, prompt_token_ids: Sequence[int], params: SamplingParams) -> str:
    """What an echo shows: the prompt's tokens as text, so that the offsets of log-probabilities hold."""
    tokenizer = service.llm.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt_token_ids, params.skip_special_tokens)


def _completion_choice(
    service: Service, made: EngineRequest, output: RequestOutput, which: int, echo: bool, writer: MakeWriter | None
) -> dict[str, Any]:
    completion = output.outputs[which]
    text, logprobs = completion.text, None
    entries, ids = list(completion.logprobs or ()), list(completion.token_ids)
    if echo:
        text = _echo(service, made.prompt_token_ids, made.params) + text
        entries, ids = [*(output.prompt_logprobs or ()), *entries], [*made.prompt_token_ids, *ids]
    if writer is not None:
        logprobs = writer().legacy(entries, ids)
    return {"text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}
