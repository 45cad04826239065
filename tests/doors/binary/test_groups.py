"""Groups and SETTLE at the binary door of a real server."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.wire.binary import Type, Verb
from tests.support.frames import Delivered, Frames, read_json
from tests.support.server import Serve

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
