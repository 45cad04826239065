"""Cursus' topics, publishing and epochs at the prefixed door of a real server."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import cramjam
import lz4.frame
import pytest

from tests.support.frames import Frames
from tests.support.lengths import Cursus, consume, records, records_frame
from tests.support.server import Serve

# ---- topics


def test_topics_are_created_listed_and_deleted(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Cursus(server) as client:
        assert client.ask("LIST") == "(no topics)"
        assert client.ask("CREATE orders") == "✅ Topic 'orders' now has 4 partitions"
        assert client.ask("create clicks 2") == "✅ Topic 'clicks' now has 2 partitions"
        assert client.ask("LIST") == "clicks, orders"
        assert client.ask("DELETE orders") == "🗑️ Topic 'orders' deleted"
        assert client.ask("DELETE topic=clicks") == "🗑️ Topic 'clicks' deleted"
        assert client.ask("LIST") == "(no topics)"


def test_a_topic_that_is_there_gets_more_partitions_and_never_fewer(client: Cursus, topic: str) -> None:
    assert client.ask(f"CREATE {topic} 2") == f"✅ Topic '{topic}' now has 2 partitions"
    assert client.ask(f"CREATE topic={topic} partitions=5") == f"✅ Topic '{topic}' now has 5 partitions"
    assert client.ask(f"CREATE {topic} 1") == f"✅ Topic '{topic}' now has 5 partitions"
    # The new ones have their share at once.
    for number in range(10):
        client.ask(f"PUBLISH topic={topic} acks=1 producerId=p message={number}")
    partitions = json.loads(client.ask(f"DESCRIBE topic={topic}"))["partitions"]
    assert [partition["leo"] for partition in partitions] == [2, 2, 2, 2, 2]


def test_a_topic_may_say_what_it_keeps(server: Serve, client: Cursus, topic: str) -> None:
    client.ask(f"CREATE topic={topic} partitions=1 retention_hours=2 retention_bytes=1000")
    with Frames(server) as frames:
        policy = frames.call("topic", name=topic)["policy"]
    assert (policy["retain_ms"], policy["retain_bytes"]) == (2 * 3600 * 1000, 1000)
    client.ask(f"CREATE topic={topic} retention_bytes=5000")
    with Frames(server) as frames:
        policy = frames.call("topic", name=topic)["policy"]
    assert (policy["retain_ms"], policy["retain_bytes"]) == (2 * 3600 * 1000, 5000)


def test_a_topic_is_described(client: Cursus, topic: str) -> None:
    client.create(topic, 2)
    client.publish(topic, b"x")
    told = client.json(f"DESCRIBE {topic}")
    assert (told["status"], told["topic"]) == ("OK", topic)
    assert sorted(partition["hwm"] for partition in told["partitions"]) == [0, 1]


# ---- publish


def test_a_message_is_published_in_either_form(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    assert client.ask(f"PUBLISH {topic} hello  world ") == f"📤 Published to '{topic}'"
    told = client.json(f"PUBLISH topic={topic} acks=1 producerId=p1 epoch=2 message=a=b message=c")
    assert told.pop("leader").startswith("127.0.0.1:")
    assert told == {
        "status": "OK",
        "last_offset": 1,
        "producer_id": "p1",
        "producer_epoch": 2,
        "seq_start": 0,
        "seq_end": 0,
    }
    assert client.ask(f"PUBLISH topic={topic} acks=0 message=third") == "OK"
    assert consume(server, topic) == [b"hello  world ", b"a=b message=c", b"third"]


def test_what_is_published_is_bytes(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    values = [bytes(range(256)), b"\xff", b" leading", b"a\r\nb\0", b""]
    for value in values:
        client.publish(topic, value)
        assert client.ask(f"PUBLISH topic={topic} acks=0 message=".encode() + value) == "OK"
    assert consume(server, topic) == [value for value in values for _ in range(2)]


def test_keyless_messages_go_to_each_partition_in_turn(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 3)
    for number in range(6):
        client.publish(topic, b"%d" % number)
    assert sorted(len(consume(server, topic, partition)) for partition in range(3)) == [2, 2, 2]


def test_a_key_decides_the_partition(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 4)
    for number in range(8):
        client.ask(f"PUBLISH topic={topic} key=customer message={number}")
    found = [consume(server, topic, partition) for partition in range(4)]
    assert sorted(map(len, found)) == [0, 0, 0, 8]
    [batch] = [client.batch(f"CONSUME topic={topic} partition={n} offset=0") for n in range(4) if found[n]]
    assert {key for _, key, _ in batch} == {b"customer"}


def test_a_publisher_may_choose_the_partition(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 3)
    for number in (2, 0, 2):
        assert client.json(f"PUBLISH topic={topic} partition={number} message=x")["status"] == "OK"
    assert [len(consume(server, topic, partition)) for partition in range(3)] == [1, 0, 2]
    assert "has no partition 9" in client.ask(f"PUBLISH topic={topic} partition=9 message=x")


def test_a_numbered_message_is_stored_once(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    for sequence in (1, 1, 2):
        told = client.json(f"PUBLISH topic={topic} producerId=p epoch=1 seqNum={sequence} message=n{sequence}")
        assert told["last_offset"] == sequence - 1
    assert client.json(f"PUBLISH topic={topic} producerId=p epoch=2 seqNum=1 message=again")["last_offset"] == 2
    assert consume(server, topic) == [b"n1", b"n2", b"again"]


# ---- epochs (DD-06)


def test_an_older_epoch_of_a_producer_is_refused(server: Serve, client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic)
    client.json(f"PUBLISH topic={topic} producerId=p epoch=1 seqNum=1 message=old")
    other.json(f"PUBLISH topic={topic} producerId=p epoch=2 seqNum=1 message=new")

    refusal = client.ask(f"PUBLISH topic={topic} producerId=p epoch=1 seqNum=2 message=late")

    assert refusal.startswith("ERROR: stale_producer_epoch producer=p current=2 got=1")
    client.json(f"PUBLISH topic={topic} producerId=q epoch=1 seqNum=1 message=another")
    client.json(f"PUBLISH topic={topic} producerId=p epoch=1 message=without")
    assert consume(server, topic) == [b"old", b"new", b"another", b"without"]


def test_each_topic_has_its_own_epochs(client: Cursus, topic: str) -> None:
    for name in (topic, f"{topic}-other"):
        client.create(name)
    client.json(f"PUBLISH topic={topic} producerId=p epoch=2 seqNum=1 message=x")
    client.json(f"PUBLISH topic={topic}-other producerId=p epoch=1 seqNum=1 message=x")
    client.ask(f"DELETE {topic}")
    client.create(topic)
    client.json(f"PUBLISH topic={topic} producerId=p epoch=1 seqNum=1 message=x")


def test_publishes_of_several_epochs_in_one_read_each_have_their_answer(client: Cursus, topic: str) -> None:
    client.create(topic)
    for epoch, sequence in ((1, 1), (2, 1), (1, 2), (2, 2)):
        client.command(f"PUBLISH topic={topic} producerId=p epoch={epoch} seqNum={sequence} message=x")
    answers = [client.frame() for _ in range(4)]
    assert [answer.startswith(b"ERROR: stale_producer_epoch") for answer in answers] == [False, False, True, False]


def test_a_batch_of_an_older_epoch_is_refused_whole(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    client.json(records_frame(topic, b"one", idempotent=True))
    client.json(f"PUBLISH topic={topic} producerId=p epoch=4 seqNum=1 message=newer")
    refusal = client.ask(records_frame(topic, b"one", b"two", idempotent=True))
    assert refusal.startswith("ERROR: stale_producer_epoch producer=p current=4 got=3")
    assert consume(server, topic) == [b"one", b"newer"]


def test_epochs_are_known_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Cursus(server) as client:
            client.create("orders")
            client.json("PUBLISH topic=orders producerId=p epoch=7 seqNum=1 message=x")
        server.kill()
        server.restart()
        with Cursus(server) as client:
            assert "current=7 got=6" in client.ask("PUBLISH topic=orders producerId=p epoch=6 seqNum=1 message=x")
            client.json("PUBLISH topic=orders producerId=p epoch=7 seqNum=2 message=y")
        assert consume(server, "orders") == [b"x", b"y"]


def test_commands_are_answered_in_their_order(client: Cursus, topic: str) -> None:
    client.create(topic)
    client.command(f"PUBLISH {topic} 1")
    client.command("PUBLISH nowhere 2")
    client.command(f"PUBLISH topic={topic} message=3")
    client.command("LIST nonsense")
    client.command(f"PUBLISH {topic} 4")
    client.command(f"FETCH_OFFSET topic={topic} partition=0 group=g")
    answers = [client.frame().decode() for _ in range(6)]
    assert answers[0] == answers[4] == f"📤 Published to '{topic}'"
    assert answers[1] == "ERROR: topic 'nowhere' does not exist"
    assert '"last_offset": 1' in answers[2]
    assert answers[3].startswith("ERROR: invalid LIST syntax")
    assert answers[5] == "0"


def test_a_batch_is_published_whole(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 2)
    told = client.json(records_frame(topic, b"one", b"two", b"three", partition=1))
    assert told.pop("leader")
    assert told == {
        "status": "OK",
        "last_offset": 2,
        "producer_id": "p",
        "producer_epoch": 3,
        "seq_start": 1,
        "seq_end": 3,
    }
    assert client.ask(records_frame(topic, b"four", partition=1, acks="0")) == "OK"
    assert consume(server, topic, 1) == [b"one", b"two", b"three", b"four"]
    assert consume(server, topic, 0) == []


def test_a_batch_of_an_idempotent_producer_is_stored_once(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    for _ in range(2):
        assert client.json(records_frame(topic, b"one", b"two", idempotent=True))["last_offset"] == 1
    assert consume(server, topic) == [b"one", b"two"]


def test_a_batch_that_cannot_be_stored_is_refused(client: Cursus, topic: str) -> None:
    client.create(topic)
    assert client.ask(records_frame("nowhere", b"x")) == "ERROR: topic 'nowhere' does not exist"
    assert "has no partition 5" in client.ask(records_frame(topic, b"x", partition=5))
    assert client.ask(records_frame(topic, b"x")[:-1]).startswith("ERROR: a batch with a length")


def test_a_message_in_an_envelope_goes_to_its_topic(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    name = topic.encode()
    assert client.ask(struct.pack(">H", len(name)) + name + b"just a message") == "OK"
    assert client.ask(b"\0\0LIST").count(topic) == 1
    assert consume(server, topic) == [b"just a message"]


def _snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def _unsnappy(data: bytes) -> bytes:
    """What is in Xerial's framing."""
    found, at = b"", 16
    assert data.startswith(b"\x82SNAPPY\0")
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        found += bytes(cramjam.snappy.decompress_raw(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(gzip.compress, gzip.decompress), (lz4.frame.compress, lz4.frame.decompress), (_snappy, _unsnappy)],
    ids=["gzip", "lz4", "snappy"],
)
def test_a_client_that_packs_is_answered_packed(
    server: Serve, topic: str, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> None:
    with Cursus(server) as packing:
        packing.command(pack(f"CREATE {topic} 1".encode()))
        assert unpack(packing.frame()).decode() == f"✅ Topic '{topic}' now has 1 partitions"
        packing.command(pack(f"PUBLISH {topic} packed".encode()))
        assert unpack(packing.frame()).decode() == f"📤 Published to '{topic}'"
        packing.command(pack(records_frame(topic, *[b"more" * 1000] * 4)))
        assert '"last_offset": 4' in unpack(packing.frame()).decode()
        packing.command(pack(f"CONSUME topic={topic} partition=0 offset=0 batch=1".encode()))
        assert records(unpack(packing.frame())) == [(0, b"", b"packed")]
        packing.command(pack(f"CONSUME {topic} 0 0".encode()))
        assert unpack(packing.frame()) == b"packed"
    assert consume(server, topic) == [b"packed", *[b"more" * 1000] * 4]
