"""An app: the consumers of a program, and their life from the first subscription to the last acknowledgement."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from penstock.app.consumer import BatchHandler, Consumer, ErrorHandler, MessageHandler, Mode, Start
from penstock.app.retry import Retry
from penstock.app.threads import call_in
from penstock.app.worker import Worker
from penstock.client.aio import AsyncClient, AsyncSubscription
from penstock.client.link import Servers
from penstock.subject import selection

logger = logging.getLogger(__name__)

_RETRY: Final = Retry.exponential()
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Handler = TypeVar("Handler", bound=MessageHandler | BatchHandler)


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event


class App:
    """Takes what `AsyncClient` takes. `stop_timeout`: how many seconds handlers may go on when it is stopped."""

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
    ) -> None:
        self.servers = servers
        self.stop_timeout = stop_timeout
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
        start: Start = "earliest",
        batch: int | None = None,
        buffer: int = 100,
        name: str | None = None,
    ) -> Callable[[Handler], Handler]:
        """The decorated function is called with each message of a pattern or a whole topic (`topic="orders"`), or with
        lists of up to `batch`. It may be plain, then it runs in a thread, or `async def`; `concurrency` of it run at
        once. The function itself stays as it is.

        A message that it returns from is acknowledged. If it raises, `on_error` hears of it, and `retry` says what
        becomes of the message. `buffer`: so many messages are asked for ahead. `start` counts when the group is new.
        """
        selected = selection(pattern, topic)

        def register(function: Handler) -> Handler:
            chosen = name or str(getattr(function, "__name__", type(function).__name__))
            if chosen in self._consumers:
                raise ValueError(f"there is a consumer {chosen} already: give this one another name with name=")
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
        return list(self._consumers.values())

    def pause(self, name: str) -> None:
        self._named(name).pause()

    def resume(self, name: str) -> None:
        self._named(name).resume()

    def _named(self, name: str) -> Consumer:
        if name not in self._consumers:
            raise LookupError(f"there is no consumer {name}, but {', '.join(self._consumers) or 'none at all'}")
        return self._consumers[name]

    # Its life.

    def run(self) -> None:
        """Until SIGTERM, SIGINT or `stop`, and then until all is in good order. A second signal ends it at once."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def let_go() -> None:
            """Of the signals: they do again what they do by default."""
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

        def hear(number: signal.Signals) -> None:
            logger.info("%s: stopping", number.name)
            let_go()
            stop.set()

        for number in _SIGNALS:
            loop.add_signal_handler(number, hear, number)
        try:
            await self.serve(stop)
        finally:
            let_go()

    async def serve(self, stop: asyncio.Event | None = None) -> None:
        """As `run`, in a loop that is there, until `stop` is set; by whoever made it, by `stop()`, or by an error that
        ends a subscription: that is raised in the end."""
        await self._serve(stop or asyncio.Event(), lambda: None)

    def stop(self) -> None:
        """From any thread. It does not wait, and does nothing if the app does not run."""
        running = self._running
        if running is not None:
            call_in(running.loop, running.stop.set)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In a thread beside this one, for tests: from when all consumers are subscribed. At the end of the block it is
        stopped, and what went wrong in it is raised here."""
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
            raise RuntimeError("the app runs already")
        self._running = _Running(asyncio.get_running_loop(), stop)
        try:
            async with self._connect(self.servers) as client:
                consumers = self.consumers
                subscriptions = [await _subscribe(client, consumer) for consumer in consumers]
                workers = [
                    Worker(consumer, client, subscription, stop, self.stop_timeout)
                    for consumer, subscription in zip(consumers, subscriptions, strict=True)
                ]
                subscribed()
                # One that fails lets the others stop in good order, and does not cancel them.
                outcomes = await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)
        finally:
            self._running = None
        _raise([outcome for outcome in outcomes if outcome is not None])


async def _subscribe(client: AsyncClient, consumer: Consumer) -> AsyncSubscription:
    logger.info(
        "consumer %s: %s for group %s, %s, %d at once",
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
