"""PUBLISH at the binary door of a real server, and the same messages through every door."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from penstock.model.batch import Compression
from penstock.model.headers import hash_key
from penstock.wire.binary import Type
from tests.support.binary_door import MIB, codes, identities, stored_values
from tests.support.frames import Frames, batch, messages, read_json
from tests.support.server import Flux, Nats, Serve, pub

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
