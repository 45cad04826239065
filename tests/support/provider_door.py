"""The Provider's protocol, as a client sees it that knows only its document."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.support.server import Raw, Serve

DATA, ACK, SUBSCRIBE, COMMIT_OFFSET, RESET, READY, DISCONNECT, HEARTBEAT = range(1, 9)
BATCH_HEADER, BATCH_ACK, RESET_ACK, READY_ACK = range(9, 13)


class Got(NamedTuple):
    type: int
    id: int
    payload: bytes


class Client(Raw):
    """It builds and reads its frames by hand: nothing here is shared with the server."""

    def __init__(self, server: Serve) -> None:
        super().__init__(server.ports["quiet"])

    def write(self, kind: int, number: int, payload: bytes = b"") -> None:
        self.send(bytes([kind]) + number.to_bytes(8, "big") + len(payload).to_bytes(4, "big") + payload)

    def write_json(self, kind: int, number: int, **fields: Any) -> None:
        self.write(kind, number, json.dumps(fields).encode())

    def frame(self) -> Got:
        head = self.read(13)
        return Got(head[0], int.from_bytes(head[1:9], "big"), self.read(int.from_bytes(head[9:], "big")))

    def publish(self, topic: str, data: Any, number: int = 1, **fields: Any) -> None:
        self.write_json(DATA, number, topic=topic, data=data, **fields)
        assert self.frame() == (ACK, number, b"")

    def subscribe(self, topic: str, group: str = "viewers", number: int = 2) -> None:
        self.write_json(SUBSCRIBE, number, topic=topic, group=group)
        assert self.frame() == (ACK, number, b"")

    def data(self) -> tuple[int, list[dict[str, Any]]]:
        """The id and the records of the next DATA."""
        frame = self.frame()
        assert frame.type == DATA, frame
        records: list[dict[str, Any]] = json.loads(frame.payload)
        return frame.id, records

    def records(self, count: int) -> list[dict[str, Any]]:
        """So many, all acknowledged."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            number, records = self.data()
            self.write(ACK, number)
            found += records
        return found

    def goodbye(self) -> dict[str, Any]:
        """What it is told when it is disconnected."""
        while (frame := self.frame()).type != DISCONNECT:
            pass
        assert self.rest() == ""
        told: dict[str, Any] = json.loads(frame.payload)
        return told
