"""Requests that wait until there is a message at one of many positions.

Such a request costs a callback for each partition, and all of them together have a limit: the largest names 10,000
positions, and a connection may have hundreds of requests at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from penstock.broker.partition import Partition
from penstock.errors import Overloaded
from penstock.health import Usage

# Positions of all requests that wait.
POSITIONS_MAX: Final = 200_000


class Waiting:
    def __init__(self) -> None:
        self._count = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._count, POSITIONS_MAX)

    async def any_grown(self, positions: Sequence[tuple[Partition, int]], timeout_s: float) -> bool:
        """Wait until one of these partitions has a message at its offset, or is gone; for at most so long. Return
        whether one is. Raise Overloaded if too many positions are waited for."""
        if self._count + len(positions) > POSITIONS_MAX:
            raise Overloaded(f"requests wait at {self._count} positions, the limit is {POSITIONS_MAX}: try again later")
        offsets: dict[Partition, int] = {}
        for partition, offset in positions:
            offsets[partition] = min(offset, offsets.get(partition, offset))
        self._count += len(positions)
        try:
            async with asyncio.timeout(timeout_s):
                await _any_grown(offsets)
        except TimeoutError:
            return False
        finally:
            self._count -= len(positions)
        return True


async def _any_grown(offsets: dict[Partition, int]) -> None:
    woken: dict[Partition, None] = dict.fromkeys(offsets)
    event = asyncio.Event()

    def wake(partition: Partition) -> None:
        woken[partition] = None
        event.set()

    callbacks = {partition: partial(wake, partition) for partition in offsets}
    for partition, callback in callbacks.items():
        partition.groups[callback] = None
    try:
        while not any(partition.has_grown(offsets[partition]) for partition in woken):
            woken.clear()
            event.clear()
            await event.wait()
    finally:
        for partition, callback in callbacks.items():
            del partition.groups[callback]
