"""The HTTP port: whether the server is well, and what it has done.

/healthz    200 {"status": "ok"}, or 503 with the reason
/varz       the server's figures
/connz      a row for each connection
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from penstock.server.server import Server


class HttpPort:
    """uvicorn in the loop of the broker. Signals are the server's affair, not its."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            _app(server), log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    async def run(self) -> None:
        await self._uvicorn.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._uvicorn.should_exit = True


def _app(server: Server) -> Starlette:
    async def healthz(_: Request) -> JSONResponse:
        reason = server.ill()
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "error": reason}, status_code=503)

    async def varz(_: Request) -> JSONResponse:
        return JSONResponse(server.statistics())

    async def connz(_: Request) -> JSONResponse:
        rows = [session.statistics() for session in server.sessions]
        return JSONResponse({"num_connections": len(rows), "connections": rows})

    return Starlette(routes=[Route("/healthz", healthz), Route("/varz", varz), Route("/connz", connz)])
