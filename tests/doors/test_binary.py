"""The binary door of a real server, frame by frame."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from penstock.model.batch import Batch, Compression, encode, encode_control
from penstock.model.batch import Control as ControlBatch
from penstock.model.headers import hash_key
from penstock.wire import binary
from penstock.wire.binary import HEAD, Settle, Type, Verb
from tests.support.frames import TIMESTAMP, Bare, Delivered, Frames, batch, messages, read_json
from tests.support.server import Flux, Nats, Serve, in_pieces, pub

MIB: Final = 1 << 20
_numbers = itertools.count()

HELLO: Final = binary.json_frame(Type.HELLO, 1, {"version": 1, "name": "bare"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all that need no settings of their own; its log has no traceback at the end."""
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Frames]:
    with Frames(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Frames]:
    with Frames(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"topic-{next(_numbers)}"


def http(server: Serve, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/{path}", timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def counted(server: Serve, name: str) -> int:
    found: int = http(server, "varz")["since_start"][name]
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


# ---- which door it is


@pytest.mark.parametrize("door", ["text", "quiet"])
def test_the_first_byte_chooses_the_door(server: Serve, topic: str, door: str) -> None:
    with Flux(server, door=door) as text, Frames(server, door=door) as frames:
        text.subscribe(topic, "1")
        frames.open(1, topic)
        assert text.publish(topic, b"by text") == "+OK"
        assert frames.publish(topic, b"by frames") == [[topic, 0, 1, False]]
        assert [message.payload for message in text.messages(2)] == [b"by text", b"by frames"]
        assert [message.value for message in frames.delivered(2)] == [b"by text", b"by frames"]


def test_a_connection_to_the_greeting_port_is_greeted_before_it_speaks_frames(server: Serve) -> None:
    with Bare(server) as client:
        assert client.info["headers"] is True
        client.send(HELLO)
        assert client.frame().type == Type.RESULT


def test_nothing_comes_from_the_quiet_port_before_the_answer(server: Serve) -> None:
    with Bare(server, door="quiet") as client:
        client.send(HELLO)
        frame = client.frame()
        assert (frame.type, frame.id) == (Type.RESULT, 1)


@pytest.mark.parametrize("door", ["text", "quiet"])
def test_a_lone_first_byte_is_enough_to_know_the_door(server: Serve, client: Frames, door: str) -> None:
    with Bare(server, door=door) as slow:
        slow.send(HELLO[:1])
        client.sync()
        for piece in in_pieces(HELLO[1:], 1):
            slow.send(piece)
            client.sync()
        assert read_json(slow.frame())["node_id"]


def test_frames_that_come_byte_by_byte_are_taken(client: Frames, topic: str) -> None:
    data = binary.frame(Type.PUBLISH, 77, messages([topic], [b"a"]).data)
    for piece in in_pieces(data, 1):
        client.send(piece)
    assert client.result_of(77) == {"receipts": [[topic, 0, 0, False]]}


def test_many_frames_in_one_piece_with_the_first_are_taken(server: Serve, topic: str) -> None:
    publishes = [binary.frame(Type.PUBLISH, 2 + n, messages([topic], [b"%d" % n]).data) for n in range(50)]
    with Bare(server) as client:
        client.send(HELLO + b"".join(publishes))
        assert client.answer(1).type == Type.RESULT
        offsets = [read_json(client.answer(2 + n))["receipts"][0][2] for n in range(50)]
    assert offsets == list(range(50))


def test_a_frame_that_is_larger_than_what_is_read_at_once_is_taken(client: Frames, topic: str) -> None:
    values = [bytes([n]) * 900_000 for n in range(4)]
    assert codes(client.publish(topic, *values)) == [None] * 4
    assert stored_values(client, topic) == values


# ---- HELLO, and who may come in


def test_hello_tells_who_the_server_is_and_its_limits(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, server_node_id="n7", server_payload_bytes_max=1234, server_heartbeat_s=7) as server,
        Frames(server) as client,
    ):
        hello = client.hello
        assert (hello["node_id"], hello["payload_bytes_max"], hello["heartbeat_s"]) == ("n7", 1234, 7)
        assert hello["version"] == server.version
        assert hello["server_id"] == client.info["server_id"]


def test_a_version_that_is_not_known_is_refused_and_the_connection_ends(server: Serve) -> None:
    for version in (0, 2, None, "1"):
        with Bare(server) as client:
            client.send(binary.json_frame(Type.HELLO, 1, {"version": version}))
            assert client.goodbye()["code"] == "BAD_REQUEST"


def test_the_name_of_a_client_is_seen_by_others(server: Serve, client: Frames, topic: str) -> None:
    with Frames(server, name="billing") as named:
        named.open(1, topic, group="named", start="earliest")
        assert "billing" in [row["name"] for row in http(server, "connz")["connections"]]
        assert client.call("group", name="named")["members"] == [
            {"name": "billing", "address": "127.0.0.1", "unacknowledged": 0}
        ]


AUTHS: Final[list[dict[str, object]]] = [{"user": "ann", "password": "secret"}, {"token": "secret"}]
WRONG: Final[list[dict[str, object]]] = [
    {},
    {"user": "ann"},
    {"user": "ann", "password": "no"},
    {"user": "bob", "password": "secret"},
    {"token": "no"},
    {"token": None},
    {"token": ["secret"]},
    {"user": {"a": 1}, "password": 5},
]


@pytest.fixture(scope="module", params=AUTHS, ids=["password", "token"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Any]]:
    settings = {f"auth_{name}": value for name, value in request.param.items()}
    with Serve(tmp_path_factory.mktemp("guarded"), **settings) as server:
        yield server, request.param


def test_who_is_known_comes_in(guarded: tuple[Serve, Any], topic: str) -> None:
    server, credentials = guarded
    with Frames(server, **credentials) as client:
        assert codes(client.publish(topic, b"a")) == [None]


@pytest.mark.parametrize("options", WRONG)
def test_who_is_not_known_is_told_so_and_the_connection_ends(
    guarded: tuple[Serve, Any], options: dict[str, object]
) -> None:
    server, _ = guarded
    before = counted(server, "unauthorized")
    with Bare(server) as client:
        client.send(binary.json_frame(Type.HELLO, 9, {"version": 1} | options))
        frames = client.frames_until_end()
    assert [(frame.type, frame.id) for frame in frames] == [(Type.ERROR, 9)]
    assert read_json(frames[0])["code"] == "UNAUTHORIZED"
    assert counted(server, "unauthorized") == before + 1


def test_what_comes_behind_a_refused_hello_is_not_done(guarded: tuple[Serve, Any], topic: str) -> None:
    server, credentials = guarded
    with Bare(server) as client:
        refused = binary.json_frame(Type.HELLO, 1, {"version": 1, "token": "no"})
        client.send(refused + binary.frame(Type.PUBLISH, 2, messages([topic], [b"a"]).data))
        assert len(client.frames_until_end()) == 1
    with Frames(server, **credentials) as client:
        assert client.refused("topic", name=topic)["code"] == "UNKNOWN_TOPIC"


PROVIDERS: Final = (Type.DATA, Type.ACK, Type.SUBSCRIBE, Type.COMMIT_OFFSET, Type.RESET, Type.READY)
OURS: Final = (Type.PUBLISH, Type.APPEND, Type.FETCH, Type.OPEN, Type.END, Type.CREDIT, Type.SETTLE, Type.CALL)


@pytest.mark.parametrize("kind", [*PROVIDERS, Type.HEARTBEAT, *OURS])
def test_nothing_but_hello_is_taken_from_who_is_not_known(guarded: tuple[Serve, Any], kind: Type) -> None:
    server, credentials = guarded
    payload = binary.json_frame(kind, 3, {"call": "create_topic", "name": "sneaked", "topic": "sneaked"})
    with Bare(server) as client:
        client.send(payload)
        assert client.goodbye()["code"] == "UNAUTHORIZED"
    with Frames(server, **credentials) as client:
        assert client.call("topics")["topics"] == [t for t in client.call("topics")["topics"] if t["name"] != "sneaked"]


def test_a_token_that_is_no_text_is_no_request(tmp_path: Path) -> None:
    """JSON can say half of a surrogate pair, which nothing can encode."""
    with Serve(tmp_path, auth_token="secret") as server, Bare(server) as client:
        client.send(binary.json_frame(Type.HELLO, 1, {"version": 1, "token": "\ud800"}))
        assert client.goodbye()["code"] == "BAD_REQUEST"


# ---- what is too large, and what is no frame


def test_a_frame_beyond_the_limit_is_refused_before_it_comes_and_takes_no_memory(server: Serve) -> None:
    before = server.rss()
    for length in (10 * MIB + 1, 1 << 31, (1 << 32) - 1):
        with Bare(server) as client:
            client.send(HEAD.pack(Type.HELLO, 1, length))
            assert client.goodbye()["code"] == "BAD_FRAME"
    assert server.rss() - before < 8 * MIB


def test_after_hello_a_frame_may_be_as_large_as_a_batch_and_no_larger(server: Serve) -> None:
    before = server.rss()
    for length in (binary.FRAME_BYTES_MAX + 1, (1 << 32) - 1):
        with Frames(server) as client:
            client.send(HEAD.pack(Type.PUBLISH, 1, length))
            assert client.goodbye()["code"] == "BAD_FRAME"
    assert server.rss() - before < 8 * MIB


def test_what_a_head_claims_takes_no_memory_until_it_comes(tmp_path: Path) -> None:
    """Nobody has to be known to send 13 bytes."""
    with Serve(tmp_path, auth_token="secret") as server, Frames(server, token="secret") as client:
        before = server.rss()
        claims = [Bare(server) for _ in range(20)]
        try:
            for claim in claims:
                claim.send(HEAD.pack(Type.HELLO, 1, 10 * MIB) + b"{")
            client.sync()
            assert server.rss() - before < 40 * MIB
        finally:
            for claim in claims:
                claim.close()


@pytest.mark.parametrize("kind", [0x00, 0x09, 0x0A, 0x16, 0x20, 0x22, 0x7F, 0xFF])
def test_a_frame_that_a_client_does_not_send_ends_its_connection_only_and_is_counted(
    server: Serve, client: Frames, kind: int
) -> None:
    before = counted(server, "protocol_errors")
    with Frames(server) as bad:
        bad.send(HEAD.pack(kind, 1, 0))
        assert bad.goodbye()["code"] == "BAD_FRAME"
    assert counted(server, "protocol_errors") == before + 1
    client.sync()


@pytest.mark.parametrize("kind", PROVIDERS)
def test_who_said_hello_does_not_speak_as_the_provider(server: Serve, kind: Type) -> None:
    with Frames(server) as client:
        client.send(binary.json_frame(kind, 1, {}))
        assert client.goodbye()["code"] == "BAD_FRAME"


@pytest.mark.parametrize("kind", [Type.APPEND, Type.FETCH, Type.END, Type.CREDIT, Type.SETTLE])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(7), bytes(13)])
def test_fields_that_do_not_fit_are_refused_and_the_connection_goes_on(
    client: Frames, kind: Type, payload: bytes
) -> None:
    assert client.error(kind, payload)["code"] == "BAD_FRAME"
    client.sync()


