"""APPEND at the binary door of a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.model.batch import Batch, Compression, encode, encode_control
from penstock.model.batch import Control as ControlBatch
from tests.support.binary_door import identities, stored_values
from tests.support.frames import TIMESTAMP, Frames, batch
from tests.support.server import Serve


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
