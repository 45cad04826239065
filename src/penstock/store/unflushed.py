"""Counts the bytes that wait for the disk, over all logs, and lets publishers wait while they are many."""

from __future__ import annotations

import asyncio

from penstock.errors import Overloaded


class UnflushedBytes:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.used = 0
        # Done when there is room again, if anyone waits for that.
        self._room: asyncio.Future[None] | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of the limit is used. Callers that can wait should."""
        return self.used > self._bytes_max // 2

    def charge(self, size: int) -> None:
        """Count bytes until they are settled. Raises Overloaded if they are too many."""
        # After `room` any batch is taken: one as large as the limit would never fit beside anything else.
        if self.used + size > self._bytes_max and self.is_crowded:
            raise Overloaded(f"{self.used} bytes wait for the disk: try again later")
        self.used += size

    def settled(self, size: int) -> None:
        self.used -= size
        if self._room is not None and not self.is_crowded:
            self._room.set_result(None)
            self._room = None

    async def room(self) -> None:
        """Wait until it is not crowded."""
        while self.is_crowded:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)
