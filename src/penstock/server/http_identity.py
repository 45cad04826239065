"""Who makes an HTTP request: checked by the port before an endpoint sees the request."""

from __future__ import annotations

from starlette.requests import Request

from penstock.doors.counters import Counters
from penstock.doors.journal import Journal
from penstock.errors import PenstockError, Unauthorized
from penstock.security.identity import Identity, authorize
from penstock.security.permissions import Action
from penstock.security.security import Login, Security
from penstock.web.port import certificate


def identity_of(request: Request) -> Identity | None:
    """Return who makes a request, if credentials are required."""
    found: Identity | None = getattr(request.state, "identity", None)
    return found


class Authorizer:
    def __init__(self, security: Security, counters: Counters, journal: Journal) -> None:
        self._security = security
        self._counters = counters
        self._journal = journal

    async def authorize(self, request: Request, action: str) -> None:
        """Raise Unauthorized or PermissionDenied unless the client may do this."""
        if not self._security.is_required:
            return
        address = "" if request.client is None else request.client.host
        try:
            identity = await self._login(request, address)
        except PenstockError:
            self._counters.unauthorized += 1
            port = "" if request.client is None else f":{request.client.port}"
            self._journal.failed_login("HTTP", f"{address}{port}")
            raise
        request.state.identity = identity
        authorize(identity, Action(action))

    async def _login(self, request: Request, address: str) -> Identity:
        shown = certificate(request)
        given = Login.from_header(request.headers.get("authorization", ""), () if shown is None else shown.names)
        if given.is_empty and not given.certificate:
            raise Unauthorized("credentials required: a user and a password (Basic), or a token (Bearer)")
        found = self._security.login(given, address=address, door="http")
        return found if isinstance(found, Identity) else await found
