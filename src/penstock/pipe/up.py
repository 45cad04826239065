"""One partition of a topic that is pushed up: its batches are appended to the parent's topic of that name.

The parent knows of each origin partition how far it has come, from its own log. It is asked when a connection begins,
and refuses what does not follow: so nothing is remembered here, and nothing is lost or doubled whoever dies when.
"""

from __future__ import annotations

from typing import Final

from penstock.broker.partition import Partition
from penstock.errors import OffsetOutOfRange, PenstockError
from penstock.pipe.connector import PipeConnector, Source
from penstock.pipe.down import Host, OnGap

# What one request brings, unless a batch is larger.
PUSH_BYTES: Final = 4 << 20


class Up:
    def __init__(self, partition: Partition, source: Source, host: Host) -> None:
        self.partition = partition
        self.source = source
        self.place = (partition.topic_id, partition.number)
        self._host = host
        # Up to where the parent has it (None: it must be asked), and where to read on: behind what holds nothing.
        self._pushed: int | None = None
        self.position = 0

    def lag(self) -> int:
        return max(0, self.partition.log.committed - self.position)

    def begin(self) -> None:
        """A new connection: what was known of the parent is not."""
        self._pushed = None

    async def step(self, connector: PipeConnector, parent: str) -> None:
        """Push what there is next, and wait until the parent has it. Raises if it cannot go on."""
        if self._pushed is None:
            self._pushed = self.position = await connector.pushed(self.source)
            self._host.heard()
        log = self.partition.log
        log.check_open()
        if self.position < log.start:
            await self._meet_gap(log.start, parent)
        committed = log.committed
        batches = await self._host.store.read(log, self.position, PUSH_BYTES) if self.position < committed else []
        if not batches:
            # Offsets that were reserved and never given out hold nothing.
            self.position = max(self.position, committed)
            await self.partition.grown(self.position)
            return
        try:
            self._pushed = self.position = await connector.push(self.source, self._pushed, batches)
        except PenstockError:
            self._pushed = None
            raise
        self._host.heard()

    async def _meet_gap(self, start: int, parent: str) -> None:
        """Retention was faster than the pipe. Before the first push there is nobody to wait for: it begins where it
        can, and that is told all the same."""
        passes = self._pushed == 0 or self._host.on_gap is OnGap.SKIP
        await self._host.gaps.record(
            self.place, self.position, start, direction="up", passes=passes, begins=False, parent=parent
        )
        if not passes:
            raise OffsetOutOfRange(self.position, start, self.partition.end)
        self.position = start
