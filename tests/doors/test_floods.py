"""Much at once: what is too large is refused with its limit, and what is long is done in parts, in order."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Final

import pytest

from penstock.doors.publishing import SLICE_MESSAGES
from penstock.model.batch import Compression, encode
from penstock.wire import binary, prefixed
from penstock.wire import cursus as wire_cursus
from penstock.wire.binary import Append, Type
from penstock.wire.cursus import Record
from tests.support.frames import Bare, Frames
from tests.support.lengths import CREATE_TOPIC, PUBLISH, Cursus, Qb, consume
from tests.support.server import Flux, Nats, Serve, hpub, pub
from tests.support.web import get

LIMIT: Final = 100_000
LONG: Final = 3 * SLICE_MESSAGES + 7

_names = (f"topic-{number}" for number in count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("floods")
    with Serve(directory, server_payload_bytes_max=LIMIT, topic_durability="flush") as server:
        yield server


@pytest.fixture
def topic(server: Serve) -> str:
    name = next(_names)
    with Frames(server) as client:
        client.call("create_topic", name=name)
    return name


# One message: its value, key and headers together.


def test_a_qb_message_counts_its_properties(server: Serve, topic: str) -> None:
    with Qb(server) as client:
        named = {"topic": topic, "client_id": "me"}
        told = client.refused(PUBLISH, b"x", **named, large="y" * LIMIT)
        assert f"{LIMIT} are allowed" in told
        assert f"{LIMIT} are allowed" in client.refused(CREATE_TOPIC, topic="z" * (LIMIT + 1))
        many = {f"p{number}": "" for number in range(2000)}
        assert "1024 are allowed" in client.refused(PUBLISH, b"x", **named, **many)
        assert client.publish(topic, b"x", fits="y" * (LIMIT - 100)) == 0


def test_a_record_counts_its_producer_and_its_key(server: Serve, topic: str) -> None:
    with Cursus(server) as client:
        record = Record(0, b"v" * (LIMIT // 2), b"", b"p" * (LIMIT // 2), 1, 1)
        told = client.ask(wire_cursus.batch(topic.encode(), 0, [record], "1", is_idempotent=True))
        assert f"{LIMIT} are allowed" in told
        record = Record(0, b"v" * (LIMIT // 2), b"k" * (LIMIT // 2 + 1))
        assert f"{LIMIT} are allowed" in client.ask(wire_cursus.batch(topic.encode(), 0, [record], "1"))
        key = "k" * (LIMIT // 2)
        command = f"PUBLISH topic={topic} key={key} producerId={key} message=x"
        assert f"{LIMIT} are allowed" in client.ask(command)
    assert consume(server, topic) == []


def test_producer_ids_are_limited_before_they_are_repeated_in_headers(server: Serve, topic: str) -> None:
    """28 KB that became a batch of 26 MB of headers."""

    def packet(size: int, count: int) -> bytes:
        records = [Record(0, b"v", b"", b"p" * size, 1, number) for number in range(1, count + 1)]
        return wire_cursus.batch(topic.encode(), 0, records, "1", is_idempotent=True)

    with Cursus(server) as client:
        client.send(prefixed.frame(gzip.compress(packet(65_535, 400))))
        assert "unpacks to more than" in client.frame().decode()
        client.send(prefixed.frame(packet(65_535, 200)))
        assert client.frame().decode() == "ERROR: a producer ID of 65535 bytes is too long: 256 are allowed"
        client.send(prefixed.frame(packet(256, 5000)))
        assert json.loads(client.frame())["status"] == "OK"
    assert len(consume(server, topic)) == 5000


def test_a_message_of_a_batch_counts_its_key_and_headers(server: Serve, topic: str) -> None:
    half = bytes(LIMIT // 2)
    lines = b"A: " + b"x" * (LIMIT // 2) + b"\r\n"
    with Frames(server) as client:
        found = client.call("topic", name=topic)
        for given in ({"keys": [half + b"x"]}, {"headers": [lines]}):
            batch = encode([half], timestamp=0, **given)  # type: ignore[arg-type]
            number = client.request(Type.APPEND, binary.append_frame(0, Append(found["id"], 0, 1), batch.data)[13:])
            assert f"{LIMIT} are allowed" in client.error_of(number)["text"]
    with Bare(server) as provider:
        record = {"topic": topic, "msg_key": "k" * (LIMIT // 2), "data": "v" * LIMIT}
        provider.send(binary.json_frame(Type.DATA, 1, record))
        assert f"{LIMIT} are allowed" in provider.rest()


def test_a_request_in_json_is_limited(server: Serve) -> None:
    with Frames(server) as client:
        told = client.error(Type.CALL, b'{"a":[' + b"0," * 70_000 + b"0]}")
        assert "more than 65536 values" in told["text"]
        client.send(binary.head(Type.CALL, 9, 3 << 20))
        assert "a frame of 3145728 bytes, 2097152 are allowed" in client.rest()


def test_a_command_is_limited(server: Serve, topic: str) -> None:
    with Cursus(server) as client:
        assert "65536 are allowed" in client.ask("CONSUME " + "a=b " * 20_000)
        offsets = ",".join(["P0:1"] * 257)
        assert "257 of them, 256 are allowed" in client.ask(f"BATCH_COMMIT {topic} g m 1 {offsets}")
        assert "65536 are allowed" in client.ask(f"PUBLISH topic={topic} key={'k' * 70_000} message=x")
        assert client.ask(f"PUBLISH {topic} " + "x" * 70_000).endswith(f"Published to '{topic}'")


# Packed.


@pytest.mark.parametrize("size", [2 << 20, 20 << 20])
def test_a_bomb_is_refused_and_the_connection_goes_on(server: Serve, topic: str, size: int) -> None:
    with Cursus(server) as client:
        # A batch that is all zeros from the number of its messages on.
        bomb = gzip.compress(wire_cursus.batch(topic.encode(), 0, [], "1") + bytes(size))
        client.send(prefixed.frame(bomb))
        assert "unpacks to more than" in client.frame().decode()
        assert client.ask("HELP").startswith("Available")
    assert consume(server, topic) == []


# Long.


def test_a_batch_of_records_is_published_in_order(server: Serve, topic: str) -> None:
    records = [Record(0, b"%d" % number, b"", b"p", 1, number) for number in range(1, LONG + 1)]
    with Cursus(server) as client:
        data = wire_cursus.batch(topic.encode(), 0, records, "1", is_idempotent=True)
        client.send(prefixed.frame(gzip.compress(data)) + prefixed.frame(f"PUBLISH {topic} last".encode()))
        told = json.loads(gzip.decompress(client.frame()))
        assert (told["status"], told["last_offset"]) == ("OK", LONG - 1)
        assert "Published" in client.frame().decode()
    assert consume(server, topic) == [b"%d" % number for number in range(1, LONG + 1)] + [b"last"]


def test_a_flood_of_commands_is_answered_in_order(server: Serve, topic: str) -> None:
    with Cursus(server) as client:
        frames = [prefixed.frame(f"PUBLISH {topic} {number}".encode()) for number in range(LONG)]
        client.send(b"".join(frames) + prefixed.frame(b"LIST"))
        assert [client.frame().decode() for _ in range(LONG)] == [f"📤 Published to '{topic}'"] * LONG
        assert topic in client.frame().decode()
    assert consume(server, topic) == [b"%d" % number for number in range(LONG)]


def test_a_flood_of_qb_messages_is_answered_in_order(server: Serve, topic: str) -> None:
    with Qb(server) as client:
        for number in range(LONG):
            client.send(client.frame(PUBLISH, number + 1, b"%d" % number, topic=topic, client_id="me"))
        answers = [client.answer(number + 1) for number in range(LONG)]
        assert [int(answer["offset"]) for answer in answers] == list(range(LONG))
    assert consume(server, topic) == [b"%d" % number for number in range(LONG)]


@pytest.mark.parametrize("compression", list(Compression))
def test_a_publish_of_many_messages_has_a_receipt_for_each(server: Serve, topic: str, compression: Compression) -> None:
    total = 20 * SLICE_MESSAGES + 7
    keys = [b"%d" % (number % 10) for number in range(total)]
    keys[5] = keys[-5] = b"last"
    subjects = [topic.encode()] * total
    subjects[100] = b"*"  # cannot be published to
    batch = encode(
        [b"v%d" % n for n in range(total)], timestamp=0, keys=keys, subjects=subjects, compression=compression
    )
    with Frames(server) as client:
        first, second = client.request(Type.PUBLISH, batch.data), client.request(Type.PUBLISH, batch.data)
        for number, base in ((first, 0), (second, total - 1)):
            receipts = client.result_of(number)["receipts"]
            assert receipts.pop(100)["code"] == "BAD_SUBJECT"
            assert [receipt[:3] for receipt in receipts] == [[topic, 0, base + n] for n in range(total - 1)]


def test_a_large_batch_that_is_appended_keeps_its_place(server: Serve, topic: str) -> None:
    with Frames(server) as client:
        to = Append(client.call("topic", name=topic)["id"], 0, 1)
        large = encode([bytes(50_000)] * 60, timestamp=0).data
        small = encode([b"x"], timestamp=0).data
        numbers = [
            client.request(Type.APPEND, binary.append_frame(0, to, data)[13:]) for data in (large, small, large, small)
        ]
        assert [client.result_of(number)["offset"] for number in numbers] == [0, 60, 61, 121]
        corrupt = bytearray(large)
        corrupt[-1] ^= 1
        number = client.request(Type.APPEND, binary.append_frame(0, to, corrupt)[13:])
        assert client.error_of(number)["code"] == "CORRUPT_BATCH"


def test_a_flood_of_text_is_answered_in_order(server: Serve, topic: str) -> None:
    """Lines that are parsed one by one, among those that are not."""
    with Flux(server) as client:
        parts = []
        for number in range(LONG):
            parts.append(b"PUB %b.%d 1\r\nx\r\n" % (topic.encode(), number))
            parts.append(hpub(topic, b"y", msg_id=number % 1000))
            parts.append(b"SUB > %d\r\n" % number if number % 500 == 3 else b"ACK 1\r\n")
        client.send(b"".join(parts) + b"PING\r\n")
        answers = []
        while (line := client.line()) != "PONG":
            if line.startswith(("MSG", "HMSG")):
                client.read(int(line.split()[-2]) + 2)
            else:
                answers.append(line)
    expected = []
    for number in range(LONG):
        expected += ["+OK", "+OK" if number < 1000 else "+OK DUP"]
        expected.append("+OK" if number % 500 == 3 else "-ERR not delivered, or a dead letter")
    assert answers == expected


def test_a_nats_client_that_publishes_to_many_subjects_at_once(server: Serve, topic: str) -> None:
    with Nats(server) as client:
        data = b"".join(b"PUB %b.%d 1\r\nx\r\n" % (topic.encode(), number) for number in range(LONG))
        for _ in range(3):
            client.send(data + b"PING\r\n")
            assert client.line() == "PONG"
    with Frames(server) as frames:
        [position] = frames.call("topic", name=topic)["positions"]
        assert position["end"] == 3 * LONG


def test_empty_frames_are_signs_of_life_however_many(server: Serve) -> None:
    with Cursus(server) as client:
        client.send(struct.pack(">I", 0) * 50_000 + prefixed.frame(b"HELP"))
        while not (answer := client.frame().decode()).startswith("Available"):
            assert answer == "ERROR: empty command"


# Much to end.


def test_a_connection_with_many_subscriptions_ends_them_all(server: Serve, topic: str) -> None:
    with Nats(server) as client:
        client.send("".join(f"SUB {topic}.{number} {number}\r\n" for number in range(2000)) + "PING\r\nPING\r\n")
        assert [client.line(), client.line()] == ["PONG", "PONG"]
        assert get(server, "/varz").json["limits"]["subscriptions"]["used"] == 2000
    while get(server, "/varz").json["limits"]["subscriptions"]["used"]:
        pass


# Many readers of much.


def test_readers_that_do_not_read_get_all_of_it_in_order_when_they_do(server: Serve, topic: str) -> None:
    values = [b"%d" % number + bytes(LIMIT - 10) for number in range(60)]
    with ExitStack() as stack:
        slow = [stack.enter_context(Nats(server, receive_bytes=4096)) for _ in range(20)]
        for client in slow:
            client.send(f"SUB {topic} 1\r\n")
            assert client.ask("PING") == "PONG"
        publisher, other = stack.enter_context(Nats(server)), stack.enter_context(Nats(server))
        other.send(f"SUB {topic}.other 1\r\n")
        publisher.send(b"".join(pub(topic, value) for value in values))
        other.send(pub(f"{topic}.other", b"not held up"))
        assert other.message().payload == b"not held up"
        assert publisher.ask("PING") == "PONG"
        for client in slow:
            client.send("PING\r\n")
            assert [client.message().payload for _ in values] == values
            assert client.line() == "PONG"
        assert get(server, "/varz").json["limits"]["unsent_bytes"]["used"] == 0
