"""The clients of a Python worker: one per broker, kept for the life of the process.

Spark reuses its workers, so a task finds the connection of an earlier one. After a fork a client connects again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import NoBroker, TimedOut
from penstock.tls.options import TlsOptions

if TYPE_CHECKING:
    from penstock.client.sync import Client

# Options that say who connects and how.
LOGIN: Final = ("user", "password", "token", "tlsCa", "tlsCert", "tlsKey")
SERVERS: Final = "127.0.0.1:4222"
TIMEOUT_S: Final = 10.0

# Between two attempts to reach a broker.
_PAUSE_S: Final = 0.1


def client(
    servers: str = SERVERS,
    timeout_s: float = TIMEOUT_S,
    *,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    tls: TlsOptions | None = None,
) -> Client:
    """Return a connected client of `servers`, "host:port" or several separated by commas.

    Retry a broker that does not answer for `timeout_s`: it may be restarting.
    """
    key = _ClientKey(servers, timeout_s, user, password, token, tls)
    found = _clients.get(key)
    if found is None:
        # Processes of Spark that only plan have no client, and importing it takes a fifth of a second.
        from penstock.client.sync import Client

        made = Client(
            _split(servers), name="spark", user=user, password=password, token=token, timeout=timeout_s, tls=tls
        )
        # If two threads race, one wins. The other's client has no connection yet and is dropped.
        found = _clients.setdefault(key, made)
    _connect(found, timeout_s)
    return found


def close() -> None:
    """Close all clients of this process."""
    while _clients:
        _clients.popitem()[1].close()


class _ClientKey(NamedTuple):
    servers: str
    timeout_s: float
    user: str | None
    password: str | None
    token: str | None
    tls: TlsOptions | None


def login(options: Mapping[str, str | float]) -> dict[str, Any]:
    """Return who connects and how, as the arguments of `client`, from the options of a source or a sink."""
    given = {name.lower(): str(value) for name, value in options.items()}
    found: dict[str, Any] = {name: given[name] for name in ("user", "password", "token") if name in given}
    tls = {name.removeprefix("tls"): value for name, value in given.items() if name in ("tlsca", "tlscert", "tlskey")}
    if tls:
        found["tls"] = TlsOptions(**tls)
    return found


_clients: Final[dict[_ClientKey, Client]] = {}


def _split(servers: str) -> list[str]:
    found = [server.strip() for server in servers.split(",") if server.strip()]
    if not found:
        raise ValueError(f"invalid servers {servers!r}: it must be host:port, such as {SERVERS}")
    return found


def _connect(found: Client, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return found.connect()
        except (NoBroker, TimedOut) as error:
            if time.monotonic() + _PAUSE_S > end:
                raise NoBroker(f"{error} (waited {timeout_s:g} s)") from error
            time.sleep(_PAUSE_S)
