"""One partition of a topic that is pushed up: append its batches to the parent's topic of the same name.

The parent knows from its own log how far each origin partition has been pushed. The child asks for this position on
each connection, and the parent refuses batches that do not follow it. So the child stores no position, and nothing is
lost or duplicated, whichever process is killed.
"""

from __future__ import annotations

from typing import Final

from penstock.broker.partition import Partition
from penstock.errors import OffsetOutOfRange, PenstockError
from penstock.pipe.connector import PipeConnector, PushSource
from penstock.pipe.down import OnGap, PipeHost

# The bytes of one request, unless a single batch is larger.
PUSH_BYTES: Final = 4 << 20


class Up:
    def __init__(self, partition: Partition, source: PushSource, host: PipeHost) -> None:
        self.partition = partition
        self.source = source
        self.place = (partition.topic_id, partition.number)
        self._host = host
        # The parent's position (None: unknown), and the next offset to read, after empty offsets.
        self._pushed: int | None = None
        self.position = 0

    def lag(self) -> int:
        return max(0, self.partition.log.committed - self.position)

    def begin(self) -> None:
        """Forget the parent's position: this is a new connection."""
        self._pushed = None

    async def step(self, connector: PipeConnector, parent: str) -> None:
        """Push the next batches, and wait until the parent has them. Raise if the pipe cannot continue."""
        if self._pushed is None:
            self._pushed = self.position = await connector.pushed(self.source)
            self._host.note_reply()
        log = self.partition.log
        log.check_open()
        if self.position < log.start:
            await self._handle_gap(log.start, parent)
        committed = log.committed
        batches = (
            await self.partition.cursor(self.position).read_batches(PUSH_BYTES) if self.position < committed else []
        )
        if not batches:
            # Reserved offsets that were never used are empty.
            self.position = max(self.position, committed)
            await self.partition.cursor(self.position).wait()
            return
        try:
            self._pushed = self.position = await connector.push(self.source, self._pushed, batches)
        except PenstockError:
            self._pushed = None
            raise
        self._host.note_reply()

    async def _handle_gap(self, start: int, parent: str) -> None:
        """Record that retention dropped messages before they were pushed. Before the first push the pipe does not stop:
        it starts at the first message that is left."""
        passes = self._pushed == 0 or self._host.on_gap is OnGap.SKIP
        await self._host.gaps.record(
            self.place, self.position, start, direction="up", passes=passes, begins=False, parent=parent
        )
        if not passes:
            raise OffsetOutOfRange(self.position, start, self.partition.end)
        self.position = start
