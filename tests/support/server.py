"""A real server in a process of its own, and a client of bare sockets to try the text door with."""

from __future__ import annotations

import json
import os
import re
import socket
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Final, NamedTuple, Self

from tests.support import forks
from tests.support.process import PATIENCE_S, Running

_READY: Final = re.compile(r"^penstock (\S+) ready: (.*), data in (.*)$")
_DOOR: Final = re.compile(r"(\w+) on \S+:(\d+)")


def reserve_port(owner: object) -> int:
    """Return a port that nobody else is given while `owner` lives, also while its server is down.

    A socket stays bound to it and never listens. Both allow addresses to be reused, so the server can listen there.
    """
    reservation = socket.socket()
    weakref.finalize(owner, reservation.close)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port: int = reservation.getsockname()[1]
    return port


class Serve(Running):
    """`penstock serve` on free ports. Settings by their names in the environment: `topic_ack_deadline_ms=200`."""

    descriptors_max: ClassVar[int | None] = None

    def __init__(
        self, directory: Path, *, config: str | None = None, flags: Sequence[str] = (), **settings: object
    ) -> None:
        super().__init__(directory)
        self.data = directory / "data"
        self.ports: dict[str, int] = {}
        self._reserved = {name: reserve_port(self) for name in ("text", "quiet", "http")}
        self.version = ""
        self._flags = list(flags)
        self._settings = settings
        if config is not None:
            path = directory / "config.toml"
            path.write_text(config)
            self._flags += ["--config", str(path)]
        self._start()

    @property
    def port(self) -> int:
        return self.ports["text"]

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def restart(self, **settings: object) -> None:
        """On the same data and ports, after `stop` or `kill`."""
        self._settings = self._settings | settings
        self._start_again()

    def rss(self) -> int:
        """Bytes of memory that it has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found
        return int(found[1]) * 1024

    def dump(self, topic: str) -> list[dict[str, Any]]:
        """What the log of a topic holds, as its tool tells it, once the server has ended."""
        done = forks.run(["log", "dump", str(self.data), "--json", "--topic", topic], environment=os.environ)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def _launch(self, stderr: IO[bytes]) -> forks.Process:
        settings: dict[str, object] = {
            "server_port": self._reserved["text"],
            "server_quiet_port": self._reserved["quiet"],
            "server_http_port": self._reserved["http"],
            "server_qb_port": "none",
            "storage_data_dir": self.data,
            # Hundreds of them would fill the disk of the tests.
            "storage_disk_reserve_bytes": 0,
        } | self._settings
        environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
        return forks.start(
            ["serve", *self._flags],
            environment=clean_environment() | environment,
            stderr=stderr,
            descriptors_max=self.descriptors_max,
        )

    def _read_ready(self, line: str) -> None:
        found = _READY.match(line)
        assert found, line
        self.version = found[1]
        self.ports = {name: int(port) for name, port in _DOOR.findall(found[2])}
        assert found[3] == str(self._settings.get("storage_data_dir", self.data))


def clean_environment() -> dict[str, str]:
    """Without settings that whoever runs the tests may have."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "QB_"))}


class Message(NamedTuple):
    subject: str
    sid: str
    payload: bytes
    # As Flux's dialect has it.
    sequence: int | None = None
    reply: str | None = None
    headers: bytes = b""

    def header(self, name: str) -> str | None:
        found = re.search(rf"^{name}: (.*?)\r$", self.headers.decode(), re.MULTILINE)
        return found[1] if found else None


