"""GET /dashboard, the data it asks for, and GET /trace."""

import asyncio
import math
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxkv.serve.errors import ApiError
from jaxkv.serve.perfetto import trace as to_trace
from jaxkv.serve.service import Service
from jaxkv.serve.sse import until_disconnect
from jaxkv.serve.watch import LINGER_S, Watch

MAX_TRACE_S = 600.0

# The page's own script and style, and nothing from anywhere else.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


async def page(request: Request) -> Response:
    """The page itself, which holds no data."""
    data = resources.files("jaxkv.serve").joinpath("dashboard.html").read_bytes()
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Response(data, media_type="text/html; charset=utf-8", headers=headers)


async def state(request: Request) -> Response:
    watch: Watch = request.app.state.watch
    return JSONResponse(await watch.state(), headers={"Cache-Control": "no-store"})


async def timeline(request: Request) -> Response:
    watch: Watch = request.app.state.watch
    name = request.path_params["name"]
    found = (await watch.timelines(name))["timelines"]
    if not found:
        raise ApiError(404, f"{name[:200]!r} did not run while somebody looked, or is long over", param="name")
    return JSONResponse(found)


async def trace(request: Request) -> Response:
    """Records for `seconds`, and answers with a trace of them and what was recorded before."""
    service: Service = request.app.state.service
    watch: Watch = request.app.state.watch
    text = request.query_params.get("seconds", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_TRACE_S:
        raise ApiError(400, f"seconds={text[:40]!r} must be in [0, {MAX_TRACE_S:g}]", param="seconds")
    if seconds:
        await watch.timelines("")  # begins
        watch.keep(seconds + LINGER_S)
        await until_disconnect(request.receive, asyncio.sleep(seconds))
    headers = {"Content-Disposition": 'attachment; filename="jaxkv-trace.json"'}
    return JSONResponse(to_trace(await watch.timelines(), service.name), headers=headers)
