"""The load: blocking sockets, blocks of messages that are made before the clock runs, and no client library.

The same for every server that speaks the text protocol. A message is known by two numbers in its payload,

    | block, 4 digits | place in the block, 8 digits | dots up to the size |

and has the same length as every other of its subject. So a block of what a subscriber must receive is known before it
arrives: it is compared as a whole, in C, and a message that is lost, repeated, altered or out of order is an error.
Only the block number has to be put into a block that is used again, a digit of all its messages at a time.

`python -m bench.load` is one publisher or one subscriber, in a process of its own, which `Worker` starts and commands.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Any, Final, Literal

_BLOCK_BYTES: Final = 256 << 10
_BLOCKS: Final = 10_000  # and then the numbers begin again
_BLOCK_DIGITS: Final = 4
_PLACE_DIGITS: Final = 8
# A server that says nothing for so long does not work; it is never part of a figure.
_SILENCE_SECONDS_MAX: Final = 60
_RECEIVE_BYTES: Final = 1 << 16

Role = Literal["publish", "subscribe"]


def make_payload(size: int, place: int = 0) -> bytes:
    numbers = b"0" * _BLOCK_DIGITS + b"%0*d" % (_PLACE_DIGITS, place)
    return numbers.ljust(size, b".")


def block_messages(size: int) -> int:
    """How many messages of this size are a block."""
    return _BLOCK_BYTES // size


def make_pub(subject: str, payload: bytes, reply: str = "") -> bytes:
    words = ["PUB", subject, *([reply] if reply else []), str(len(payload))]
    return b"%b\r\n%b\r\n" % (" ".join(words).encode(), payload)


def make_xadd(key: str, payload: bytes) -> bytes:
    """The same for Redis: an entry of a stream, which numbers it."""
    words = [b"XADD", key.encode(), b"*", b"v", payload]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Connection:
    """One connection, to a server that speaks the text protocol."""

    def __init__(self, port: int, *, verbose: bool = False) -> None:
        self.socket = connect(port)
        options = {"verbose": verbose, "pedantic": False, "lang": "bench", "version": "0", "protocol": 1}
        self.socket.sendall(b"CONNECT %b\r\n" % json.dumps(options).encode())
        self.ping()

    def ping(self) -> None:
        """Return when the server has done all that was sent before, which a PONG says."""
        self.socket.sendall(b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            received += _receive(self.socket)

    def subscribe(self, subject: str, number: int = 1) -> None:
        self.socket.sendall(b"SUB %b %d\r\n" % (subject.encode(), number))
        self.ping()

    def request(self, subject: str, payload: bytes) -> dict[str, Any]:
        """Ask an API of JSON."""
        self.subscribe("_INBOX.request", 9)
        self.socket.sendall(make_pub(subject, payload, "_INBOX.request"))
        received = self.receive_until(b"}\r\n")
        self.socket.sendall(b"UNSUB 9\r\n")
        self.ping()
        answer: dict[str, Any] = json.loads(received[received.index(b"{") :])
        return answer

    def receive_until(self, end: bytes) -> bytes:
        received = b""
        while not received.endswith(end):
            received += _receive(self.socket)
        return received

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class Block:
    """Messages of one subject, as they are on the wire, which are sent or expected again and again."""

    def __init__(self, head: bytes, size: int) -> None:
        self.messages = block_messages(size)
        self.data = bytearray().join(b"%b%b\r\n" % (head, make_payload(size, n)) for n in range(self.messages))
        self._stride = len(self.data) // self.messages
        self._number_at = len(head)
        self._number = 0

    def advance(self) -> None:
        """Give it the next number."""
        self._number = (self._number + 1) % _BLOCKS
        for place, digit in enumerate(b"%0*d" % (_BLOCK_DIGITS, self._number), self._number_at):
            self.data[place :: self._stride] = bytes([digit]) * self.messages


class Publisher:
    """Sends as fast as the server takes it."""

    def __init__(self, port: int, subject: str, size: int) -> None:
        self._connection = Connection(port)
        self._block = Block(b"PUB %b %d\r\n" % (subject.encode(), size), size)

    def run(self, blocks: int) -> tuple[float, float]:
        """When it began, and when the server said that it has everything."""
        begun = time.perf_counter()
        for _ in range(blocks):
            self._block.advance()
            self._connection.socket.sendall(self._block.data)
        self._connection.ping()
        return begun, time.perf_counter()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.socket.close()


class Subscriber:
    """Receives, and compares every byte with what was to come."""

    def __init__(self, connection: socket.socket, subject: str, size: int) -> None:
        self._socket = connection
        self._block = Block(b"MSG %b 1 %d\r\n" % (subject.encode(), size), size)
        self._received = bytearray(len(self._block.data))

    def run(self, blocks: int) -> tuple[float, float]:
        """When it began, and when the last byte was there. What comes too much is found by the next round."""
        begun = time.perf_counter()
        for _ in range(blocks):
            self._block.advance()
            self._fill(0)
            while self._received != self._block.data:
                self._fill(self._take_ping())
        return begun, time.perf_counter()

    def _fill(self, length: int) -> None:
        with memoryview(self._received) as view:
            while length < len(view):
                count = self._socket.recv_into(view[length:])
                if not count:
                    raise ConnectionError(f"the server closed the connection after {bytes(view[:length][-200:])!r}")
                length += count

    def _take_ping(self) -> int:
        """A server may ask between two messages whether anyone is there: answer, take it out, say what is left."""
        wrong = next(i for i, pair in enumerate(zip(self._received, self._block.data, strict=True)) if len({*pair}) > 1)
        if not self._received.startswith(b"PING\r\n", wrong):
            was, expected = (
                bytes(data[max(0, wrong - 40) : wrong + 40]) for data in (self._received, self._block.data)
            )
            raise RuntimeError(f"received …{was!r}… where …{expected!r}… was to come")
        self._socket.sendall(b"PONG\r\n")
        left = self._received.replace(b"PING\r\n", b"", 1)
        self._received[: len(left)] = left
        return len(left)


def run_window(connection: socket.socket, frames: list[bytes], count: int, mark: bytes) -> float:
    """Seconds to have `count` messages acknowledged, with at most as many of them under way as there are `frames`.

    An acknowledgement is known by a byte that it has once and nothing else has. For what it frees, as much is sent.
    """
    window, stride = len(frames), len(frames[0])
    ring = memoryview(b"".join(frames) * 2)
    sent = acknowledged = 0
    begun = time.perf_counter()
    while acknowledged < count:
        free = min(window - (sent - acknowledged), count - sent)
        if free:
            place = sent % window
            connection.sendall(ring[place * stride : (place + free) * stride])
            sent += free
        acknowledged += _receive(connection).count(mark)
    seconds = time.perf_counter() - begun
    if acknowledged > count:
        raise RuntimeError(f"{acknowledged} acknowledgements for {count} messages")
    return seconds


def run_single(connection: socket.socket, frame: bytes, count: int, mark: bytes) -> list[float]:
    """Seconds from each publish to its acknowledgement, one after the other."""
    return [run_window(connection, [frame], 1, mark) for _ in range(count)]


def run_paced(publisher: Connection, subscriber: Connection, subject: str, count: int, *, rate: int) -> list[float]:
    """Seconds from each send to its receipt. Both are in this thread, so one clock reads both times.

    A message is sent when it is due, whether those before it have arrived or not: a server that stalls is charged for
    each of them. The time of a send is in the payload.
    """
    head = b"MSG %b 1 20\r\n" % subject.encode()
    length = len(head) + 22
    times: list[float] = []
    received = b""
    begun = time.perf_counter_ns()
    sent = 0
    while len(times) < count:
        due = begun + sent * 1_000_000_000 // rate
        wait = (due - time.perf_counter_ns()) / 1e9 if sent < count else _SILENCE_SECONDS_MAX
        if wait <= 0:
            publisher.socket.sendall(make_pub(subject, b"%020d" % time.perf_counter_ns()))
            sent += 1
        elif select.select([subscriber.socket], [], [], wait)[0]:
            data = _receive(subscriber.socket)
            now = time.perf_counter_ns()
            received = (received + data).replace(b"PING\r\n", b"")
            while len(received) >= length:
                message, received = received[:length], received[length:]
                assert message.startswith(head), message
                times.append((now - int(message[len(head) :])) / 1e9)
        elif sent == count:
            raise TimeoutError(f"{len(times)} of {count} messages arrived")
    return times


class Worker:
    """A publisher or subscriber in a process of its own: it must not wait for this one, nor for another of them."""

    def __init__(self, role: Role, port: int, subject: str, size: int) -> None:
        command = [sys.executable, "-m", "bench.load", role, str(port), subject, str(size)]
        # In a group of its own: after Ctrl-C it ends when its input does.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, process_group=0
        )

    def wait_until_ready(self) -> None:
        self._answer()

    def begin(self, blocks: int) -> None:
        assert self._process.stdin
        print(blocks, file=self._process.stdin)

    def end(self) -> tuple[float, float]:
        """When it began and ended, on the clock that all processes share."""
        begun, ended = map(float, self._answer().split())
        return begun, ended

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args!r} gave up")
        return answer


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel keeps the time: with `settimeout` every call would be two.
    silence = struct.pack("@ll", _SILENCE_SECONDS_MAX, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, silence)
    return connection


def _receive(connection: socket.socket) -> bytes:
    """What is there, which is no error. A server that asks whether anyone is here is answered."""
    received = connection.recv(_RECEIVE_BYTES)
    if not received:
        raise ConnectionError("the server closed the connection")
    if b"-ERR" in received or b'"error"' in received:
        raise RuntimeError(f"the server said {received[-500:]!r}")
    if b"PING\r\n" in received:
        connection.sendall(b"PONG\r\n")
    return received


def _work(role: Role, port: int, subject: str, size: int) -> None:
    end: Publisher | Subscriber
    if role == "publish":
        end = Publisher(port, subject, size)
    else:
        connection = Connection(port)
        connection.subscribe(subject)
        end = Subscriber(connection.socket, subject, size)
    print("ready", flush=True)
    for line in sys.stdin:
        print(*end.run(int(line)), flush=True)


if __name__ == "__main__":
    _work("publish" if sys.argv[1] == "publish" else "subscribe", int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
