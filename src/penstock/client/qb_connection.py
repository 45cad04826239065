"""One connection of a `BrokerClient`: a blocking socket and its threads.

One thread writes. One reads: answers go to the callers that wait for them, messages to `BrokerDeliveries`. One calls
the handlers. One sends heartbeats, and notices when they are not answered. One extends ack deadlines.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final

from penstock.client.qb_deliveries import HANDLER_S, BrokerDeliveries, now_ms, read_message
from penstock.errors import BadRequest, ConnectionLost, PenstockError, TimedOut
from penstock.tls.blocking import BlockingTls
from penstock.wire import prefixed, qb
from penstock.wire.qb import Kind

# How long a connection may take to end: for a running handler, and to leave the subscriptions.
CLOSE_S: Final = HANDLER_S

_VERSION: Final = "1.0"
_RECEIVE_BYTES: Final = 256 << 10
_ENDED: Final = "the connection has ended: call connect() again"

logger = logging.getLogger("penstock.client.qb")


class BrokerConnection:
    def __init__(
        self, dialled: socket.socket | BlockingTls, address: str, client_id: str, timeout_s: float, heartbeat_s: float
    ) -> None:
        self.deliveries = BrokerDeliveries(self._send)
        # Set when the connection is lost or closed.
        self.ended = threading.Event()
        self._address = address
        self._client_id = client_id
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._socket = dialled
        dialled.settimeout(timeout_s)
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A forked child has no threads, and must not use the connection of its parent.
        self._process = os.getpid()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sequences = count(1)
        self._waiting: dict[int, Future[dict[str, str]]] = {}
        # Guards `_lost`, `_is_ending` and `_deadline_s`.
        self._lock = threading.Lock()
        # Why there is no connection any more.
        self._lost: str | None = None
        # The last error that the broker sent without a request.
        self._last_error = ""
        self._is_ending = False
        self._ends_after_handler = False
        # The shortest ack deadline of the subscriptions.
        self._deadline_s: float | None = None
        self._threads: dict[str, threading.Thread] = {}
        _OPEN.add(self)
        self._start("writer", self._write)
        self._start("reader", self._read)
        self._start("messages", self._deliver)
        self._start("heartbeats", self._beat)

    @property
    def is_open(self) -> bool:
        return self._lost is None and not self._is_ending and self._process == os.getpid()

    def check(self) -> None:
        """Raise ConnectionLost if there is no connection. A handler may still use one that ends after it."""
        if not self.is_open and (self._lost is not None or not self.deliveries.is_in_handler):
            raise ConnectionLost(self._lost or _ENDED)

    def ask(
        self, kind: Kind, fields: Mapping[str, object], body: bytes = b"", timeout_s: float | None = None
    ) -> dict[str, str]:
        """Send a request, and return the properties of the answer."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        sequence = next(self._sequences)
        data = self._encode(kind, sequence, fields, body)
        answer: Future[dict[str, str]] = Future()
        with self._lock:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            self._waiting[sequence] = answer
        try:
            self._send(data)
            return answer.result(timeout_s)
        except TimeoutError:
            raise TimedOut(f"{kind.name}: no answer from {self._address} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(sequence, None)

    def send(self, kind: Kind, fields: Mapping[str, object]) -> None:
        """Send a request without waiting for the answer."""
        self._send(self._encode(kind, next(self._sequences), fields))

    def extend_within(self, deadline_ms: str) -> None:
        """Extend the deadlines of messages that are not handled, before the broker redelivers them."""
        if not deadline_ms.isdecimal():
            return
        deadline_s = int(deadline_ms) / 1000
        with self._lock:
            if self._deadline_s is None or deadline_s < self._deadline_s:
                self._deadline_s = deadline_s
                self._start("deadlines", partial(self._extend, deadline_s))

    def close(self) -> None:
        """Leave the subscriptions and end the connection. Called by a handler: after that handler."""
        if self._process != os.getpid():
            return
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
            self.deliveries.is_stopping = True
        if self.deliveries.is_in_handler:
            self._ends_after_handler = self._ends_after_handler or is_first
            return
        if is_first:
            self._end()
        until = time.monotonic() + CLOSE_S
        for thread in list(self._threads.values()):
            thread.join(max(0, until - time.monotonic()))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"penstock {self._client_id} {name}", daemon=True)
        thread.start()
        # Not before: an interrupt may come in between, and `close` joins these threads.
        self._threads[name] = thread

    def _encode(self, kind: Kind, sequence: int, fields: Mapping[str, object], body: bytes = b"") -> bytes:
        time_ms = now_ms()
        common = {"client_id": self._client_id, "created_at": f"{time_ms / 1000:.3f}", "version": _VERSION}
        data = qb.message(kind, sequence, time_ms, qb.properties({**fields, **common}), body)
        if len(data) > prefixed.FRAME_BYTES_MAX:
            raise BadRequest(f"message of {len(data)} bytes is too large: {prefixed.FRAME_BYTES_MAX} are allowed")
        return data

    def _send(self, data: bytes) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        self._outgoing.put(data)

    # The threads.

    def _write(self) -> None:
        """Write frames, in a thread of its own, where Ctrl-C does not interrupt one."""
        try:
            while (data := self._outgoing.get()) is not None:
                self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)
        except TimeoutError:
            self._lose(f"{self._address} does not read")
        except OSError as error:
            self._lose(f"the connection to {self._address} was lost: {error.strerror or error}")

    def _read(self) -> None:
        frames = prefixed.PrefixedReader()
        frames.dialect = prefixed.PrefixedDialect.QB
        reason = "the reading thread has failed"
        try:
            while frames.refusal is None and (data := self._receive()):
                for message in frames.feed(data):
                    assert isinstance(message, qb.QbMessage), "of the dialect"
                    self._take(message)
            reason = f"{self._address} closed the connection"
            if self._last_error:
                reason = f"{reason}: {self._last_error}"
            if frames.refusal is not None:
                reason = f"{self._address} does not speak the protocol: {frames.refusal}"
        except OSError as error:
            reason = f"the connection to {self._address} was lost: {error.strerror or error}"
        except PenstockError as error:
            reason = f"{self._address} does not speak the protocol: {error}"
        finally:
            self._lose(reason)
            self._threads["writer"].join()
            self._socket.close()

    def _receive(self) -> bytes:
        while True:
            try:
                return self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                pass  # heartbeats notice a broker that is gone

    def _take(self, message: qb.QbMessage) -> None:
        properties = qb.read_properties(message.properties)
        match message.kind:
            case Kind.ACK | Kind.HEARTBEAT:
                answer = self._waiting.pop(message.sequence, None)
                if answer is not None:
                    answer.set_result(properties)
                elif is_refusal(properties):
                    self._last_error = properties.get("error", "")
            case Kind.DATA:
                self.deliveries.put(read_message(message, properties))

    def _deliver(self) -> None:
        try:
            for _ in self.deliveries.run():
                if self._ends_after_handler:
                    self._end()
                    return
        except SystemExit:
            pass  # a handler has ended this thread, and with it the connection
        finally:
            self._lose("a handler has ended its thread")

    def _extend(self, deadline_s: float) -> None:
        """Extend deadlines until the connection ends, or a subscription has a shorter deadline."""
        while not self.ended.wait(deadline_s / 3) and self._deadline_s == deadline_s:
            with suppress(ConnectionLost):
                self._send(b"".join(self.deliveries.pending()))

    def _beat(self) -> None:
        while not self.ended.wait(self._heartbeat_s):
            try:
                with suppress(ConnectionLost):
                    self.ask(Kind.HEARTBEAT, {})
            except TimedOut as error:
                self._lose(str(error))

    # The end.

    def _end(self) -> None:
        """Leave the subscriptions, as far as there is time. The broker notices the rest when the connection is gone."""
        until = time.monotonic() + CLOSE_S
        subscriptions = self.deliveries.subscriptions
        self.deliveries.remove(list(subscriptions))
        try:
            for name, subscription in subscriptions.items():
                fields = {"subscription_id": name, "subscriber_id": self._client_id}
                self.ask(Kind.UNSUBSCRIBE, fields, timeout_s=max(0, until - time.monotonic()))
                if subscription.own is not None:
                    self.ask(Kind.DELETE_SUBSCRIPTION, fields, timeout_s=max(0, until - time.monotonic()))
        except (ConnectionLost, TimedOut) as error:
            logger.debug("while disconnecting: %s", error)
        # Closing a socket with unread bytes would discard what was sent last.
        self._outgoing.put(None)
        self.ended.wait(max(0, until - time.monotonic()))
        self._lose(_ENDED)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = _ENDED if self._is_ending else reason
        _OPEN.discard(self)
        if self.deliveries.subscriptions and not self._is_ending:
            logger.warning("%s", reason)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the broker has closed it
        while self._waiting:
            try:
                _, answer = self._waiting.popitem()
            except KeyError:
                break
            answer.set_exception(ConnectionLost(self._lost))
        self._outgoing.put(None)
        self.deliveries.close(None if self._is_ending else reason)
        self.ended.set()


def is_refusal(answer: Mapping[str, str]) -> bool:
    return answer.get("status") == "error"


_OPEN: Final[set[BrokerConnection]] = set()


@atexit.register
def _close_all() -> None:
    """Let handlers finish, and leave the subscriptions, when the interpreter exits."""
    for connection in list(_OPEN):
        connection.close()
