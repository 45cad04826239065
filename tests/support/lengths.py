"""Clients of the prefixed door that build and read their frames by hand: nothing here is shared with the server."""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

from tests.support.server import Raw, Serve

DATA, ACK, HEARTBEAT, CREATE_TOPIC, CREATE_SUBSCRIPTION, DELETE_SUBSCRIPTION, SUBSCRIBE, UNSUBSCRIBE, PUBLISH = range(
    1, 10
)
# When every message is made that says nothing else.
MADE_MS: Final = 1_700_000_000_123


class Got(NamedTuple):
    kind: int
    sequence: int
    timestamp_ms: int
    properties: dict[str, str]
    body: bytes


class Qb(Raw):
    """The Python broker's protocol: `[total][kind][sequence][timestamp][length][properties][length][body]`.

    `counts_itself` and `lengths_first`: the ways in which its clients differ.
    """

    def __init__(self, server: Serve, *, counts_itself: bool = True, lengths_first: bool = False) -> None:
        super().__init__(server.ports["quiet"])
        self._counts_itself = counts_itself
        self._lengths_first = lengths_first
        self._last = 0
        self._later: list[Got] = []

    def frame(self, kind: int, sequence: int, body: bytes = b"", /, **properties: object) -> bytes:
        made_ms = properties.pop("made_ms", MADE_MS)
        block = b"".join(f"{name}={value}".encode() + b"\0" for name, value in properties.items())
        total = 32 + len(block) + len(body) - (0 if self._counts_itself else 4)
        head = struct.pack(">IIQQI", total, kind, sequence, made_ms, len(block))
        length = struct.pack(">I", len(body))
        return head + (length + block if self._lengths_first else block + length) + body

    def begin(self, kind: int, body: bytes = b"", /, **properties: object) -> int:
        """Send a request; its sequence."""
        self._last += 1
        self.send(self.frame(kind, self._last, body, **properties))
        return self._last

    def ask(self, kind: int, body: bytes = b"", /, **properties: object) -> dict[str, str]:  # type: ignore[override]
        """The properties of the ACK, without those that every message has."""
        return self.answer(self.begin(kind, body, **properties))

    def answer(self, sequence: int) -> dict[str, str]:
        got = self._await(lambda got: got.kind == ACK and got.sequence == sequence)
        assert got.properties.pop("version") == "1.0"
        assert float(got.properties.pop("created_at")) > 1e9
        return got.properties

    def done(self, kind: int, body: bytes = b"", /, **properties: object) -> dict[str, str]:
        answer = self.ask(kind, body, **properties)
        assert answer.pop("status") == "success", answer
        return answer

    def refused(self, kind: int, body: bytes = b"", /, **properties: object) -> str:
        answer = self.ask(kind, body, **properties)
        assert answer.pop("status") == "error", answer
        assert list(answer) == ["error"], answer
        return answer["error"]

    def publish(self, topic: str, body: bytes, **properties: object) -> int:
        """Its offset."""
        return int(self.done(PUBLISH, body, topic=topic, client_id="tests", **properties)["offset"])

    def subscribe(self, subscription: str, subscriber: str = "ann", **properties: object) -> None:
        self.done(SUBSCRIBE, subscription_id=subscription, subscriber_id=subscriber, **properties)

    def create(self, topic: str, *subscriptions: str, partitions: int = 1) -> None:
        self.done(CREATE_TOPIC, topic=topic, partitions=partitions)
        for subscription in subscriptions:
            self.done(CREATE_SUBSCRIPTION, subscription_id=subscription, topic=topic)

    def data(self, count: int) -> list[Got]:
        """So many messages."""
        return [self._await(lambda got: got.kind == DATA) for _ in range(count)]

    def bodies(self, count: int) -> list[bytes]:
        return [got.body for got in self.data(count)]

    def ack(self, got: Got) -> None:
        names = ("subscription_id", "topic", "partition")
        self.send(self.frame(ACK, got.sequence, **{name: got.properties[name] for name in names}))

    def heartbeat(self, sequence: int = 77, /, **properties: object) -> Got:
        self.send(self.frame(HEARTBEAT, sequence, **properties))
        return self._await(lambda got: got.sequence == sequence)

    def sync(self) -> list[Got]:
        """All that the server had to say before it answers; what came and nobody asked for."""
        self.heartbeat()
        later, self._later = self._later, []
        return later

    def next(self) -> Got:
        """The next message, whatever it is."""
        if self._later:
            return self._later.pop(0)
        (total,) = struct.unpack(">I", self.read(4))
        data = self.read(total - 4 if self._counts_itself else total)
        kind, sequence, timestamp_ms, length = struct.unpack(">IQQI", data[:24])
        at = 28 if self._lengths_first else 24
        block = data[at : at + length]
        (size,) = struct.unpack(">I", data[24:28] if self._lengths_first else data[24 + length : 28 + length])
        body = data[28 + length :]
        assert len(body) == size, "lengths that do not agree"
        items = [item.partition("=") for item in block.decode().split("\0")[:-1]]
        return Got(kind, sequence, timestamp_ms, {name: value for name, _, value in items}, body)

    def _await(self, wanted: Any) -> Got:
        passed = []
        while not wanted(got := self.next()):
            passed.append(got)
        self._later = passed + self._later
        return got


