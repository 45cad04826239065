"""The Provider's protocol: groups, offsets, and batches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.frames import Frames
from tests.support.provider_door import (
    ACK,
    BATCH_ACK,
    BATCH_HEADER,
    COMMIT_OFFSET,
    DATA,
    HEARTBEAT,
    READY,
    READY_ACK,
    RESET,
    RESET_ACK,
    Client,
)
from tests.support.server import Raw, Serve

PRICES: Final = ["AAPL", "GOOGL", "MSFT", "TSLA", "AMZN"]


def committed(server: Serve, topic: str, group: str = "viewers") -> int:
    """Where a group is."""
    with Frames(server) as asker:
        found: int = asker.call("group", name=f"{topic}:{group}")["positions"][0]["committed"]
    return found


def wait_committed(server: Serve, topic: str, offset: int) -> None:
    until = time.monotonic() + 20
    while committed(server, topic) != offset:
        assert time.monotonic() < until, f"the group does not come to {offset}"


# ---- groups and offsets


def test_five_messages_from_the_source_to_the_consumer(tmp_path: Path) -> None:
    """TE-06, GR-14: the offset goes from 0 to 5, and stays."""
    with Serve(tmp_path) as server:
        with Client(server) as source, Client(server) as consumer:
            consumer.subscribe("prices")
            for number, symbol in enumerate(PRICES):
                source.publish("prices", json.dumps({"symbol": symbol}), number=number, msg_key=symbol)
            assert committed(server, "prices") == 0
            records: list[dict[str, Any]] = []
            numbers = []
            while len(records) < 5:
                number, found = consumer.data()
                numbers.append(number)
                records += found
            assert [record["msgKey"] for record in records] == PRICES
            assert [json.loads(record["data"])["symbol"] for record in records] == PRICES
            for number in numbers:
                consumer.write(ACK, number)
            wait_committed(server, "prices", 5)
        server.stop()
        server.restart()
        assert committed(server, "prices") == 5
        with Client(server) as source, Client(server) as consumer:
            consumer.subscribe("prices")
            source.publish("prices", "next")
            assert [record["data"] for record in consumer.records(1)] == ["next"]


def test_what_is_not_acknowledged_comes_again_to_the_next_consumer(server: Serve, client: Client, topic: str) -> None:
    for symbol in PRICES:
        client.publish(topic, symbol)
    with Client(server) as consumer:
        consumer.subscribe(topic)
        found = 0
        while found < 5:
            found += len(consumer.data()[1])
    with Client(server) as consumer:
        consumer.subscribe(topic)
        assert [record["data"] for record in consumer.records(5)] == PRICES


def test_what_is_never_acknowledged_comes_again_without_end_unless_the_topic_has_a_limit(tmp_path: Path) -> None:
    with (
        Serve(tmp_path / "endless", topic_ack_deadline_ms=20) as server,
        Client(server) as client,
        Client(server) as consumer,
        Frames(server) as asker,
    ):
        client.publish("endless", "x")
        consumer.subscribe("endless")
        for _ in range(6):
            number, records = consumer.data()
            assert [record["data"] for record in records] == ["x"]
        assert asker.call("dead_letters", pattern=">")["letters"] == []
        consumer.write(ACK, number)
        wait_committed(server, "endless", 1)
    with (
        Serve(tmp_path / "limited", topic_deliveries_max=2, topic_ack_deadline_ms=20) as server,
        Client(server) as client,
        Client(server) as consumer,
        Frames(server) as asker,
    ):
        client.publish("limited", "y")
        consumer.subscribe("limited")
        until = time.monotonic() + 20
        while not (letters := asker.call("dead_letters", pattern=">")["letters"]):
            assert time.monotonic() < until, "there is no dead letter"
        assert [(letter["subject"], letter["attempts"]) for letter in letters] == [("limited", 2)]


def test_a_commit_ends_all_below_it_and_is_there_after_a_kill(tmp_path: Path) -> None:
    """DE-19, WI-34"""
    with Serve(tmp_path) as server:
        with Client(server) as client:
            for symbol in PRICES:
                client.publish("prices", symbol)
            client.subscribe("prices")
            found = 0
            while found < 5:
                found += len(client.data()[1])
            client.write_json(COMMIT_OFFSET, 77, topic="prices", offset=3)
            assert client.frame() == (ACK, 77, b"")
            assert committed(server, "prices") == 3
            server.kill()
        server.restart()
        with Client(server) as client:
            client.subscribe("prices")
            assert [record["data"] for record in client.records(2)] == PRICES[3:]


def test_a_commit_beyond_the_end_is_refused(server: Serve, client: Client, topic: str) -> None:
    client.publish(topic, "x")
    client.subscribe(topic)
    client.data()
    client.write_json(COMMIT_OFFSET, 3, topic=topic, offset=1 << 60)
    assert json.loads(client.frame().payload)["code"] == "OFFSET_OUT_OF_RANGE"
    assert committed(server, topic) == 0


def test_a_commit_does_not_go_back(server: Serve, client: Client, topic: str) -> None:
    client.publish(topic, "x")
    client.publish(topic, "y")
    client.subscribe(topic)
    client.records(2)
    for offset in (2, 0):
        client.write_json(COMMIT_OFFSET, 3, topic=topic, offset=offset)
        assert client.frame() == (ACK, 3, b"")
    assert committed(server, topic) == 2


def test_an_offset_alone_says_nothing_where_there_are_several_partitions(server: Serve, topic: str) -> None:
    with Frames(server) as asker, Client(server) as client:
        asker.topic_id(topic, partitions=2)
        client.subscribe(topic)
        client.write_json(COMMIT_OFFSET, 3, topic=topic, offset=1)
        assert client.goodbye()["code"] == "BAD_REQUEST"


def test_a_topic_with_dots_in_its_name_can_be_committed(server: Serve, client: Client, topic: str) -> None:
    """For the Provider a name is a name."""
    name = f"{topic}.nyse"
    client.publish(name, "x")
    client.subscribe(name)
    client.data()
    client.write_json(COMMIT_OFFSET, 3, topic=name, offset=1)
    assert client.frame() == (ACK, 3, b"")
    assert committed(server, name) == 1


def test_each_group_gets_all_and_each_member_its_share(server: Serve, client: Client, topic: str) -> None:
    """GR-13"""
    with Client(server) as ann, Client(server) as bob, Client(server) as alone:
        ann.subscribe(topic, "shared")
        bob.subscribe(topic, "shared")
        alone.subscribe(topic, "alone")
        for number in range(10):
            client.publish(topic, str(number))
        shared = ann.records(5) + bob.records(5)
        assert sorted(int(record["data"]) for record in shared) == list(range(10))
        assert [int(record["data"]) for record in alone.records(10)] == list(range(10))


def test_a_group_of_one_topic_is_not_that_of_another(client: Client, topic: str) -> None:
    client.publish(f"{topic}-a", "a")
    client.publish(f"{topic}-b", "b")
    client.subscribe(f"{topic}-a", "same", number=10)
    assert [record["data"] for record in client.records(1)] == ["a"]
    client.subscribe(f"{topic}-b", "same", number=11)
    assert [record["data"] for record in client.records(1)] == ["b"]


def test_large_records_come_in_several_frames_each_acknowledged_for_itself(
    server: Serve, client: Client, topic: str
) -> None:
    with Frames(server) as frames:
        frames.publish(topic, *(b"%d" % number + b"x" * 700_000 for number in range(4)))
    client.subscribe(topic)
    first, records = client.data()
    assert len(records) == 1
    for _ in range(3):
        _, records = client.data()
        assert len(records) == 1
    client.write(ACK, first)
    wait_committed(server, topic, 1)


def test_an_acknowledgement_of_nothing_harms_nobody(client: Client, topic: str) -> None:
    client.write(ACK, 999)
    client.write(ACK, 0, b"whatever")
    client.publish(topic, "x")


def test_many_clients_at_once(server: Serve, topic: str) -> None:
    """WI-39"""
    clients = [Client(server) for _ in range(60)]
    try:
        for number, client in enumerate(clients):
            client.write_json(DATA, number, topic=topic, data=str(number))
        for number, client in enumerate(clients):
            assert client.frame() == (ACK, number, b"")
        for number, client in enumerate(clients):
            client.subscribe(topic, group=f"group-{number}")
        for client in clients:
            assert sorted(int(record["data"]) for record in client.records(60)) == list(range(60))
    finally:
        for client in clients:
            client.close()


# ---- batches


def names(topic: str, group: str = "viewers") -> bytes:
    return b"".join(len(name).to_bytes(4, "big") + name for name in (topic.encode(), group.encode()))


class Batch(NamedTuple):
    # Key, 'M' or 'D', data, milliseconds.
    records: list[tuple[bytes, bytes, bytes, int]]
    names: bytes


def read_batch(client: Client) -> Batch:
    """A BATCH_HEADER, and the bytes behind it."""
    frame = client.frame()
    assert frame.type == BATCH_HEADER, frame
    count, size = int.from_bytes(frame.payload[:4], "big"), int.from_bytes(frame.payload[4:12], "big")
    data = client.read(size)
    records = []

    def take(length: int) -> bytes:
        nonlocal data
        assert len(data) >= length
        taken, data = data[:length], data[length:]
        return taken

    for _ in range(count):
        key = take(int.from_bytes(take(4), "big"))
        kind = take(1)
        records.append((key, kind, take(int.from_bytes(take(4), "big")), int.from_bytes(take(8), "big")))
    assert data == b""
    return Batch(records, frame.payload[12:])


@pytest.fixture(scope="module")
def ready_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("ready"), server_provider_ready=True) as server:
        yield server


def test_who_answers_ready_with_names_gets_batches_and_acknowledges_them_in_order(
    ready_server: Serve, topic: str
) -> None:
    begin_ms = time.time() * 1000
    with Client(ready_server) as consumer, Client(ready_server) as source:
        source.publish(topic, "first", msg_key="AAPL")
        consumer.subscribe(topic)
        ready = consumer.frame()
        assert (ready.type, json.loads(ready.payload)) == (READY, {"topic": topic})
        # The id is the client's own.
        consumer.write(READY_ACK, 1 << 40, names(topic))
        [(key, kind, data, created_ms)], of = read_batch(consumer)
        assert (key, kind, data, of) == (b"AAPL", b"M", b"first", names(topic))
        assert begin_ms - 1 <= created_ms <= time.time() * 1000

        source.publish(topic, "", msg_key="AAPL", event_type="DELETE")
        [(key, kind, data, _)], _ = read_batch(consumer)
        assert (key, kind, data) == (b"AAPL", b"D", b"")
        with Frames(ready_server) as other:
            other.publish(topic, b"\xff\x00")
        assert read_batch(consumer).records[0][:3] == (b"", b"M", b"\xff\x00")

        assert committed(ready_server, topic) == 0
        for offset in (1, 2, 3):
            consumer.write(BATCH_ACK, 7, names(topic))
            wait_committed(ready_server, topic, offset)


def test_who_answers_ready_with_ack_gets_data(ready_server: Serve, topic: str) -> None:
    with Client(ready_server) as client:
        client.publish(topic, "x")
        client.subscribe(topic)
        ready = client.frame()
        assert ready.type == READY
        client.write(ACK, ready.id)
        assert [record["data"] for record in client.records(1)] == ["x"]
        wait_committed(ready_server, topic, 1)


def test_nothing_is_delivered_before_ready_is_answered(ready_server: Serve, topic: str) -> None:
    with Client(ready_server) as client:
        client.publish(topic, "x")
        client.subscribe(topic)
        assert client.frame().type == READY
        client.write(READY_ACK, 1, names(topic, "another"))
        client.write(HEARTBEAT, 5)
        assert client.frame() == (HEARTBEAT, 5, b"")
        client.write(READY_ACK, 1, names(topic))
        assert read_batch(client).records[0][2] == b"x"


def test_each_group_of_a_connection_acknowledges_its_own_batches(ready_server: Serve, topic: str) -> None:
    with Client(ready_server) as client:
        for group in ("viewers", "writers"):
            client.subscribe(topic, group)
            assert client.frame().type == READY
            client.write(READY_ACK, 1, names(topic, group))
        with Client(ready_server) as source:
            source.publish(topic, "x")
        assert {read_batch(client).names for _ in range(2)} == {names(topic), names(topic, "writers")}
        client.write(BATCH_ACK, 1, names(topic, "writers"))
        until = time.monotonic() + 20
        while committed(ready_server, topic, "writers") != 1:
            assert time.monotonic() < until
        assert committed(ready_server, topic) == 0
        client.write(BATCH_ACK, 1, names(topic))
        wait_committed(ready_server, topic, 1)


def test_a_batch_without_its_ack_comes_again_to_the_next_consumer(ready_server: Serve, topic: str) -> None:
    for _ in range(2):
        with Client(ready_server) as client:
            client.subscribe(topic)
            assert client.frame().type == READY
            client.write(READY_ACK, 1, names(topic))
            with Client(ready_server) as source:
                source.publish(topic, "x")
            assert read_batch(client).records[0][2] == b"x"


def test_many_large_records_come_in_several_batches(ready_server: Serve, topic: str) -> None:
    values = [b"%d" % number * 100_000 for number in range(8)]
    with Frames(ready_server) as other:
        for value in values:
            other.publish(topic, value)
    with Client(ready_server) as client:
        client.subscribe(topic)
        assert client.frame().type == READY
        client.write(READY_ACK, 1, names(topic))
        found: list[bytes] = []
        while len(found) < len(values):
            found += [record[2] for record in read_batch(client).records]
            client.write(BATCH_ACK, 1, names(topic))
        assert found == values
        wait_committed(ready_server, topic, len(values))


def test_a_refresh_is_answered_with_names(server: Serve, client: Client, topic: str) -> None:
    """Also where READY is not sent first: whoever answers so gets batches from then on."""
    client.publish(topic, "x")
    with Client(server) as consumer:
        consumer.subscribe(topic)
        assert len(consumer.records(1)) == 1
        with Frames(server) as asker:
            asker.call("refresh_topic", name=topic)
        assert consumer.frame().type == RESET
        consumer.write(RESET_ACK, 99, names(topic, "another"))
        consumer.write(RESET_ACK, 99, names(topic))
        assert len(consumer.records(1)) == 1
        assert consumer.frame().type == READY
        consumer.write(READY_ACK, 99, names(topic))
        client.publish(topic, "y")
        assert read_batch(consumer).records[0][2] == b"y"


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0\0\0", names("t")[:-1], names("t") + b"!", b"\xff" * 8, (1 << 20).to_bytes(4, "big") + bytes(1 << 20)],
)
def test_a_batch_ack_whose_names_do_not_fit_ends_its_connection(server: Serve, topic: str, payload: bytes) -> None:
    with Client(server) as client:
        client.subscribe(topic)
        client.write(BATCH_ACK, 1, payload)
        assert client.goodbye()["code"] == "BAD_FRAME"


def test_an_acknowledgement_with_names_that_nobody_has_harms_nobody(client: Client, topic: str) -> None:
    for kind in (RESET_ACK, READY_ACK, BATCH_ACK):
        client.write(kind, 1, names(topic))
    client.subscribe(topic)
    client.write(BATCH_ACK, 1, names(topic))
    client.publish(topic, "x", number=9)
    assert [record["data"] for record in client.records(1)] == ["x"]


def test_a_newline_begins_a_line_of_text_though_it_is_the_type_of_a_batch_ack(server: Serve) -> None:
    with Raw(server.ports["quiet"]) as text:
        text.send(b"\nPING\r\n")
        assert text.line() == "PONG"