def test_a_settle_frame_that_claims_more_than_it_holds_is_refused(client: Frames) -> None:
    data = bytearray(binary.settle_frame(1, Settle(1, Verb.ACK, 0, 0, 1, 0, [5])))[HEAD.size :]
    data[37:41] = (1 << 31).to_bytes(4, "big")
    assert client.error(Type.SETTLE, data)["code"] == "BAD_FRAME"


@pytest.mark.parametrize("kind", [Type.OPEN, Type.CALL, Type.HELLO])
@pytest.mark.parametrize("payload", [b"{", b"[]", b"1", b"\xff", b'"x"', b"[" * 100_000, b"9" * 5000])
def test_what_is_not_json_is_refused_and_the_connection_goes_on(client: Frames, kind: Type, payload: bytes) -> None:
    assert client.error(kind, payload)["code"] == "BAD_REQUEST"
    client.sync()


@pytest.mark.parametrize("payload", [b"", b"x" * 95, bytes(96), bytes(104), bytes(1000)])
def test_what_is_no_batch_is_refused_and_the_connection_goes_on(client: Frames, topic: str, payload: bytes) -> None:
    assert client.error(Type.PUBLISH, payload)["code"] == "CORRUPT_BATCH"
    to = binary.append_frame(0, binary.Append(client.topic_id(topic), 0, 1), payload)[HEAD.size :]
    assert client.error(Type.APPEND, to)["code"] == "CORRUPT_BATCH"
    assert stored_values(client, topic) == []


def test_disconnect_ends_the_connection(client: Frames) -> None:
    client.send(binary.frame(Type.DISCONNECT, 0))
    assert client.frames_until_end() == []


# ---- PUBLISH


def test_each_message_has_a_receipt_that_says_where_it_is(client: Frames, topic: str) -> None:
    first, second = f"{topic}-a", f"{topic}-b"
    subjects = [first, second, f"{first}.x", second]
    receipts = client.publish_batch(messages(subjects, [b"1", b"2", b"3", b"4"]))
    assert receipts == [[first, 0, 0, False], [second, 0, 0, False], [first, 0, 1, False], [second, 0, 1, False]]
    assert stored_values(client, first) == [b"1", b"3"]
    assert stored_values(client, second) == [b"2", b"4"]


def test_the_key_decides_the_partition(client: Frames, topic: str) -> None:
    client.topic_id(topic, partitions=4)
    keys = [b"key-%d" % number for number in range(40)]
    receipts = client.publish(topic, *keys, keys=keys)
    assert [receipt[1] for receipt in receipts] == [hash_key(key) % 4 for key in keys]
    topic_id = client.call("topic", name=topic)["id"]
    for receipt, key in zip(receipts, keys, strict=True):
        fetched = client.fetch(topic_id, receipt[2], partition=receipt[1])
        assert dict(zip(fetched.offsets, fetched.values, strict=True))[receipt[2]] == key


def test_a_subject_that_cannot_be_is_refused_and_the_others_are_stored(client: Frames, topic: str) -> None:
    subjects = ["", topic, "a..b", "a b", f"{topic}.*", f"{topic}.>", "$delayed", "$x.y", topic, "x" * 1025]
    receipts = client.publish_batch(messages(subjects, [b"%d" % n for n in range(len(subjects))]))
    stored = [1, 8]
    assert codes(receipts) == [None if n in stored else "BAD_SUBJECT" for n in range(len(subjects))]
    assert stored_values(client, topic) == [b"1", b"8"]


def test_a_message_without_a_subject_is_refused(client: Frames) -> None:
    assert codes(client.publish_batch(batch(b"a", b"b"))) == ["BAD_SUBJECT", "BAD_SUBJECT"]


@pytest.mark.parametrize("reply", [b"\xff", b"a\r\nMSG x 1 0", b"a b", b"a\nb", b"\x00"])
def test_a_reply_that_cannot_be_is_refused_with_all_of_its_frame(client: Frames, topic: str, reply: bytes) -> None:
    client.publish(topic, b"before")
    replies = [None, reply, b"_INBOX.x"]
    refused = messages([topic] * 3, (b"a", b"b", b"c"), replies=replies)
    assert client.error(Type.PUBLISH, refused.data)["code"] == "BAD_SUBJECT"
    assert stored_values(client, topic) == [b"before"]


def test_no_reply_can_put_lines_into_the_text_door(server: Serve, client: Frames, topic: str) -> None:
    with Nats(server) as text:
        assert text.ask(f"SUB {topic} 1\r\nPING") == "PONG"
        client.error(Type.PUBLISH, messages([topic], (b"a",), replies=[b"x\r\nMSG evil 1 3\r\nabc"]).data)
        client.publish(topic, b"b")
        while (message := text.message()).payload != b"b":
            assert message.subject == topic


def test_what_a_header_asks_and_cannot_be_is_refused_for_its_own_message_only(client: Frames, topic: str) -> None:
    receipts = client.publish(topic, b"a", b"b", headers=[b"Delay: soon\r\n", b"X: y\r\n"])
    assert codes(receipts) == ["BAD_HEADER", None]
    assert stored_values(client, topic) == [b"b"]


@pytest.mark.parametrize("columns", [{"keys": [bytes(MIB + 1)]}, {"headers": [b"A: " + b"b" * MIB + b"\r\n"]}])
def test_no_part_of_a_message_is_larger_than_a_payload_may_be(
    client: Frames, topic: str, columns: dict[str, list[bytes]]
) -> None:
    client.publish(topic, b"before")
    refused = messages([topic], (b"a",), **columns)
    assert client.error(Type.PUBLISH, refused.data)["code"] == "BATCH_TOO_LARGE"
    assert stored_values(client, topic) == [b"before"]


@pytest.mark.parametrize("compression", list(Compression))
def test_a_message_that_is_too_large_is_refused_however_it_is_packed(
    client: Frames, topic: str, compression: Compression
) -> None:
    values = [b"small", bytes(MIB + 1)]
    assert client.error(Type.PUBLISH, messages([topic] * 2, values, compression=compression).data)["code"] == (
        "BATCH_TOO_LARGE"
    )
    topic_id = client.topic_id(topic)
    assert client.append_refused(topic_id, batch(*values, compression=compression)) == "BATCH_TOO_LARGE"
    assert stored_values(client, topic) == []
    assert codes(client.publish(topic, bytes(MIB), compression=compression)) == [None]


def identities(*names: str) -> list[bytes]:
    return [f"Msg-ID: {name}\r\n".encode() for name in names]


