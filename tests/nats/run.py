"""Run scenarios on a server and write down what each connection receives, so that two servers can be compared.

After each step the connection that took it exchanges PING and PONG with the server, then every other connection does.
So a step's effects are complete before the next one, and what a connection receives belongs to one step.

The protocol does not define in which order a connection receives one message on several subscriptions, nor which member
of a queue group receives a message: the transcript has neither. It names INFO without its fields. PINGs of the server
are answered.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

from tests.nats.scenario import Act, Step, parse, restore
from tests.support import forks
from tests.support.server import Serve
from tests.support.websocket import WebSocket

NATS_SERVER: Final = Path(sys.executable).with_name("nats-server")
# How long to wait for a PONG. Only a server that differs takes so long.
_PATIENCE_S: Final = 10.0
# In a transcript: a PING was not answered in time.
NO_PONG: Final = "(no PONG)"
# Long enough for any line: INFO is the longest.
_LINE_BYTES_MAX: Final = 1 << 20
_PAYLOAD_SHOWN: Final = 60
_SMALL_BUFFER: Final = 4096
# No other number in a transcript looks like these.
_numbers: Final = count(1_000_003)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to run scenarios on."""

    name: str
    port: int
    http_port: int
    process: forks.Process
    # Where it takes WebSocket, and whether that is what is tried.
    websocket_port: int = 0
    is_websocket: bool = False

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.websocket_port}" if self.is_websocket else f"nats://127.0.0.1:{self.port}"

    def connect(self, receive_bytes: int | None = None) -> socket.socket | WebSocket:
        connected = socket.socket()
        if receive_bytes is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connected.settimeout(_PATIENCE_S)
        connected.connect(("127.0.0.1", self.websocket_port if self.is_websocket else self.port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return WebSocket(connected, deflates=True) if self.is_websocket else connected

    def get(self, path: str) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=_PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextmanager
def nats_server(*flags: str) -> Iterator[Peer]:
    """Run the real nats-server, without JetStream."""
    command = [str(NATS_SERVER), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            ports: dict[bytes, int] = {}
            for line in process.stderr:
                if found := re.search(rb"(http monitor|client connections|websocket clients) on \S+?:(\d+)", line):
                    ports[found[1]] = int(found[2])
                if b"Server is ready" in line:
                    break
            websocket_port = ports.get(b"websocket clients", 0)
            yield Peer("nats-server", ports[b"client connections"], ports[b"http monitor"], process, websocket_port)
        finally:
            process.terminate()


@contextmanager
def penstock(directory: Path) -> Iterator[Peer]:
    with Serve(directory) as server:
        yield Peer("penstock", server.port, server.ports["http"], server.process, server.ports["http"])


class Message(NamedTuple):
    """A message as a connection received it."""

    subject: bytes
    sid: bytes
    reply: bytes
    headers: bytes
    payload: bytes

    def __str__(self) -> str:
        words = [self.subject, *([self.reply] if self.reply else [])]
        headers = f" {{{_text(self.headers)}}}" if self.headers else ""
        payload = _text(self.payload[:_PAYLOAD_SHOWN])
        if len(self.payload) > _PAYLOAD_SHOWN:
            payload += f"... {len(self.payload)} bytes, {hashlib.sha256(self.payload).hexdigest()[:8]}"
        return f"MSG {' '.join(map(_text, words))}{headers} ={payload}"


# A message, or any other line.
Received = Message | str


class Wire:
    """A connection of a scenario."""

    def __init__(self, peer: Peer, *, is_slow: bool) -> None:
        self.is_closed = False
        self.is_paused = False
        # sid -> its queue name.
        self.queues: dict[bytes, bytes] = {}
        self._buffer = bytearray()
        # PONGs that have not come yet.
        self._awaited = 0
        self._received: list[Received] = []
        self._socket = peer.connect(_SMALL_BUFFER if is_slow else None)

    def send(self, data: bytes, pings: int = 0) -> None:
        if self.is_closed:
            return
        self._awaited += pings
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # what the server sent before is still to be read

    def take(self) -> list[Received]:
        """Return what comes until all PINGs are answered, without the last PONG."""
        try:
            while self._awaited > 0 and not self.is_closed:
                self._receive()
        except TimeoutError:
            self._received.append(NO_PONG)
            self.close()
        received, self._received = self._received, []
        if received and received[-1] == "PONG":
            received.pop()
        return received

    def half_close(self) -> None:
        """End the sending side, and drop what comes until the server closes."""
        if not self.is_closed:
            self._socket.shutdown(socket.SHUT_WR)
            while not self.is_closed:
                self._receive()
        self._received.clear()

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._received.append("(closed)")
            self.close()
            return
        self._buffer += data
        while self._parse():
            pass

    def _parse(self) -> bool:
        """Take one line, with its payload, from the buffer; return whether it was complete."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            assert len(self._buffer) < _LINE_BYTES_MAX, "a line without an end"
            return False
        line = bytes(self._buffer[:end])
        taken = end + 2
        verb, *words = line.split(b" ")
        if verb in (b"MSG", b"HMSG"):
            numbers = [int(word) for word in words[-(1 if verb == b"MSG" else 2) :]]
            subject, sid, *reply = words[: -len(numbers)]
            taken += numbers[-1] + 2
            if len(self._buffer) < taken:
                return False
            payload = bytes(self._buffer[end + 2 : taken - 2])
            head = numbers[0] if verb == b"HMSG" else 0
            self._received.append(Message(subject, sid, reply[0] if reply else b"", payload[:head], payload[head:]))
        elif verb == b"PING":
            self.send(b"PONG\r\n")
        else:
            if verb == b"PONG":
                self._awaited -= 1
            self._received.append("INFO" if verb == b"INFO" else _text(line))
        del self._buffer[:taken]
        return True


def run(peer: Peer, text: str, number: int | None = None) -> list[str]:
    """Run a scenario and return its transcript: a line for each thing that a connection, or a queue group, received."""
    number = next(_numbers) if number is None else number
    steps = parse(text, number)
    idle = _idle(peer) if any(step.act is Act.KILL for step in steps) else 0
    wires: dict[str, Wire] = {}
    transcript: list[str] = []
    try:
        for at, step in enumerate(steps):
            received = _take(peer, step, wires, idle)
            transcript += (f"{at} {line}" for line in _normalise(received, wires))
    finally:
        for wire in wires.values():
            wire.close()
    return [restore(line, number) for line in transcript]


def run_both(peers: tuple[Peer, Peer], text: str, *, is_relaxed: bool = False) -> tuple[list[str], list[str]]:
    """Return the transcripts of both servers, if relaxed without the order that `relax` drops."""
    number = next(_numbers)
    one, other = (run(peer, text, number) for peer in peers)
    if is_relaxed:
        one, other = relax(one), relax(other)
    return _shorten(one), _shorten(other)


def _take(peer: Peer, step: Step, wires: dict[str, Wire], idle: int) -> dict[str, list[Received]]:
    """Take a step and return what each connection received until its effects were complete."""
    name = step.connection
    match step.act:
        case Act.OPEN | Act.SLOW:
            wires[name] = Wire(peer, is_slow=step.act is Act.SLOW)
            wires[name].send(step.data, step.pings)
        case Act.SEND:
            wires[name].queues.update(step.queues())
            wires[name].send(step.data, step.pings)
        case Act.PAUSE:
            wires[name].is_paused = True
        case Act.RESUME:
            wires[name].is_paused = False
        case Act.KILL:
            wires[name].half_close()
            _wait_forgotten(peer, idle, sum(not wire.is_closed for wire in wires.values()))
    if not step.waits:
        return {}
    order = [name, *(other for other in wires if other != name)]
    received: dict[str, list[Received]] = {}
    for other in order:
        wire = wires[other]
        # One that does not read has its PONG with the rest when it does.
        if not wire.is_paused:
            wire.send(b"PING\r\n", 1)
            received[other] = wire.take()
    return {other: received[other] for other in wires if other in received}


def _is_status(message: Message) -> bool:
    """Whether it is the server's word that there are no responders: of several subscriptions it goes to any one."""
    return message.headers.startswith(b"NATS/1.0 503")


def _normalise(received: dict[str, list[Received]], wires: dict[str, Wire]) -> Iterator[str]:
    queued: list[str] = []
    for name, items in received.items():
        queues = wires[name].queues
        shown: list[tuple[str, str]] = []
        for item in items:
            if isinstance(item, str):
                shown.append((item, ""))
            elif item.sid in queues:
                queued.append(f"{_text(queues[item.sid])}: {item}")
            else:
                shown.append((str(item), "" if _is_status(item) else f" @{_text(item.sid)}"))
        # One message, on several subscriptions.
        lines = (
            f"{name}: {line}{sid}" for _, same in groupby(shown, lambda pair: pair[0]) for line, sid in sorted(same)
        )
        yield from lines
    yield from sorted(queued)


def _shorten(transcript: list[str]) -> list[str]:
    """Write equal lines in a row as one."""
    numbers = ((line, sum(1 for _ in same)) for line, same in groupby(transcript))
    return [f"{line} ({number} times)" if number > 1 else line for line, number in numbers]


def relax(transcript: list[str]) -> list[str]:
    """Return, for each step, first a connection's answers, then the server's own messages, then the others.

    That messages come before the PONG that covers them is still seen: otherwise they are in the next step.
    """
    found: list[str] = []
    for _, lines in groupby(transcript, lambda line: line.partition(":")[0]):
        found += sorted(lines, key=lambda line: (": MSG " in line) + (" @" in line))
    return found


def _idle(peer: Peer) -> int:
    """Wait until no connection is left, and return how many subscriptions the server itself has."""
    _wait_for(lambda: bool(peer.get("/connz")["num_connections"] == 0))
    return int(peer.get("/subsz")["num_subscriptions"])


def _wait_forgotten(peer: Peer, idle: int, connections: int) -> None:
    """Wait until a server has only so many connections, and no subscriptions but theirs."""

    def is_forgotten() -> bool:
        connz = peer.get("/connz")
        held = sum(row["subscriptions"] for row in connz["connections"])
        found: tuple[int, int] = connz["num_connections"], peer.get("/subsz")["num_subscriptions"]
        return found == (connections, idle + held)

    _wait_for(is_forgotten)


def _wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "a closed connection is still there"
        time.sleep(0.002)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").replace("\r", "\\r").replace("\n", "\\n")
