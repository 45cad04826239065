"""The registry's HTTP port.

/registry/topology?nodeId=    the topology of one node
/registry/nodes               all nodes, with their URLs
/health                       200, and the problems of the file if there are any

Errors are {"code", "text"}, as everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock.errors import BadRequest, BadTopology, PenstockError, UnknownNode
from penstock.registry.watched_file import WatchedFile
from penstock.tls.port import ServerTls
from penstock.web.port import WebPort

# A change is used after two reads gave the same content.
POLL_S: Final = 0.5
# Close connections that send no request, or do not read the reply, for this long.
IDLE_S: Final = 30.0
_STATUS: Final = {BadRequest.code: 400, BadTopology.code: 400, UnknownNode.code: 404}
_PATHS: Final = "/registry/topology, /registry/nodes and /health"


async def serve(
    app: Starlette,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[int], None],
    watched: WatchedFile | None = None,
    tls: ServerTls | None = None,
) -> None:
    """Serve until `stop`, and check the `watched` file and the certificate for changes. Call `ready` with the port."""
    http = WebPort(app, host, port, idle_s=IDLE_S, tls=tls)
    async with asyncio.TaskGroup() as tasks:
        web = tasks.create_task(http.run())
        watchers = [] if watched is None else [tasks.create_task(_watch(watched))]
        if tls is not None:
            watchers.append(tasks.create_task(tls.watch()))
        ready(http.port)
        await stop.wait()
        for watcher in watchers:
            watcher.cancel()
        http.stop()
        await web


async def _watch(watched: WatchedFile) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        await asyncio.to_thread(watched.look)


def app(watched: WatchedFile) -> Starlette:
    async def topology(request: Request) -> JSONResponse:
        node_id = request.query_params.get("nodeId")
        if not node_id:
            raise BadRequest("nodeId is missing: /registry/topology?nodeId=…")
        tree, version = watched.served
        return JSONResponse(tree.document(node_id, version))

    async def nodes(_: Request) -> JSONResponse:
        tree, version = watched.served
        return JSONResponse({"topologyVersion": version, "nodes": tree.documents(version)})

    async def health(_: Request) -> JSONResponse:
        tree, version = watched.served
        found: dict[str, Any] = {"status": "ok", "topologyVersion": version, "nodes": len(tree.nodes)}
        return JSONResponse(found | {"problems": list(watched.problems)})

    return Starlette(
        routes=[
            Route("/registry/topology", topology),
            Route("/registry/nodes", nodes),
            Route("/health", health),
        ],
        exception_handlers={PenstockError: refuse, HTTPException: refuse_route(_PATHS)},
    )


async def refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError)
    return JSONResponse({"code": error.code, "text": str(error)}, status_code=_STATUS[error.code])


def refuse_route(paths: str) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    """Return the handler of Starlette's own errors: unknown path or method."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        document = {"code": BadRequest.code, "text": f"{error.detail}: available are GET {paths}"}
        return JSONResponse(document, status_code=error.status_code, headers=error.headers)

    return refused
