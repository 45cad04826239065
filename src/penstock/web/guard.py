"""What a request must be before an application sees it.

- The Host header must name this machine. Otherwise a web page whose domain suddenly resolves to our address could read
  everything that its visitor's browser can reach (DNS rebinding).
- A request that changes something must not come from a page of another site.
- An unexpected exception in the application is answered with 500, and counted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import address
from penstock.errors import Forbidden, PenstockError

_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_SHOWN_CHARACTERS: Final = 100
# For browsers: nothing here is to be guessed at, framed, kept, or told to other sites.
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)

# Returns an error as the answers of an application show it.
Describe = Callable[[PenstockError], dict[str, object]]
# Called with a path and the unexpected exception of its handler.
Fault = Callable[[str, Exception], None]


class Guard:
    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], setting: str, describe: Describe, fault: Fault) -> None:
        """`hosts` are the names of this machine in the Host header; `setting` is the setting that adds one. Addresses
        and localhost are always allowed, since no page of another site has such a name. `*` allows all."""
        self._app = app
        self._hosts = frozenset(map(_bare, hosts))
        self._setting = setting
        self._describe = describe
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def sent(message: Message) -> None:
            nonlocal is_started
            is_started = True
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [header for header in _HEADERS if header[0] not in given]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await JSONResponse(self._describe(refusal), 403)(scope, receive, sent)
            else:
                await self._app(scope, receive, sent)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  a bug in one request must not end the others
            self._fault(repr(scope["path"][:_SHOWN_CHARACTERS]), error)
            if not is_started:
                await JSONResponse(self._describe(unexpected()), 500)(scope, receive, sent)

    def _refusal(self, scope: Scope) -> Forbidden | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Every browser sends one.
        host = headers.get(b"host", "localhost")
        if not self._knows(_bare(host)):
            shown = host[:_SHOWN_CHARACTERS]
            return Forbidden(f"unknown host {shown!r} in the Host header: add it to {self._setting}, or use an address")
        if scope["method"] not in _SAFE and not _is_own(headers, host):
            return Forbidden("cross-site request: web pages of other sites must not change anything here")
        return None

    def _knows(self, name: str) -> bool:
        return (
            name in self._hosts
            or "*" in self._hosts
            or name == "localhost"
            or name.endswith(".localhost")
            or address.is_ip(name)
        )


def unexpected() -> PenstockError:
    """Return the error that a client gets for an unexpected exception."""
    return PenstockError("internal error: see the server's log")


def local_names(host: str, more: str | None) -> list[str]:
    """Return the names of this machine for a `Guard`: its addresses, its host name, and a list with commas."""
    own = socket.gethostname()
    return [*address.hosts(host), own, own.partition(".")[0], *address.listed(more)]


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether an Origin header names the host of the request."""
    return origin.partition("://")[2].lower() == host.lower()


def _is_own(headers: dict[bytes, str], host: str) -> bool:
    """Return whether a request comes from no page, or from one of ours. Browsers say so, and pages cannot forge it."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or is_same_origin(origin, host)


def _bare(host: str) -> str:
    """Return a host without its port, brackets and final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.removesuffix(".")