class Cursus(Raw):
    """Cursus' commands: `[length][command]`, answered by text."""

    def __init__(self, server: Serve) -> None:
        super().__init__(server.ports["quiet"])

    def command(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.send(struct.pack(">I", len(data)) + data)

    def frame(self) -> bytes:
        (length,) = struct.unpack(">I", self.read(4))
        return self.read(length)

    def ask(self, command: str | bytes) -> str:
        self.command(command)
        return self.frame().decode()

    def answer(self, command: str) -> str:
        """As `ask`, of a member, which is sent signs of life too."""
        self.command(command)
        while not (frame := self.frame()):
            pass
        return frame.decode()

    def status(self, topic: str, group: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.answer(f"GROUP_STATUS group={group} topic={topic}"))
        return found

    def json(self, command: str | bytes) -> dict[str, Any]:
        answer = self.ask(command)
        assert not answer.startswith("ERROR"), answer
        found: dict[str, Any] = json.loads(answer)
        return found

    def create(self, topic: str, partitions: int = 1) -> None:
        assert self.ask(f"CREATE {topic} {partitions}") == f"✅ Topic '{topic}' now has {partitions} partitions"

    def publish(self, topic: str, value: bytes) -> None:
        assert self.ask(f"PUBLISH {topic} ".encode() + value) == f"📤 Published to '{topic}'"

    def subscribe(self, topic: str, *words: object) -> None:
        command = " ".join(map(str, ("SUBSCRIBE", topic, *words)))
        assert self.ask(command) == f"✅ Subscribed to '{topic}'"

    def messages(self, count: int) -> list[bytes]:
        """So many, and signs of life between them."""
        found: list[bytes] = []
        while len(found) < count:
            if frame := self.frame():
                found.append(frame)
        return found

    def all_frames(self) -> list[bytes]:
        """What comes until the connection ends."""
        found = []
        while True:
            try:
                found.append(self.frame())
            except AssertionError:
                return found

    def batch(self, command: str | None = None) -> list[tuple[int, bytes, bytes]]:
        """Offset, key and value of each message in the next batch."""
        if command is not None:
            self.command(command)
        while not (data := self.frame()):
            pass
        return records(data)


def consume(server: Serve, topic: str, partition: int = 0, offset: int = 0) -> list[bytes]:
    """A partition's messages: it takes a connection of its own."""
    with Cursus(server) as client:
        client.command(f"CONSUME {topic} {partition} {offset}")
        return client.all_frames()


def records(data: bytes) -> list[tuple[int, bytes, bytes]]:
    assert data[:2] == b"\xba\x7c", data
    (length,) = struct.unpack(">H", data[2:4])
    at = 4 + length + 4
    at += 1 + data[at]
    _, _, _, count = struct.unpack(">?QQi", data[at : at + 21])
    at += 21
    found = []
    for _ in range(count):
        offset, _, length = struct.unpack(">QQH", data[at : at + 18])
        at += 18 + length
        (length,) = struct.unpack(">H", data[at : at + 2])
        key = data[at + 2 : at + 2 + length]
        at += 2 + length
        _, length = struct.unpack(">qI", data[at : at + 12])
        found.append((offset, key, data[at + 12 : at + 12 + length]))
        at += 12 + length
    assert at == len(data), "bytes behind the last message"
    return found


def records_frame(topic: str, *values: bytes, partition: int = 0, acks: str = "1", idempotent: bool = False) -> bytes:
    """A producer's batch, numbered from 1 on."""
    name, word = topic.encode(), acks.encode()
    head = b"\xba\x7c" + struct.pack(">H", len(name)) + name + struct.pack(">iB", partition, len(word)) + word
    head += struct.pack(">?QQi", idempotent, 1, len(values), len(values))
    parts = [
        struct.pack(">QQH", 0, number, 1) + b"p" + struct.pack(">H", 0) + struct.pack(">qI", 3, len(value)) + value
        for number, value in enumerate(values, 1)
    ]
    return head + b"".join(parts)
