"""What a NATS connection receives, in which order with its PONGs: the same scenarios on nats-server and Penstock."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.msg import Msg

from tests.support.server import Message, Nats, Raw, Serve, pub

_numbers = count()


class Reference:
    """nats-server, as far as a client must know it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"


Server = Serve | Reference


@contextmanager
def reference(directory: Path) -> Iterator[Reference]:
    program = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if program is None:
        pytest.skip("nats-server is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [program, "-a", "127.0.0.1", "-p", "-1"], cwd=directory, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"client connections on 127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
            if "Server is ready" in line:
                break
        try:
            yield Reference(port)
        finally:
            process.kill()


@pytest.fixture(scope="module", params=["nats-server", "fsync", "flush"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "nats-server":
        with reference(directory) as theirs:
            yield theirs
    else:
        with Serve(directory, topic_durability=request.param) as ours:
            yield ours


@pytest.fixture
def subject() -> str:
    return f"d{next(_numbers)}.x"


class Client(Nats):
    """A client that reads INFO wherever the server sends it."""

    def __init__(self, server: Server, *, receive_bytes: int | None = None, **options: object) -> None:
        Raw.__init__(self, server.port, receive_bytes=receive_bytes)
        options = {"verbose": False, "headers": True, "no_responders": True} | options
        self.send(f"CONNECT {json.dumps(options)}\r\nPING\r\n")
        assert until_pong(self) == []


def until_pong(client: Client) -> list[Message]:
    """The messages in front of the next PONG."""
    found = []
    while not (line := client.peek()).startswith(b"PONG"):
        if line.startswith(b"INFO "):
            client.line()
        else:
            found.append(client.message())
    assert client.line() == "PONG"
    return found


def payloads(messages: list[Message]) -> list[int]:
    return [int(message.payload) for message in messages]


def numbered(subject: str, numbers: range) -> bytes:
    return b"".join(pub(subject, b"%d" % number) for number in numbers)


# ---- PONG


def test_a_pong_follows_the_messages_that_it_covers(server: Server, subject: str) -> None:
    with Client(server) as client:
        client.send(f"SUB {subject} 1\r\n")
        for first in range(0, 500, 100):
            client.send(numbered(subject, range(first, first + 100)) + b"PING\r\n")
            assert payloads(until_pong(client)) == list(range(first, first + 100))


def test_a_pong_follows_what_another_connection_has_flushed(server: Server, subject: str) -> None:
    with Client(server) as client, Client(server) as publisher:
        client.send(f"SUB {subject} 1\r\nPING\r\n")
        assert until_pong(client) == []
        publisher.send(numbered(subject, range(100)) + b"PING\r\n")
        assert until_pong(publisher) == []
        client.send("PING\r\n")
        assert payloads(until_pong(client)) == list(range(100))


def test_a_pong_follows_the_backlog_of_a_slow_reader(server: Server, subject: str) -> None:
    """20 MB wait for a connection that has not read; nats-server keeps them in memory, Penstock reads them again."""
    with Client(server, receive_bytes=4096) as client, Client(server) as publisher:
        client.send(f"SUB {subject} 1\r\nPING\r\n")
        assert until_pong(client) == []
        filler = b"x" * 100_000
        publisher.send(b"".join(pub(subject, b"%08d" % number + filler) for number in range(200)) + b"PING\r\n")
        assert until_pong(publisher) == []
        client.send("PING\r\n")
        assert [int(message.payload[:8]) for message in until_pong(client)] == list(range(200))


def test_messages_are_there_after_a_flush(server: Server, subject: str) -> None:
    async def work() -> None:
        client = await nats.connect(server.url)
        subscription = await client.subscribe(subject)
        for number in range(20):
            await client.publish(subject, b"%d" % number)
            # The client writes its PING ahead of what it has gathered, so only the second PONG speaks for that.
            await client.flush()
            await client.flush()
            assert subscription.pending_msgs == 1
            assert (await subscription.next_msg(1)).data == b"%d" % number
        await client.close()

    asyncio.run(work())


# ---- UNSUB


def test_unsubscribe_delivers_what_was_published_before_it(server: Server, subject: str) -> None:
    with Client(server) as client:
        after = numbered(subject, range(100, 120))
        client.send(
            f"SUB {subject} 1\r\n".encode() + numbered(subject, range(100)) + b"UNSUB 1\r\n" + after + b"PING\r\n"
        )
        assert payloads(until_pong(client)) == list(range(100))
        client.send("PING\r\n")
        assert until_pong(client) == []


def test_unsubscribe_of_a_wildcard_delivers_every_subject(server: Server, subject: str) -> None:
    with Client(server) as client:
        names = [f"{subject}.{number % 3}" for number in range(90)]
        client.send(f"SUB {subject}.> 1\r\nSUB > 2\r\n")
        client.send(b"".join(pub(name, b"%d" % number) for number, name in enumerate(names)))
        client.send("UNSUB 1\r\nUNSUB 2\r\nPING\r\n")
        found = until_pong(client)
        for sid in "12":
            assert payloads([message for message in found if message.sid == sid]) == list(range(90))


def test_a_sid_can_be_used_again_after_unsubscribe(server: Server, subject: str) -> None:
    with Client(server) as client:
        client.send(f"SUB {subject}.a 1\r\n".encode() + numbered(f"{subject}.a", range(10)))
        client.send(f"UNSUB 1\r\nSUB {subject}.b 1\r\n".encode() + numbered(f"{subject}.a", range(10, 20)))
        client.send(numbered(f"{subject}.b", range(20, 30)) + b"PING\r\n")
        assert sorted(payloads(until_pong(client))) == [*range(10), *range(20, 30)]


def test_unsubscribe_delivers_what_another_connection_has_flushed(server: Server, subject: str) -> None:
    with Client(server) as client, Client(server) as publisher:
        client.send(f"SUB {subject} 1\r\nPING\r\n")
        assert until_pong(client) == []
        publisher.send(numbered(subject, range(1000)) + b"PING\r\n")
        assert until_pong(publisher) == []
        client.send("UNSUB 1\r\nPING\r\n")
        assert payloads(until_pong(client)) == list(range(1000))


def test_unsubscribe_delivers_the_backlog_of_a_slow_reader(server: Server, subject: str) -> None:
    with Client(server, receive_bytes=4096) as client, Client(server) as publisher:
        client.send(f"SUB {subject} 1\r\nPING\r\n")
        assert until_pong(client) == []
        filler = b"x" * 100_000
        publisher.send(b"".join(pub(subject, b"%08d" % number + filler) for number in range(200)) + b"PING\r\n")
        assert until_pong(publisher) == []
        client.send("UNSUB 1\r\nPING\r\n")
        assert [int(message.payload[:8]) for message in until_pong(client)] == list(range(200))
        publisher.send(pub(subject, b"too late") + b"PING\r\n")
        assert until_pong(publisher) == []
        client.send("PING\r\n")
        assert until_pong(client) == []


@pytest.mark.parametrize("limit", [1, 5, 7, 9])
def test_unsubscribe_after_so_many_counts_what_was_published_before_it(
    server: Server, subject: str, limit: int
) -> None:
    """What came before UNSUB is delivered, though it is more than the maximum; what comes behind it only up to that."""
    with Client(server) as client:
        client.send(f"SUB {subject} 1\r\n".encode() + numbered(subject, range(7)))
        client.send(b"UNSUB 1 %d\r\n" % limit + numbered(subject, range(7, 20)) + b"PING\r\n")
        assert payloads(until_pong(client)) == list(range(max(7, limit)))
        client.send(numbered(subject, range(20, 30)) + b"PING\r\n")
        assert until_pong(client) == []


def test_unsubscribe_after_so_many_counts_over_all_topics(server: Server) -> None:
    with Client(server) as client:
        names = [f"m{next(_numbers)}.all" for _ in range(4)]
        client.send("SUB *.all 1\r\n")
        client.send(b"".join(pub(name, b"0") for name in names))
        client.send(b"UNSUB 1 6\r\n" + b"".join(pub(name, b"1") for name in names) + b"PING\r\n")
        found = until_pong(client)
        assert Counter(payloads(found)) == {0: 4, 1: 2}


def test_the_last_member_of_a_queue_group_gets_what_was_published_before_it_left(server: Server, subject: str) -> None:
    with Client(server) as one, Client(server) as two:
        for client in (one, two):
            client.send(f"SUB {subject} workers 1\r\nPING\r\n")
            assert until_pong(client) == []
        one.send("UNSUB 1\r\nPING\r\n")
        assert until_pong(one) == []
        two.send(numbered(subject, range(50)) + b"UNSUB 1\r\nPING\r\n")
        assert payloads(until_pong(two)) == list(range(50))
        one.send(f"SUB {subject} workers 2\r\n".encode() + numbered(subject, range(50, 60)) + b"PING\r\n")
        assert payloads(until_pong(one)) == list(range(50, 60))


# ---- queue groups with several patterns


def test_one_queue_name_on_overlapping_patterns_is_one_group(server: Server, subject: str) -> None:
    with Client(server) as one, Client(server) as two, Client(server) as publisher:
        one.send(f"SUB {subject}.* workers 1\r\nSUB {subject}.a workers 2\r\nSUB {subject}.* others 3\r\nPING\r\n")
        two.send(f"SUB {subject}.> workers 1\r\nPING\r\n")
        assert until_pong(one) + until_pong(two) == []
        names = [f"{subject}.{'ab'[number % 2]}" for number in range(100)]
        publisher.send(b"".join(pub(name, b"%d" % number) for number, name in enumerate(names)) + b"PING\r\n")
        publisher.send(numbered(f"{subject}.a.b", range(100, 110)) + b"PING\r\n")
        assert until_pong(publisher) + until_pong(publisher) == []
        for client in (one, two):
            client.send("PING\r\n")
        found = [*until_pong(one), *until_pong(two)]
        others = [message for message in found if message.sid == "3"]
        assert payloads(others) == list(range(100))
        assert sorted(payloads([message for message in found if message not in others])) == list(range(110))


def test_the_rest_of_a_queue_name_takes_over_when_a_pattern_ends(server: Server, subject: str) -> None:
    with Client(server) as client:
        client.send(f"SUB {subject}.* workers 1\r\n".encode() + numbered(f"{subject}.a", range(10)))
        client.send(f"SUB {subject}.> workers 2\r\n".encode() + numbered(f"{subject}.a", range(10, 20)))
        client.send(b"UNSUB 1\r\n" + numbered(f"{subject}.a", range(20, 30)) + b"PING\r\n")
        assert sorted(payloads(until_pong(client))) == list(range(30))
        client.send(b"UNSUB 2\r\n" + numbered(f"{subject}.a", range(30, 40)) + b"PING\r\n")
        assert until_pong(client) == []


@pytest.mark.parametrize("ends", [False, True])
def test_slow_readers_with_one_queue_name_share_without_repetition(server: Server, subject: str, ends: bool) -> None:
    filler = b"x" * 100_000
    with (
        Client(server, receive_bytes=4096) as one,
        Client(server, receive_bytes=4096) as two,
        Client(server) as publisher,
    ):
        one.send(f"SUB {subject}.* workers 1\r\nPING\r\n")
        assert until_pong(one) == []
        two.send(f"SUB {subject}.> workers 1\r\nPING\r\n")
        assert until_pong(two) == []
        names = [f"{subject}.a", f"{subject}.a.b"]
        publisher.send(
            b"".join(pub(names[number % 2], b"%08d" % number + filler) for number in range(200)) + b"PING\r\n"
        )
        assert until_pong(publisher) == []
        one.send("UNSUB 1\r\nPING\r\n" if ends else "PING\r\n")
        found = until_pong(one)
        two.send("PING\r\n")
        found += until_pong(two)
        assert sorted(int(message.payload[:8]) for message in found) == list(range(200))


# ---- drain


def test_drain_delivers_what_the_client_itself_published(server: Server, subject: str) -> None:
    async def work() -> None:
        client = await nats.connect(server.url)
        got: list[bytes] = []

        async def receive(message: Msg) -> None:
            got.append(message.data)

        await client.subscribe(subject, cb=receive)
        for number in range(100):
            await client.publish(subject, b"%d" % number)
        await client.drain()
        assert got == [b"%d" % number for number in range(100)]

    asyncio.run(work())


def test_drain_of_a_subscription_delivers_what_is_there(server: Server, subject: str) -> None:
    async def work() -> None:
        client, publisher = await nats.connect(server.url), await nats.connect(server.url)
        got: list[bytes] = []

        async def receive(message: Msg) -> None:
            got.append(message.data)

        subscription = await client.subscribe(subject, cb=receive)
        await client.flush()
        for number in range(1000):
            await publisher.publish(subject, b"%d" % number)
        await publisher.flush()
        await publisher.flush()
        await subscription.drain()  # type: ignore[no-untyped-call]
        assert got == [b"%d" % number for number in range(1000)]
        await client.close()
        await publisher.close()

    asyncio.run(work())


# ---- no responders


def no_responders(message: Message) -> bool:
    return message.headers.startswith(b"NATS/1.0 503")


def test_a_client_without_echo_is_not_its_own_responder(server: Server, subject: str) -> None:
    with Client(server, echo=False) as client, Client(server) as other:
        client.send(f"SUB _INBOX.{subject} 1\r\nSUB {subject} 2\r\nSUB {subject} workers 3\r\n")
        client.send(f"PUB {subject} _INBOX.{subject} 1\r\nx\r\nPING\r\n")
        [message] = until_pong(client)
        assert (message.sid, no_responders(message)) == ("1", True)
        other.send(f"SUB {subject} 1\r\nPING\r\n")
        assert until_pong(other) == []
        client.send(f"PUB {subject} _INBOX.{subject} 1\r\ny\r\nPING\r\n")
        assert until_pong(client) == []
        other.send("PING\r\n")
        assert [message.payload for message in until_pong(other)] == [b"y"]


def test_a_client_with_echo_is_its_own_responder(server: Server, subject: str) -> None:
    with Client(server) as client:
        client.send(f"SUB _INBOX.{subject} 1\r\nSUB {subject} 2\r\n")
        client.send(f"PUB {subject} _INBOX.{subject} 1\r\nx\r\nPING\r\n")
        assert [message.sid for message in until_pong(client)] == ["2"]


def test_a_subscription_that_ended_is_no_responder(server: Server, subject: str) -> None:
    with Client(server) as client:
        client.send(f"SUB _INBOX.{subject} 1\r\nSUB {subject} 2\r\n" + f"PUB {subject} 1\r\nx\r\n")
        client.send(f"UNSUB 2\r\nPUB {subject} _INBOX.{subject} 1\r\ny\r\nPING\r\n")
        found = until_pong(client)
        assert sorted((message.sid, no_responders(message)) for message in found) == [("1", True), ("2", False)]


def test_a_pong_does_not_wait_for_ever_behind_a_backlog(tmp_path: Path) -> None:
    """A client that gets none takes its connection for dead."""
    value, number = bytes(1 << 20), 24
    with (
        Serve(tmp_path, server_heartbeat_s=1, topic_durability="flush") as server,
        Nats(server, receive_bytes=4096) as reader,
        Nats(server) as publisher,
    ):
        reader.send(b"SUB orders 1\r\nPING\r\n")
        assert reader.line() == "PONG"
        for _ in range(number):
            publisher.send(pub("orders", value))
        assert publisher.ask("PING") == "PONG"
        reader.send(b"PING\r\n")
        # It reads nothing for longer than the PONG waits, and shows that it is there.
        for _ in range(20):
            reader.send(b"PONG\r\n")
            publisher.send(b"PONG\r\n")
            time.sleep(0.1)
        kinds: list[str] = []
        while kinds.count("MSG") < number:
            line = reader.line()
            kinds.append(line.partition(" ")[0])
            if kinds[-1] == "MSG":
                reader.read(len(value) + 2)
        assert "PONG" in kinds, "it was not behind all of them"


@pytest.mark.parametrize("cut", [0, 12, 1500], ids=["together", "within a line", "within a payload"])
def test_a_ping_that_nats_py_writes_ahead_of_its_publishes_covers_them(tmp_path: Path, cut: int) -> None:
    """Its flush writes PING at once, and what it has gathered in the next turn of its loop."""
    with Serve(tmp_path) as server, Client(server, lang="python3", protocol=1) as client:
        client.send("SUB early 1\r\nPING\r\n")
        assert until_pong(client) == []
        data = (
            b"PING\r\n"
            + b"".join(pub("early", b"%03d" % number + b"x" * 1000) for number in range(300))
            + b"UNSUB 1\r\n"
        )
        client.send(data[:cut])
        client.send(data[cut:])
        assert [int(message.payload[:3]) for message in until_pong(client)] == list(range(300))
        assert client.ask("PING") == "PONG"


def test_a_ping_of_nats_py_is_answered_when_nothing_follows(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server, lang="python3") as client:
        assert client.ask("PING") == "PONG"
        client.send(b"PING\r\n" * 10_000)
        assert [client.line() for _ in range(10_000)] == ["PONG"] * 10_000
        client.send(b"PING\r\n" + pub("early", b"") + b"PING\r\nnonsense\r\n")
        assert client.rest().endswith("-ERR 'Unknown Protocol Operation'\r\n")