class Raw:
    """A connection, its lines and payloads. Nothing is waited for longer than PATIENCE_S."""

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            # Before it connects, or the system has more room in mind.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def send(self, data: bytes | str) -> None:
        self.socket.sendall(data.encode() if isinstance(data, str) else data)

    def flood(self, data: bytes, patience_s: float = 3.0) -> int:
        """Send until the other side takes no more for a while; how many bytes it took."""
        self.socket.settimeout(patience_s)
        sent = 0
        try:
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + (64 << 10)])
        except TimeoutError:
            pass
        self.socket.settimeout(PATIENCE_S)
        return sent

    def line(self) -> str:
        """The next line, without its end."""
        while b"\r\n" not in self._received:
            assert self._receive(), f"the connection ended, after {self._received!r}"
        line, _, self._received = self._received.partition(b"\r\n")
        return line.decode(errors="backslashreplace")

    def read(self, count: int) -> bytes:
        parts = [self._received]
        missing = count - len(self._received)
        while missing > 0:
            part = self.socket.recv(1 << 20)
            assert part, f"the connection ended, {missing} bytes too early"
            parts.append(part)
            missing -= len(part)
        data = b"".join(parts)
        self._received = data[count:]
        return data[:count]

    def ask(self, command: bytes | str) -> str:
        """Send a line, and read one."""
        self.send((command.encode() if isinstance(command, str) else command) + b"\r\n")
        return self.line()

    def rest(self) -> str:
        """What comes until the other side closes."""
        while self._receive():
            pass
        rest, self._received = self._received, b""
        return rest.decode(errors="backslashreplace")

    def close(self) -> None:
        self.socket.close()

    def peek(self) -> bytes:
        """The next line, which stays the next."""
        while b"\r\n" not in self._received:
            assert self._receive(), f"the connection ended, after {self._received!r}"
        return self._received.partition(b"\r\n")[0]

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Flux(Raw):
    """A client of the Flux dialect: it never sends CONNECT."""

    def __init__(self, server: Serve, *, door: str = "text", receive_bytes: int | None = None) -> None:
        super().__init__(server.ports[door], receive_bytes=receive_bytes)
        self.info: dict[str, Any] = {}
        if door == "text":
            verb, _, fields = self.line().partition(" ")
            assert verb == "INFO"
            self.info = json.loads(fields)

    def publish(self, subject: str, payload: bytes = b"") -> str:
        """The answer."""
        self.send(pub(subject, payload))
        return self.line()

    def publish_with_headers(self, subject: str, payload: bytes, **headers: object) -> str:
        self.send(hpub(subject, payload, **headers))
        return self.line()

    def subscribe(self, subject: str, *words: str) -> None:
        answer = self.ask(f"SUB {subject} {' '.join(words)}")
        assert answer == "+OK", answer

    def message(self) -> Message:
        line = self.line()
        verb, *words = line.split(" ")
        assert verb in ("MSG", "HMSG"), line
        if verb == "MSG":
            subject, sid, count, sequence = words
            return Message(subject, sid, self._payload(int(count)), int(sequence))
        subject, sid, head, count, sequence = words
        payload = self._payload(int(count))
        return Message(subject, sid, payload[int(head) :], int(sequence), headers=payload[: int(head)])

    def messages(self, count: int) -> list[Message]:
        return [self.message() for _ in range(count)]

    def until_ok(self) -> tuple[list[Message], str]:
        """The messages that come before an answer, and what that says behind +OK."""
        found = []
        while not self.peek().startswith(b"+OK"):
            found.append(self.message())
        return found, self.line().removeprefix("+OK").strip()

    def ack(self, message: Message, *key: str) -> None:
        answer = self.ask(" ".join(["ACK", str(message.sequence), *key]))
        assert answer == "+OK", answer

    def stats(self, *sid: str) -> dict[str, Any]:
        verb, _, fields = self.ask(" ".join(["STATS", *sid])).partition(" ")
        assert verb == "+STATS", fields
        found: dict[str, Any] = json.loads(fields)
        return found

    def _payload(self, count: int) -> bytes:
        payload = self.read(count + 2)
        assert payload.endswith(b"\r\n")
        return payload[:-2]


class Nats(Raw):
    """A client of the NATS dialect that does no more than it is told to: it answers no PING."""

    def __init__(self, server: Serve, *, receive_bytes: int | None = None, **options: object) -> None:
        super().__init__(server.port, receive_bytes=receive_bytes)
        assert self.line().startswith("INFO ")
        usual = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}
        self.send(f"CONNECT {json.dumps(usual | options)}\r\n")
        assert self.ask("PING") == "PONG"
        assert self.line().startswith("INFO ")

    def message(self) -> Message:
        line = self.line()
        verb, *words = line.split(" ")
        assert verb in ("MSG", "HMSG"), line
        numbers = 1 if verb == "MSG" else 2
        subject, sid, *reply = words[:-numbers]
        payload = self.read(int(words[-1]) + 2)[:-2]
        head = int(words[-2]) if verb == "HMSG" else 0
        return Message(subject, sid, payload[head:], reply=reply[0] if reply else None, headers=payload[:head])


def pub(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


def hpub(subject: str, payload: bytes, **headers: object) -> bytes:
    """Headers are named as in Python: `msg_id` is Msg-Id."""
    lines = [f"{name.replace('_', '-').title()}: {value}\r\n" for name, value in headers.items()]
    block = "".join([*lines, "\r\n"]).encode()
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), len(block), len(block) + len(payload), block, payload)


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))
