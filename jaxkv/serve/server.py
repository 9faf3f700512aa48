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


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, before the model is loaded; clients can connect once `serve` runs.

    Args:
        host: name or address to listen at.
        port: 0 takes a free one.

    Raises:
        OSError: the address is in use, or not ours.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror}") from error
    return listener


def serve(llm: "LLM", config: ServeConfig, listener: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
        llm: loaded.
        config: how to behave.
        listener: from `bind`.
    """
    export_traces()
    service = Service(llm, config)
    app = make_app(service)
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, backlog=1024, timeout_graceful_shutdown=5, timeout_keep_alive=60
    )
    host, port = listener.getsockname()[:2]
    listener.listen(1024)
    print(f"jaxkv: {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    DrainingServer(settings, service).run(sockets=[listener])
