"""Batches that were read not long ago, opened, for all partitions together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.health import Usage
from penstock.model.batch import Batch
from penstock.model.run import Run, open_batch

T = TypeVar("T")

# A batch with more of either is large: it is opened in another thread, and its readers get it in parts. The other
# readers of the broker wait for one part, some milliseconds, and not for all of it, which can be seconds.
LARGE_MESSAGES: Final = 16_384
LARGE_BYTES: Final = 4 << 20

# What is kept opened of batches that were read last: readers with little room come back for the rest, and many readers
# that are a little behind read the same ones.
OPENED_BYTES_MAX: Final = 4 << 20
# The memory of a message besides its bytes.
_OBJECT_BYTES: Final = 64
# A large one that nobody reads from is kept so long.
_LARGE_IDLE_S: Final = 5.0


def is_large(item: Batch | Run) -> bool:
    if isinstance(item, Batch):
        return item.count > LARGE_MESSAGES or item.plain_length > LARGE_BYTES
    return len(item) > LARGE_MESSAGES or item.size > LARGE_BYTES


async def in_worker_if_large(batch: Batch, read: Callable[[], T]) -> T:
    """Open a batch without holding up the loop."""
    if is_large(batch):
        return await asyncio.get_running_loop().run_in_executor(None, read)
    found = read()
    await asyncio.sleep(0)
    return found


class Opened:
    """Batches that were read not long ago, opened; for all partitions together, the oldest use goes first.

    Opened, a large batch takes several times its size. So there is one at a time, and it is kept only until somebody
    has read all of it, or nobody has read from it for a while.
    """

    def __init__(self, bytes_max: int = OPENED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._runs: dict[tuple[int, int, int], Run] = {}
        self._bytes = 0
        # Held while a large batch is read and opened.
        self.lock = asyncio.Lock()
        self._large: _Large | None = None

    def open(self, place: tuple[int, int], batch: Batch, topic: bytes) -> Run:
        """Return the messages of a batch that is not large."""
        key = (*place, batch.base_offset)
        known = self._take(key, batch) or open_batch(batch, topic)
        self._runs[key] = known
        self._bytes += _opened_bytes(batch)
        while self._bytes > self._bytes_max and len(self._runs) > 1:
            self._drop(next(iter(self._runs)))
        return known

    def large_at(self, place: tuple[int, int], offset: int) -> Run | None:
        """Return the large batch with this offset, if it is open."""
        large = self._large
        if large is None or large.place != place or not large.batch.base_offset <= offset < large.batch.end:
            return None
        self._keep(large)
        return large.run

    async def open_large(self, place: tuple[int, int], batch: Batch, topic: bytes) -> Run:
        """Open a large batch in another thread, in place of the one before."""
        self.drop_large()
        run = await asyncio.get_running_loop().run_in_executor(None, open_batch, batch, topic)
        self._keep(_Large(place, batch, run))
        return run

    def drop_large(self) -> None:
        if self._large is not None and self._large.timer is not None:
            self._large.timer.cancel()
        self._large = None

    def _keep(self, large: _Large) -> None:
        self.drop_large()
        large.timer = asyncio.get_running_loop().call_later(_LARGE_IDLE_S, self.drop_large)
        self._large = large

    def _take(self, key: tuple[int, int, int], batch: Batch) -> Run | None:
        """Take out what is kept for a batch; None if that is nothing, or was another batch."""
        known = self._runs.get(key)
        if known is None:
            return None
        self._drop(key)
        return known if known.batch is not None and known.batch.crc == batch.crc else None

    @property
    def usage(self) -> Usage:
        return Usage(self._bytes, self._bytes_max)

    def forget(self, place: tuple[int, int]) -> None:
        for key in [key for key in self._runs if key[:2] == place]:
            self._drop(key)
        if self._large is not None and self._large.place == place:
            self.drop_large()

    def _drop(self, key: tuple[int, int, int]) -> None:
        batch = self._runs.pop(key).batch
        assert batch is not None
        self._bytes -= _opened_bytes(batch)


def _opened_bytes(batch: Batch) -> int:
    return batch.plain_length + _OBJECT_BYTES * batch.count


@dataclass(slots=True)
class _Large:
    place: tuple[int, int]
    batch: Batch
    run: Run
    timer: asyncio.TimerHandle | None = None
