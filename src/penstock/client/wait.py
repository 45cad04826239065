"""Waiting in an event loop: for a condition, or with a timeout."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from penstock.errors import TimedOut


class Bell:
    """Wake the tasks that wait for a condition. A ring costs nothing if no task waits."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. It is checked after each ring."""
        while not condition():
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    def ring(self) -> None:
        """Let all waiting tasks check their conditions."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Within:
    """`async with Within(5, "connect")`: raise TimedOut with what took too long. None: no timeout."""

    __slots__ = ("_seconds", "_timeout", "_what")

    def __init__(self, seconds: float | None, what: str | Callable[[], str]) -> None:
        self._seconds = None if seconds is None or math.isinf(seconds) else seconds
        self._what = what
        self._timeout = asyncio.timeout(self._seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._timeout.expired():
                raise
            what = self._what if isinstance(self._what, str) else self._what()
            raise TimedOut(f"{what}: not done within {self._seconds:g} s") from None
