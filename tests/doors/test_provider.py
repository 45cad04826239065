"""The Provider's protocol, as a client sees it that knows only frames of types 0x01 to 0x0C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from penstock.model.batch import encode
from tests.support.frames import Frames, batch
from tests.support.server import Flux, Raw, Serve

DATA, ACK, SUBSCRIBE, COMMIT_OFFSET, RESET, READY, DISCONNECT, HEARTBEAT = range(1, 9)
BATCH_HEADER, BATCH_ACK, RESET_ACK, READY_ACK = range(9, 13)
PRICES: Final = ["AAPL", "GOOGL", "MSFT", "TSLA", "AMZN"]
_names = iter(range(1 << 30))


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"prices-{next(_names)}"


def committed(server: Serve, topic: str, group: str = "viewers") -> int:
    """Where a group is."""
    with Frames(server) as asker:
        found: int = asker.call("group", name=f"{topic}:{group}")["positions"][0]["committed"]
    return found


def wait_committed(server: Serve, topic: str, offset: int) -> None:
    until = time.monotonic() + 20
    while committed(server, topic) != offset:
        assert time.monotonic() < until, f"the group does not come to {offset}"


# ---- the frames


def test_a_frame_is_type_id_and_length_in_network_order(client: Client, topic: str) -> None:
    """WI-30, WI-31, WI-32"""
    payload = f'{{"topic": "{topic}", "data": "x"}}'.encode()
    client.send(b"\x01" + b"\x01\x02\x03\x04\x05\x06\x07\x08" + bytes([0, 0, 0, len(payload)]) + payload)
    assert client.read(13) == b"\x02" + b"\x01\x02\x03\x04\x05\x06\x07\x08" + bytes(4)


def test_the_greeting_port_takes_them_too(server: Serve, topic: str) -> None:
    with Raw(server.port) as raw:
        assert raw.line().startswith("INFO ")
        payload = json.dumps({"topic": topic, "data": "x"}).encode()
        raw.send(b"\x01" + bytes(7) + b"\x09" + len(payload).to_bytes(4, "big") + payload)
        assert raw.read(13) == b"\x02" + bytes(7) + b"\x09" + bytes(4)


def test_each_data_is_acknowledged_under_its_id_though_many_are_on_the_way(client: Client, topic: str) -> None:
    """WI-40"""
    for number in range(200):
        client.write_json(DATA, number, topic=topic, data=str(number))
    assert sorted(client.frame() for _ in range(200)) == [(ACK, number, b"") for number in range(200)]
    client.subscribe(topic)
    assert [record["data"] for record in client.records(200)] == [str(number) for number in range(200)]


def test_a_heartbeat_is_answered(client: Client) -> None:
    """WI-38"""
    client.write(HEARTBEAT, 5)
    assert client.frame() == (HEARTBEAT, 5, b"")


def test_who_is_silent_hears_heartbeats_and_is_not_dropped(tmp_path: Path) -> None:
    """The Provider's clients need not answer."""
    with Serve(tmp_path, server_heartbeat_s=1) as server, Client(server) as client:
        client.publish("prices", "x")
        assert [client.frame() for _ in range(4)] == [(HEARTBEAT, 0, b"")] * 4
        client.publish("prices", "y")


def test_who_disconnects_is_gone_from_its_group(server: Serve, client: Client, topic: str) -> None:
    """WI-37, WI-41"""
    client.subscribe(topic)
    client.write(DISCONNECT, 0)
    assert client.rest() == ""
    with Frames(server) as asker:
        until = time.monotonic() + 20
        while asker.call("group", name=f"{topic}:viewers")["members"]:
            assert time.monotonic() < until, "it is still a member"


@pytest.mark.parametrize("kind", [RESET, READY, BATCH_HEADER, 0x0D, 0x20, 0xFF])
def test_what_a_client_does_not_send_ends_its_connection(server: Serve, topic: str, kind: int) -> None:
    """WI-35, WI-36: RESET and READY are for brokers to send."""
    with Client(server) as client:
        client.publish(topic, "x")
        client.write(kind, 1)
        assert client.goodbye()["code"] == "BAD_FRAME"


def test_a_payload_beyond_10_mb_is_rejected(server: Serve) -> None:
    """WI-43"""
    with Client(server) as client:
        client.send(bytes([DATA]) + bytes(8) + (10 * (1 << 20) + 1).to_bytes(4, "big"))
        assert client.goodbye()["code"] == "BAD_FRAME"


