"""Messages that are published one by one. Those of one turn of the event loop share a frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from penstock.client.link import Link, resolve
from penstock.client.outgoing import Prepared, check_size, encode_each
from penstock.client.protocol import Answer, PendingRequest
from penstock.client.values import Receipt
from penstock.clock import Clock
from penstock.errors import PenstockError, from_wire
from penstock.model.run import MESSAGE_BYTES
from penstock.wire.binary import Type, frame

# A frame of this size is sent at once.
FRAME_BYTES: Final = 1 << 20

Waiting = tuple[Prepared, asyncio.Future[Receipt]]


class _Unsent(Exception):
    """The connection was lost before any byte was sent."""


class Outbox:
    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        # By whether they may be sent again after a reconnect: a frame is repeated as a whole or not at all.
        self._waiting: dict[bool, list[Waiting]] = {True: [], False: []}
        self._bytes = 0

    async def publish(self, message: Prepared, timeout_s: float | None) -> Receipt:
        async with self._link.within(timeout_s, f"publish to {message.subject}"):
            while True:
                await self._link.connect(timeout_s)
                await self._link.room()
                check_size(len(message.value), self._link.hello.payload_bytes_max)
                try:
                    return await self._put(message)
                except _Unsent:
                    pass

    async def publish_alone(self, message: Prepared) -> None:
        """Publish a message once, in a frame of its own. Raise ConnectionLost if it may have arrived."""
        await self._link.connect()
        check_size(len(message.value), self._link.hello.payload_bytes_max)
        batch = encode_each([message], self._clock.now_us())
        what = f"publish to {message.subject}"
        answer = await self._link.ask(lambda number: frame(Type.PUBLISH, number, batch.data), what)
        if isinstance(error := _read(answer["receipts"][0]), PenstockError):
            raise error

    def send(self, message: Prepared, done: Callable[[PenstockError | None], None]) -> None:
        """Send a message in a frame of its own without waiting, now or as soon as there is a connection."""
        batch = encode_each([message], self._clock.now_us())

        def answered(answer: Answer) -> None:
            found = _read(answer["receipts"][0]) if isinstance(answer, dict) else answer
            done(found if isinstance(found, PenstockError) else None)

        self._link.send(PendingRequest(lambda number: frame(Type.PUBLISH, number, batch.data), answered))

    def _put(self, message: Prepared) -> asyncio.Future[Receipt]:
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if not self._bytes:
            asyncio.get_running_loop().call_soon(self._send)
        self._bytes += MESSAGE_BYTES + len(message.value) + len(message.headers or b"")
        self._waiting[message.has_identity].append((message, future))
        if self._bytes >= FRAME_BYTES:
            self._send()
        return future

    def _send(self) -> None:
        self._bytes = 0
        for is_repeatable, waiting in self._waiting.items():
            wanted = [each for each in waiting if not each[1].done()]
            waiting.clear()
            if self._link.connection is None:
                # The connection was lost in this turn. A message that waited on could be sent after its timeout.
                for _, future in wanted:
                    future.set_exception(_Unsent())
            elif wanted:
                self._send_frame(wanted, is_repeatable=is_repeatable)

    def _send_frame(self, waiting: list[Waiting], *, is_repeatable: bool) -> None:
        def done(answer: Answer) -> None:
            receipts = answer["receipts"] if isinstance(answer, dict) else [answer] * len(waiting)
            for (_, future), receipt in zip(waiting, receipts, strict=True):
                resolve(future, _read(receipt))

        try:
            batch = encode_each([message for message, _ in waiting], self._clock.now_us())
            request = PendingRequest(
                lambda number: frame(Type.PUBLISH, number, batch.data), done, is_repeatable=is_repeatable
            )
            self._link.send(request)
        except PenstockError as error:
            done(error)


def _read(receipt: Any) -> Any:
    match receipt:
        case [topic, partition, offset, duplicate]:
            return Receipt(topic, partition, offset, duplicate)
        case {"code": code, "text": text}:
            return from_wire(code, text)
    return receipt
