"""The clients of a Python worker: one per broker, kept for the life of the process.

Spark reuses its workers, so a task finds the connection of an earlier one. After a fork a client connects again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import NoBroker, TimedOut

if TYPE_CHECKING:
    from penstock.client.sync import Client

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
) -> Client:
    """Return a connected client of `servers`, "host:port" or several separated by commas.

    Retry a broker that does not answer for `timeout_s`: it may be restarting.
    """
    key = _ClientKey(servers, timeout_s, user, password, token)
    found = _clients.get(key)
    if found is None:
        # Processes of Spark that only plan have no client, and importing it takes a fifth of a second.
        from penstock.client.sync import Client

        made = Client(_split(servers), name="spark", user=user, password=password, token=token, timeout=timeout_s)
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
