"""The handshake of NATS over WebSocket, on the HTTP port."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.address import listed
from penstock.doors.shared import Shared
from penstock.doors.websocket import WebSocket
from penstock.errors import BadRequest, Closed, Forbidden, PenstockError
from penstock.web.endpoints import refusal
from penstock.web.guard import is_same_origin
from penstock.web.port import UPGRADE
from penstock.wire import websocket

# The path that NATS clients ask for.
PATH: Final = "/"


def route(shared: Shared, origins: str | None) -> Route:
    """Return the route of the handshake. `origins`: the sites whose web pages may connect."""

    async def answer(request: Request) -> Response:
        try:
            return _upgrade(shared, origins, request)
        except PenstockError as error:
            refused = refusal(error)
            if isinstance(error, BadRequest):
                refused.headers["Sec-WebSocket-Version"] = websocket.VERSION
            return refused

    return Route(PATH, answer, methods=["GET"])


class _Upgrade(Response):
    """Hand the connection over instead of answering."""

    def __init__(self, protocol: WebSocket, headers: dict[str, str]) -> None:
        super().__init__()
        self._protocol = protocol
        self._answer = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await scope["extensions"][UPGRADE](self._answer, self._protocol)


def _upgrade(shared: Shared, origins: str | None, request: Request) -> Response:
    headers = request.headers
    _check_origin(headers.get("origin"), headers.get("host", ""), origins)
    if shared.sessions.is_leaving:
        raise Closed("the server takes no more connections: it is stopping")
    key = websocket.accept(headers.get("sec-websocket-key", ""))
    version = headers.get("sec-websocket-version", "")
    is_asked = request.method == "GET" and UPGRADE in request.scope.get("extensions", {})
    if not is_asked or key is None or version != websocket.VERSION:
        raise BadRequest(
            f"not a WebSocket handshake: {PATH} takes NATS clients over WebSocket, version {websocket.VERSION}; "
            "/openapi.json lists the rest"
        )
    deflates = websocket.offers_deflate(headers.get("sec-websocket-extensions", ""))
    answer = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": key}
    if deflates:
        answer["Sec-WebSocket-Extensions"] = websocket.DEFLATE
    return _Upgrade(WebSocket(shared, deflates=deflates), answer)


def _check_origin(origin: str | None, host: str, allowed: str | None) -> None:
    """Raise Forbidden if the request comes from a web page of another site. Only browsers send an origin."""
    origins = listed((allowed or "").lower())
    if origin is None or is_same_origin(origin, host) or "*" in origins or origin.lower() in origins:
        return
    raise Forbidden(f"web pages of {origin[:100]!r} must not connect: add it to server.websocket_origins")
