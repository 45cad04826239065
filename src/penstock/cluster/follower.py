"""Reads the shared log in order, and applies each valid record.

Whatever is found in order is committed: see `place`. A follower also takes what its leader sends over a connection.
Such a record is committed too, and if it has the next number of the epoch, only void records lie before it.

Below the trim mark rounds are missing, and a node that was paused for long may append a LEAD in their place. It does
not lead, because it then finds the mark; but a reader would believe it. So each reading ends with the mark, and counts
only if nothing of it is below.
"""

from __future__ import annotations

from typing import Final

from penstock.cluster.actions import Action, Commit, Read, Reading, Restore
from penstock.cluster.checkpoint import UNTRIMMED, Mark
from penstock.cluster.place import Place, begin_at
from penstock.cluster.record import Kind, Record, decode

# Records of one reading: they share one look at the mark.
READ_LIMIT: Final = 16


class Follower:
    __slots__ = ("_is_reading", "_is_restoring", "is_at_end", "mark", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        # The newest trim mark that was seen.
        self.mark: Mark = UNTRIMMED
        # Whether the last reading found the end of the log, and nothing was appended since by this node.
        self.is_at_end = False
        self._is_reading = False
        self._is_restoring = False

    def poll(self) -> list[Action]:
        """Look for new records."""
        if self._is_reading or self._is_restoring:
            return []
        self._is_reading = True
        return [Read(self.place.position, READ_LIMIT)]

    def read(self, reading: Reading) -> list[Action]:
        """Apply what was read."""
        self._is_reading = False
        self.is_at_end = False
        self.note_mark(reading.mark)
        if self._is_trimmed(reading):
            self._is_restoring = True
            return [Restore(reading.mark.checkpoint)]
        if reading.position != self.place.position:
            return []  # the leader's connection was faster
        actions = []
        for position, data in enumerate(reading.records, reading.position):
            actions += self._next(decode(data, position))
        self.is_at_end = reading.is_end
        return actions

    def _is_trimmed(self, reading: Reading) -> bool:
        return self.place.position < reading.mark.position

    def restored(self, record: Record) -> None:
        """Go on behind a checkpoint: the local store has everything in it."""
        self._is_restoring = False
        self.place = begin_at(record)

    def pushed(self, record: Record) -> list[Action]:
        """Apply a record that the leader has committed, unless something before it is missing here."""
        if self._is_restoring or record.kind is Kind.LEAD or record.position < self.place.position:
            return []
        return self.commit(record)

    def commit(self, record: Record) -> list[Action]:
        """Apply a record that is committed, unless it is not the next one."""
        place = self.place.after(record)
        if place is None:
            return []
        self.place = place
        return [Commit(record, place)]

    def note_mark(self, mark: Mark) -> None:
        if mark.number > self.mark.number:
            self.mark = mark

    def _next(self, record: Record) -> list[Action]:
        committed = self.commit(record)
        if not committed:
            self.place = self.place.skip(record)
        return committed
