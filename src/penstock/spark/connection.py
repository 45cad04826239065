"""The client of a Python worker: one in each process for each broker, kept for as long as the process lives.

Spark uses its workers again, so a task finds the connection that an earlier one made. After a fork the client makes a
connection of its own.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from penstock.client.sync import Client
from penstock.errors import NoBroker, TimedOut

SERVERS: Final = "127.0.0.1:4222"
TIMEOUT_S: Final = 10.0

# Between two tries to reach a broker that is not there (yet).
_PAUSE_S: Final = 0.1


def client(
    servers: str = SERVERS,
    timeout_s: float = TIMEOUT_S,
    *,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
) -> Client:
    """A connected client of `servers` ("host:port", several with commas between them).

    A broker that does not answer is waited for, `timeout_s` at the most: it may be on its way up again.
    """
    key = _Key(servers, timeout_s, user, password, token)
    found = _clients.get(key)
    if found is None:
        made = Client(_split(servers), name="spark", user=user, password=password, token=token, timeout=timeout_s)
        # Of two threads one wins; what the other made has no connection yet, and is just dropped.
        found = _clients.setdefault(key, made)
    _connect(found, timeout_s)
    return found


def close() -> None:
    """Close all clients of this process."""
    while _clients:
        _clients.popitem()[1].close()


class _Key(NamedTuple):
    servers: str
    timeout_s: float
    user: str | None
    password: str | None
    token: str | None


_clients: Final[dict[_Key, Client]] = {}


def _split(servers: str) -> list[str]:
    found = [server.strip() for server in servers.split(",") if server.strip()]
    if not found:
        raise ValueError(f"servers={servers!r} names no server: it must be host:port, such as {SERVERS}")
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
