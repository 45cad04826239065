"""The HTTP port: health, metrics and the admin API, in the loop of the broker."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn

from penstock.server import admin, monitor, openapi, pipe_http, routes, trial
from penstock.server.metrics import Metrics, pipe_metrics
from penstock.server.routes import Endpoint

if TYPE_CHECKING:
    from penstock.server.server import Server


class HttpPort:
    """uvicorn in the loop of the broker. Signals are the server's affair, not its."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            routes.application(server, endpoints(server), pipe_http.routes(server)),
            log_level="warning",
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=server.config.server.connections_max,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    async def run(self) -> None:
        await self._uvicorn.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._uvicorn.should_exit = True


def endpoints(server: Server) -> tuple[Endpoint, ...]:
    """All there are: what describes them is one of them."""
    metrics = Metrics(server, [lambda: pipe_metrics(server.pipes.status())])
    trials = trial.ENDPOINTS if server.config.server.test_endpoints else ()
    every = (*monitor.endpoints(metrics), *admin.ENDPOINTS, *trials)
    return openapi.with_description(every, server.version)
