"""The client's core without I/O: bytes and the time are arguments."""

from __future__ import annotations

import threading
from typing import Any, Final

from penstock.client.batcher import Batcher
from penstock.client.feed import Feed
from penstock.client.lane import SealedBatch
from penstock.client.outgoing import Prepared
from penstock.client.partitioner import Layout
from penstock.client.protocol import Answer, ClientConnection, PendingRequest
from penstock.errors import (
    PenstockError,
)
from penstock.model.batch import Batch, Compression, encode
from penstock.wire.binary import (
    SCRATCH_BYTES,
    FrameReader,
    Messages,
    Type,
    json_frame,
    messages_frame,
    read_json,
)

HELLO: Final = {"server_id": "s", "version": "1", "node_id": "n", "payload_bytes_max": 1000, "heartbeat_s": 10}


def nothing() -> None:
    pass


class Wire:
    """A connection, and the broker's end of it."""

    def __init__(self, *, greeted: bool = True, **credentials: str) -> None:
        self.connection = ClientConnection(bytearray(SCRATCH_BYTES), credentials, now=0.0)
        self.now = 0.0
        self._reader = FrameReader(bytearray(SCRATCH_BYTES))
        if greeted:
            self.sent()
            self.receive(json_frame(Type.RESULT, 1, HELLO))

    def receive(self, data: bytes) -> None:
        buffer = self.connection.buffer()
        buffer[: len(data)] = data
        self.connection.filled(len(data), self.now)

    def sent(self) -> list[tuple[int, int, bytes]]:
        return [
            (each.type, each.id, bytes(each.payload)) for each in self._reader.feed(b"".join(self.connection.take()))
        ]

    def ask(self, *, is_repeatable: bool = False) -> tuple[int, list[Answer]]:
        """The number of a new request, and where its answer will be."""
        answers: list[Answer] = []
        request = PendingRequest(
            lambda number: json_frame(Type.CALL, number, {}), answers.append, is_repeatable=is_repeatable
        )
        self.connection.request(request)
        return self.sent()[-1][1], answers

    def open(self, feed: Feed, *positions: list[int]) -> int:
        """A subscription that the broker has agreed to; its number there."""
        self.connection.open(feed, lambda _: None)
        _, number, payload = self.sent()[-1]
        self.receive(json_frame(Type.RESULT, number, {"positions": list(positions), "generation": 7}))
        subscription: int = read_json(payload)["subscription"]
        return subscription


def delivered(subscription: int, *values: bytes, offset: int = 0, partition: int = 0, **fields: Any) -> bytes:
    batch = encode(values, timestamp=1, **fields)
    batch.stamp(offset, append_time=0)
    return messages_frame(subscription, Messages(5, partition, 7, b"t", {}, batch.data))


def stored(*values: bytes, offset: int = 0, **fields: Any) -> Batch:
    batch = encode(values, timestamp=1_700_000_000_123_456, **fields)
    batch.stamp(offset, append_time=0)
    return batch


class Bench:
    """A batcher, and the time."""

    def __init__(self, *, partitions: int = 1, timeout: float = 30.0, **options: Any) -> None:
        self.now = 100.0
        self.woken = 0
        ids = iter(range(1, 1_000_000))
        given: dict[str, Any] = {
            "batch_bytes": 1000,
            "linger": 0.005,
            "buffer_bytes": 100_000,
            "compression": Compression.NONE,
            "draw": lambda: next(ids),
        }
        self.batcher = Batcher(
            **given | options,
            timeout=timeout,
            now_us=lambda: 1,
            lock=threading.Lock(),
            wake=self._wake,
        )
        self.batcher.learn(Layout(b"t", 5, partitions))

    def add(self, *values: bytes, subject: str = "t", key: bytes | None = None, **fields: Any) -> None:
        for value in values:
            if key is None and not fields:
                assert self.batcher.add(subject, value)
            else:
                assert self.batcher.add_prepared(Prepared(subject, value, key, **fields))

    def pump(self, after: float = 0.0, *, is_connected: bool = True) -> list[SealedBatch]:
        self.now += after
        return self.batcher.pump(self.now, is_connected=is_connected)

    def seal(self, *values: bytes, **options: Any) -> SealedBatch:
        """A batch of its own, and sent."""
        self.add(*values, **options)
        self.batcher.mark()
        return self.pump()[-1]

    def answer(self, sealed: SealedBatch, error: PenstockError | None = None) -> None:
        self.batcher.answered(sealed, error, self.now)

    def _wake(self) -> None:
        self.woken += 1
