"""`AsyncSubscription`: a subscription of an `AsyncClient`."""

# Both clients take timeouts as parameters.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.client.feed import Feed, SubscriptionOptions
from penstock.client.link import resolve
from penstock.client.message import Message
from penstock.client.outgoing import Prepared, check_size
from penstock.client.protocol import Answer, PendingRequest
from penstock.client.settlements import Settlement
from penstock.client.unread import RefreshNotice
from penstock.client.wait import Bell, Within
from penstock.errors import Closed, ConnectionLost, Overloaded, PenstockError
from penstock.wire.binary import settle_frame

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

# Delay before a subscription is opened again that the broker could not continue.
REOPEN_S: Final = 0.2

# What to call for each word of a refresh, RESET and READY; the callbacks of an AsyncSubscription are coroutines.
Callbacks = Mapping[str, Callable[[str], Any] | None]

_LOG: Final = logging.getLogger("penstock.client")


class AsyncSubscription:
    """A stream of messages: `async for message in subscription`, or `get`.

    It continues after a reconnect: a subscription without a group at the next offset; a member of a group receives its
    unacknowledged messages again.
    """

    def __init__(self, client: AsyncClient, options: SubscriptionOptions, callbacks: Callbacks) -> None:
        """Use `AsyncClient.subscribe`."""
        self._client = client
        self._link = client._link
        self._bell = Bell()
        self._opening = OpenFeed(client, options, self._bell)
        self._feed = self._opening.feed
        self._callbacks = callbacks
        # The callback that runs, in a task of its own.
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def pattern(self) -> str:
        return self._feed.options.pattern

    @property
    def group(self) -> str | None:
        return self._feed.options.group

    @property
    def mode(self) -> str:
        return self._feed.options.mode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = self._feed.take()
        while message is None:
            if self._feed.is_closed:
                raise StopAsyncIteration
            await self._wait()
            message = self._feed.take()
        return message

    async def get(self, timeout: float | None = None) -> Message:
        """Return the next message. Raise TimedOut if none arrives in time, Closed if the subscription is closed."""
        message = self._feed.take()
        if message is not None:
            return message
        async with Within(timeout, f"get from {self.pattern}"):
            async for message in self:
                return message
        raise closed_subscription()

    async def get_many(self, max: int | None = None, timeout: float | None = None) -> list[Message]:
        """Return the messages that have arrived, at least one. Raise TimedOut if none arrives in time, Closed if the
        subscription is closed."""
        async with Within(timeout, f"get from {self.pattern}"):
            messages = await self._next_many(max)
        if not messages:
            raise closed_subscription()
        return messages

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Yield lists of messages, each with those that have arrived since the last one."""
        while messages := await self._next_many(None):
            yield messages

    def unread(self) -> list[Message]:
        """Return the messages that have arrived and were not read, without reading them. Their ack deadlines run."""
        return self._feed.unread()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all acknowledgements so far are stored. Raise NotOutstanding if some were too late."""
        settlements = self._feed.settlements
        mark = settlements.mark()
        self._opening.send()
        async with self._link.within(timeout, f"flush of {self.pattern}"):
            await self._bell.until(lambda: settlements.is_done(mark) or self._feed.is_over)
        settlements.check()

    async def close(self) -> None:
        """Stop receiving: iteration ends. Unacknowledged messages go to other members of the group."""
        if self._feed.is_closed:
            return
        if self._refreshing is not None and self._refreshing is not asyncio.current_task():
            self._refreshing.cancel()
        self._feed.give_back()
        self._opening.send()
        self._detach()
        await self._opening.leave()

    async def _begin(self) -> None:
        """Open it at the broker. Raise the broker's error if it refuses."""
        async with self._link.within(None, f"subscribe to {self.pattern}"):
            await self._link.connect()
            self._client._open[self] = None
            self._link.attach(self._opening)
            try:
                await self._bell.until(lambda: self._opening.is_open or self._feed.is_over)
            finally:
                if not self._opening.is_open:
                    self._detach()
            # If it was opened, the reader gets the error, behind the messages that came before it.
            if self._feed.ended is not None and not self._opening.is_open:
                raise self._feed.ended

    def _detach(self) -> None:
        self._feed.close()
        self._link.detach(self._opening)
        self._client._open.pop(self, None)

    async def _wait(self) -> None:
        """Wait for messages or the end. Run the callback of a refresh if one is due."""
        await self._bell.until(lambda: self._feed.is_ready)
        if (notice := self._feed.notice()) is not None:
            # In a task of its own: a reader whose timeout passes must not cancel the callback halfway.
            self._refreshing = asyncio.create_task(self._refresh(notice))
            await asyncio.wait([self._refreshing])

    async def _refresh(self, notice: RefreshNotice) -> None:
        callback = self._callbacks[notice.word]
        try:
            if callback is not None:
                await callback(notice.topic)
        except Exception as error:  # noqa: BLE001  whatever it is, the reader must see it
            await self._fail(notice, error)
        else:
            self._feed.complete(notice)

    async def _fail(self, notice: RefreshNotice, error: BaseException) -> None:
        """End the subscription because a callback failed. The broker gets no confirmation, but an END."""
        failure = Closed(f"on_{notice.word.lower()} of {self.pattern} failed for {notice.topic}: {error!r}")
        failure.__cause__ = error
        self._feed.end(failure)
        try:
            await self._opening.leave()
        except PenstockError as refused:
            _LOG.warning("could not end the subscription to %s at the broker: %s", self.pattern, refused)

    async def _next_many(self, count_max: int | None) -> list[Message]:
        """Return messages; an empty list if the subscription is closed."""
        messages = self._feed.take_many(count_max)
        while not messages and not self._feed.is_closed:
            await self._wait()
            messages = self._feed.take_many(count_max)
        return messages

    # For the inbox, which waits for one of many messages.

    @property
    def _is_over(self) -> bool:
        return self._feed.is_over

    def _take_unread(self) -> Iterator[Message]:
        """Read the messages that have arrived, without waiting."""
        while not self._feed.is_over and (messages := self._feed.take_many(None)):
            yield from messages

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until arriving messages make a condition true. Raise Closed if the subscription ends first."""
        await self._bell.until(lambda: condition() or self._feed.is_over)
        if not condition():
            raise self._feed.ended or closed_subscription()


class OpenFeed:
    """A feed on a link: opened on each new connection; credit and settlements are sent as they come up."""

    def __init__(self, client: AsyncClient, options: SubscriptionOptions, bell: Bell) -> None:
        """`bell` rings when something has changed for a reader."""
        self.feed = Feed(options, lock=threading.Lock(), wake=self._wake, arrived=bell.ring, respond=self._respond)
        # Whether the broker has accepted the subscription once.
        self.is_open = False
        self._link = client._link
        self._outbox = client._outbox
        self._pattern = options.pattern
        self._bell = bell
        self._is_woken = False
        self._reopening: asyncio.TimerHandle | None = None

    def connected(self) -> None:
        """Called by the link: open the subscription on this connection."""
        self._stop_reopening()
        connection = self._link.connection
        if connection is not None and not self.feed.is_over:
            connection.open(self.feed, self._opened)
            self._link.flush_soon()

    def disconnected(self) -> None:
        """Called by the link. The connection itself has informed the feed."""
        self._stop_reopening()

    def writable(self) -> None:
        """Called by the link: send what waited for room."""
        self.send()

    def send(self) -> None:
        """Send credit, settlements and confirmations of a refresh, in this order."""
        self._is_woken = False
        connection = self._link.connection
        if connection is None or not self._link.is_writable:
            return
        connection.credit(self.feed)
        for since, about, offsets in self.feed.take_settlements():
            self._settle(since, about, offsets)
        connection.confirm(self.feed)
        self._link.flush_soon()

    async def leave(self) -> None:
        """End the subscription at the broker."""
        connection = self._link.connection
        if connection is None or not self.feed.number:
            return
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        connection.end(self.feed, lambda answer: resolve(ended, answer))
        self._link.flush_soon()
        try:
            async with self._link.within(None, f"end of {self._pattern}"):
                await ended
        except ConnectionLost:
            # The subscription ended with the connection.
            pass

    def _stop_reopening(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()

    def _opened(self, answer: Answer) -> None:
        match answer:
            case dict():
                if not self.is_open and (hint := answer.get("hint")) is not None:
                    _LOG.warning("hint: %s", hint)
                self.is_open = True
            case ConnectionLost():
                pass
            case Closed() | Overloaded() if self.is_open:
                self._reopening = asyncio.get_running_loop().call_later(REOPEN_S, self.connected)
            case PenstockError():
                self.feed.end(answer)
        self._bell.ring()

    def _wake(self) -> None:
        """Called from any thread, with the lock of the feed held."""
        if not self._is_woken:
            self._is_woken = True
            self._link.call_soon(self.send)

    def _settle(self, since: int, about: Settlement, offsets: list[int]) -> None:
        settlements = self.feed.settlements

        def done(answer: Answer) -> None:
            match answer:
                case ConnectionLost():
                    settlements.repeat(since, about, offsets)
                case PenstockError():
                    _LOG.warning("%d messages of %s were not settled: %s", len(offsets), self._pattern, answer)
                    settlements.settled(since, 0, answer)
                case dict():
                    settlements.settled(since, len(answer["refused"]))
            self._bell.ring()

        frame = about.frame(self.feed.number, offsets)
        self._link.send(PendingRequest(lambda number: settle_frame(number, frame), done))

    def _respond(self, message: Prepared) -> None:
        """Called from any thread."""
        self._link.check_open()
        check_size(len(message.value), self._link.hello.payload_bytes_max)
        self._link.call_soon(lambda: self._send_reply(message))

    def _send_reply(self, message: Prepared) -> None:
        def done(error: PenstockError | None) -> None:
            if error is not None:
                _LOG.warning("a reply to %s was not sent: %s", message.subject, error)

        try:
            self._outbox.send(message, done)
        except PenstockError as error:
            done(error)


def closed_subscription() -> Closed:
    return Closed("the subscription is closed")
