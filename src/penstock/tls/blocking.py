"""A TLS socket for threads: one may read while another writes.

Python's own must not be used by two threads at a time.
"""

from __future__ import annotations

import socket
import ssl
import threading

from penstock.errors import NoBroker
from penstock.tls.dial import Greeting, explain
from penstock.tls.stream import TlsStream

_RECEIVE_BYTES = 256 << 10


class BlockingTls:
    """A connected socket, with the methods of one that a client needs."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, host: str, address: str) -> None:
        """Do the handshake. Raise NoBroker if it fails. `address` is for errors."""
        self._socket = connected
        self._address = address
        self._stream = TlsStream(context, is_server=False, server_name=host)
        # Guards the stream; held by those who send, so that what they encrypt keeps its order.
        self._lock, self._sending = threading.Lock(), threading.Lock()
        greeting = Greeting(address)
        try:
            while not self._stream.handshake():
                connected.sendall(self._stream.take())
                data = connected.recv(_RECEIVE_BYTES)
                if not data:
                    raise greeting.no_tls("it closed the connection during the handshake")
                self._stream.feed(greeting.strip(data))
            connected.sendall(self._stream.take())
        except ssl.SSLError as error:
            raise NoBroker(explain(address, error)) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_data(self) -> bool:
        """Whether something that came was not returned yet, whatever the socket says."""
        with self._lock:
            return not self._stream.is_empty

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._socket.setsockopt(level, name, value)

    def recv(self, bytes_max: int) -> bytes:
        """Return what comes, b"" at the end. Raise OSError if the connection is lost, also by TLS."""
        while True:
            with self._lock:
                data = self._read(bytes_max)
                has_answer, has_ended = self._stream.has_output, self._stream.has_ended
            if has_answer:
                self.sendall(b"")
            if data or has_ended:
                return data
            came = self._socket.recv(bytes_max)
            if not came:
                return b""
            with self._lock:
                self._stream.feed(came)

    def _read(self, bytes_max: int) -> bytes:
        try:
            return self._stream.read(bytes_max)
        except ssl.SSLError as error:
            raise ConnectionError(explain(self._address, error)) from None

    def sendall(self, data: bytes) -> None:
        with self._sending:
            with self._lock:
                if data:
                    self._stream.write(data)
                out = self._stream.take()
            self._socket.sendall(out)

    def shutdown(self, how: int) -> None:
        if how == socket.SHUT_WR:
            with self._lock:
                self._stream.end()
            self.sendall(b"")
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()
