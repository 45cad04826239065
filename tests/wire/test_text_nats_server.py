"""The text codec against nats-server: both refuse the same."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock.model.run import Run
from penstock.wire.events import (
    Connect,
    Refused,
    SimpleCommand,
)
from penstock.wire.text import (
    PAYLOAD_BYTES_MAX,
    TextParser,
)
from tests.support.text_rows import _WRONG, CONNECT, feed, parser_of

SERVER: Final = Path(sys.executable).with_name("nats-server")
Ask = Callable[[bytes], tuple[list[str], bool]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """What nats-server says of a command: its errors, and whether it closes."""
    if not SERVER.exists():
        pytest.skip("nats-server is not installed")
    command = [str(SERVER), "-a", "127.0.0.1", "-p", "-1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            port = 0
            for line in server.stderr:
                if found := re.search(rb"client connections on 127\.0\.0\.1:(\d+)", line):
                    port = int(found[1])
                if b"Server is ready" in line:
                    break

            def ask_server(data: bytes) -> tuple[list[str], bool]:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                    connection.sendall(CONNECT + data + b"PING\r\n")
                    answer = b""
                    while b"PONG" not in answer:
                        try:
                            received = connection.recv(65_536)
                        except ConnectionResetError:
                            received = b""
                        if not received:
                            return re.findall(r"-ERR '(.*)'", answer.decode()), True
                        answer += received
                    return re.findall(r"-ERR '(.*)'", answer.decode()), False

            yield ask_server
        finally:
            server.terminate()


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n",
        b"SUB a..b 1\r\n",
        b"SUB a.>.b 1\r\n",
        b"PUB a %d\r\n" % (PAYLOAD_BYTES_MAX + 1),
        b"SUB " + b"a" * 5000 + b" 1\r\n",
        b"PUB  a   1 \r\nx\r\n",
        b"PUB a 007\r\n1234567\r\n",
        b"PUB a 1\nx\r\n",
        b"HPUB a 12 13\r\nNATS/1.0\r\n\r\nx\r\n",
        b"UNSUB 1 \r\n",
        b"sub a q 1\r\n",
    ],
    ids=lambda data: data[:20].decode().strip(),
)
def test_nats_server_gives_the_same_error(ask: Ask, data: bytes) -> None:
    errors, closes = ask(data)

    refusals = [event for event in feed(parser_of(True), data) if isinstance(event, Refused)]
    assert ([event.reason for event in refusals], any(event.closes for event in refusals)) == (errors, closes)


@pytest.mark.parametrize(
    "data",
    [
        b"PUB\r\n",
        b"PUB a\r\n",
        b"PUB a b c 1\r\n",
        b"PUB a x\r\n",
        b"PUB a -1\r\n",
        b"PUB a " + b"9" * 21 + b"\r\n",
        b"PUB a 3\r\nabcd\r\n",
        b"HPUB a 10 5\r\n",
        b"HPUB a 5\r\n",
        b"SUB a\r\n",
        b"SUB a b c d\r\n",
        b"CONNECT nonsense\r\n",
    ],
    ids=lambda data: data[:20].decode().strip(),
)
def test_nats_server_closes_too(ask: Ask, data: bytes) -> None:
    assert ask(data)[1]
    assert feed(parser_of(True), data) == [_WRONG]


def test_a_parser_may_take_some_lines_at_a_time() -> None:
    data = b"".join(b"PUB a.%d 1\r\nx\r\nPING\r\nPUB a r 1\r\ny\r\n" % number for number in range(20))
    parser = TextParser(lines_max=3)
    found = []
    for at in range(0, len(data), 100):
        events = parser.feed(data[at : at + 100])
        found += events
        while parser.has_more:
            assert len(events) <= 3
            events = parser.feed(b"")
            found += events
    pings = [event for event in found if event is SimpleCommand.PING]
    values = [value for event in found if isinstance(event, Run) for value in event.values]
    assert (len(pings), values) == (20, [b"x", b"y"] * 20)


def test_messages_whose_lines_are_known_do_not_count() -> None:
    parser = TextParser(lines_max=2)
    parser.feed(b"PUB a 1\r\nx\r\n")
    [run] = parser.feed(b"PUB a 1\r\nx\r\n" * 100)
    assert isinstance(run, Run)
    assert len(run) == 100
    assert not parser.has_more


@pytest.mark.parametrize(
    "line", [b"PUB a 1000000\r\n", b"PING\r\n", b"SUB a 1\r\n", b"\r\n HPUB a 1 9\r\n", b"NONE\r\n"]
)
def test_a_line_in_front_of_connect_is_refused_at_once_if_connect_is_needed(line: bytes) -> None:
    assert TextParser(needs_connect=True).feed(line) == [Refused("Authorization Violation", closes=True)]
    parser = TextParser(needs_connect=True)
    events = parser.feed(b"CONNECT {}\r\nPUB a 1\r\nx\r\n")
    assert [type(event) for event in events] == [Connect, Run]
