"""Calls of the functions of a consumer: `async def` functions in the event loop, plain ones in threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

from penstock.app.consumer import Consumer
from penstock.app.threads import Threads


class FunctionCalls:
    def __init__(self, consumer: Consumer) -> None:
        functions = (consumer.function, consumer.on_error)
        blocks = any(function is not None and not _is_async(function) for function in functions)
        self._threads = Threads(consumer.concurrency, f"penstock {consumer.name}") if blocks else None

    async def call(self, function: Callable[..., object], *arguments: Any) -> None:
        if _is_async(function):
            result = function(*arguments)
        else:
            assert self._threads is not None, "one of the functions blocks"
            # The function sees the context variables of the caller, such as the current span of OpenTelemetry.
            result = await self._threads.call(copy_context().run, function, *arguments)
        if inspect.isawaitable(result):
            await _uncancelled(result)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _uncancelled(result: Awaitable[object]) -> None:
    """Await a result. If something that the handler awaits was cancelled, but not the handler itself, it has failed."""
    try:
        await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("a task that the handler awaited was cancelled") from error
