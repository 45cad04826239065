"""Parse addresses, and open sockets that listen on them: `127.0.0.1:4222`, `[::1]:4222`, `localhost`,
`nats://user:password@host:4222`, `tls://host:4222`."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final
from urllib.parse import unquote

PORT_MAX: Final = 65535
# The backlog of connections that are not accepted yet.
BACKLOG: Final = 4096
# Attempts to find a port that is free on all hosts.
_TRIES: Final = 20
# Errors for an address that the machine does not have.
_MISSING: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Schemes of a broker's URL.
_SCHEMES: Final = ("nats://", "tls://")
# All addresses of the machine. `::` includes IPv4, as in most servers.
_ANY: Final = "0.0.0.0"
_ANY_6: Final = "::"


class _InUse(OSError):
    pass


def split(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `[::1]`, `[::1]:port`, `::1`, or a URL, `nats://` or `tls://`. Raise
    ValueError for anything else."""
    text = _without_login(text)[1]
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        is_valid = bool(bracket) and is_ip(host) and (not port or port.startswith(":"))
        port = port.removeprefix(":") if port != ":" else "-"
    elif text.count(":") > 1:
        host, port, is_valid = text, "", is_ip(text)
    else:
        host, colon, port = text.partition(":")
        port = port if port or not colon else "-"
        is_valid = bool(host) and not any(each.isspace() or each in "[]/@," for each in host)
    if not is_valid or (port and not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX)):
        raise ValueError(
            f"invalid address {text!r}: it must be host:port, such as 127.0.0.1:{default_port} or [::1]:{default_port}"
        )
    return host, int(port) if port else default_port


def uses_tls(text: str) -> bool:
    """Return whether a broker's URL asks for TLS: `tls://host:port`."""
    return text.strip().lower().startswith("tls://")


def login(text: str) -> dict[str, str]:
    """Return the credentials in a URL, `nats://user:password@host` or `nats://token@host`, by name."""
    found, _ = _without_login(text)
    if not found:
        return {}
    user, colon, password = found.partition(":")
    return {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}


def _without_login(text: str) -> tuple[str, str]:
    """Return the credentials of an address, and the rest, which may be shown."""
    text = text.strip()
    scheme = next((each for each in _SCHEMES if text.lower().startswith(each)), None)
    if scheme is None:
        return "", text
    found, _, rest = text[len(scheme) :].rpartition("@")
    return found, rest.removesuffix("/")


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """Return a host without the brackets that an IPv6 address may have."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def listed(text: str | None) -> list[str]:
    """Split a comma-separated list."""
    return [part for part in (each.strip() for each in (text or "").split(",")) if part]


def hosts(text: str) -> list[str]:
    """Return the hosts of a comma-separated list."""
    return [bare(host) for host in listed(text)]


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a port on this host."""
    host = bare(host).removesuffix(".").lower()
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def bind(names: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets that are bound to one port on all addresses of these hosts, and do not accept yet.

    If one fails, none stays open, and the OSError says what to do. Port 0: a port that is free on all of them.
    """
    for _ in range(_TRIES if port == 0 else 1):
        with ExitStack() as opened:
            try:
                sockets = [opened.enter_context(each) for each in _bind_all(names, port)]
            except _InUse:
                if port == 0:
                    continue
                raise
            opened.pop_all()
            return sockets
    raise OSError(f"found no port that is free on all of {', '.join(names)}: choose one")


def _bind_all(names: Sequence[str], port: int) -> Iterator[socket.socket]:
    bound: set[str] = set()
    for name in _expand(names):
        missing: OSError | None = None
        is_bound = False
        for family, address in _resolve(name):
            if address[0] in bound or (family == socket.AF_INET and _ANY in bound):
                is_bound = True
                continue
            try:
                opened = _listen(family, (address[0], port, *address[2:]))
            except OSError as error:
                # A name may resolve to addresses that this machine lacks: ::1 without IPv6.
                if error.errno not in _MISSING or is_ip(name):
                    raise _explained(error, name, address[0], port) from None
                missing = _explained(error, name, address[0], port)
                continue
            port = opened.getsockname()[1]
            bound.add(address[0])
            is_bound = True
            yield opened
        if missing is not None and not is_bound:
            raise missing


def _expand(names: Iterable[str]) -> list[str]:
    """Drop hosts that are included in another: a socket cannot listen on an address and on all addresses."""
    every = list(dict.fromkeys(names))
    if _ANY_6 in every:
        return [_ANY_6, _ANY]
    if _ANY in every:
        return [_ANY, *(name for name in every if name != _ANY)]
    return every


def _resolve(name: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            f"unknown host {name!r} ({reason}): use an address, or a name that this machine can resolve"
        ) from None
    return [(family, address) for family, _, _, _, address in found]


def _listen(family: socket.AddressFamily, address: Any) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has its own socket, so that its clients have IPv4 addresses.
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setblocking(False)
        opened.bind(address)
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def _explained(error: OSError, name: str, address: str, port: int) -> OSError:
    where = join(address, port) if name == address else f"{join(address, port)} ({name})"
    number = error.errno or 0
    match number:
        case errno.EADDRINUSE:
            advice = "another process uses the port: stop it, or choose another port (0: any free one)"
        case errno.EADDRNOTAVAIL:
            advice = "this machine does not have the address: use one of its own, 127.0.0.1, or 0.0.0.0 for all"
        case errno.EAFNOSUPPORT:
            advice = "this machine has no IPv6: use an IPv4 address"
        case errno.EACCES:
            advice = "permission denied for this user: choose a port from 1024 on"
        case _:
            advice = "choose another host or port"
    kind = _InUse if number == errno.EADDRINUSE else OSError
    return kind(f"cannot listen on {where}: {os.strerror(number)}: {advice}")
