"""Runs the application with uvicorn, and ends it gracefully."""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import uvicorn

from jaxkv.serve.app import make_app
from jaxkv.serve.limits import ServeConfig
from jaxkv.serve.service import Service
from jaxkv.serve.tracing import export_traces

if TYPE_CHECKING:
    from types import FrameType

    from jaxkv.api import LLM

log = logging.getLogger(__name__)

_POLL_S = 0.05  # between looks at whether all requests are over


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or Ctrl-C lets running requests end while new ones get 503; the second ends them.

    Args:
        config: of uvicorn.
        service: what is served.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: "FrameType | None") -> None:
        """In the main thread, between any two of its instructions."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_ending)

    def _begin_ending(self) -> None:
        if self._service.gate.is_draining:
            self.should_exit = True
            self._service.stop()
            return
        self._service.gate.is_draining = True
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        gate, seconds = self._service.gate, self._service.config.drain_s
        log.warning("shutting down: %d sequences have %g s left", gate.num_inside, seconds)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while gate.num_inside and loop.time() < end_s and not self.should_exit:
            await asyncio.sleep(_POLL_S)
        self._service.stop()  # what is left ends with the text that it has
        self.should_exit = True


def serve(llm: "LLM", config: ServeConfig, *, host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
        llm: loaded.
        config: how to behave.
        host: address to listen at.
        port: 0 takes a free one; the log says which.

    Raises:
        OSError: the address is in use, or not ours.
    """
    export_traces()
    service = Service(llm, config)
    listener = socket.create_server((host, port), family=_family(host), backlog=1024, reuse_port=False)
    with listener:
        address = listener.getsockname()
        print(f"jaxkv: {service.name} at http://{host}:{address[1]}", flush=True)
        settings = uvicorn.Config(
            make_app(service), log_config=None, access_log=False, timeout_graceful_shutdown=5, timeout_keep_alive=60
        )
        DrainingServer(settings, service).run(sockets=[listener])


def _family(host: str) -> int:
    return socket.getaddrinfo(host, None)[0][0]
