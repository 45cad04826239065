"""Cursus' consumers and groups at the prefixed door of a real server."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.frames import Frames
from tests.support.lengths import Cursus, Qb, consume, records_frame
from tests.support.server import Flux, Serve, in_pieces

# ---- consume (DE-04 to DE-06)


def test_consume_gives_a_range_and_completes(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    for number in range(10):
        client.publish(topic, b"%d" % number)
    assert consume(server, topic) == [b"%d" % number for number in range(10)]
    assert consume(server, topic, offset=7) == [b"7", b"8", b"9"]
    assert consume(server, topic, offset=10) == []
    assert consume(server, topic, offset=1000) == []


def test_consume_by_name_gives_one_batch_with_offsets(client: Cursus, topic: str) -> None:
    client.create(topic)
    for number in range(5):
        client.publish(topic, b"%d" % number)
    assert client.batch(f"CONSUME topic={topic} partition=0 offset=3 member=m") == [(3, b"", b"3"), (4, b"", b"4")]
    assert client.batch(f"CONSUME topic={topic} partition=0 offset=1 batch=2") == [(1, b"", b"1"), (2, b"", b"2")]
    assert client.batch(f"CONSUME topic={topic} partition=0 offset=5") == []


def test_a_large_range_is_given_whole(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    for begin in range(0, 9000, 3000):
        client.json(records_frame(topic, *(b"%d" % number for number in range(begin, begin + 3000))))
    values = [b"%d" % number for number in range(9000)]
    assert consume(server, topic) == values
    assert [value for _, _, value in client.batch(f"CONSUME topic={topic} partition=0 offset=0")] == values


def test_a_batch_holds_so_many_bytes_and_the_rest_is_asked_for(client: Cursus, topic: str) -> None:
    client.create(topic)
    for _ in range(5):
        client.json(records_frame(topic, *[bytes(1 << 20)] * 4))
    first = client.batch(f"CONSUME topic={topic} partition=0 offset=0")
    assert 16 <= len(first) < 20
    rest = client.batch(f"CONSUME topic={topic} partition=0 offset={len(first)}")
    assert [offset for offset, _, _ in first + rest] == list(range(20))


def test_consume_may_wait_for_what_comes(client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic)
    client.command(f"CONSUME topic={topic} partition=0 offset=0 wait_ms=20000")
    other.publish(topic, b"late")
    assert client.batch() == [(0, b"", b"late")]
    assert client.batch(f"CONSUME topic={topic} partition=0 offset=1 wait_ms=1") == []


def test_consume_reads_topics_whose_names_match(server: Serve, client: Cursus, topic: str) -> None:
    for name in (f"{topic}-a1", f"{topic}-a2", f"{topic}-b"):
        client.create(name)
        client.publish(name, name.encode())
    assert sorted(consume(server, f"{topic}-a?")) == [f"{topic}-a1".encode(), f"{topic}-a2".encode()]
    assert sorted(consume(server, f"{topic}-*"))[-1] == f"{topic}-b".encode()
    assert consume(server, f"{topic}-c*") == [f"ERROR: topic '{topic}-c*' does not exist".encode()]
    [refusal] = consume(server, "x" * 257)
    assert refusal == b"ERROR: a topic has at most 256 characters here"


@pytest.mark.parametrize("word", ["follow", "tail"])
def test_who_follows_gets_what_was_and_what_comes(client: Cursus, other: Cursus, topic: str, word: str) -> None:
    client.create(topic)
    client.publish(topic, b"before")
    client.command(f"CONSUME {topic} 0 0 {word}")
    assert client.messages(1) == [b"before"]
    other.publish(topic, b"after")
    other.publish(topic, b"later")
    assert client.messages(2) == [b"after", b"later"]


def test_who_follows_by_name_gets_batches(client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic)
    other.publish(topic, b"one")
    client.command(f"STREAM topic={topic} partition=0 group=g member=m")
    assert client.batch() == [(0, b"", b"one")]
    other.publish(topic, b"two")
    assert client.batch() == [(1, b"", b"two")]
    client.command(f"CONSUME topic={topic} partition=0 offset=1 follow=true")
    assert client.batch() == [(1, b"", b"two")]


def test_the_next_command_ends_the_following(client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic)
    client.command(f"CONSUME {topic} 0 0 follow")
    other.publish(topic, b"x")
    assert client.messages(1) == [b"x"]
    assert client.ask(f"FETCH_OFFSET topic={topic} partition=0 group=g") == "0"
    other.publish(topic, b"y")
    assert topic in client.ask("LIST")


def test_who_waits_hears_that_the_server_is_there(tmp_path: Path) -> None:
    with Serve(tmp_path, server_heartbeat_s=1) as server, Cursus(server) as client, Cursus(server) as other:
        client.create("orders")
        client.command("CONSUME orders 0 0 follow")
        assert [client.frame() for _ in range(2)] == [b"", b""]
        other.subscribe("orders")
        assert [other.frame() for _ in range(2)] == [b"", b""]


def test_a_follower_of_a_topic_that_goes_is_told(client: Cursus, server: Serve, topic: str) -> None:
    client.create(topic)
    with Cursus(server) as named, Cursus(server) as ordered:
        named.command(f"STREAM topic={topic} partition=0")
        ordered.command(f"CONSUME {topic} 0 0 follow")
        client.publish(topic, b"x")
        assert named.batch() == [(0, b"", b"x")]
        assert ordered.messages(1) == [b"x"]
        client.ask(f"DELETE {topic}")
        assert named.all_frames() == [b"STREAM_CONTROL type=CLOSE reason=removed offset=1"]
        assert ordered.all_frames() == []


# ---- groups (GR-01 to GR-03)


def test_a_subscriber_is_pushed_what_comes(client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic, 4)
    client.publish(topic, b"before")
    client.subscribe(topic)
    for number in range(8):
        other.publish(topic, b"%d" % number)
    assert sorted(client.messages(8)) == [b"%d" % number for number in range(8)]


def test_partition_p_belongs_to_consumer_p_modulo_consumers(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 4)
    with Cursus(server) as first, Cursus(server) as second:
        first.subscribe(topic, "workers")
        second.subscribe(topic, "workers")
        for number in range(12):
            client.json(f"PUBLISH topic={topic} partition={number % 4} message={number}")
        assert sorted(map(int, first.messages(6))) == [0, 2, 4, 6, 8, 10]
        assert sorted(map(int, second.messages(6))) == [1, 3, 5, 7, 9, 11]


def test_a_connection_may_be_several_consumers(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 6)
    with Cursus(server) as two, Cursus(server) as one:
        two.subscribe(topic, "workers", 2)
        one.subscribe(topic, "workers", 1)
        for number in range(6):
            client.json(f"PUBLISH topic={topic} partition={number} message={number}")
        assert sorted(map(int, two.messages(4))) == [0, 1, 3, 4]
        assert sorted(map(int, one.messages(2))) == [2, 5]


def test_each_group_gets_everything(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 2)
    with Cursus(server) as first, Cursus(server) as second:
        first.subscribe(topic, "a")
        second.subscribe(topic, "b")
        for number in range(4):
            client.publish(topic, b"%d" % number)
        assert sorted(first.messages(4)) == sorted(second.messages(4)) == [b"0", b"1", b"2", b"3"]


def test_a_group_goes_on_where_it_was(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic, 2)
    with Cursus(server) as first:
        first.subscribe(topic, "workers")
        client.publish(topic, b"seen")
        assert first.messages(1) == [b"seen"]
    with Frames(server) as frames:
        while frames.call("group", name=f"{topic}:workers")["members"]:
            pass
    client.publish(topic, b"missed")
    with Cursus(server) as second:
        second.subscribe(topic, "workers")
        assert second.messages(1) == [b"missed"]


def test_who_subscribes_by_name_is_pushed_batches(client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic)
    assert client.ask(f"SUBSCRIBE topic={topic} group=g") == f"✅ Subscribed to '{topic}'"
    other.publish(topic, b"x")
    assert client.batch() == [(0, b"", b"x")]


def test_a_member_reads_its_partitions_and_commits(server: Serve, client: Cursus, other: Cursus, topic: str) -> None:
    client.create(topic, 4)
    for number in range(8):
        client.json(f"PUBLISH topic={topic} partition={number % 4} message={number}")
    assert client.ask(f"REGISTER_GROUP topic={topic} group=g") == f"✅ Group 'g' registered for topic '{topic}'"
    first = dict(word.split("=") for word in client.ask(f"JOIN_GROUP topic={topic} group=g member=ann").split()[1:])
    assert (first["member"][:4], len(first["member"]), first["assignments"]) == ("ann-", 8, "[0,1,2,3]")
    second = dict(word.split("=") for word in other.ask(f"JOIN_GROUP topic={topic} group=g member=bob").split()[1:])
    assert second["assignments"] == "[1,3]"
    ann = f"topic={topic} group=g member={first['member']}"
    assert client.ask(f"SYNC_GROUP {ann} generation={second['generation']}") == "OK assignments=[0,2]"
    assert client.ask(f"HEARTBEAT {ann} generation={first['generation']}").startswith("ERROR: GEN_MISMATCH")
    assert other.ask(f"HEARTBEAT {ann}") == "OK"
    assert client.batch(f"CONSUME topic={topic} partition=2 offset=0 group=g member={first['member']}") == [
        (0, b"", b"2"),
        (1, b"", b"6"),
    ]
    assert client.ask(f"COMMIT_OFFSET {ann} partition=2 offset=1 generation={second['generation']}") == "OK"
    assert client.ask(f"FETCH_OFFSET topic={topic} partition=2 group=g") == "1"
    assert client.batch(f"CONSUME topic={topic} partition=2 offset=0 group=g") == [(1, b"", b"6")]
    assert client.ask(f"COMMIT_OFFSET {ann} partition=1 offset=1").startswith("ERROR: NOT_OWNER")
    assert client.ask(f"COMMIT_OFFSET {ann} partition=2 offset=0").startswith("ERROR: offset_regression")
    assert client.ask(f"COMMIT_OFFSET {ann} partition=2 offset=99").startswith("ERROR: invalid offset")
    assert client.ask(f"BATCH_COMMIT {ann} P0:2,P2:2") == "OK batched=2"
    client.create(f"{topic}-other")
    client.ask(f"REGISTER_GROUP {topic}-other g")
    assert "say topic=<topic>, too" in client.ask("GROUP_STATUS g")
    status = client.json(f"GROUP_STATUS group=g topic={topic}")
    assert (status["topic_name"], status["member_count"], status["partition_count"]) == (topic, 2, 4)
    assert [member["assignments"] for member in status["members"]] == [[0, 2], [1, 3]]
    assert client.ask(f"LEAVE_GROUP {ann}") == "✅ Left group 'g'"
    assert client.ask(f"SYNC_GROUP {ann}") == f"ERROR: member {first['member']} not found in group"
    assert other.ask(f"SYNC_GROUP topic={topic} group=g member={second['member']}") == "OK assignments=[0,1,2,3]"


def test_a_silent_member_loses_its_partitions_though_it_is_connected(tmp_path: Path) -> None:
    with Serve(tmp_path, server_session_timeout_ms=3000) as server, Cursus(server) as hung, Cursus(server) as awake:
        awake.create("orders", 4)
        assert hung.ask("JOIN_GROUP topic=orders group=g member=hung").endswith("assignments=[0,1,2,3]")
        joined = awake.ask("JOIN_GROUP topic=orders group=g member=awake")
        assert joined.endswith("assignments=[1,3]")
        member = f"topic=orders group=g member={joined.split()[2].removeprefix('member=')}"

        while awake.answer(f"SYNC_GROUP {member}") == "OK assignments=[1,3]":
            pass

        assert awake.answer(f"SYNC_GROUP {member}") == "OK assignments=[0,1,2,3]"
        assert awake.answer(f"HEARTBEAT {member}") == "OK"
        assert [each["member_id"][:5] for each in awake.status("orders", "g")["members"]] == ["awake"]
        # It may join again.
        assert "assignments=[1,3]" in hung.answer("JOIN_GROUP topic=orders group=g member=hung")


def test_a_member_that_waits_for_messages_is_alive(tmp_path: Path) -> None:
    with Serve(tmp_path, server_session_timeout_ms=500) as server, Cursus(server) as waiting, Cursus(server) as other:
        other.create("orders")
        member = waiting.ask("JOIN_GROUP topic=orders group=g member=m").split()[2].removeprefix("member=")
        waiting.command(f"CONSUME topic=orders partition=0 offset=0 group=g member={member} wait_ms=60000")
        gone = other.ask("JOIN_GROUP topic=orders group=g member=gone").split()[2].removeprefix("member=")
        while len(members := other.status("orders", "g")["members"]) > 1:
            pass
        assert [each["member_id"] for each in members] == [member] != [gone]
        other.publish("orders", b"x")
        assert waiting.batch() == [(0, b"", b"x")]


def test_a_member_that_asks_for_messages_gets_nothing_else(tmp_path: Path) -> None:
    with Serve(tmp_path, server_session_timeout_ms=500) as server, Cursus(server) as silent, Cursus(server) as other:
        other.create("orders")
        silent.ask("JOIN_GROUP topic=orders group=g member=m")
        # It was looked at, again and again, and is gone.
        while other.status("orders", "g")["members"]:
            pass
        silent.command("LIST")
        assert silent.frame().decode() == "orders"


def test_a_subscriber_needs_no_heartbeat(tmp_path: Path) -> None:
    with Serve(tmp_path, server_session_timeout_ms=500) as server, Cursus(server) as client, Cursus(server) as other:
        other.create("orders")
        client.subscribe("orders", "g")
        other.ask("JOIN_GROUP topic=orders group=h member=gone")
        while other.status("orders", "h")["members"]:
            pass
        assert len(other.status("orders", "g")["members"]) == 1


def test_what_a_group_committed_is_there_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Cursus(server) as client:
            client.create("orders")
            for number in range(5):
                client.publish("orders", b"%d" % number)
            assert client.ask("COMMIT_OFFSET topic=orders partition=0 group=g offset=3") == "OK"
        server.kill()
        server.restart()
        with Cursus(server) as client:
            assert client.ask("FETCH_OFFSET topic=orders partition=0 group=g") == "3"


# ---- what is wrong (WI-05)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("", "ERROR: empty command"),
        ("   ", "ERROR: empty command"),
        ("FLY", "ERROR: unknown command: FLY. Type HELP for available commands."),
        ("CREATE", "ERROR: missing topic name"),
        ("CREATE partitions=3", "ERROR: missing topic name"),
        ("CREATE t none", "ERROR: partitions must be a positive integer"),
        ("CREATE t 0", "ERROR: partitions must be a positive integer"),
        ("CREATE t -1", "ERROR: partitions must be a positive integer"),
        ("CREATE t 257", "ERROR: partitions must be a positive integer, 256 at the most"),
        ("CREATE t 1 2", "ERROR: invalid CREATE syntax"),
        ("CREATE topic=t colour=red", "ERROR: unknown parameter"),
        ("CREATE a..b", "ERROR: a topic cannot be named 'a..b'"),
        ("CREATE $own", "ERROR: a topic cannot be named '$own'"),
        ("DELETE nowhere", "ERROR: topic 'nowhere' not found"),
        ("DELETE", "ERROR: missing topic name"),
        ("SUBSCRIBE nowhere", "ERROR: topic 'nowhere' does not exist"),
        ("SUBSCRIBE there g 0", "ERROR: consumers must be a positive integer"),
        ("PUBLISH", "ERROR: invalid PUBLISH syntax"),
        ("PUBLISH there", "ERROR: invalid PUBLISH syntax"),
        ("PUBLISH topic=there", "ERROR: invalid PUBLISH syntax"),
        ("PUBLISH nowhere x", "ERROR: topic 'nowhere' does not exist"),
        ("PUBLISH topic=there acks=2 message=x", "ERROR: invalid acks: 0, 1, -1 or all"),
        ("PUBLISH topic=there seqNum=1 message=x", "ERROR: missing producerId parameter"),
        ("CONSUME there", "ERROR: invalid CONSUME syntax"),
        ("CONSUME there 0 0 later", "ERROR: invalid CONSUME syntax"),
        ("CONSUME nowhere 0 0", "ERROR: topic 'nowhere' does not exist"),
        ("CONSUME there zero 0", "ERROR: invalid partition ID"),
        ("CONSUME there 9 0", "ERROR: invalid partition ID"),
        ("CONSUME there 0 -1", "ERROR: invalid offset"),
        ("CONSUME there 0 first", "ERROR: invalid offset"),
        ("CONSUME topic=there* partition=0 follow=true", "ERROR: invalid"),
        ("COMMIT_OFFSET topic=there partition=9 group=g offset=0", "ERROR: invalid partition ID"),
        ("FETCH_OFFSET topic=there partition=9 group=g", "ERROR: invalid partition ID"),
        ("BATCH_COMMIT topic=there group=g member=m P0-1", "ERROR: invalid offsets"),
        ("GROUP_STATUS group=none", "ERROR: group 'none' not found"),
        ("HEARTBEAT topic=there group=none member=m", "ERROR: group 'none' not found"),
    ],
)
def test_what_cannot_be_done_is_told(client: Cursus, command: str, answer: str) -> None:
    client.ask("CREATE there 1")
    if "follow=true" in command:
        client.ask("CREATE there-too 1")
        answer = "ERROR: one topic can be followed, not several"
    assert client.ask(command).startswith(answer)
    if command.startswith(("CONSUME there ", "CONSUME nowhere ")):
        assert client.all_frames() == []
    else:
        assert "there" in client.ask("LIST")


def test_help_names_every_command(client: Cursus) -> None:
    told = client.ask("HELP")
    for verb in ("CREATE", "DELETE", "LIST", "SUBSCRIBE", "PUBLISH", "CONSUME", "HELP", "EXIT"):
        assert f"\n  {verb}" in told


def test_exit_ends_the_connection(client: Cursus) -> None:
    client.command("EXIT")
    assert client.all_frames() == []


def test_a_command_may_come_byte_by_byte(client: Cursus) -> None:
    for piece in in_pieces(struct.pack(">I", 4) + b"HELP", 1):
        client.send(piece)
    assert client.frame().startswith(b"Available commands")


def test_a_length_above_the_limit_ends_the_connection(server: Serve) -> None:
    with Cursus(server) as client:
        client.send(struct.pack(">I", 0x00FFFFFF) + b"LIST")
        with Cursus(server) as other:
            assert other.ask("LIST")
    with Cursus(server) as client:
        assert client.ask("LIST")
        client.send(struct.pack(">I", (16 << 20) + 1))
        assert client.all_frames() == [b"ERROR: a frame of 16777217 bytes, 16777216 are allowed"]


def test_a_payload_above_the_limit_is_refused_by_itself(client: Cursus, topic: str) -> None:
    client.create(topic)
    assert client.ask(f"PUBLISH {topic} ".encode() + bytes((1 << 20) + 1)).startswith(
        "ERROR: a message of 1048577 bytes"
    )
    client.publish(topic, bytes(1 << 20))


def test_a_packed_frame_that_cannot_be_unpacked_is_refused(client: Cursus) -> None:
    assert client.ask(b"\x1f\x8bgarbage").startswith("ERROR: a frame that cannot be unpacked")
    assert client.ask(b"\x82SNAPPY\0" + bytes(9)).startswith("ERROR: a frame that cannot be unpacked")
    assert client.ask("HELP")


def test_who_must_say_who_it_is_says_so_first(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="ann", auth_password="secret") as server:
        with Cursus(server) as client:
            assert client.ask("LIST").startswith("ERROR: say AUTH")
            assert client.all_frames() == []
        with Cursus(server) as client:
            client.send(struct.pack(">I", 1 << 20) + b"AUTH user=")
            assert client.all_frames() == [b"ERROR: a frame of 1048576 bytes, 65536 are allowed"]
        with Cursus(server) as client:
            assert client.ask("AUTH user=ann password=wrong").startswith("ERROR: the broker does not know")
            assert client.all_frames() == []
        with Cursus(server) as client:
            assert client.ask("AUTH user=ann password=secret") == "OK"
            assert client.ask("LIST") == "(no topics)"


def test_messages_reach_the_other_doors(server: Serve, client: Cursus, topic: str) -> None:
    client.create(topic)
    with Flux(server) as flux, Frames(server) as frames, Qb(server) as qb:
        flux.subscribe(topic, "1")
        frames.open(1, topic)
        qb.create(f"{topic}-x")
        client.json(f"PUBLISH topic={topic} key=k message=x")
        [message] = frames.delivered(1)
        assert (message.key, message.value) == (b"k", b"x")
        assert flux.message().header("Penstock-Key") == "k"
