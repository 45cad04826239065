"""Makes a node the leader, by a LEAD record at the end of the log.

    read to the first missing position ─▶ append LEAD there ─▶ look at the trim mark ─▶ lead
                 ▲                              │                      │
                 └── taken: read on ────────────┘                      └ beyond it: the position was free only because
                                                                         its round is deleted, and nobody reads there

No clock decides anything: any node may try at any time. An attempt draws a new incarnation and leads at most once.
"""

from __future__ import annotations

from enum import Enum

from penstock.cluster.actions import Action, Answer, Append, Read, Reading, Stored, Unknown
from penstock.cluster.checkpoint import Member
from penstock.cluster.follower import Follower
from penstock.cluster.record import Kind, Record


class Phase(Enum):
    READING = "reading"
    APPENDING = "appending"
    CHECKING = "checking"
    # Another node began an epoch, or the position was trimmed.
    GIVEN_UP = "given up"
    LEADING = "leading"


class TakeOver:
    __slots__ = ("_epoch", "_follower", "_incarnation", "_member", "_sent", "lead", "phase")

    def __init__(self, follower: Follower, member: Member, incarnation: int) -> None:
        self._follower = follower
        self._member = member
        self._incarnation = incarnation
        # The epoch that is to be ended, once the end of the log was found.
        self._epoch: int | None = None
        self.lead: Record | None = None
        self._sent: Append | None = None
        self.phase = Phase.READING

    def begin(self) -> list[Action]:
        return self._follower.poll()

    def read(self, reading: Reading) -> list[Action]:
        if self.phase is Phase.CHECKING:
            return self._checked(reading)
        actions = self._follower.read(reading)
        return actions + (self._append() if self._follower.is_at_end else self._follower.poll())

    def awaits(self, append: Append) -> bool:
        """Whether this is the append of the LEAD record."""
        return self.phase is Phase.APPENDING and append == self._sent

    def answered(self, append: Append, answer: Answer) -> list[Action]:
        assert self.awaits(append)
        if isinstance(answer, Unknown):
            return [append]
        if isinstance(answer, Stored) or answer.data == append.data:
            self.phase = Phase.CHECKING
            return [Read(append.position, 0)]
        return self._taken()

    def _taken(self) -> list[Action]:
        self.phase = Phase.READING
        return self._follower.poll()

    def _append(self) -> list[Action]:
        place = self._follower.place
        if self._epoch not in (None, place.lineage.epoch):
            self.phase = Phase.GIVEN_UP
            return []
        self._epoch = place.lineage.epoch
        body = self._member.encode()
        self.lead = Record(Kind.LEAD, self._epoch + 1, self._incarnation, 0, place.position, body)
        self.phase = Phase.APPENDING
        self._sent = Append(place.position, self.lead.encode())
        return [self._sent]

    def _checked(self, reading: Reading) -> list[Action]:
        assert self.lead is not None
        self._follower.note_mark(reading.mark)
        if self._is_trimmed(reading):
            self.phase = Phase.GIVEN_UP
            return self._follower.poll()
        self.phase = Phase.LEADING
        return self._follower.commit(self.lead)

    def _is_trimmed(self, reading: Reading) -> bool:
        return reading.position < reading.mark.position
