"""An event loop in a thread of its own, so that threads can use an `AsyncClient`.

A forked child has neither the thread nor a right to the connection, which is its parent's. So the child abandons both,
and the client makes new ones on next use.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.errors import Closed, PenstockError

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

T = TypeVar("T")

# How long a client may take to store the messages of its producers when the interpreter exits.
EXIT_S: Final = 5.0

_LOG: Final = logging.getLogger("penstock.client")


class LoopThread:
    """The thread of one `AsyncClient`. It starts with the first `run`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Why nothing more is run.
        self._closed: str | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the loop, and return its result. Called from other threads. `work` makes the coroutine in
        the loop: Ctrl-C can come at any moment here, and would leave a coroutine behind that is never awaited."""
        self._check_thread()
        with self._lock:
            if self._closed is not None:
                raise Closed(self._closed)
            if self._loop is None:
                self._start()
            assert self._loop is not None
            future = _submit(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Closed("the client was closed in the meantime") from None
        finally:
            # After Ctrl-C nobody waits for the result.
            future.cancel()

    def iterate(self, lists: AsyncGenerator[list[Any], None]) -> Iterator[Any]:
        """Yield the items of lists that an async generator produces in the loop."""
        steps = _Steps(lists)
        try:
            while (items := self.run(steps.next)) is not None:
                yield from items
        finally:
            # Closing the client ends the generator as well.
            with suppress(Closed):
                self.run(steps.close)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the client, and end the thread."""
        self._check_thread()
        with self._lock:
            is_first, self._closed = self._closed is None, self._closed or "the client is closed"
            loop, thread = self._loop, self._thread
        if not is_first or loop is None or thread is None:
            return
        _RUNNING.discard(self)
        try:
            _submit(self._client.close, loop).result(timeout_s)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def abandon(self) -> None:
        """Give up the thread and the client in a forked child. They are never collected: that would close the parent's
        connection."""
        # A thread of the parent may hold the lock.
        self._lock = threading.Lock()
        self._closed = self._closed or "this object belongs to the parent process: create another one in the child"
        _ABANDONED.append(self)
        _RUNNING.discard(self)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a client cannot wait for itself: call it from another thread")

    def _start(self) -> None:
        self._loop = loop = _new_loop()
        self._thread = threading.Thread(target=_serve, args=(loop,), name="penstock client", daemon=True)
        self._thread.start()
        _RUNNING.add(self)


def _submit(work: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop) -> Future[T]:
    """Run a coroutine in a loop of another thread. Cancelling the future cancels the coroutine."""
    future: Future[T] = Future()

    def begin() -> None:
        if future.cancelled():
            return
        try:
            task = loop.create_task(work())
        except Exception as error:  # noqa: BLE001 - the caller gets it: the arguments do not fit
            future.set_exception(error)
            return
        task.add_done_callback(finish)
        future.add_done_callback(lambda _: None if task.done() else loop.call_soon_threadsafe(task.cancel))

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            future.cancel()
        error = None if task.cancelled() else task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    loop.call_soon_threadsafe(begin)
    return future


class _Steps:
    """The steps of an async generator, each called from another thread. `close` waits for a step that is cancelled."""

    def __init__(self, lists: AsyncGenerator[list[Any], None]) -> None:
        self._lists = lists
        self._lock = asyncio.Lock()

    async def next(self) -> list[Any] | None:
        """Return the next list; None at the end."""
        async with self._lock:
            return await anext(self._lists, None)

    async def close(self) -> None:
        async with self._lock:
            await self._lists.aclose()


_RUNNING: Final[set[LoopThread]] = set()
_ABANDONED: Final[list[LoopThread]] = []


def abandon_all() -> None:
    """Give up all threads in a forked child, including those whose client was collected."""
    for thread in list(_RUNNING):
        thread.abandon()


@atexit.register
def _close_all() -> None:
    """Store the messages of producers when the interpreter exits, if that does not take long."""
    for thread in list(_RUNNING):
        try:
            thread.close(EXIT_S)
        except (PenstockError, TimeoutError) as error:
            _LOG.error("at exit: %s", error)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