@pytest.mark.parametrize(
    ("kind", "payload", "code"),
    [
        (DATA, b"", None),
        (DATA, b"{", "BAD_REQUEST"),
        (DATA, b"[1]", "BAD_REQUEST"),
        (DATA, b"\xff", "BAD_REQUEST"),
        (DATA, b'{"topic": "a..b"}', "BAD_SUBJECT"),
        (DATA, b'{"topic": "a.*"}', "BAD_SUBJECT"),
        (DATA, b'{"topic": "$delayed"}', "BAD_SUBJECT"),
        (DATA, b'{"topic": {"a": 1}}', "BAD_SUBJECT"),
        (DATA, b'{"event_type": "UPDATE"}', "BAD_REQUEST"),
        (DATA, b'{"event_type": 5}', "BAD_REQUEST"),
        (DATA, b'{"event_type": "DELETE"}', "BAD_REQUEST"),
        (SUBSCRIBE, b"nothing", "BAD_REQUEST"),
        (SUBSCRIBE, b'{"topic": "a..b"}', "BAD_SUBJECT"),
        (COMMIT_OFFSET, b'{"topic": "default-topic"}', "BAD_REQUEST"),
        (COMMIT_OFFSET, b'{"topic": "default-topic", "offset": "5"}', "BAD_REQUEST"),
        (COMMIT_OFFSET, b'{"topic": "default-topic", "offset": -1}', "BAD_REQUEST"),
        (COMMIT_OFFSET, b'{"topic": "default-topic", "offset": true}', "BAD_REQUEST"),
        (COMMIT_OFFSET, b'{"topic": "default-topic", "offset": 5}', "UNKNOWN_GROUP"),
    ],
)
def test_who_asks_for_what_cannot_be_is_disconnected_with_the_reason(
    server: Serve, kind: int, payload: bytes, code: str | None
) -> None:
    with Client(server) as client:
        client.write(kind, 1, payload)
        if code is None:
            assert client.frame() == (ACK, 1, b"")
        else:
            assert client.goodbye()["code"] == code


# ---- in


def test_what_is_sent_comes_back_as_records(client: Client, topic: str) -> None:
    """WI-33, WI-43"""
    before = datetime.now(UTC) - timedelta(seconds=1)
    client.publish(topic, "grüße", msg_key="k1", event_type="MESSAGE")
    client.publish(topic, {"price": 5, "list": [1, None]})
    client.publish(topic, None, msg_key=7, event_type="DELETE")
    client.publish(topic, "", msg_key=None)
    client.subscribe(topic)
    records = client.records(4)
    assert [record.keys() for record in records] == [{"msgKey", "eventType", "data", "createdAt"}] * 4
    assert [(record["msgKey"], record["eventType"]) for record in records] == [
        ("k1", "MESSAGE"),
        (None, "MESSAGE"),
        ("7", "DELETE"),
        (None, "MESSAGE"),
    ]
    assert records[0]["data"] == "grüße"
    assert json.loads(records[1]["data"]) == {"price": 5, "list": [1, None]}
    assert [record["data"] for record in records[2:]] == ["", ""]
    for record in records:
        assert before < datetime.fromisoformat(record["createdAt"]) < datetime.now(UTC) + timedelta(seconds=1)


def test_without_a_topic_it_is_the_default_topic(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(server) as client:
        client.write(DATA, 1, b'{"data": "x"}')
        assert client.frame() == (ACK, 1, b"")
        client.write(SUBSCRIBE, 2, b"{}")
        assert client.frame() == (ACK, 2, b"")
        assert [record["data"] for record in client.records(1)] == ["x"]
        with Frames(server) as asker:
            assert asker.call("group", name="default-topic:default")["pattern"] == "default-topic"


def test_the_key_decides_the_partition_and_a_delete_is_a_tombstone(server: Serve, client: Client, topic: str) -> None:
    with Frames(server) as asker:
        topic_id = asker.topic_id(topic, partitions=3)
        client.publish(topic, "x", msg_key="k")
        client.publish(topic, None, msg_key="k", event_type="DELETE")
        [found] = [
            [message for each in asker.fetch(topic_id, partition=number).batches for message in [each]]
            for number in range(3)
            if asker.fetch(topic_id, partition=number).batches
        ]
        keys = [key for each in found for key in each.columns().keys() or ()]
        assert keys == [b"k", b"k"]
        assert (found[-1].columns().tombstones() or [])[-1] is True


def test_records_of_other_doors_come_too_also_what_is_no_text(server: Serve, client: Client, topic: str) -> None:
    with Flux(server) as text, Frames(server) as frames:
        assert text.publish(topic, b"by text") == "+OK"
        frames.publish(topic, b"\xff\xfe", keys=[b"\xff"])
        frames.append(frames.call("resolve", subject=topic)["id"], batch(b"appended"))
    client.subscribe(topic)
    records = client.records(3)
    assert [record["data"] for record in records] == ["by text", "��", "appended"]
    assert records[1]["dataBase64"] == "//4="
    assert "dataBase64" not in records[0]


@pytest.mark.parametrize("timestamp", [-(1 << 63), -1, 0, 1 << 62, (1 << 63) - 1])
def test_a_time_that_no_calendar_has_harms_nobody(tmp_path: Path, timestamp: int) -> None:
    """A producer's clock says what it says."""
    with Serve(tmp_path) as server, Client(server) as client, Frames(server) as frames:
        topic_id = frames.topic_id("prices")
        frames.append(topic_id, encode([b"x"], timestamp=timestamp))
        frames.append(topic_id, batch(b"y"))
        client.socket.settimeout(5)
        client.subscribe("prices")
        assert [record["data"] for record in client.records(2)] == ["x", "y"]


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
