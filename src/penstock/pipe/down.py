"""One partition of a topic that is piped down: what the parent has is appended here, at the offsets that it has there.

Where it goes on is the end of its own log, so there is no position beside the data that could be ahead of it or behind
it. What was fetched and is not on the disk when the process ends is fetched again; what is there already is not stored
again.
"""

from __future__ import annotations

from contextlib import aclosing
from enum import StrEnum
from typing import Protocol

from penstock.broker.partition import Partition
from penstock.errors import OffsetOutOfRange, PenstockError
from penstock.pipe.batches import check_stored
from penstock.pipe.connector import Piece, PipeConnector, RemoteTopic
from penstock.pipe.gaps import Gaps
from penstock.storage.store import Store


class OnGap(StrEnum):
    """What a pipe does where the parent has dropped what it wants."""

    STOP = "stop"
    SKIP = "skip"


class Host(Protocol):
    store: Store
    gaps: Gaps
    on_gap: OnGap

    def heard(self) -> None:
        """The parent has answered."""
        ...


class Down:
    def __init__(self, partition: Partition, host: Host) -> None:
        self.partition = partition
        self.place = (partition.topic_id, partition.number)
        self._host = host
        # How far the parent's log is, and up to where it has nothing that is not here.
        self.known = 0
        self._caught = 0
        # Where the log ended when it was last touched from here.
        self._end = 0
        self._failure: PenstockError | None = None

    @property
    def position(self) -> int:
        return self.partition.end

    def lag(self) -> int:
        return max(0, self.known - max(self.partition.end, self._caught))

    async def step(self, connector: PipeConnector, topic: RemoteTopic, parent: str) -> None:
        """One answer of the parent. Raises if it cannot go on."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self.partition.log.check_open()
        self._end = self.partition.end
        offset = self._host.gaps.behind(self.place, self._end)
        try:
            async with aclosing(connector.stream(topic, self.partition.number, offset)) as pieces:
                async for piece in pieces:
                    self._host.heard()
                    if not await self._take(piece):
                        return
        except OffsetOutOfRange as error:
            await self._meet_gap(offset, error, parent)

    async def _take(self, piece: Piece) -> bool:
        """Append what came; False if the rest must be asked for again."""
        self.known = max(self.known, piece.committed)
        if not piece.batches:
            self._caught = max(self._caught, piece.committed)
        for batch in piece.batches:
            check_stored(batch, self.partition.name)
            await self._host.store.rounds.room()
            await self._host.gaps.heal(self.place, self._end)
            # What the disk refused was taken back: to append what comes behind it would leave a gap.
            if self.partition.end != self._end:
                return False
            self.partition.append_at(batch, self._settled)
            self._end = self.partition.end
        return True

    def _settled(self, _offset: int, error: PenstockError | None) -> None:
        if error is not None:
            self._failure = error

    async def _meet_gap(self, offset: int, error: OffsetOutOfRange, parent: str) -> None:
        """The parent has it no more. A copy that has nothing yet begins where the parent does."""
        begins = self.partition.end == 0
        passes = begins or self._host.on_gap is OnGap.SKIP
        await self._host.gaps.record(
            self.place, offset, error.start, direction="down", passes=passes, begins=begins, parent=parent
        )
        if not passes:
            raise error