def test_a_repetition_has_the_receipt_of_the_first_also_within_one_frame(client: Frames, topic: str) -> None:
    client.topic_id(topic, partitions=4)
    keys = [b"k1", b"k2", b"k1", b"k9"]
    first = client.publish(topic, b"a", b"b", b"c", b"d", keys=keys, headers=identities("1", "2", "1", "3"))
    assert [receipt[3] for receipt in first] == [False, False, True, False]
    assert first[2][:3] == first[0][:3]
    again = client.publish(topic, b"x", b"y", b"z", keys=[b"k5", b"k6", b"k7"], headers=identities("3", "2", "1"))
    assert again == [[*first[3][:3], True], [*first[1][:3], True], [*first[0][:3], True]]
    assert sorted(stored_values(client, topic)) == [b"a", b"b", b"d"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_repetition_after_a_restart_has_the_receipt_of_the_first(tmp_path: Path, end: str) -> None:
    with Serve(tmp_path, config="[topics.orders]\npartitions = 4\n") as server:
        keys, headers = [b"k1", b"k2", b"k3"], identities("1", "2", "3")
        with Frames(server) as client:
            first = client.publish("orders", b"a", b"b", b"c", keys=keys, headers=headers)
        server.stop() if end == "stop" else server.kill()
        server.restart()
        with Frames(server) as client:
            again = client.publish("orders", b"x", b"y", b"z", headers=headers)
            assert again == [[*receipt[:3], True] for receipt in first]
            assert sorted(stored_values(client, "orders")) == [b"a", b"b", b"c"]


def test_the_receipt_of_a_delayed_message_has_no_offset_yet_and_it_comes_when_it_is_due(
    client: Frames, topic: str
) -> None:
    client.open(1, topic)
    headers = [b"Delay: 50ms\r\nMsg-ID: late\r\n"]
    assert client.publish(topic, b"late", headers=headers) == [[topic, -1, -1, False]]
    assert client.publish(topic, b"again", headers=headers) == [[topic, -1, -1, True]]
    assert [message.value for message in client.delivered(1)] == [b"late"]
    assert stored_values(client, topic) == [b"late"]


def test_what_goes_to_an_inbox_is_stored_nowhere_and_its_receipt_says_so(client: Frames, other: Frames) -> None:
    other.open(1, "_INBOX.>")
    [receipt] = client.publish("_INBOX.x", b"a")
    assert [(message.subject, message.value) for message in other.delivered(1)] == [("_INBOX.x", b"a")]
    assert receipt[1:] == [-1, -1, False]


def test_what_is_published_keeps_its_order_though_a_topic_must_be_made_first(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    numbers = []
    for step in range(20):
        subjects = [topic, f"{topic}-new-{step}"]
        numbers.append(client.request(Type.PUBLISH, messages(subjects, [b"%d" % (3 * step)] * 2).data))
        numbers.append(client.request(Type.PUBLISH, messages([topic], [b"%d" % (3 * step + 1)]).data))
        numbers.append(client.ask_append(topic_id, batch(b"%d" % (3 * step + 2), producer=5, sequence=step)))
    for number in numbers:
        client.result_of(number)
    assert stored_values(client, topic) == [b"%d" % number for number in range(60)]


def test_a_tombstone_is_stored_as_one(client: Frames, topic: str) -> None:
    client.open(1, topic)
    client.publish(topic, b"", b"x", keys=[b"k", b"k"], tombstones=[True, False])
    assert [(message.key, message.deleted) for message in client.delivered(2)] == [(b"k", True), (b"k", False)]


# ---- APPEND


def everything(topic: str, compression: Compression) -> Batch:
    """A batch with all that a producer can say."""
    name = topic.encode()
    return encode(
        [b"a" * 500, b"\xff\xfe", b"", b"d" * 500],
        timestamp=TIMESTAMP,
        timestamps=[TIMESTAMP + number for number in range(4)],
        keys=[b"k", None, b"\x00", b"k"],
        subjects=[None, name + b".x", name + b".y.z", name],
        replies=[None, b"_INBOX.r", None, None],
        headers=[b"X: y\r\n", None, None, None],
        tombstones=[False, False, True, False],
        producer=(1 << 64) - 1,
        sequence=0,
        compression=compression,
    )


@pytest.mark.parametrize("compression", list(Compression))
def test_what_is_stored_is_what_the_producer_signed_byte_for_byte(
    client: Frames, topic: str, compression: Compression
) -> None:
    topic_id = client.topic_id(topic)
    client.publish(topic, b"before")
    sent = everything(topic, compression)
    assert sent.compression is compression
    assert client.append(topic_id, sent) == (1, False)
    [found] = client.fetch(topic_id, 1).batches
    assert (found.base_offset, found.end) == (1, 5)
    assert bytes(found.data[56:]) == bytes(sent.data[56:])


@pytest.mark.parametrize("compression", list(Compression))
def test_who_subscribes_gets_all_that_the_producer_said(client: Frames, topic: str, compression: Compression) -> None:
    client.open(1, f"{topic}.>")
    client.open(2, topic)
    client.append(client.call("resolve", subject=topic)["id"], everything(topic, compression))
    below = client.delivered(2, subscription=1)
    assert [(m.subject, m.value, m.key, m.reply, m.deleted) for m in below] == [
        (f"{topic}.x", b"\xff\xfe", None, b"_INBOX.r", False),
        (f"{topic}.y.z", b"", b"\x00", None, True),
    ]
    assert [(m.value, m.headers, m.offset) for m in client.delivered(2, subscription=2)] == [
        (b"a" * 500, b"X: y\r\n", 0),
        (b"d" * 500, b"", 3),
    ]


def test_what_the_producer_writes_where_the_broker_stamps_does_not_count(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    sent = batch(b"a")
    sent.stamp(77, append_time=5, log=9, durable_bytes=8, epoch=7, source=6, position=5)
    assert client.append(topic_id, sent) == (0, False)
    [found] = client.fetch(topic_id).batches
    assert (found.base_offset, found.source, found.position) == (0, 0, 0)
    assert found.append_time > TIMESTAMP


def test_a_batch_that_is_sent_again_is_stored_once_and_answered_with_its_first_offset(
    client: Frames, topic: str
) -> None:
    topic_id = client.topic_id(topic)
    sent = [batch(b"%d" % number, b"x", producer=7, sequence=number) for number in range(5)]
    assert [client.append(topic_id, each) for each in sent] == [(2 * number, False) for number in range(5)]
    assert [client.append(topic_id, each) for each in sent] == [(2 * number, True) for number in range(5)]
    assert client.call("topic", name=topic)["positions"][0]["end"] == 10


def test_a_repetition_that_comes_right_behind_the_first_is_answered_as_one(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    numbers = [client.ask_append(topic_id, batch(b"a", producer=7)) for _ in range(3)]
    assert [client.result_of(number) for number in numbers] == [
        {"offset": 0, "duplicate": duplicate} for duplicate in (False, True, True)
    ]


def test_a_gap_is_refused_and_nothing_of_it_is_stored(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    assert client.append_refused(topic_id, batch(b"a", producer=7, sequence=1)) == "OUT_OF_SEQUENCE"
    client.append(topic_id, batch(b"b", producer=7, sequence=0))
    assert client.append_refused(topic_id, batch(b"c", producer=7, sequence=2)) == "OUT_OF_SEQUENCE"
    assert stored_values(client, topic) == [b"b"]


def test_what_was_chosen_among_fewer_partitions_is_refused_unless_it_is_stored_already(
    client: Frames, topic: str
) -> None:
    topic_id = client.topic_id(topic, partitions=2)
    first, second = batch(b"a", producer=7, sequence=0), batch(b"b", producer=7, sequence=1)
    assert client.append(topic_id, first, partition=1, partitions=2) == (0, False)
    client.call("alter_topic", name=topic, partitions=3)
    assert client.append(topic_id, first, partition=1, partitions=2) == (0, True)
    assert client.append_refused(topic_id, second, partition=1, partitions=2) == "STALE_LAYOUT"
    assert client.append_refused(topic_id, batch(b"c"), partition=1, partitions=2) == "STALE_LAYOUT"
    assert client.append_refused(topic_id, batch(b"c"), partition=3, partitions=3) == "STALE_LAYOUT"
    assert stored_values(client, topic) == [b"a"]
    assert client.append(topic_id, second, partition=1, partitions=3) == (1, False)


def test_what_is_for_a_topic_that_is_gone_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    client.append(topic_id, batch(b"a", producer=7))
    client.call("delete_topic", name=topic)
    assert client.append_refused(topic_id, batch(b"a", producer=7)) == "UNKNOWN_TOPIC"
    asks = batch(b"a", headers=identities("1"), asks=True)
    assert client.append_refused(topic_id, asks) == "UNKNOWN_TOPIC"
    assert client.append_refused((1 << 64) - 1, batch(b"a")) == "UNKNOWN_TOPIC"
    # One that is made again under the name is another one.
    assert client.topic_id(topic) != topic_id


def test_a_batch_with_one_wrong_bit_anywhere_in_what_was_signed_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    sent = batch(b"abcdefgh", producer=7)
    for place in range(56, len(sent.data), 5):
        broken = bytearray(sent.data)
        broken[place] ^= 1
        assert client.append_refused(topic_id, Batch(broken)) in ("CORRUPT_BATCH", "UNSUPPORTED_BATCH")
    assert stored_values(client, topic) == []


def test_a_batch_with_holes_or_of_the_logs_own_kind_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    for sent in (batch(b"a", b"b", deltas=[0, 5], span=6), encode_control(ControlBatch(1, 0))):
        assert client.append_refused(topic_id, sent) == "CORRUPT_BATCH"
    assert stored_values(client, topic) == []


def test_a_subject_that_is_not_the_topics_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    name = topic.encode()
    for asks in (False, True):
        for subject in (b"other", name + b"x", name + b".", name + b".*", name + b".a b", b"$delayed"):
            sent = batch(b"a", b"b", subjects=[name, subject], asks=asks)
            assert client.append_refused(topic_id, sent) == "BAD_SUBJECT", subject
    assert stored_values(client, topic) == []


@pytest.mark.parametrize("asks", [False, True])
def test_a_producers_reply_must_fit_into_a_line_of_text(client: Frames, topic: str, asks: bool) -> None:
    topic_id = client.topic_id(topic)
    for reply in (b"\xff", b"x\r\nMSG evil 1 3\r\nabc", b"a b"):
        assert client.append_refused(topic_id, batch(b"a", replies=[reply], asks=asks)) == "BAD_SUBJECT", reply
    assert stored_values(client, topic) == []


def test_a_batch_that_asks_is_opened_and_its_ids_tell_repetitions(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    sent = batch(b"a", b"b", headers=identities("1", "2"), asks=True)
    assert client.append(topic_id, sent) == (0, False)
    assert client.append(topic_id, sent) == (0, True)
    assert client.append(topic_id, batch(b"b", b"c", headers=identities("2", "3"), asks=True)) == (1, False)
    assert stored_values(client, topic) == [b"a", b"b", b"c"]
    # And they are the ids that PUBLISH knows.
    assert client.publish(topic, b"x", headers=identities("3")) == [[topic, 0, 2, True]]


def test_a_batch_that_asks_for_a_delay_comes_later(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    client.open(1, topic)
    assert client.append(topic_id, batch(b"late", headers=[b"Delay: 50ms\r\n"], asks=True)) == (-1, False)
    assert [message.value for message in client.delivered(1)] == [b"late"]


def test_a_batch_that_asks_has_no_producer(client: Frames, topic: str) -> None:
    sent = batch(b"a", headers=identities("1"), asks=True, producer=7)
    assert client.append_refused(client.topic_id(topic), sent) == "BAD_REQUEST"
    assert stored_values(client, topic) == []


def test_a_batch_that_is_refused_is_not_stored_in_part(client: Frames, topic: str) -> None:
    """An error says that nothing of it is stored: its producer sends all of it again."""
    topic_id = client.topic_id(topic)
    sent = batch(b"a", b"b", headers=[b"X: y\r\n", b"Delay: soon\r\n"], asks=True)
    assert client.append_refused(topic_id, sent) == "BAD_HEADER"
    assert stored_values(client, topic) == []


def test_where_equal_payloads_are_repetitions_a_batch_is_looked_into(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic, policy={"dedup": "payload"})
    assert client.append(topic_id, batch(b"a", b"b", producer=7, sequence=0)) == (0, False)
    assert client.append(topic_id, batch(b"b", b"c", producer=7, sequence=1)) == (1, False)
    assert client.append(topic_id, batch(b"c", b"a", producer=8, sequence=0)) == (2, True)
    assert stored_values(client, topic) == [b"a", b"b", b"c"]


def test_the_brokers_own_topics_are_not_there_for_clients(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        first = client.topic_id("orders")
        for topic_id in range(first):
            assert client.append_refused(topic_id, batch(b"junk")) == "UNKNOWN_TOPIC"
            assert client.error_of(client.ask_fetch(topic_id))["code"] == "UNKNOWN_TOPIC"
        for name in ("$delayed", "$state"):
            assert client.refused("topic", name=name)["code"] == "UNKNOWN_TOPIC"
            assert client.refused("resolve", subject=name)["code"] == "BAD_SUBJECT"
        assert [topic["name"] for topic in client.call("topics")["topics"]] == ["orders"]


@pytest.mark.parametrize("durability", ["fsync", "flush"])
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path, durability: str) -> None:
    with Serve(tmp_path, config=f'[topics.orders]\ndurability = "{durability}"\n') as server:
        sent = [batch(b"%d" % number, producer=7, sequence=number) for number in range(15)]
        # After a kill offsets may be left out, but none is given out twice.
        offsets: list[int] = []
        for begin in (0, 5, 10):
            with Frames(server) as client:
                topic_id = client.call("resolve", subject="orders")["id"]
                assert [client.append(topic_id, each) for each in sent[:begin]] == [(each, True) for each in offsets]
                for each in sent[begin : begin + 5]:
                    offset, is_duplicate = client.append(topic_id, each)
                    assert not is_duplicate
                    offsets.append(offset)
                server.kill()
            server.restart()
        assert offsets == sorted(set(offsets))
        with Frames(server) as client:
            assert stored_values(client, "orders") == [b"%d" % number for number in range(15)]


# ---- FETCH


def test_a_fetch_begins_with_the_batch_that_holds_the_offset(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    for begin in range(0, 9, 3):
        client.append(topic_id, batch(*(b"%d" % number for number in range(begin, begin + 3))))
    assert client.fetch(topic_id, 0).offsets == list(range(9))
    assert client.fetch(topic_id, 4).offsets == list(range(3, 9))
    assert client.fetch(topic_id, 4, size=1).offsets == [3, 4, 5]
    assert client.fetch(topic_id, 0, end=3).offsets == [0, 1, 2]
    assert client.fetch(topic_id, 0, end=4).offsets == [0, 1, 2, 3, 4, 5]
    fetched = client.fetch(topic_id, 9)
    assert (fetched.start, fetched.committed, fetched.batches) == (0, 9, [])


def test_a_fetch_waits_until_there_is_something(client: Frames, other: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    number = client.ask_fetch(topic_id, 0, wait_ms=20_000)
    client.sync()
    other.publish(topic, b"a")
    fetched = client.fetched(number)
    assert (fetched.values, fetched.committed) == ([b"a"], 1)


def test_a_fetch_that_waits_in_vain_gives_nothing(client: Frames, topic: str) -> None:
    fetched = client.fetch(client.topic_id(topic), 0, wait_ms=20)
    assert (fetched.start, fetched.committed, fetched.batches) == (0, 0, [])


def test_others_are_answered_while_a_fetch_waits(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    waiting = [client.ask_fetch(topic_id, 0, wait_ms=20_000) for _ in range(10)]
    assert client.call("topic", name=topic)["id"] == topic_id
    assert client.fetch(topic_id).batches == []
    client.publish(topic, b"a")
    assert [client.fetched(number).values for number in waiting] == [[b"a"]] * 10


def test_a_fetch_that_waits_for_a_topic_that_is_deleted_is_answered(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    number = client.ask_fetch(topic_id, 0, wait_ms=20_000)
    client.sync()
    client.call("delete_topic", name=topic)
    frame = client.answer(number)
    assert frame.type == Type.ERROR or client.error_of(client.ask_fetch(topic_id))["code"] == "UNKNOWN_TOPIC"


def test_a_fetch_behind_the_last_message_waits_also_after_a_crash(tmp_path: Path) -> None:
    """Offsets are left out then: that they are committed does not mean that there is something."""
    with Serve(tmp_path, topic_durability="flush") as server:
        with Frames(server) as client:
            client.publish("orders", b"a", b"b")
            server.kill()
        server.restart()
        with Frames(server) as client, Frames(server) as other:
            topic_id = client.call("topic", name="orders")["id"]
            assert client.fetch(topic_id).values == [b"a", b"b"]
            number = client.ask_fetch(topic_id, 2, wait_ms=20_000)
            client.sync()
            other.publish("orders", b"c")
            assert client.fetched(number).values == [b"c"]


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    config = "[topics.orders]\nsegment_bytes = 4096\nretain_bytes = 8192\n"
    with Serve(tmp_path, config=config, storage_upkeep_ms=50) as server, Frames(server) as client:
        topic_id = client.call("topic", name="orders")["id"]
        for number in range(40):
            client.append(topic_id, batch(b"%02d" % number + bytes(1000)))
        until = time.monotonic() + 20
        while not (start := client.call("topic", name="orders")["positions"][0]["start"]):
            assert time.monotonic() < until, "nothing is dropped"
        error = client.error_of(client.ask_fetch(topic_id, start - 1))
        assert error["code"] == "OFFSET_OUT_OF_RANGE"
        assert (error["offset"], error["end"]) == (start - 1, 40)
        assert error["start"] >= start
        beyond = client.error_of(client.ask_fetch(topic_id, 41, wait_ms=20_000))
        assert (beyond["code"], beyond["offset"], beyond["end"]) == ("OFFSET_OUT_OF_RANGE", 41, 40)
        # What is kept: from then on nothing is dropped.
        while (start := client.fetch(topic_id, 40).start) < 32:
            assert time.monotonic() < until, "too much is kept"
        assert client.fetch(topic_id, start).values[0][:2] == b"%02d" % start


def test_a_fetch_from_what_is_not_there_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    assert client.error_of(client.ask_fetch(topic_id, partition=1))["code"] == "UNKNOWN_TOPIC"
    assert client.error_of(client.ask_fetch(1 << 63))["code"] == "UNKNOWN_TOPIC"
    assert client.error_of(client.ask_fetch(topic_id, (1 << 64) - 1))["code"] == "OFFSET_OUT_OF_RANGE"


def test_many_fetches_at_once_are_all_answered(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    client.publish(topic, *(b"%d" % number for number in range(100)))
    numbers = [client.ask_fetch(topic_id, number % 100, size=1) for number in range(1000)]
    for number in numbers:
        assert len(client.fetched(number).values) == 100


@pytest.mark.parametrize("tail_bytes", [0, 64 * MIB])
def test_who_does_not_read_what_it_fetches_does_not_make_the_server_grow(tmp_path: Path, tail_bytes: int) -> None:
    with (
        Serve(tmp_path, topic_durability="flush", storage_tail_bytes_max=tail_bytes) as server,
        Frames(server) as client,
        Frames(server, receive_bytes=4096) as lazy,
    ):
        topic_id = client.topic_id("orders")
        for _ in range(20):
            client.append(topic_id, batch(bytes(900_000)))
        before = server.rss()
        asked = [lazy.ask_fetch(topic_id, size=16 * MIB) for _ in range(20)]
        # Each of these is read by the same threads, behind those.
        for _ in range(20):
            client.fetch(topic_id, size=16 * MIB)
        assert server.rss() - before < 120 * MIB
        for number in asked:
            assert len(lazy.fetched(number).batches) > 10


# ---- OPEN, CREDIT, END


def test_no_more_come_than_there_is_credit_for(client: Frames, other: Frames, topic: str) -> None:
    client.open(1, topic, credit=3)
    values = [b"%d" % number for number in range(10)]
    for value in values:
        other.publish(topic, value)
    found = client.delivered(3)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 2)
    found += client.delivered(2)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 1000)
    found += client.delivered(5)
    assert [message.value for message in found] == values
    assert [message.offset for message in found] == list(range(10))


def test_one_batch_is_cut_where_the_credit_ends(client: Frames, topic: str) -> None:
    client.open(1, topic, credit=4)
    client.publish(topic, *(b"%d" % number for number in range(10)))
    assert [message.offset for message in client.delivered(4)] == [0, 1, 2, 3]
    client.credit(1, 1)
    assert [message.offset for message in client.delivered(1)] == [4]


def test_without_credit_nothing_comes(client: Frames, topic: str) -> None:
    client.open(1, topic, credit=0)
    client.publish(topic, b"a")
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 1)
    client.delivered(1)


@pytest.mark.parametrize("group", [None, "eager"])
def test_credit_that_comes_right_behind_open_counts(
    client: Frames, other: Frames, topic: str, group: str | None
) -> None:
    options = {"subscription": 1, "pattern": topic, "group": group and f"{group}-{topic}", "credit": 0}
    client.send(binary.json_frame(Type.OPEN, 50, options) + binary.credit_frame(1, 1))
    client.result_of(50)
    other.publish(topic, b"a")
    client.socket.settimeout(5)
    assert [message.value for message in client.delivered(1)] == [b"a"]


def test_credit_for_what_is_not_open_harms_nobody(client: Frames) -> None:
    client.credit(99, (1 << 32) - 1)
    client.sync()


def test_a_client_hears_itself(client: Frames, topic: str) -> None:
    client.open(1, topic)
    client.publish(topic, b"a")
    assert [message.value for message in client.delivered(1)] == [b"a"]


def begin_at(place: str, client: Frames, topic: str, moment_us: int) -> Any:
    topic_id = client.call("topic", name=topic)["id"]
    return {
        "latest": "latest",
        "earliest": "earliest",
        "offset": {"offset": 2},
        "beyond": {"offset": 1 << 40},
        "time": {"time_us": moment_us},
        "long ago": {"time_us": 0},
        "to come": {"time_us": 1 << 62},
        "positions": {"positions": [[topic_id, 0, 1]]},
        "not listed": {"positions": [[topic_id + 1000, 0, 1]]},
    }[place]


BEGINS: Final = {
    "latest": 4,
    "earliest": 0,
    "offset": 2,
    "beyond": 4,
    "time": 3,
    "long ago": 0,
    "to come": 4,
    "positions": 1,
    "not listed": 0,
}


@pytest.mark.parametrize("mode", [None, "shared", "partitioned"])
@pytest.mark.parametrize("place", list(BEGINS))
def test_where_a_reader_begins(client: Frames, topic: str, place: str, mode: str | None) -> None:
    for number in range(3):
        client.publish(topic, b"%d" % number)
    moment_us = time.time_ns() // 1000
    client.publish(topic, b"3")
    start = begin_at(place, client, topic, moment_us)
    group: dict[str, Any] = {} if mode is None else {"group": f"group-{topic}", "mode": mode}
    opened = client.open(1, topic, start=start, **group)
    if mode is None:
        assert opened["positions"] == [[client.call("topic", name=topic)["id"], 0, BEGINS[place]]]
    else:
        assert opened["positions"] == []
    client.publish(topic, b"4")
    expected = [b"%d" % number for number in range(BEGINS[place], 5)]
    assert [message.value for message in client.delivered(len(expected))] == expected


def test_who_resumes_by_positions_misses_and_doubles_nothing(server: Serve, topic: str) -> None:
    with Frames(server) as client:
        client.topic_id(topic, partitions=3)
    stop = threading.Event()
    published: list[bytes] = []

    def publish() -> None:
        with Frames(server) as publisher:
            while not stop.is_set():
                values = [b"%d" % (len(published) + step) for step in range(7)]
                publisher.publish(topic, *values, keys=values)
                published.extend(values)
                time.sleep(0)

    thread = threading.Thread(target=publish)
    found: dict[tuple[int, int], list[Delivered]] = {}

    def receive(client: Frames, count: int) -> None:
        for message in client.delivered(count):
            found.setdefault((message.topic_id, message.partition), []).append(message)

    positions: dict[tuple[int, int], int] = {}
    try:
        for life in range(12):
            with Frames(server) as client:
                listed = [[*place, offset] for place, offset in positions.items()]
                opened = client.open(1, topic, credit=20, start={"positions": listed} if life else "earliest")
                if not life:
                    positions = {(topic_id, number): offset for topic_id, number, offset in opened["positions"]}
                    thread.start()
                assert {(row[0], row[1]): row[2] for row in opened["positions"]} == positions
                receive(client, 20)
                client.credit(1, 5)
                receive(client, 5)
            positions |= {place: received[-1].offset + 1 for place, received in found.items()}
    finally:
        stop.set()
        thread.join()
    with Frames(server) as client:
        listed = [[*place, offset] for place, offset in positions.items()]
        client.open(1, topic, credit=1 << 20, start={"positions": listed})
        receive(client, len(published) - sum(map(len, found.values())))
    values = [message.value for received in found.values() for message in received]
    assert sorted(values, key=int) == published
    for received in found.values():
        assert [message.offset for message in received] == list(range(len(received)))


def test_after_end_no_more_come(client: Frames, other: Frames, topic: str) -> None:
    client.open(1, topic)
    client.open(2, topic)
    client.end(1)
    other.publish(topic, b"a")
    client.delivered(1, subscription=2)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.end(1)
    client.end(77)


@pytest.mark.parametrize("group", [None, "hasty"])
def test_an_end_right_behind_its_open_ends_it(client: Frames, other: Frames, topic: str, group: str | None) -> None:
    options = {"subscription": 1, "pattern": topic, "group": group and f"{group}-{topic}"}
    client.send(binary.json_frame(Type.OPEN, 50, options) + binary.end_frame(51, 1))
    client.answer(50)
    client.answer(51)
    other.publish(topic, b"a")
    client.call("topics")
    assert client.kept(Type.MESSAGES) == []
    assert sum(len(told["members"]) for told in other.call("groups")["groups"] if told["name"] == options["group"]) == 0


def test_a_number_is_of_one_subscription(client: Frames, topic: str) -> None:
    client.open(1, topic)
    assert client.open_refused(1, topic)["code"] == "GROUP_CONFLICT"


def test_a_number_is_of_one_subscription_also_when_both_are_asked_for_at_once(
    client: Frames, other: Frames, topic: str
) -> None:
    names = [f"{topic}-a", f"{topic}-b"]
    asked = [
        other.request(Type.OPEN, {"subscription": 1, "pattern": topic, "group": name, "start": "earliest"})
        for name in names
    ]
    assert sorted(other.answer(number).type for number in asked) == [Type.RESULT, Type.ERROR]
    other.close()
    until = time.monotonic() + 20
    while any(told["members"] for told in client.call("groups")["groups"] if told["name"] in names):
        assert time.monotonic() < until, "a member stays in its group though its connection is gone"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"subscription": "1"}, "subscription"),
        ({"subscription": -1}, "subscription"),
        ({"subscription": None}, "subscription"),
        ({"credit": -1}, "credit"),
        ({"credit": 1.5}, "credit"),
        ({"credit": True}, "credit"),
        ({"pattern": 5}, "pattern"),
        ({"pattern": None}, "pattern"),
        ({"group": 5}, "group"),
        ({"group": "g", "mode": "both"}, "mode"),
        ({"group": "g", "mode": ["shared"]}, "mode"),
        ({"start": "now"}, "start"),
        ({"start": {"offset": -1}}, "start"),
        ({"start": {"offset": "1"}}, "start"),
        ({"start": {}}, "start"),
        ({"start": 5}, "start"),
        ({"start": {"positions": 5}}, "start"),
        ({"start": {"positions": [[1, 2]]}}, "start"),
        ({"start": {"positions": [[1, 2, -3]]}}, "start"),
        ({"start": {"positions": [["a", 2, 3]]}}, "start"),
        ({"start": {"positions": [None]}}, "start"),
    ],
)
def test_an_open_with_a_bad_field_is_refused_by_its_name(client: Frames, fields: dict[str, Any], named: str) -> None:
    error = client.error(Type.OPEN, {"subscription": 1, "pattern": "orders", "credit": 5} | fields)
    assert error["code"] == "BAD_REQUEST"
    assert error["text"].startswith(f"{named} is ")


@pytest.mark.parametrize("pattern", ["", "a..b", "a b", "a.>.b", "$delayed", "$>", "x" * 1025])
@pytest.mark.parametrize("group", [None, "of-a-bad-pattern"])
def test_a_pattern_that_cannot_be_read_is_refused(client: Frames, pattern: str, group: str | None) -> None:
    assert client.open_refused(1, pattern, group=group)["code"] == "BAD_SUBJECT"
    assert client.refused("group", name="of-a-bad-pattern")["code"] == "UNKNOWN_GROUP"


def test_a_name_that_cannot_be_encoded_is_refused_and_not_taken_for_another(client: Frames) -> None:
    """JSON can say half of a surrogate pair."""
    assert client.refused("create_topic", name="\ud800")["code"] == "BAD_REQUEST"
    assert client.open_refused(1, "\ud800")["code"] == "BAD_REQUEST"
    assert client.refused("create_group", name="\ud800", pattern="a")["code"] == "BAD_REQUEST"


def test_a_pattern_reads_many_topics_and_those_that_are_made_later(client: Frames, other: Frames, topic: str) -> None:
    other.publish(f"{topic}-old.x", b"0")
    opened = client.open(1, "*.x", start="latest")
    assert [offset for _, _, offset in opened["positions"]].count(1) >= 1
    other.publish(f"{topic}-old.x", b"1")
    other.publish(f"{topic}-new.x", b"2")
    other.publish(f"{topic}-new.y", b"3")
    other.publish(f"{topic}-new.x", b"4")
    found = client.delivered(3)
    assert sorted((message.subject, message.value) for message in found) == [
        (f"{topic}-new.x", b"2"),
        (f"{topic}-new.x", b"4"),
        (f"{topic}-old.x", b"1"),
    ]
    assert {message.topic for message in found} == {f"{topic}-old", f"{topic}-new"}


def test_who_does_not_read_its_messages_does_not_make_the_server_grow(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, topic_durability="flush", storage_tail_bytes_max=MIB) as server,
        Frames(server) as client,
        Frames(server, receive_bytes=4096) as lazy,
    ):
        lazy.open(1, "orders", credit=1 << 20)
        client.publish("orders", b"first")
        before = server.rss()
        for _ in range(100):
            client.publish("orders", bytes(900_000))
        assert server.rss() - before < 60 * MIB
        assert [len(message.value) for message in lazy.delivered(101)] == [5] + [900_000] * 100


# More than the answers that may wait, and what the system keeps for a connection besides.
FLOODS: Final = {
    "heartbeats": lambda: b"".join(binary.frame(Type.HEARTBEAT, number) for number in range(1, 700_000)),
    "calls": lambda: b"".join(binary.json_frame(Type.CALL, number, {"call": "topics"}) for number in range(3000)),
    "ends": lambda: binary.end_frame(1, 1) * 600_000,
}


@pytest.mark.parametrize("kind", list(FLOODS))
def test_who_does_not_read_its_answers_is_not_read_from(tmp_path: Path, kind: str) -> None:
    with Serve(tmp_path) as server, Frames(server, receive_bytes=4096) as lazy, Frames(server) as client:
        for number in range(20):
            client.topic_id(f"topic-{number}")
        before = server.rss()
        lazy.flood(FLOODS[kind]())
        until = time.monotonic() + 20
        while not counted(server, "unread"):
            assert time.monotonic() < until, "it is read from, whatever it does not read"
        assert server.rss() - before < 60 * MIB
        client.sync()


# ---- groups


def test_a_shared_group_gives_each_message_to_one_member(server: Serve, topic: str) -> None:
    with Frames(server) as ann, Frames(server) as bob, Frames(server) as publisher:
        ann.open(1, topic, group=f"g-{topic}")
        bob.open(1, topic, group=f"g-{topic}")
        for number in range(10):
            publisher.publish(topic, b"%d" % number)
        found = ann.delivered(5) + bob.delivered(5)
        assert sorted(message.value for message in found) == [b"%d" % number for number in range(10)]
        assert {message.attempts for message in found} == {1}


def test_what_a_member_had_comes_to_another_when_its_connection_ends(server: Serve, topic: str) -> None:
    with Frames(server) as bob:
        with Frames(server) as ann:
            ann.open(1, topic, group=f"g-{topic}")
            ann.publish(topic, b"a", b"b", b"c")
            [first, *_] = ann.delivered(3)
            assert ann.settle(Verb.ACK, first) == []
            bob.open(1, topic, group=f"g-{topic}")
        again = bob.delivered(2)
        assert [(message.value, message.attempts) for message in again] == [(b"b", 2), (b"c", 2)]
        assert bob.settle(Verb.ACK, again[0], 1, 2) == []
        assert bob.call("group", name=f"g-{topic}")["lag"] == 0


def test_each_partition_of_a_partitioned_group_has_one_member(server: Serve, topic: str) -> None:
    name = f"g-{topic}"
    with Frames(server) as ann, Frames(server) as bob, Frames(server) as publisher:
        publisher.topic_id(topic, partitions=4)
        first = ann.open(1, topic, group=name, mode="partitioned")["generation"]
        second = bob.open(1, topic, group=name, mode="partitioned")["generation"]
        assert second > first
        keys = [b"%d" % number for number in range(40)]
        receipts = publisher.publish(topic, *keys, keys=keys)
        even = sum(receipt[1] % 2 == 0 for receipt in receipts)
        for member, count, remainder in ((ann, even, 0), (bob, 40 - even, 1)):
            found = member.delivered(count)
            assert {message.partition % 2 for message in found} == {remainder}
            assert {message.generation for message in found} == {second}


def test_a_group_is_what_it_is(client: Frames, topic: str) -> None:
    client.open(1, topic, group=f"g-{topic}")
    assert client.open_refused(2, f"{topic}.>", group=f"g-{topic}")["code"] == "GROUP_CONFLICT"
    assert client.open_refused(2, topic, group=f"g-{topic}", mode="partitioned")["code"] == "GROUP_CONFLICT"
    client.open(2, topic, group=f"g-{topic}")


def test_the_start_counts_only_for_a_group_that_is_made(client: Frames, topic: str) -> None:
    client.publish(topic, b"a")
    client.open(1, topic, group=f"g-{topic}", start="latest", credit=0)
    client.open(2, topic, group=f"g-{topic}", start="earliest")
    client.publish(topic, b"b")
    assert [message.value for message in client.delivered(1, subscription=2)] == [b"b"]


def test_who_reads_in_a_group_that_is_deleted_is_told_that_no_more_come(
    client: Frames, other: Frames, topic: str
) -> None:
    client.open(1, topic, group=f"g-{topic}")
    client.open(2, topic)
    other.call("delete_group", name=f"g-{topic}")
    ended = client.of_type(Type.ENDED)
    assert (ended.id, read_json(ended)["code"]) == (1, "UNKNOWN_GROUP")
    other.publish(topic, b"a")
    client.delivered(1, subscription=2)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    # The number may be had again, and the name too.
    client.open(1, topic, group=f"g-{topic}", start="earliest")
    assert [message.value for message in client.delivered(1)] == [b"a"]


# ---- SETTLE


@pytest.fixture
def group(client: Frames, topic: str) -> list[Delivered]:
    """Five messages that a member of the group `g-<topic>` has."""
    client.open(1, topic, group=f"g-{topic}")
    client.publish(topic, *(b"%d" % number for number in range(5)))
    return client.delivered(5)


def test_what_cannot_be_acknowledged_is_told(client: Frames, topic: str, group: list[Delivered]) -> None:
    assert client.settle(Verb.ACK, group[0], 0, 2, 77, (1 << 64) - 1) == [77, (1 << 64) - 1]
    told = client.call("group", name=f"g-{topic}")
    assert (told["lag"], told["pending"], told["positions"][0]["committed"]) == (3, 3, 1)
    # What was done before is not refused.
    assert client.settle(Verb.ACK, group[0], 0, 1) == []
    assert client.settle(Verb.ACK, group[0], 99) == [99]


def test_what_is_given_back_comes_again(client: Frames, group: list[Delivered]) -> None:
    assert client.settle(Verb.NACK, group[0], 1, 3, 99) == [99]
    again = client.delivered(2)
    assert [(message.offset, message.attempts) for message in again] == [(1, 2), (3, 2)]


def test_what_is_given_back_for_later_comes_later(client: Frames, topic: str, group: list[Delivered]) -> None:
    assert client.settle(Verb.NACK, group[0], 1, delay_us=1 << 63) == []
    assert client.settle(Verb.NACK, group[0], 2, delay_us=1) == []
    assert [message.offset for message in client.delivered(1)] == [2]
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    assert client.call("group", name=f"g-{topic}")["pending"] == 5


def test_what_is_rejected_is_a_dead_letter_at_once(client: Frames, topic: str, group: list[Delivered]) -> None:
    assert client.settle(Verb.REJECT, group[0], 1, 99) == [99]
    until = time.monotonic() + 20
    while not (letters := client.call("dead_letters", pattern=topic)["letters"]):
        assert time.monotonic() < until, "it does not become one"
    assert [(letter["topic"], letter["origin_offset"]) for letter in letters] == [(topic, 1)]


def test_who_needs_more_time_has_it(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=1500) as server, Frames(server) as client:
        client.open(1, "orders", group="g")
        client.publish("orders", b"a", b"b")
        held = client.delivered(2)
        # The one that is extended stays, and the other one comes again.
        again: list[Delivered] = []
        until = time.monotonic() + 20
        while not again:
            assert time.monotonic() < until, "nothing comes again"
            assert client.settle(Verb.EXTEND, held[0], 0, 99) == [99]
            again += client.delivered(len(client.kept(Type.MESSAGES)))
        assert {message.offset for message in again} == {1}


def test_a_commit_ends_all_below_it_and_one_of_an_earlier_generation_is_refused(
    client: Frames, other: Frames, topic: str
) -> None:
    name = f"g-{topic}"
    client.publish(topic, *(b"%d" % number for number in range(5)))
    client.open(1, topic, group=name, mode="partitioned", start="earliest")
    held = client.delivered(5)
    assert client.settle(Verb.COMMIT, held[0], 3) == []
    assert client.call("group", name=name)["positions"][0]["committed"] == 3
    other.open(1, topic, group=name, mode="partitioned")
    assert client.settle_refused(Verb.COMMIT, held[0], 5) == "STALE_COMMIT"
    assert client.call("group", name=name)["positions"][0]["committed"] == 3


def test_a_commit_beyond_what_there_is_does_not_skip_what_comes(client: Frames, topic: str) -> None:
    name = f"g-{topic}"
    client.publish(topic, b"a")
    client.open(1, topic, group=name, mode="partitioned", start="earliest")
    held = client.delivered(1)
    client.answer(client.ask_settle(Verb.COMMIT, held[0], [1000]))
    client.publish(topic, b"b")
    assert client.call("group", name=name)["positions"][0]["committed"] <= 2
    client.socket.settimeout(5)
    assert [message.value for message in client.delivered(1)] == [b"b"]


def test_a_commit_for_what_the_group_does_not_read_is_refused(client: Frames, group: list[Delivered]) -> None:
    elsewhere = group[0]._replace(partition=7)
    assert client.settle_refused(Verb.COMMIT, elsewhere, 1) == "STALE_COMMIT"
    assert client.settle(Verb.ACK, elsewhere, 1) == [1]
    assert client.settle(Verb.NACK, elsewhere, 1) == [1]
    assert client.settle(Verb.EXTEND, elsewhere, 1) == [1]
    assert client.settle(Verb.REJECT, elsewhere, 1) == [1]


def test_only_messages_of_a_group_are_settled(client: Frames, topic: str) -> None:
    client.open(1, topic)
    client.publish(topic, b"a")
    [message] = client.delivered(1)
    assert client.settle_refused(Verb.ACK, message) == "BAD_REQUEST"
    assert client.settle_refused(Verb.ACK, message, subscription=2) == "BAD_REQUEST"


def test_what_was_confirmed_as_acknowledged_does_not_come_again_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Frames(server) as client:
            client.open(1, "orders", group="g")
            client.publish("orders", *(b"%d" % number for number in range(10)))
            held = client.delivered(10)
            assert client.settle(Verb.ACK, held[0], 0, 1, 2, 5, 9) == []
            server.kill()
        server.restart()
        with Frames(server) as client:
            client.open(1, "orders", group="g")
            assert [message.offset for message in client.delivered(5)] == [3, 4, 6, 7, 8]


def test_what_was_delivered_to_a_connection_that_is_gone_can_be_acknowledged_by_the_next(
    server: Serve, topic: str
) -> None:
    name = f"g-{topic}"
    with Frames(server) as client:
        client.open(1, topic, group=name)
        client.publish(topic, b"a", b"b")
        held = client.delivered(2)
    with Frames(server) as client:
        client.open(1, topic, group=name)
        assert client.settle(Verb.ACK, held[0], 0, 1) == []
        assert client.call("group", name=name)["lag"] == 0


def test_acknowledgements_that_are_sent_all_at_once_are_all_confirmed(client: Frames, topic: str) -> None:
    client.open(1, topic, group=f"g-{topic}", credit=5000)
    values = [b"%d" % number for number in range(1000)]
    client.publish(topic, *values)
    held = client.delivered(1000)
    numbers = [client.ask_settle(Verb.ACK, held[0], [message.offset]) for message in held]
    assert [client.result_of(number) for number in numbers] == [{"refused": []}] * 1000
    assert client.call("group", name=f"g-{topic}")["lag"] == 0


# ---- CALL


def test_a_topic_is_made_described_altered_and_deleted(client: Frames, topic: str) -> None:
    made = client.call("create_topic", name=topic, partitions=2, policy={"retain_ms": 5000, "durability": "flush"})
    assert (made["name"], made["partitions"], made["refused"]) == (topic, 2, None)
    assert (made["policy"]["retain_ms"], made["policy"]["durability"]) == (5000, "flush")
    client.publish(topic, b"a", keys=[b"k"])
    altered = client.call("alter_topic", name=topic, partitions=3, policy={"retain_ms": None})
    assert (altered["id"], altered["partitions"], altered["policy"]["retain_ms"]) == (made["id"], 3, None)
    assert altered["policy"]["durability"] == "flush"
    told = client.call("topic", name=topic)
    assert told.pop("now_us") > 0
    assert told == next(each for each in client.call("topics")["topics"] if each["name"] == topic)
    assert [position["partition"] for position in told["positions"]] == [0, 1, 2]
    assert sum(position["committed"] for position in told["positions"]) == 1
    assert all(position["start"] <= position["committed"] <= position["end"] for position in told["positions"])
    assert all(position["bytes"] > 0 for position in told["positions"])
    assert client.refused("create_topic", name=topic)["code"] == "TOPIC_CONFLICT"
    assert client.refused("alter_topic", name=topic, partitions=1)["code"] == "BAD_REQUEST"
    assert client.call("delete_topic", name=topic) == {}
    for call in ("topic", "alter_topic", "delete_topic"):
        assert client.refused(call, name=topic)["code"] == "UNKNOWN_TOPIC"


@pytest.mark.parametrize("partitions", [0, 257, 1 << 40])
def test_a_topic_with_as_many_partitions_as_cannot_be_is_refused(tmp_path: Path, partitions: int) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        assert client.refused("create_topic", name="orders", partitions=partitions)["code"] == "BAD_REQUEST"
        assert client.refused("topic", name="orders")["code"] == "UNKNOWN_TOPIC"
        client.topic_id("orders")
        assert client.refused("alter_topic", name="orders", partitions=partitions)["code"] == "BAD_REQUEST"


def test_resolve_tells_the_topic_of_a_subject_and_makes_it(client: Frames, topic: str) -> None:
    told = client.call("resolve", subject=f"{topic}.a.b")
    assert told == client.call("resolve", subject=topic)
    assert (told["topic"], told["partitions"]) == (topic, 1)
    assert client.call("topic", name=topic)["id"] == told["id"]


def test_resolve_makes_no_topic_where_topics_do_not_make_themselves(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_auto_create="false") as server, Frames(server) as client:
        assert client.refused("resolve", subject="orders")["code"] == "UNKNOWN_TOPIC"
        assert codes(client.publish("orders", b"a")) == ["UNKNOWN_TOPIC"]
        client.topic_id("orders")
        assert codes(client.publish("orders.x", b"a")) == [None]


def test_offsets_are_found_by_time_and_by_size(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    for number in range(10):
        client.append(topic_id, batch(b"%d" % number + bytes(5000)))
    times = [each.append_time for each in client.fetch(topic_id).batches]
    for number, moment in enumerate(times):
        found = client.call("offset_at", name=topic, partition=0, time_us=moment)["offset"]
        assert found == times.index(moment) <= number
    assert client.call("offset_at", name=topic, partition=0, time_us=times[-1] + 1) == {"offset": 10}
    assert client.call("offset_after", name=topic, partition=0, offset=0, bytes=12_000) == {"offset": 3}
    assert client.call("offset_after", name=topic, partition=0, offset=5, bytes=1 << 40) == {"offset": 10}
    assert client.refused("offset_after", name=topic, partition=0, offset=11, bytes=1)["code"] == "OFFSET_OUT_OF_RANGE"
    assert client.refused("offset_at", name=topic, partition=1, time_us=0)["code"] == "UNKNOWN_TOPIC"


def test_a_group_is_made_described_reset_and_deleted(client: Frames, topic: str) -> None:
    name = f"g-{topic}"
    client.publish(topic, *(b"%d" % number for number in range(10)))
    made = client.call("create_group", name=name, pattern=topic, mode="partitioned", start={"offset": 4})
    assert (made["name"], made["pattern"], made["mode"], made["lag"]) == (name, topic, "partitioned", 6)
    assert made == client.call("group", name=name)
    [listed] = [each for each in client.call("groups")["groups"] if each["name"] == name]
    assert made == {**listed, "hint": None}
    [position] = made["positions"]
    assert (position["topic"], position["partition"], position["committed"], position["end"]) == (topic, 0, 4, 10)
    assert client.refused("create_group", name=name, pattern=topic)["code"] == "GROUP_CONFLICT"
    reset = client.call("reset_group", name=name, start="earliest")
    assert (reset["lag"], reset["generation"] > made["generation"]) == (10, True)
    reset = client.call("reset_group", name=name, start={"offset": 7}, topic=topic, partition=0)
    assert reset["positions"][0]["committed"] == 7
    assert client.refused("reset_group", name=name, start="earliest", partition=1)["code"] == "UNKNOWN_TOPIC"
    assert client.refused("reset_group", name=name, start="earliest", topic="nothing")["code"] == "UNKNOWN_TOPIC"
    assert client.call("commit", group=name, topic=topic, partition=0, offset=9) == {}
    assert client.call("group", name=name)["positions"][0]["committed"] == 9
    refused = client.refused("commit", group=name, topic=topic, partition=0, offset=1 << 40)
    assert refused["code"] == "OFFSET_OUT_OF_RANGE"
    client.call("commit", group=name, topic=topic, partition=0, offset=10)
    assert client.call("group", name=name)["positions"][0]["committed"] == 10
    assert client.call("delete_group", name=name) == {}
    for call in ("group", "delete_group"):
        assert client.refused(call, name=name)["code"] == "UNKNOWN_GROUP"
    assert client.refused("reset_group", name=name, start="latest")["code"] == "UNKNOWN_GROUP"
    assert client.refused("commit", group=name, topic=topic, partition=0, offset=1)["code"] == "UNKNOWN_GROUP"


def test_what_was_set_by_hand_is_there_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Frames(server) as client:
            client.publish("orders", *(b"%d" % number for number in range(10)))
            client.call("create_group", name="reset", pattern="orders", start="earliest")
            client.call("create_group", name="committed", pattern="orders", start="earliest")
            client.call("create_group", name="gone", pattern="orders")
            client.call("reset_group", name="reset", start={"offset": 3})
            client.call("commit", group="committed", topic="orders", partition=0, offset=6)
            client.call("delete_group", name="gone")
            server.kill()
        server.restart()
        with Frames(server) as client:
            told = {each["name"]: each["positions"][0]["committed"] for each in client.call("groups")["groups"]}
            assert told == {"reset": 3, "committed": 6}


def test_a_member_whose_group_is_reset_reads_from_there(client: Frames, topic: str) -> None:
    client.publish(topic, b"a", b"b")
    client.open(1, topic, group=f"g-{topic}", start="earliest")
    held = client.delivered(2)
    client.settle(Verb.ACK, held[0], 0, 1)
    client.call("reset_group", name=f"g-{topic}", start="earliest")
    assert [message.value for message in client.delivered(2)] == [b"a", b"b"]


def test_dead_letters_are_listed_and_redriven(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        assert client.call("dead_letters", pattern=">")["letters"] == []
        client.open(1, "orders", group="g")
        client.publish("orders", b"\xff\xfe", b"b", b"c", headers=[b"X: y\r\n", None, None])
        held = client.delivered(3)
        client.settle(Verb.REJECT, held[0], 0, 1, 2)
        until = time.monotonic() + 20
        while len(letters := client.call("dead_letters", pattern="orders")["letters"]) < 3:
            assert time.monotonic() < until, "they do not become dead letters"
        letter = letters[0]
        assert (letter["value"], letter["subject"], letter["topic"]) == ("//4=", "orders", "orders")
        assert (letter["origin_partition"], letter["origin_offset"], letter["group"]) == (0, 0, "g")
        assert (letter["attempts"], letter["redriven"]) == (1, False)
        assert "X: y" in letter["headers"]
        assert len(client.call("dead_letters", pattern=">", limit=2)["letters"]) == 2
        assert client.call("dead_letters", pattern="bills")["letters"] == []
        assert client.call("redrive", pattern="orders", count=1)["redriven"] == 1
        assert [message.value for message in client.delivered(1)] == [b"\xff\xfe"]
        assert client.call("redrive", pattern=">")["redriven"] == 2
        assert [message.value for message in client.delivered(2)] == [b"b", b"c"]
        assert client.call("dead_letters", pattern=">")["letters"] == []
        assert len(client.call("dead_letters", pattern=">", redriven=True)["letters"]) == 3


def test_statistics_are_those_of_the_http_port(server: Serve, client: Frames) -> None:
    assert client.call("statistics").keys() == http(server, "varz").keys()


BAD_CALLS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("resolve", {}, "subject"),
    ("resolve", {"subject": 5}, "subject"),
    ("topic", {}, "name"),
    ("topic", {"name": ["a"]}, "name"),
    ("create_topic", {"partitions": 1}, "name"),
    ("create_topic", {"name": "bad", "partitions": "2"}, "partitions"),
    ("create_topic", {"name": "bad", "partitions": True}, "partitions"),
    ("create_topic", {"name": "bad", "partitions": -1}, "partitions"),
    ("create_topic", {"name": "bad", "policy": [1]}, "policy"),
    ("create_topic", {"name": "bad", "policy": {"retain_ms": "1"}}, "retain_ms"),
    ("create_topic", {"name": "bad", "policy": {"retain_ms": 0}}, "retain_ms"),
    ("create_topic", {"name": "bad", "policy": {"durability": "none"}}, "durability"),
    ("create_topic", {"name": "bad", "policy": {"durability": ["fsync"]}}, "durability"),
    ("create_topic", {"name": "bad", "policy": {"colour": "red"}}, "colour"),
    ("create_topic", {"name": "bad", "policy": {"dead_letters": 1}}, "dead_letters"),
    ("alter_topic", {}, "name"),
    ("alter_topic", {"name": "there", "policy": {"deliveries_max": 0}}, "deliveries_max"),
    ("alter_topic", {"name": "there", "partitions": 1.0}, "partitions"),
    ("delete_topic", {}, "name"),
    ("offset_at", {"name": "there", "time_us": 0}, "partition"),
    ("offset_at", {"name": "there", "partition": 0}, "time_us"),
    ("offset_after", {"name": "there", "partition": 0, "bytes": 0}, "offset"),
    ("offset_after", {"name": "there", "partition": 0, "offset": 0}, "bytes"),
    ("offset_after", {"name": "there", "partition": 0, "offset": 0, "bytes": 1 << 64}, "bytes"),
    ("group", {}, "name"),
    ("create_group", {"name": "bad"}, "pattern"),
    ("create_group", {"pattern": "bad"}, "name"),
    ("create_group", {"name": "bad", "pattern": "there", "mode": "x"}, "mode"),
    ("create_group", {"name": "bad", "pattern": "there", "start": "x"}, "start"),
    ("reset_group", {"start": "earliest"}, "name"),
    ("reset_group", {"name": "there", "start": {"offset": -1}}, "start"),
    ("reset_group", {"name": "there", "start": "earliest", "partition": "0"}, "partition"),
    ("delete_group", {"name": None}, "name"),
    ("commit", {"topic": "there", "partition": 0, "offset": 0}, "group"),
    ("commit", {"group": "there", "partition": 0, "offset": 0}, "topic"),
    ("commit", {"group": "there", "topic": "there", "offset": 0}, "partition"),
    ("commit", {"group": "there", "topic": "there", "partition": 0}, "offset"),
    ("dead_letters", {"pattern": 7}, "pattern"),
    ("dead_letters", {"pattern": ">", "limit": -1}, "limit"),
    ("redrive", {}, "pattern"),
    ("redrive", {"pattern": ">", "count": "all"}, "count"),
]


@pytest.mark.parametrize(("call", "fields", "named"), BAD_CALLS)
def test_a_call_with_a_bad_field_is_refused_by_its_name(
    client: Frames, call: str, fields: dict[str, Any], named: str
) -> None:
    if "there" not in [told["name"] for told in client.call("topics")["topics"]]:
        client.topic_id("there")
        client.call("create_group", name="there", pattern="there")
    error = client.refused(call, **fields)
    assert error["code"] == "BAD_REQUEST"
    assert named in error["text"]
    assert client.refused("topic", name="bad")["code"] == "UNKNOWN_TOPIC"
    assert client.refused("group", name="bad")["code"] == "UNKNOWN_GROUP"


@pytest.mark.parametrize("fields", [{}, {"call": None}, {"call": 5}, {"call": "reboot"}])
def test_a_call_that_there_is_not_is_refused(client: Frames, fields: dict[str, Any]) -> None:
    error = client.error(Type.CALL, fields)
    assert error["code"] == "BAD_REQUEST"
    if fields.get("call") == "reboot":
        assert "create_topic" in error["text"]


@pytest.mark.parametrize("name", ["", "a..b", "a b", "a.*", ">", "$a", "_a", "x" * 1025])
def test_a_topic_cannot_have_a_bad_or_reserved_name(client: Frames, name: str) -> None:
    assert client.refused("create_topic", name=name)["code"] == "BAD_SUBJECT"
    assert client.refused("resolve", subject=name)["code"] in ("BAD_SUBJECT", "BAD_REQUEST")


# ---- heartbeats, and the end


def test_a_heartbeat_is_answered_with_its_id(client: Frames) -> None:
    client.send(binary.frame(Type.HEARTBEAT, 77))
    assert client.frame() == (Type.HEARTBEAT, 77, b"")


def test_who_says_nothing_is_asked_and_dropped_and_who_answers_stays(tmp_path: Path) -> None:
    with Serve(tmp_path, server_heartbeat_s=1) as server, Frames(server) as silent, Frames(server) as awake:
        ended = threading.Event()
        said: list[Any] = []

        def listen() -> None:
            said.extend(silent.frames_until_end())
            ended.set()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            until = time.monotonic() + 20
            while not ended.is_set():
                assert time.monotonic() < until, "it is not dropped"
                awake.of_type(Type.HEARTBEAT, 0)
                awake.send(binary.frame(Type.HEARTBEAT, 0))
        finally:
            silent.socket.shutdown(2) if not ended.is_set() else None
            thread.join()
        assert [frame.type for frame in said] == [Type.HEARTBEAT, Type.HEARTBEAT, Type.DISCONNECT]
        assert {frame.id for frame in said} == {0}
        awake.sync()
        assert counted(server, "stale") == 1


def test_who_sends_no_whole_frame_is_dropped(tmp_path: Path) -> None:
    with Serve(tmp_path, server_handshake_s=1) as server, Bare(server) as slow:
        slow.send(HELLO[:-1])
        assert slow.goodbye()["code"] == "BAD_REQUEST"
        assert counted(server, "silent") == 1


def test_a_server_that_stops_answers_what_was_published_and_says_goodbye(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Frames(server) as client:
            topic_id = client.topic_id("orders")
            client.open(1, "bills")
            sent = [
                client.ask_append(topic_id, batch(b"%d" % number, producer=7, sequence=number)) for number in range(200)
            ]
            client.result_of(sent[0])
            server.process.send_signal(signal.SIGTERM)
            frames = client.frames_until_end()
            assert frames[-1].type == Type.DISCONNECT
            assert read_json(frames[-1])["code"] == "CLOSED"
            answered = [frame.id for frame in frames[:-1]]
            assert {frame.type for frame in frames[:-1]} <= {Type.RESULT}
            assert answered == sent[1 : 1 + len(answered)]
        assert server.wait().code == 0
        # Neither more nor less: what was not answered was not taken either.
        assert [message["value"] for message in server.dump("orders")] == [str(n) for n in range(len(answered) + 1)]


def test_a_server_that_stops_says_goodbye_to_who_has_not_said_hello(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Bare(server) as client:
        client.send(binary.json_frame(Type.DATA, 1, {"topic": "orders", "data": "a"}))
        assert client.frame().type == Type.ACK
        server.process.send_signal(signal.SIGTERM)
        assert client.goodbye()["code"] == "CLOSED"
        assert server.wait() == (0, "")


def test_who_waits_for_a_fetch_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        client.ask_fetch(client.topic_id("orders"), wait_ms=60_000)
        client.sync()
        server.process.send_signal(signal.SIGTERM)
        assert client.frames_until_end()[-1].type == Type.DISCONNECT
        assert server.wait() == (0, "")


# ---- the same through each door


WORKLOAD: Final = [
    (f"{subject}", value)
    for subject in ("", ".eu", ".eu.new", ".us")
    for value in (b"", b"text", b"\xff\xfe\x00\r\n", bytes(range(256)) * 20)
]


def through(server: Serve, way: str, topic: str) -> None:
    work = [(topic + tail, value) for tail, value in WORKLOAD]
    match way:
        case "text":
            with Flux(server) as text:
                for subject, value in work:
                    text.send(pub(subject, value))
                assert [text.line() for _ in work] == ["+OK"] * len(work)
        case "publish":
            with Frames(server) as client:
                client.publish_batch(messages([subject for subject, _ in work], [value for _, value in work]))
        case "append":
            with Frames(server) as client:
                topic_id = client.call("resolve", subject=topic)["id"]
                subjects = [None if subject == topic else subject.encode() for subject, _ in work]
                client.append(topic_id, batch(*(value for _, value in work), subjects=subjects, producer=9))


@pytest.mark.parametrize("way", ["text", "publish", "append"])
def test_what_is_published_through_one_door_is_the_same_at_every_other(server: Serve, topic: str, way: str) -> None:
    expected = [(topic + tail, value) for tail, value in WORKLOAD]
    with Frames(server) as frames, Flux(server) as text, Nats(server) as nats:
        frames.call("resolve", subject=topic)
        frames.open(1, topic, credit=1000)
        frames.open(2, f"{topic}.>", credit=1000)
        for pattern, sid in ((topic, "1"), (f"{topic}.>", "2")):
            text.subscribe(pattern, sid)
        assert nats.ask(f"SUB {topic} 1\r\nSUB {topic}.> 2\r\nPING") == "PONG"
        through(server, way, topic)
        at, below = expected[:4], expected[4:]
        assert [(m.subject, m.value) for m in frames.delivered(len(at), subscription=1)] == at
        assert [(m.subject, m.value) for m in frames.delivered(len(below), subscription=2)] == below
        for messages_of in (text.message, nats.message):
            found = [messages_of() for _ in expected]
            assert [(m.subject, m.payload) for m in found if m.sid == "1"] == at
            assert [(m.subject, m.payload) for m in found if m.sid == "2"] == below
        frames.end(1)
        frames.end(2)
        late = frames.open(3, ">", start="earliest", credit=100_000)
        assert late["positions"]
        assert stored_values(frames, topic) == [value for _, value in expected]


@pytest.mark.parametrize("block", [b"A: b\r\n", b"A: b", b"A: b\nC: d\n", b"A: b\r\n\r\nC: d\r\n", b""])
def test_headers_of_frames_are_headers_at_the_text_door(
    server: Serve, client: Frames, topic: str, block: bytes
) -> None:
    """They end with the first empty line, and have one."""
    with Nats(server) as nats:
        assert nats.ask(f"SUB {topic} 1\r\nPING") == "PONG"
        both = messages([topic] * 2, (b"value", b"last"), headers=[block, None])
        answer = client.answer(client.request(Type.PUBLISH, both.data))
        if answer.type == Type.ERROR:
            assert read_json(answer)["code"] == "BAD_HEADER"
            client.publish(topic, b"last")
        message = nats.message()
        if answer.type == Type.RESULT:
            assert message.payload == b"value"
            if block:
                assert message.headers.startswith(b"NATS/1.0\r\n")
                assert message.headers.endswith(b"\r\n\r\n")
                assert message.headers.index(b"\r\n\r\n") == len(message.headers) - 4
            message = nats.message()
        assert message.payload == b"last"


def test_headers_of_the_text_door_are_headers_of_frames(server: Serve, client: Frames, topic: str) -> None:
    client.open(1, topic)
    with Flux(server) as text:
        assert text.publish_with_headers(topic, b"v", msg_id=1, x="y") == "+OK"
    [message] = client.delivered(1)
    assert message.headers == b"Msg-Id: 1\r\nX: y\r\n"
    assert client.publish(topic, b"again", headers=identities("1")) == [[topic, 0, 0, True]]


# ---- anything at all


NUMBERS: Final = st.sampled_from([0, 1, 2, 3, 255, 256, 1 << 31, (1 << 32) - 1])
LARGE: Final = st.sampled_from([0, 1, 2, 3, 4, 100, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
NAMES: Final = st.sampled_from(
    [
        "orders",
        "orders.a",
        "bills",
        "g",
        "h",
        ">",
        "*",
        "a..b",
        "",
        "$delayed",
        "_x",
        "\ud800",
        "\x00",
        "DLQ",
        "DLQ.orders",
    ]
)
STARTS: Final = st.one_of(
    st.sampled_from(["latest", "earliest", "x"]),
    st.builds(lambda n: {"offset": n}, LARGE),
    st.builds(lambda n: {"time_us": n}, st.integers(-(1 << 70), 1 << 70)),
    st.builds(lambda rows: {"positions": rows}, st.lists(st.lists(LARGE, min_size=2, max_size=3), max_size=3)),
)
ANY: Final = st.one_of(st.none(), st.booleans(), LARGE, st.floats(), NAMES, st.lists(NAMES, max_size=2), STARTS)
POLICIES: Final = st.dictionaries(
    st.sampled_from(["retain_ms", "retain_bytes", "segment_bytes", "dedup", "durability", "deliveries_max", "colour"]),
    st.one_of(LARGE, st.sampled_from(["id", "payload", "off", "fsync", "flush"]), ANY),
    max_size=1,
)
FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "name": NAMES,
    "subject": NAMES,
    "pattern": NAMES,
    "group": NAMES,
    "topic": NAMES,
    "partition": LARGE,
    "partitions": st.one_of(LARGE, st.integers(0, 300)),
    "policy": POLICIES,
    "offset": LARGE,
    "bytes": LARGE,
    "time_us": LARGE,
    "mode": st.sampled_from(["shared", "partitioned", "x"]),
    "start": STARTS,
    "limit": LARGE,
    "count": LARGE,
    "redriven": st.booleans(),
    "subscription": st.integers(0, 3),
    "credit": LARGE,
    "version": st.sampled_from([1, 1, 2, None]),
    "token": NAMES,
    "msg_key": ANY,
    "event_type": st.sampled_from(["MESSAGE", "DELETE", "x"]),
    "data": ANY,
}
CALLS: Final[dict[str, tuple[str, ...]]] = {
    "resolve": ("subject",),
    "topics": (),
    "topic": ("name",),
    "create_topic": ("name", "partitions", "policy"),
    "alter_topic": ("name", "partitions", "policy"),
    "delete_topic": ("name",),
    "offset_at": ("name", "partition", "time_us"),
    "offset_after": ("name", "partition", "offset", "bytes"),
    "groups": (),
    "group": ("name",),
    "create_group": ("name", "pattern", "mode", "start"),
    "reset_group": ("name", "start", "topic", "partition"),
    "delete_group": ("name",),
    "commit": ("group", "topic", "partition", "offset"),
    "dead_letters": ("pattern", "limit", "redriven"),
    "redrive": ("pattern", "count"),
    "statistics": (),
    "reboot": ("name",),
}
OPEN: Final = ("subscription", "pattern", "group", "mode", "start", "credit")
CALL: Final = ("call",)
PROVIDERS_FIELDS: Final = ("topic", "group", "offset", "msg_key", "event_type", "data")
HEADERS: Final = st.sampled_from(
    [
        b"",
        b"Msg-ID: 1\r\n",
        b"Delay: 1ms\r\n",
        b"Delay: x\r\n",
        b"Deliver-At: 0001-01-01\r\n",
        b"\xff",
        b"Penstock-Key: k\r\n",
    ]
)


@st.composite
def objects(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """JSON with these fields, most of them there and of the kind that they must be."""
    fields: dict[str, Any] = {}
    if names is CALL:
        fields["call"] = draw(st.sampled_from(list(CALLS)))
        names = CALLS[fields["call"]]
    for name in names:
        match draw(st.integers(0, 9)):
            case 0:
                pass
            case 1:
                fields[name] = draw(ANY)
            case _:
                fields[name] = draw(FIELDS[name])
    return json.dumps(fields).encode()


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """A batch that is right, most of the time."""
    count = draw(st.integers(1, 4))

    def column(items: st.SearchStrategy[bytes]) -> list[bytes | None] | None:
        return draw(st.none() | st.lists(st.none() | items, min_size=count, max_size=count))

    subjects = st.sampled_from([b"orders", b"orders.a", b"bills.b", b"", b"a..b", b"$x", b"_INBOX.x", b"\xff"])
    made = encode(
        draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
        timestamp=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        subjects=column(subjects),
        keys=column(st.binary(max_size=3)),
        replies=column(st.sampled_from([b"r", b"\xff", b"a b"])),
        headers=column(HEADERS),
        tombstones=draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count)),
        producer=draw(st.sampled_from([0, 0, 1, (1 << 64) - 1])),
        sequence=draw(st.sampled_from([0, 0, 1, (1 << 64) - 1])),
        compression=draw(st.sampled_from(list(Compression))),
        asks=draw(st.booleans()),
    ).data
    data = bytearray(made)
    if draw(st.integers(0, 5)) == 0:
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


@st.composite
def frames(draw: st.DrawFn, kinds: list[Type]) -> bytes:
    kind, number = draw(st.sampled_from(kinds)), 0
    if draw(st.integers(0, 7)) == 0:
        return binary.frame(kind, number, draw(st.binary(max_size=80)))
    match kind:
        case Type.PUBLISH:
            return binary.frame(kind, number, draw(batches()))
        case Type.APPEND:
            to = binary.Append(draw(st.integers(0, 6) | LARGE), draw(NUMBERS), draw(NUMBERS))
            return binary.append_frame(number, to, draw(batches()))
        case Type.FETCH:
            ids = draw(st.integers(0, 6) | LARGE)
            fetch = binary.Fetch(
                ids, draw(NUMBERS), draw(st.sampled_from([0, 1])), *draw(st.tuples(LARGE, LARGE, NUMBERS))
            )
            return binary.fetch_frame(number, fetch)
        case Type.END:
            return binary.end_frame(number, draw(st.integers(0, 3)))
        case Type.CREDIT:
            return binary.credit_frame(draw(st.integers(0, 3)), draw(NUMBERS))
        case Type.SETTLE:
            offsets = draw(st.lists(LARGE, min_size=1, max_size=4))
            verb, generation, delay = draw(st.sampled_from(Verb)), draw(LARGE), draw(LARGE)
            ids = draw(st.integers(0, 6) | LARGE)
            settle = Settle(draw(st.integers(0, 3)), verb, generation, delay, ids, draw(NUMBERS), offsets)
            return binary.settle_frame(number, settle)
        case Type.HELLO:
            return binary.frame(kind, number, draw(objects(("version", "name", "token"))))
        case Type.OPEN:
            return binary.frame(kind, number, draw(objects(OPEN)))
        case Type.CALL:
            return binary.frame(kind, number, draw(objects(CALL)))
        case _:
            return binary.frame(kind, number, draw(objects(PROVIDERS_FIELDS)))


@pytest.fixture(scope="module")
def beaten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("beaten"), topic_topics_max=50) as server:
        yield server


# Nothing is made smaller: the server is not what it was before.
beatings = settings(
    max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)


@beatings
@given(data=st.lists(frames([Type.HELLO, *OURS, Type.OPEN, Type.CALL, Type.CALL]), min_size=1, max_size=12))
def test_each_request_has_one_answer_whatever_it_says(beaten: Serve, data: list[bytes]) -> None:
    note(repr(data))
    numbered = [each[:1] + number.to_bytes(8, "big") + each[9:] for number, each in enumerate(data, 100)]
    asked = {number for number, each in enumerate(data, 100) if each[0] != Type.CREDIT}
    answered: list[int] = []
    with Frames(beaten) as client:
        client.send(b"".join(numbered))
        while asked - set(answered):
            frame = client.frame()
            if frame.type in (Type.RESULT, Type.ERROR, Type.BATCHES):
                answered.append(frame.id)
            else:
                assert frame.type in (Type.MESSAGES, Type.ENDED), frame
    # A CREDIT that cannot be read is told of too.
    assert len(answered) == len(set(answered))
    assert "Traceback" not in beaten.stderr, beaten.stderr


@beatings
@given(data=st.lists(frames([*PROVIDERS, *PROVIDERS, *OURS, Type.HELLO]), min_size=1, max_size=12))
def test_no_frames_end_more_than_their_own_connection(beaten: Serve, data: list[bytes]) -> None:
    note(repr(data))
    with Bare(beaten) as client:
        client.send(b"".join(data) + binary.frame(Type.HEARTBEAT, 7))
        while client._receive() and binary.frame(Type.HEARTBEAT, 7) not in client._received:
            pass
    with Frames(beaten) as judge:
        judge.sync()
    assert "Traceback" not in beaten.stderr, beaten.stderr
