"""vLLM's routes for tokens: POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxkv.cache_control import Caching
from jaxkv.serve.errors import ApiError
from jaxkv.serve.fields import parse
from jaxkv.serve.limits import read_body
from jaxkv.serve.openai_fields import DetokenizeFields, TokenizeFields
from jaxkv.serve.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    return JSONResponse(await service.in_thread(_tokenize, service, body))


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config.max_body_bytes)
    return JSONResponse({"prompt": await service.in_thread(_detokenize, service, body)})


async def tokenizer_info(request: Request) -> Response:
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    template = tokenizer.chat_template
    return JSONResponse(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "adds_bos": tokenizer.add_bos,
            "special_tokens": dict(tokenizer.special.texts),
            "special_token_ids": sorted(tokenizer.special_ids),
            "chat_templates": None if template is None else template.sources,
            "max_model_len": service.llm.max_len,
        }
    )


def _tokenize(service: Service, body: bytes) -> dict[str, Any]:
    fields = parse(TokenizeFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    tokenizer = service.tokenizer
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    if fields.prompt is not None:
        ids = tokenizer.encode(fields.prompt, add_bos=None if fields.add_special_tokens else False)
    else:
        messages = [each.for_template() for each in fields.messages or ()]
        ids, _ = service.llm.lay_out_chat(
            messages,
            fields.tools,
            Caching(),
            add_generation_prompt=fields.add_generation_prompt,
            variables=fields.chat_template_kwargs,
        )
    texts = [tokenizer.token_text(token) for token in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.llm.max_len, "tokens": ids, "token_strs": texts}


def _detokenize(service: Service, body: bytes) -> str:
    fields = parse(DetokenizeFields, body, lenient=service.config.lenient)
    service.check_model(fields.model)
    tokenizer = service.tokenizer
    for token in fields.tokens:
        if not 0 <= token < tokenizer.vocab_size:
            message = f"tokens: {token} is outside the vocabulary of {tokenizer.vocab_size}"
            raise ApiError(400, message, param="tokens")
    return tokenizer.decode(fields.tokens, fields.skip_special_tokens)
