"""Calls between threads and an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_Outcome = tuple[object, BaseException | None]


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: Any) -> bool:
    """Call it in the loop, from any thread. Return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


class _Call(NamedTuple):
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    outcome: asyncio.Future[_Outcome]


class Threads:
    """A pool of threads for functions that block. They are daemons, unlike those of concurrent.futures: a function that
    never returns must not keep the process from exiting."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def call(self, function: Callable[..., object], *arguments: Any) -> object:
        """Return or raise what the function does. Cancelling this does not stop the function."""
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(function, arguments, outcome))
        result, error = await outcome
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End each thread when its function returns."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call_in(call.outcome.get_loop(), _set, call.outcome, _outcome(call)):
                logger.warning("%s: a function returned after the loop was closed", threading.current_thread().name)


def _outcome(call: _Call) -> _Outcome:
    """Return the outcome as a value, because a future refuses some exceptions (StopIteration)."""
    try:
        return call.function(*call.arguments), None
    except BaseException as error:  # noqa: BLE001 it is raised in the caller
        return None, error


def _set(future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
