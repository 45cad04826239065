"""A node of a cluster: it follows, tries to lead, or leads.

    FOLLOWING ──take_over──▶ TAKING_OVER ──────▶ LEADING
        ▲                         │                 │
        └───── another leads ─────┴──── deposed ────┘

Every method takes an event and returns actions; `actions` says which answers are due.
"""

from __future__ import annotations

from enum import Enum

from penstock.cluster.actions import Action, Answer, Append, Delete, Deposed, Lead, Reading, StoreMark, Surveyed
from penstock.cluster.checkpoint import Mark, Member
from penstock.cluster.follower import Follower
from penstock.cluster.leader import Leader
from penstock.cluster.place import Place, make_checkpoint
from penstock.cluster.record import Kind, Record, decode
from penstock.cluster.take_over import Phase, TakeOver
from penstock.cluster.trim import Trim


class Role(Enum):
    FOLLOWING = "following"
    TAKING_OVER = "taking over"
    LEADING = "leading"


class Node:
    __slots__ = ("_follower", "_is_checkpointing", "_leader", "_take_over", "_trim", "member")

    def __init__(self, member: Member, place: Place) -> None:
        """`place` is that of the local store."""
        self.member = member
        self._follower = Follower(place)
        self._take_over: TakeOver | None = None
        self._leader: Leader | None = None
        # Whether a checkpoint is appended and not committed, and what is being trimmed.
        self._is_checkpointing = False
        self._trim: Trim | None = None

    @property
    def role(self) -> Role:
        if self._leader is not None:
            return Role.LEADING
        return Role.FOLLOWING if self._take_over is None else Role.TAKING_OVER

    @property
    def place(self) -> Place:
        return self._follower.place

    @property
    def mark(self) -> Mark:
        """Return the newest trim mark that was seen."""
        return self._follower.mark

    @property
    def pending(self) -> int:
        """Return how many records of this leader are not committed."""
        return 0 if self._leader is None else self._leader.pending

    # Following.

    def poll(self) -> list[Action]:
        """Look for new records: the leader said that there are some, or nothing was heard for a while."""
        return self._follower.poll() if self.role is Role.FOLLOWING else []

    def pushed(self, data: bytes, position: int) -> list[Action]:
        """Take a record that the leader has committed, from its connection."""
        return self._follower.pushed(decode(data, position)) if self.role is Role.FOLLOWING else []

    def read(self, reading: Reading) -> list[Action]:
        assert self._leader is None, "a leader reads nothing"
        if self._take_over is not None:
            return self._tried(self._take_over.read(reading))
        actions = self._follower.read(reading)
        return actions if self._follower.is_at_end else actions + self._follower.poll()

    def restored(self, data: bytes, position: int) -> list[Action]:
        """Go on behind a checkpoint: the local store has its content."""
        self._follower.restored(decode(data, position))
        return self._follower.poll()

    # Taking over.

    def take_over(self, incarnation: int) -> list[Action]:
        """Try to lead. `incarnation` is a random number that was never used before."""
        if self.role is not Role.FOLLOWING:
            return []
        self._take_over = TakeOver(self._follower, self.member, incarnation)
        return self._take_over.begin()

    def surveyed(self, survey: Surveyed) -> list[Action]:
        """Take what is beyond the end of the log. Raises CorruptRecord if a record was removed."""
        assert self._take_over is not None
        return self._tried(self._take_over.surveyed(survey))

    def _tried(self, actions: list[Action]) -> list[Action]:
        attempt = self._take_over
        assert attempt is not None
        if attempt.phase is Phase.GIVEN_UP:
            self._take_over = None
        elif attempt.phase is Phase.LEADING:
            assert attempt.lead is not None
            self._take_over = None
            self._leader = Leader(attempt.lead)
            actions = [*actions, Lead(attempt.lead.epoch), *self._begin_trim()]
        return actions

    # Leading.

    def append(self, kind: Kind, body: bytes) -> tuple[int, list[Action]]:
        """Append a record as the leader; return its number. `Commit` with this number follows, or `Deposed`."""
        assert self._leader is not None, "only the leader appends"
        number, append = self._leader.append(kind, body)
        return number, [append]

    def answered(self, append: Append, answer: Answer) -> list[Action]:
        """Take the answer to an append."""
        if self._take_over is not None and self._take_over.awaits(append):
            return self._tried(self._take_over.answered(append, answer))
        if self._leader is None or not self._leader.awaits(append):
            return []  # of an earlier epoch of this node
        actions: list[Action] = [*self._leader.answered(append, answer)]
        if self._leader.deposed_by is not None:
            return self._deposed(self._leader.deposed_by)
        for record in self._leader.take_committed():
            actions += self._committed(record)
        return actions

    def _deposed(self, epoch: int) -> list[Action]:
        self._leader = self._trim = None
        self._is_checkpointing = False
        return [Deposed(epoch), *self._follower.poll()]

    def _committed(self, record: Record) -> list[Action]:
        actions = self._follower.commit(record)
        assert actions, f"record {record.position} is not the next one"
        if record.kind is Kind.CHECKPOINT:
            self._is_checkpointing = False
            actions += self._begin_trim()
        return actions

    # Checkpoints.

    @property
    def may_checkpoint(self) -> bool:
        """Whether this node leads, and what the last checkpoint allows to delete is deleted."""
        return self._leader is not None and self._trim is None and not self._is_checkpointing

    def checkpoint(self, place: Place, content: str) -> tuple[int, list[Action]]:
        """Append a checkpoint of everything below `place`, which this node had since `may_checkpoint`, as the leader.

        Then the log is trimmed below it.
        """
        assert self.may_checkpoint
        assert place.trimmable == self.place.trimmable, "there is a later checkpoint"
        self._is_checkpointing = True
        return self.append(Kind.CHECKPOINT, make_checkpoint(place, content).encode())

    def mark_answered(self, store: StoreMark, answer: Answer) -> list[Action]:
        """Take the answer to storing the trim mark."""
        if self._trim is None or not self._trim.awaits(store.mark):
            return []  # of an earlier epoch of this node
        return self._trim.answered(answer)

    def deleted(self, delete: Delete) -> list[Action]:
        """What was trimmed is deleted."""
        if self._trim is not None and self._trim.deletes(delete):
            self._follower.note_mark(self._trim.mark)
            self._trim = None
        return []

    def _begin_trim(self) -> list[Action]:
        trimmable = self.place.trimmable
        if trimmable is None:
            return []
        self._trim = Trim(trimmable, self.mark)
        return self._trim.begin()
