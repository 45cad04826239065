"""Makes a node the leader, by a LEAD record at the end of the log.

    read to the first missing position ─▶ look beyond ─▶ append LEAD there ─▶ look at the trim mark ─▶ lead
                 ▲                                              │                      │
                 └───────────── taken: read on ─────────────────┘                      └ beyond it: give up

Below the mark a position is free only because its round is deleted. Nobody reads there.

Beyond the first missing position there may be records that an earlier leader could not commit. If there is one that it
sent when it had committed more than was read, or one of a later epoch, someone has removed a record. Then a LEAD in
its place would make everything behind it void, so the node stops.

No clock decides anything: any node may try at any time. An attempt draws a new incarnation and leads at most once.
"""

from __future__ import annotations

from enum import Enum

from penstock.cluster.actions import Action, Answer, Append, Read, Reading, Stored, Survey, Surveyed, Unknown
from penstock.cluster.checkpoint import Member
from penstock.cluster.follower import Follower
from penstock.cluster.place import Place
from penstock.cluster.record import Kind, Record, decode
from penstock.errors import CorruptRecord


class Phase(Enum):
    READING = "reading"
    LOOKING = "looking"
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
        return actions + (self._look() if self._follower.is_at_end else self._follower.poll())

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

    def _look(self) -> list[Action]:
        self.phase = Phase.LOOKING
        return [Survey(self._follower.place.position)]

    def surveyed(self, survey: Surveyed) -> list[Action]:
        """Append, unless a record was removed. Raises CorruptRecord then."""
        place = self._follower.place
        assert survey.position == place.position
        if survey.data is not None and survey.mark.position <= place.position:
            check_missing(place, decode(survey.data, survey.beyond))
        return self._append()

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


def check_missing(place: Place, beyond: Record) -> None:
    """Raise CorruptRecord if the record at `place` was there when `beyond` was sent."""
    lineage = place.lineage
    was_committed = (beyond.epoch, beyond.incarnation) == (lineage.epoch, lineage.incarnation) and (
        beyond.committed > lineage.number
    )
    if was_committed or beyond.epoch > lineage.epoch:
        raise CorruptRecord(
            f"record {place.position} of the shared log is missing, and was there when record {beyond.position} was "
            f"written: restore it, and let nothing but this cluster delete its objects"
        )
