"""What hostile clients have done to a broker once, each as small as it can be: none of it works."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.wire.binary import Append, Type, Verb, append_frame
from tests.hostile import frames, prefixed
from tests.hostile.oracle import PASSWORD, USER, Oracle, credentials, get, open_files
from tests.hostile.siege import SUBJECT, TOPIC, start
from tests.support.frames import Frames
from tests.support.lengths import PUBLISH, Cursus, Qb, records_frame
from tests.support.server import Nats, Raw, Serve, hpub, pub

MB: Final = 1_000_000
# Enough of them are more than a batch may have.
MANY: Final = 70


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serve]:
    """It asks for credentials, and has a topic."""
    with start(tmp_path / "serve", topic_retain_bytes="none") as server:
        with _client(server) as client:
            client.topic_id(TOPIC)
        yield server


def _client(server: Serve) -> Frames:
    return Frames(server, user=USER, password=PASSWORD)


def _nats(server: Serve) -> Nats:
    return Nats(server, **credentials())


def _stored(server: Serve, topic: str = TOPIC) -> int:
    """How many messages a topic has."""
    with _client(server) as client:
        found: dict[str, Any] = client.call("topic", name=topic)
        return sum(position["committed"] - position["start"] for position in found["positions"])


# Before a connection is authorised.


@pytest.mark.parametrize("topic", [TOPIC, "no-such-topic"])
@pytest.mark.parametrize("form", ["batch", "envelope"])
def test_who_is_not_authorised_publishes_nothing_with_cursus(server: Serve, form: str, topic: str) -> None:
    with Oracle(server) as oracle:
        with Cursus(server) as client:
            name = topic.encode()
            envelope = struct.pack(">H", len(name)) + name + b"x"
            client.command(records_frame(topic, b"x") if form == "batch" else envelope)
            answer = client.rest()
        oracle.judge()
    assert _stored(server) == 0
    assert topic not in answer, "whether there is such a topic is nobody's business"


@pytest.mark.parametrize("bomb", ["producers", "records"])
def test_nothing_is_unpacked_for_who_is_not_authorised(server: Serve, bomb: str) -> None:
    with Oracle(server) as oracle:
        with Raw(server.ports["quiet"]) as client:
            data = prefixed.bomb_of_producers() if bomb == "producers" else prefixed.bomb_of_records()
            assert len(data) < 64 << 10
            client.send(struct.pack(">I", len(data)) + data)
            client.rest()
        figures = oracle.judge()
    assert figures.rss_peak - figures.rss_before < 20 * MB
    assert _stored(server) == 0


def test_payloads_of_who_is_not_authorised_are_not_kept(server: Serve) -> None:
    with Oracle(server) as oracle, contextlib.ExitStack() as clients:
        for _ in range(60):
            client = clients.enter_context(Raw(server.port))
            with contextlib.suppress(OSError):  # or it is closed in the midst of it
                client.flood(b"PUB hostile.x 1048576\r\n" + bytes(MB), patience_s=0.1)
        clients.close()
        figures = oracle.judge()
    assert figures.rss_peak - figures.rss_before < 20 * MB


# Sizes.


@pytest.mark.parametrize("bomb", ["producers", "records"])
def test_what_is_packed_is_bounded_for_everybody(server: Serve, bomb: str) -> None:
    with Oracle(server) as oracle:
        with Cursus(server) as client:
            assert client.ask(f"AUTH user={USER} password={PASSWORD}").startswith("OK")
            client.command(prefixed.bomb_of_producers() if bomb == "producers" else prefixed.bomb_of_records())
            client.frame()
        figures = oracle.judge()
    assert figures.rss_peak - figures.rss_before < 200 * MB


@pytest.mark.parametrize("size", [5 * MB, (16 << 20) - 1000])
def test_properties_are_as_limited_as_a_payload(server: Serve, size: int) -> None:
    with Oracle(server) as oracle:
        with Qb(server) as client:
            client.heartbeat(user=USER, password=PASSWORD)
            assert "1048576" in client.refused(PUBLISH, b"x", topic=TOPIC, client_id="c", large="x" * size)
        oracle.judge()
    assert _stored(server) == 0


def test_a_frame_that_is_larger_than_any_message_closes_its_connection(server: Serve) -> None:
    with Oracle(server) as oracle:
        with Qb(server) as client:
            client.heartbeat(user=USER, password=PASSWORD)
            # Closed while it is being sent: the answer may be lost with the connection.
            with pytest.raises((ConnectionError, AssertionError)):
                assert "1048576" in client.refused(PUBLISH, b"x", topic=TOPIC, client_id="c", large="x" * (64 << 20))
        oracle.judge()
    assert _stored(server) == 0


def test_a_reader_that_wants_most_of_the_largest_batch_gets_it(server: Serve) -> None:
    with Oracle(server) as oracle:
        with _client(server) as reader, _client(server) as publisher:
            topic_id = publisher.call("topic", name=TOPIC)["id"]
            reader.open(1, SUBJECT.decode(), credit=1000)
            # There is room for it, though a bystander publishes all the time.
            for _ in range(3):
                assert publisher.answer(_append_large(publisher, topic_id)).type == Type.RESULT
            got = reader.delivered(64)
            assert {message.subject for message in got} == {SUBJECT.decode()}
        oracle.judge()


def _append_large(publisher: Frames, topic_id: int) -> int:
    publisher.send(append_frame(99, Append(topic_id, 0, 1), frames.large_batch()))
    return 99


# Messages that the broker moves.


def test_many_large_delayed_messages_are_delivered_together(server: Serve) -> None:
    with Oracle(server) as oracle:
        with _nats(server) as reader, _nats(server) as publisher:
            reader.send("SUB hostile 1\r\nSUB elsewhere 2\r\n")
            assert reader.ask("PING") == "PONG"
            # All are due at the same moment, and stored by then: moved as they come, they would fit.
            due = time.time() + 2
            for _ in range(MANY):
                publisher.send(hpub("hostile", bytes(MB), deliver_at=due))
            publisher.send(hpub("elsewhere", b"late", deliver_at=due))
            assert publisher.ask("PING") == "PONG"
            sizes = sorted(len(reader.message().payload) for _ in range(MANY + 1))
            assert sizes == [4] + [MB] * MANY
        oracle.judge()


def test_many_large_dead_letters_are_stored_and_redriven_together(server: Serve) -> None:
    with _client(server) as client:
        client.call("alter_topic", name=TOPIC, policy={"deliveries_max": 1, "ack_deadline_ms": 60_000})
    with Oracle(server) as oracle:
        with _client(server) as reader, _nats(server) as publisher:
            reader.open(1, TOPIC, group="g", start="earliest", credit=2 * MANY)
            for _ in range(MANY):
                publisher.send(pub(TOPIC, bytes(MB)))
            assert publisher.ask("PING") == "PONG"
            got = reader.delivered(MANY)
            assert reader.settle(Verb.REJECT, got[0], *(message.offset for message in got)) == []
            with _client(server) as letters:
                letters.open(1, "DLQ.>", start="earliest", credit=2 * MANY)
                assert [len(message.value) for message in letters.delivered(MANY)] == [MB] * MANY
                assert letters.call("redrive", pattern=">")["redriven"] == MANY
                assert letters.call("dead_letters", pattern=">")["letters"] == []
            assert [len(message.value) for message in reader.delivered(MANY)] == [MB] * MANY
        oracle.judge()


# Memory.


def test_acknowledgements_far_behind_take_little_memory(server: Serve) -> None:
    """Every other message is acknowledged, each when the last one is confirmed: the broker stores which, every time."""
    count = 20_000
    with Oracle(server) as oracle:
        with _nats(server) as publisher:
            publisher.send(pub(TOPIC, b"x") * count)
            assert publisher.ask("PING") == "PONG"
        with _client(server) as reader:
            reader.open(1, TOPIC, group="g", start="earliest", credit=count)
            got = reader.delivered(count)
            for message in got[: count // 10 : 2]:
                assert reader.settle(Verb.ACK, message) == []
        figures = oracle.judge()
    assert figures.rss_peak - figures.rss_before < 100 * MB
    state = sum(path.stat().st_size for path in (server.data / "topics" / "0").rglob("*.log"))
    assert state < 5 * MB


@pytest.mark.parametrize("header", ["Msg-Id", "Penstock-Key"])
def test_long_ids_and_keys_are_not_kept(server: Serve, header: str) -> None:
    source = random.Random(1)
    with Oracle(server) as oracle:
        with _nats(server) as publisher:
            for _ in range(60):
                publisher.send(hpub(TOPIC, b"", **{header: source.randbytes(450_000).hex()}))
                # One at a time: what waits for the disk is limited elsewhere. It is stored, or refused.
                if publisher.ask("PING") != "PONG":
                    break
        figures = oracle.judge()
    assert figures.rss_after - figures.rss_before < 30 * MB


def test_subjects_are_not_remembered_for_every_subscription(server: Serve) -> None:
    with Oracle(server) as oracle:
        with _nats(server) as reader, _nats(server) as publisher:
            reader.send(b"".join(b"SUB hostile.> %d\r\n" % sid for sid in range(500)))
            assert reader.ask("PING") == "PONG"
            subjects = [b"hostile.%d" % number for number in range(20_000)]
            # Nobody reads it: what is remembered is who would.
            for at in range(0, len(subjects), 1000):
                publisher.send(b"".join(b"PUB %b 0\r\n\r\n" % subject for subject in subjects[at : at + 1000]))
                assert publisher.ask("PING") == "PONG"
            peak = server.rss()
        figures = oracle.judge()
    assert peak - figures.rss_before < 60 * MB


# Descriptors.


def test_a_topic_that_cannot_be_made_leaves_no_files_open(server: Serve) -> None:
    pid = server.process.pid
    with Oracle(server) as oracle:
        with _client(server) as client:
            before = open_files(pid)
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (before + 20, hard))
            number = client.request(Type.CALL, {"call": "create_topic", "name": "wide", "partitions": 256})
            client.answer(number)  # made, or refused
            # There are descriptors left for another one.
            assert client.topic_id("narrow")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert open_files(pid) <= before + 20
            if client.call("topics")["total"] < 3:
                assert client.topic_id("wide", partitions=256)
        oracle.judge()


# Text that is none.


def test_a_name_that_is_no_text_does_not_break_the_pages_that_show_it(server: Serve) -> None:
    known = json.dumps(credentials())[1:-1]
    with Oracle(server) as oracle:
        with Raw(server.port) as client:
            client.line()
            client.send(f'CONNECT {{"verbose":false,"name":"\\ud800",{known}}}\r\nSUB hostile DURABLE:d 1\r\n')
            assert client.ask("PING") == "PONG"
            for path in ("/connz?subs=1", "/subsz", "/admin/groups", "/varz", "/metrics"):
                assert get(server, path).status == 200, path
        oracle.judge()


def test_credentials_that_are_no_text_are_wrong(server: Serve) -> None:
    with Oracle(server) as oracle:
        with Raw(server.port) as client:
            client.line()
            client.send('CONNECT {"user":"\\ud800","pass":"\\ud800","auth_token":"\\ud800"}\r\nPING\r\n')
            assert "Authorization Violation" in client.rest()
        oracle.judge()
