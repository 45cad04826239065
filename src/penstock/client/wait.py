"""Waiting in an event loop: until something is so, or for so long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from penstock.errors import TimedOut


class Bell:
    """Wakes all who wait for something to become so. One future for each who waits, none for each ring."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    def ring(self) -> None:
        """Something has changed: whoever waits looks again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Within:
    """`async with Within(5, "connect")`: raises TimedOut, saying what took too long. None: as long as it takes."""

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
