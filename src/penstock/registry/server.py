"""The registry's HTTP port.

/registry/topology?nodeId=    what one node is told
/registry/nodes               all nodes, and where they are
/health                       200, and what is wrong with the file if anything is

What cannot be answered is {"code", "text"}, as everywhere.
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
from penstock.registry.watched import Watched
from penstock.web import WebPort

# A change is taken when it was seen twice.
LOOK_S: Final = 0.5
# A client that sends no request, or does not read its answer, is closed.
IDLE_S: Final = 30.0
_STATUS: Final = {BadRequest.code: 400, BadTopology.code: 400, UnknownNode.code: 404}
_PATHS: Final = "/registry/topology, /registry/nodes and /health"


async def serve(
    app: Starlette,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[int], None],
    watched: Watched | None = None,
) -> None:
    """Answer until `stop`. `ready` is told the port; changes of a file that is `watched` are taken."""
    http = WebPort(app, host, port, idle_s=IDLE_S)
    async with asyncio.TaskGroup() as tasks:
        web = tasks.create_task(http.run())
        watcher = None if watched is None else tasks.create_task(_watch(watched))
        ready(http.port)
        await stop.wait()
        if watcher is not None:
            watcher.cancel()
        http.stop()
        await web


async def _watch(watched: Watched) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(watched.look)


def app(watched: Watched) -> Starlette:
    async def topology(request: Request) -> JSONResponse:
        node_id = request.query_params.get("nodeId")
        if not node_id:
            raise BadRequest("say which node: /registry/topology?nodeId=…")
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
    """What Starlette itself refuses: another path, another method."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        told = {"code": BadRequest.code, "text": f"{error.detail}: there is GET {paths}"}
        return JSONResponse(told, status_code=error.status_code, headers=error.headers)

    return refused
