"""An app: the consumers of a program, from the first subscription to the last acknowledgement."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from penstock.app.consumer import BatchHandler, Consumer, ErrorHandler, MessageHandler, Mode
from penstock.app.retry import Retry
from penstock.app.threads import call_in
from penstock.app.worker import Worker
from penstock.client.aio import AsyncClient
from penstock.client.servers import Servers
from penstock.client.subscription import AsyncSubscription
from penstock.client.values import Place
from penstock.model.subject import selection
from penstock.times import check_seconds
from penstock.tls.options import TlsOptions

logger = logging.getLogger(__name__)

_RETRY: Final = Retry.exponential()
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Handler = TypeVar("Handler", bound=MessageHandler | BatchHandler)


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event


class App:
    """The consumers of a program. It takes the parameters of `AsyncClient`. `stop_timeout`: the seconds for handlers to
    finish when the app stops."""

    def __init__(
        self,
        servers: Servers = "127.0.0.1:4222",
        *,
        name: str = "",
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
        stop_timeout: float = 30.0,
        tls: TlsOptions | None = None,
    ) -> None:
        self.servers = servers
        check_seconds("stop_timeout", stop_timeout)
        self.stop_timeout = stop_timeout
        self.tls = tls
        self._connect = partial(AsyncClient, name=name, user=user, password=password, token=token, timeout=timeout)
        self._consumers: dict[str, Consumer] = {}
        self._running: _Running | None = None

    def consumer(
        self,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        group: str,
        mode: Mode = "shared",
        retry: Retry = _RETRY,
        on_error: ErrorHandler | None = None,
        concurrency: int = 1,
        start: Place = "earliest",
        batch: int | None = None,
        buffer: int = 100,
        name: str | None = None,
    ) -> Callable[[Handler], Handler]:
        """Decorate a function to be called with each message of a pattern or a whole topic (`topic="orders"`), or with
        lists of up to `batch` messages. A plain function runs in a thread, an `async def` function in the event loop.
        Up to `concurrency` calls run at once. The function itself is not changed.

        Returning acknowledges the message. Raising calls `on_error`, and `retry` decides what happens to the message.
        `buffer`: messages to receive ahead. `start`: where a new group begins.
        """
        selected = selection(pattern, topic)

        def register(function: Handler) -> Handler:
            chosen = name or str(getattr(function, "__name__", type(function).__name__))
            if chosen in self._consumers:
                raise ValueError(f"duplicate consumer {chosen}: give this one another name with name=")
            self._consumers[chosen] = Consumer(
                name=chosen,
                function=function,
                pattern=selected,
                group=group,
                mode=mode,
                retry=retry,
                on_error=on_error,
                concurrency=concurrency,
                start=start,
                batch=batch,
                buffer=buffer,
            )
            return function

        return register

    @property
    def consumers(self) -> list[Consumer]:
        """The registered consumers."""
        return list(self._consumers.values())

    def pause(self, name: str) -> None:
        """Pause a consumer: start no more handlers until `resume`. Any thread may call this."""
        self._named(name).pause()

    def resume(self, name: str) -> None:
        """Resume a paused consumer. Any thread may call this."""
        self._named(name).resume()

    def _named(self, name: str) -> Consumer:
        if name not in self._consumers:
            raise LookupError(f"unknown consumer {name}: the app has {', '.join(self._consumers) or 'none'}")
        return self._consumers[name]

    # Running.

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`, then stop in order. A second signal ends the process at once."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def restore_signals() -> None:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

        def request_stop(number: signal.Signals) -> None:
            logger.info("%s: stopping", number.name)
            restore_signals()
            stop.set()

        for number in _SIGNALS:
            loop.add_signal_handler(number, request_stop, number)
        try:
            await self.serve(stop)
        finally:
            restore_signals()

    async def serve(self, stop: asyncio.Event | None = None) -> None:
        """Run in the current event loop until the event `stop` is set: by the caller, by `stop()`, or because a
        subscription has ended with an error, which is raised at the end."""
        await self._serve(stop or asyncio.Event(), lambda: None)

    def stop(self) -> None:
        """Stop the app without waiting. Any thread may call this. If the app is not running, nothing happens."""
        running = self._running
        if running is not None:
            call_in(running.loop, running.stop.set)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run in another thread during a `with` block, for tests. The block starts when all consumers are subscribed.
        At the end the app stops, and its error is raised."""
        subscribed: Future[None] = Future()
        with ThreadPoolExecutor(1, "penstock app") as thread:
            serving = self._serve(asyncio.Event(), lambda: subscribed.set_result(None))
            ended = thread.submit(asyncio.run, serving)
            wait((subscribed, ended), return_when=FIRST_COMPLETED)
            try:
                if subscribed.done():
                    try:
                        yield
                    finally:
                        self.stop()
            finally:
                ended.result()

    async def _serve(self, stop: asyncio.Event, subscribed: Callable[[], None]) -> None:
        if not self._consumers:
            raise ValueError("the app has no consumers: decorate a function with @app.consumer(pattern, group=...)")
        if self._running is not None:
            raise RuntimeError("the app is already running")
        self._running = _Running(asyncio.get_running_loop(), stop)
        try:
            async with self._connect(self.servers, tls=self.tls) as client:
                consumers = self.consumers
                subscriptions = [await _subscribe(client, consumer) for consumer in consumers]
                workers = [
                    Worker(consumer, client, subscription, stop, self.stop_timeout)
                    for consumer, subscription in zip(consumers, subscriptions, strict=True)
                ]
                subscribed()
                # A consumer that fails does not cancel the others: they stop in order.
                outcomes = await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)
        finally:
            self._running = None
        _raise([outcome for outcome in outcomes if outcome is not None])


async def _subscribe(client: AsyncClient, consumer: Consumer) -> AsyncSubscription:
    logger.info(
        "consumer %s: %s, group %s (%s), concurrency %d",
        consumer.name,
        consumer.pattern,
        consumer.group,
        consumer.mode,
        consumer.concurrency,
    )
    return await client.subscribe(
        consumer.pattern,
        group=consumer.group,
        mode=consumer.mode,
        start=consumer.start,
        buffer=consumer.buffer,
        deliveries_max=consumer.retry.deliveries_max if consumer.mode == "shared" else None,
    )


def _raise(errors: list[BaseException]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup("several consumers ended with an error", errors)
