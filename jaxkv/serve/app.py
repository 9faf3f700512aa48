"""The application: routes, and what turns every error into an answer in the shape of its API."""

import contextlib
import json
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxkv
from jaxkv.errors import JaxkvError
from jaxkv.serve import anthropic_routes, dashboard, openai_routes, token_routes
from jaxkv.serve.errors import ApiError, refusal
from jaxkv.serve.limits import check_key
from jaxkv.serve.openapi import document
from jaxkv.serve.service import Service
from jaxkv.serve.sse import ClientGone
from jaxkv.serve.watch import Watch

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

_HUNG_UP = 499  # nginx's status for a client that left; nobody reads it


def make_app(service: Service) -> Starlette:
    """The ASGI application; the engine thread runs from its start-up to its shutdown."""

    watch = Watch(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        service.engine.start()
        try:
            yield
        finally:
            service.engine.close()
            watch.close()

    routes = [
        Route("/v1/chat/completions", _guard(openai_routes.chat_completions), methods=["POST"]),
        Route("/v1/completions", _guard(openai_routes.completions), methods=["POST"]),
        Route("/v1/models", _guard(openai_routes.models)),
        Route("/v1/models/{name:path}", _guard(openai_routes.model)),
        Route("/v1/messages", _guard(anthropic_routes.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", _guard(anthropic_routes.count_tokens), methods=["POST"]),
        Route("/tokenize", _guard(token_routes.tokenize), methods=["POST"]),
        Route("/detokenize", _guard(token_routes.detokenize), methods=["POST"]),
        Route("/tokenizer_info", _guard(token_routes.tokenizer_info)),
        # What watches servers asks without a key:
        Route("/health", _guard(_health, is_open=True)),
        Route("/metrics", _guard(_metrics, is_open=True)),
        Route("/version", _guard(_version, is_open=True)),
        Route("/openapi.json", _guard(_openapi, is_open=True)),
        Route("/dashboard", _guard(dashboard.page, is_open=True)),
        Route("/dashboard/state", _guard(dashboard.state)),
        Route("/dashboard/requests/{name}", _guard(dashboard.timeline)),
        Route("/trace", _guard(dashboard.trace)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.state.service = service
    app.state.watch = watch
    return app


def _guard(endpoint: Endpoint, *, is_open: bool = False) -> Endpoint:
    """The endpoint behind the key check, with an answer for whatever it raises."""

    async def guarded(request: Request) -> Response:
        service: Service = request.app.state.service
        try:
            if not is_open:
                check_key(request, service.config.api_keys)
            return await endpoint(request)
        except ApiError as error:
            return _answer(request, error)
        except JaxkvError as error:
            return _answer(request, refusal(error))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=_HUNG_UP)
        except Exception as error:
            _log_fault(service, request, error)
            return _answer(request, ApiError(500, "the server made a mistake; its log has the place"))

    return guarded


def _answer(request: Request, error: ApiError) -> Response:
    service: Service = request.app.state.service
    service.metrics.refusals[str(error.status)] += 1
    content = error.anthropic() if request.url.path.startswith("/v1/messages") else error.openai()
    # A refusal may quote what the client sent, for example half of a surrogate pair: that must not break the answer.
    data = json.dumps(content, allow_nan=False).encode()
    return Response(data, status_code=error.status, headers=error.headers, media_type="application/json")


def _log_fault(service: Service, request: Request, error: Exception) -> None:
    """Says where the fault is; its message may quote a prompt, so it comes only where prompts may be logged."""
    log.error("%s %s: %s", request.method, request.url.path, type(error).__name__)
    log.error("%s", "".join(traceback.format_tb(error.__traceback__)))
    if service.config.log_prompts:
        log.error("%s", error)


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _answer(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _health(request: Request) -> Response:
    """200 while requests are taken; load balancers leave a server that answers 503."""
    service: Service = request.app.state.service
    if not service.engine.is_alive:
        return JSONResponse({"status": "failed"}, status_code=503)
    if service.gate.is_draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    return JSONResponse({"status": "ok"})


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    data, content_type = service.metrics.render(request.headers.get("accept", ""))
    return Response(data, headers={"Content-Type": content_type})


async def _version(request: Request) -> Response:
    return JSONResponse({"version": jaxkv.__version__})


async def _openapi(request: Request) -> Response:
    return JSONResponse(document())
