"""`AsyncProducer`: a producer of an `AsyncClient`."""

# Both clients take timeouts as parameters.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import random
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.client import tracing
from penstock.client.batcher import Batcher
from penstock.client.lane import SealedBatch
from penstock.client.outgoing import ABSENT, Prepared, prepare
from penstock.client.protocol import Answer, PendingRequest
from penstock.client.routes import TopicLanes
from penstock.client.values import TTL, Delay, Headers
from penstock.client.wait import Bell, Within
from penstock.errors import Closed, ConnectionLost, DeliveryFailed, PenstockError, UnknownTopic
from penstock.model.batch import BATCH_BYTES_MAX, Compression
from penstock.model.subject import owns
from penstock.wire.binary import Append, append_frame

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

_COMPRESSIONS: Final = {kind.name.lower(): kind for kind in Compression}
_RANDOM: Final = random.SystemRandom()


class AsyncProducer:
    """Publish many messages in few batches. Each is stored once and in order, even if connections break."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        batch_bytes: int,
        linger: float,
        buffer_bytes: int,
        compression: str,
        timeout: float,
    ) -> None:
        """Use `AsyncClient.producer`."""
        if compression not in _COMPRESSIONS:
            raise ValueError(f"invalid compression {compression!r}: it must be one of {', '.join(_COMPRESSIONS)}")
        if not 0 < batch_bytes <= BATCH_BYTES_MAX // 2:
            raise ValueError(f"invalid batch_bytes {batch_bytes}: it must be 1 to {BATCH_BYTES_MAX // 2}")
        if linger < 0:
            raise ValueError(f"invalid linger {linger}: it must be 0 or more")
        if buffer_bytes < 1:
            raise ValueError(f"invalid buffer_bytes {buffer_bytes}: it must be at least 1")
        if timeout <= 0:
            raise ValueError(f"invalid timeout {timeout}: it must be more than 0")
        self._client = client
        self._link = client._link
        self._clock = client._clock
        self._timeout = timeout
        self._bell = Bell()
        self._batcher = Batcher(
            batch_bytes=batch_bytes,
            linger=linger,
            buffer_bytes=buffer_bytes,
            compression=_COMPRESSIONS[compression],
            timeout=timeout,
            draw=lambda: _RANDOM.randrange(1, 1 << 63),
            now_us=self._clock.now_us,
            lock=threading.Lock(),
            wake=self._wake,
        )
        self._is_woken = False
        self._is_detached = False
        self._timer: asyncio.TimerHandle | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def stored(self) -> int:
        """The number of stored messages, including duplicates."""
        return self._batcher.stored

    @property
    def duplicates(self) -> int:
        """The number of duplicates: the broker had already stored their `message_id` (or payload).

        A message that was sent again after a lost connection may count as its own duplicate.
        """
        return self._batcher.duplicates

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def publish(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        message_id: str | None = None,
        delay: Delay = None,
        ttl: TTL = None,
    ) -> None:
        """Accept a message, which is stored later. Wait only if `buffer_bytes` are not stored yet.

        Raise DeliveryFailed, once, if earlier messages were not stored; then this one was not accepted.
        """
        left = self._add(subject, value, json, key, headers, message_id, delay, ttl)
        if left is not None:
            await self._publish(left)
        if self._is_woken:
            # A batch begins or is full: a loop that only publishes must let the event loop send it.
            await asyncio.sleep(0)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages so far are stored. Raise DeliveryFailed with those that were not."""
        mark = self._batcher.mark()
        # Without a timeout: each message has one.
        async with Within(timeout, "flush of a producer"):
            await self._bell.until(lambda: self._batcher.is_done(mark))
        self._check_failed()

    async def close(self) -> None:
        """Flush, and accept no more messages."""
        if self._batcher.is_closed:
            return
        self._batcher.close()
        try:
            await self.flush()
        finally:
            self._client._open.pop(self, None)
            self._link.detach(self)
            self._is_detached = True
            if self._timer is not None:
                self._timer.cancel()
            for relay in self._relays:
                relay.cancel()

    def connected(self) -> None:
        """Called by the link: send the unanswered batches again."""
        self._pump()

    def disconnected(self) -> None:
        """Called by the link: it is unknown whether batches that were sent are stored."""
        self._batcher.lost()
        self._pump()

    def writable(self) -> None:
        """Called by the link: send what waited for room."""
        self._pump()

    def _add(
        self,
        subject: str,
        value: bytes | None,
        json: Any,
        key: bytes | str | None,
        headers: Headers,
        message_id: str | None,
        delay: Delay,
        ttl: TTL,
    ) -> Prepared | None:
        """Add a message, from any thread. If that is not possible now, return what `_publish` needs."""
        headers = tracing.created(subject, headers)
        # The usual case: nothing but a value.
        if (
            type(value) is bytes
            and key is None
            and headers is None
            and message_id is None
            and delay is None
            and ttl is None
            and json is ABSENT
        ):
            return None if self._batcher.add(subject, value) else Prepared(subject, value)
        message = prepare(subject, value, json, key, headers, message_id, delay, ttl, self._clock.now_us())
        return None if self._batcher.add_prepared(message) else message

    async def _publish(self, message: Prepared) -> None:
        """Add a message when that is possible."""
        while True:
            self._check_failed()
            if self._batcher.is_closed:
                raise Closed("the producer is closed")
            if not self._batcher.knows(message.subject):
                await self._resolve(message.subject)
            if self._batcher.add_prepared(message):
                return
            async with self._link.within(self._timeout, f"publish to {message.subject}: room in the producer"):
                await self._bell.until(lambda: not self._batcher.is_full)

    async def _resolve(self, subject: str) -> None:
        """Ask for the topic of a subject."""
        async with self._link.within(self._timeout, f"find the topic of {subject}"):
            await self._link.connect()
            layout = await self._client._calls.layout(subject)
        if not owns(layout.name, subject.encode()):
            raise UnknownTopic(f"the broker named a topic that cannot store {subject}: {layout.name.decode()}")
        self._batcher.value_bytes_max = self._link.hello.payload_bytes_max
        self._batcher.learn(layout)
        self._link.attach(self)

    def _check_failed(self) -> None:
        failed = self._batcher.take_failed()
        if failed:
            raise DeliveryFailed(failed)

    def _wake(self) -> None:
        """Called from any thread, with the lock of the batcher held."""
        if not self._is_woken:
            self._is_woken = True
            self._link.call_soon(self._pump)

    def _pump(self) -> None:
        """Send the batches that can be sent."""
        if self._is_detached:
            return
        loop = asyncio.get_running_loop()
        self._is_woken = False
        out = self._batcher.pump(loop.time(), is_connected=self._link.is_writable)
        stale = self._batcher.stale()
        next_at = self._batcher.next_at
        for sealed in out:
            self._send(sealed)
        for topic in stale:
            relay = loop.create_task(self._relay(topic))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if next_at is None else loop.call_at(next_at, self._pump)
        self._bell.ring()

    def _send(self, sealed: SealedBatch) -> None:
        def done(answer: Answer) -> None:
            # `disconnected` has already informed the batcher.
            if not isinstance(answer, ConnectionLost):
                error = answer if isinstance(answer, PenstockError) else None
                # Only batches without a number report duplicates.
                duplicates = answer.get("duplicates", 0) if isinstance(answer, dict) else 0
                self._batcher.answered(sealed, error, asyncio.get_running_loop().time(), duplicates)
                self._bell.ring()

        layout = sealed.lane.topic.layout
        to = Append(layout.id, sealed.lane.partition, layout.partitions)
        self._link.send(PendingRequest(lambda number: append_frame(number, to, sealed.batch.data), done))

    async def _relay(self, topic: TopicLanes) -> None:
        """Ask for the new partitions of a topic, and distribute its messages again."""
        try:
            layout = await self._client._calls.layout(topic.layout.name.decode())
        except PenstockError as error:
            self._batcher.abandon(topic, error)
        else:
            self._batcher.relay(topic, layout)
        self._bell.ring()
