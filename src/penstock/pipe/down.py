"""One partition of a topic that is piped down: append the parent's batches at the same offsets.

The pipe continues at the end of its own log, so no separate position can be ahead of the data or behind it. Batches
that were fetched but not on disk when the process ended are fetched again; stored batches are not stored again.
"""

from __future__ import annotations

from contextlib import aclosing
from enum import StrEnum
from typing import Protocol

from penstock.broker.partition import Partition
from penstock.errors import OffsetOutOfRange, PenstockError
from penstock.outcome import Outcome
from penstock.pipe.batches import check_stored
from penstock.pipe.connector import Piece, PipeConnector, RemoteTopic
from penstock.pipe.gaps import Gaps
from penstock.store.store import Store


class OnGap(StrEnum):
    """What a pipe does if the parent has dropped messages that it still needs."""

    STOP = "stop"
    SKIP = "skip"


class PipeHost(Protocol):
    store: Store
    gaps: Gaps
    on_gap: OnGap

    def note_reply(self) -> None:
        """Note that the parent has replied."""
        ...


class Down:
    def __init__(self, partition: Partition, host: PipeHost) -> None:
        self.partition = partition
        self.place = (partition.topic_id, partition.number)
        self._host = host
        # The committed end of the parent's log, and the offset up to which this copy has all of its messages.
        self.known = 0
        self._caught = 0
        # The end of the log after the last append of this pipe.
        self._end = 0
        self._failure: PenstockError | None = None

    @property
    def position(self) -> int:
        return self.partition.end

    def lag(self) -> int:
        return max(0, self.known - max(self.partition.end, self._caught))

    async def step(self, connector: PipeConnector, topic: RemoteTopic, parent: str) -> None:
        """Process one reply of the parent. Raise if the pipe cannot continue."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self.partition.log.check_open()
        self._end = self.partition.end
        offset = self._host.gaps.behind(self.place, self._end)
        try:
            async with aclosing(connector.stream(topic, self.partition.number, offset)) as pieces:
                async for piece in pieces:
                    self._host.note_reply()
                    if not await self._take(piece):
                        return
        except OffsetOutOfRange as error:
            await self._handle_gap(offset, error, parent)

    async def _take(self, piece: Piece) -> bool:
        """Append the batches; return False if the rest must be requested again."""
        self.known = max(self.known, piece.committed)
        if not piece.batches:
            self._caught = max(self._caught, piece.committed)
        for batch in piece.batches:
            check_stored(batch, self.partition.name)
            await self._host.store.rounds.unflushed.room()
            await self._host.gaps.heal(self.place, self._end)
            # If the disk refused a batch, it was rolled back: appending the next one would leave a gap.
            if self.partition.end != self._end:
                return False
            self.partition.append_at(batch, Outcome(self._settled))
            self._end = self.partition.end
        return True

    def _settled(self, error: PenstockError | None) -> None:
        if error is not None:
            self._failure = error

    async def _handle_gap(self, offset: int, error: OffsetOutOfRange, parent: str) -> None:
        """Record that the parent has dropped the offset. An empty copy starts where the parent's log starts."""
        begins = self.partition.end == 0
        passes = begins or self._host.on_gap is OnGap.SKIP
        await self._host.gaps.record(
            self.place, offset, error.start, direction="down", passes=passes, begins=begins, parent=parent
        )
        if not passes:
            raise error
