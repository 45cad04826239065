"""The Provider's protocol: frames, and messages that come in."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.model.batch import encode
from tests.support.frames import Frames, batch
from tests.support.provider_door import (
    ACK,
    BATCH_HEADER,
    COMMIT_OFFSET,
    DATA,
    DISCONNECT,
    HEARTBEAT,
    READY,
    RESET,
    SUBSCRIBE,
    Client,
)
from tests.support.server import Flux, Raw, Serve

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
