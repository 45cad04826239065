"""WebSocket over a blocking socket: frames as a test writes them, or a stream of bytes in messages."""

from __future__ import annotations

import socket
import zlib
from typing import Any, Final, NamedTuple

from penstock.wire.websocket import Opcode
from tests.support.server import Nats, Raw, Serve, in_pieces

# The example of RFC 6455.
KEY: Final = "dGhlIHNhbXBsZSBub25jZQ=="
DEFLATE: Final = "permessage-deflate; client_max_window_bits"
MASK: Final = b"\x11\x22\x33\x44"
_TAIL: Final = b"\x00\x00\xff\xff"


class Frame(NamedTuple):
    opcode: int
    payload: bytes
    is_final: bool = True
    is_deflated: bool = False

    @property
    def message(self) -> bytes:
        """Its payload as it was before it was compressed."""
        return zlib.decompressobj(-15).decompress(self.payload + _TAIL) if self.is_deflated else self.payload


def encode(
    opcode: int,
    payload: bytes = b"",
    *,
    final: bool = True,
    reserved: int = 0,
    mask: bytes | None = MASK,
    length: int | None = None,
) -> bytes:
    """A frame of a client. `reserved`: its bits RSV1 (4), RSV2 (2) and RSV3 (1); `length`: what it announces."""
    length = len(payload) if length is None else length
    masked = 0x80 if mask else 0
    if length < 126:
        head = bytes([masked | length])
    elif length < 1 << 16:
        head = bytes([masked | 126]) + length.to_bytes(2, "big")
    else:
        head = bytes([masked | 127]) + length.to_bytes(8, "big")
    first = bytes([final << 7 | reserved << 4 | opcode])
    if mask is None:
        return first + head + payload
    if mask == bytes(4):
        return first + head + mask + payload
    masks = (mask * (len(payload) // 4 + 1))[: len(payload)]
    plain, other = int.from_bytes(payload, "big"), int.from_bytes(masks, "big")
    return first + head + mask + (plain ^ other).to_bytes(len(payload), "big")


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)).removesuffix(_TAIL)


def request(port: int, path: str = "/", method: str = "GET", **headers: str | None) -> bytes:
    """A handshake. Headers are named as in Python; None: it has no such header."""
    usual: dict[str, str | None] = {
        "host": f"127.0.0.1:{port}",
        "upgrade": "websocket",
        "connection": "keep-alive, Upgrade",
        "sec_websocket_version": "13",
        "sec_websocket_key": KEY,
    }
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in (usual | headers).items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


class WebSocket:
    """A socket whose bytes travel in binary messages, as far as a scenario uses one."""

    def __init__(self, connected: socket.socket, *, deflates: bool = False, **headers: str) -> None:
        self._socket = connected
        self._buffer = b""
        # Control frames that have come.
        self.controls: list[Frame] = []
        if deflates:
            headers["sec_websocket_extensions"] = DEFLATE
        connected.sendall(request(connected.getpeername()[1], **headers))
        while b"\r\n\r\n" not in self._buffer:
            more = connected.recv(1 << 16)
            assert more, f"the connection ended, after {self._buffer!r}"
            self._buffer += more
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        self.deflates = b"permessage-deflate" in head
        assert self.deflates == deflates

    def sendall(self, data: bytes) -> None:
        # nats-server takes no compressed message that is larger than a payload.
        for part in in_pieces(data, 256 << 10):
            packs = self.deflates and len(part) > 20
            self._socket.sendall(encode(Opcode.BINARY, deflate(part) if packs else part, reserved=4 if packs else 0))

    def sendall_raw(self, data: bytes) -> None:
        """Send frames, or what is none."""
        self._socket.sendall(data)

    def recv(self, _count: int) -> bytes:
        """Return the payload of the next message; nothing at the end."""
        while (frame := self.frame()) is not None:
            if frame.opcode == Opcode.BINARY and frame.payload:
                return frame.message
            self.controls.append(frame)
        return b""

    def frame(self) -> Frame | None:
        """Return the next frame; None at the end."""
        while True:
            found = parse(self._buffer)
            if found is not None:
                frame, self._buffer = found
                return frame
            more = self._socket.recv(1 << 16)
            if not more:
                assert not self._buffer, "the connection ended within a frame"
                return None
            self._buffer += more

    def settimeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


class WebSocketRaw(Nats):
    """A connection over WebSocket whose lines and payloads are read as those of the text door."""

    socket: WebSocket  # type: ignore[assignment]

    def __init__(
        self, server: Serve, *, receive_bytes: int | None = None, deflates: bool = False, **headers: str
    ) -> None:
        # Nats would send CONNECT.
        Raw.__init__(self, server.ports["http"], receive_bytes=receive_bytes)
        connected: Any = self.socket
        self.socket = WebSocket(connected, deflates=deflates, **headers)
        self.info = self.line()
        assert self.info.startswith("INFO ")


def parse(data: bytes) -> tuple[Frame, bytes] | None:
    """Take a frame of the server, which has no mask."""
    if len(data) < 2:
        return None
    assert not data[1] & 0x80, "a server masks nothing"
    length, at = data[1], 2
    if length >= 126:
        at += 2 if length == 126 else 8
        length = int.from_bytes(data[2:at], "big")
    if len(data) < at + length:
        return None
    payload = data[at : at + length]
    return Frame(data[0] & 0x0F, payload, bool(data[0] & 0x80), bool(data[0] & 0x40)), data[at + length :]
