"""Helpers for tests of the binary door of a real server."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, Final

from penstock.wire.binary import Type
from tests.support import web
from tests.support.frames import Frames
from tests.support.server import Serve

MIB: Final = 1 << 20


def http(server: Serve, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/{path}", timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def counted(server: Serve, name: str, **headers: str) -> int:
    found: int = web.get(server, "/varz", **headers).json["since_start"][name]
    return found


def codes(receipts: list[Any]) -> list[str | None]:
    return [receipt["code"] if isinstance(receipt, dict) else None for receipt in receipts]


def stored_values(client: Frames, name: str) -> list[bytes]:
    """All values of a topic, in the order of its partitions."""
    told = client.call("topic", name=name)
    values: list[bytes] = []
    for position in told["positions"]:
        offset = position["start"]
        # Behind the last batch there may be offsets that were never given out.
        while (fetched := client.fetch(told["id"], offset, partition=position["partition"])).batches:
            values += fetched.values
            offset = fetched.batches[-1].end
    return values


PROVIDERS: Final = (Type.DATA, Type.ACK, Type.SUBSCRIBE, Type.COMMIT_OFFSET, Type.RESET, Type.READY)
OURS: Final = (Type.PUBLISH, Type.APPEND, Type.FETCH, Type.OPEN, Type.END, Type.CREDIT, Type.SETTLE, Type.CALL)


def identities(*names: str) -> list[bytes]:
    return [f"Msg-ID: {name}\r\n".encode() for name in names]
