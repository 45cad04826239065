"""How far a group has come in one partition, and what is written of it. No I/O: the time is an argument.

A position is stored as a whole record followed by records of changes. The whole is written again when the changes have
grown as large as it is. Beside the fields of `inflight.py` a record has:

    buried    the number of the last decision whose dead letters are stored
    burying   the decision whose dead letters are being stored: [offset, attempts] of each; null if there is none
    graves    offsets of the last messages that became dead letters
    since     the group's generation when the position was last reset
    lost      messages that retention or a purge dropped before they were acknowledged
    expired   messages whose TTL ended before they were acknowledged
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from penstock.broker.flow import Backlog
from penstock.broker.inflight import Inflight, PositionRecord, weight
from penstock.broker.member import Place
from penstock.errors import LogDamaged
from penstock.log.policy import OnDamage, Policy
from penstock.model.run import Run

# The id of a topic, and the number of a partition.
PartitionId = tuple[int, int]

NEVER_US: Final = 1 << 62
# How many messages that became dead letters are remembered.
_DEAD_LETTERED_MAX: Final = 100
# The cost of a record of changes besides its numbers: a batch, a key, and later the deletion of the key.
_RECORD_WEIGHT: Final = 32


class Extent(Place, Protocol):
    """A partition, as far as the decisions of a group depend on it."""

    @property
    def start(self) -> int: ...

    @property
    def served(self) -> int: ...

    @property
    def policy(self) -> Policy: ...


P = TypeVar("P", bound=Extent)


class DeadMessage(NamedTuple):
    offset: int
    attempts: int


class Review(NamedTuple):
    """The result of `Position.review`."""

    lost: int
    # Whether the position must be written.
    is_changed: bool


class Position(Generic[P]):
    """How far a group has come in one partition."""

    __slots__ = (
        "acked",
        "backlog",
        "charged",
        "damage",
        "dead_lettered",
        "decision",
        "decision_number",
        "expired",
        "failed",
        "inflight",
        "is_attached",
        "lost",
        "partition",
        "retried",
        "sent",
        "since",
        "_unexpired",
        "_weight",
        "_written",
    )

    def __init__(self, partition: P, inflight: Inflight) -> None:
        self.partition = partition
        self.inflight = inflight
        # False once the topic or the group is deleted: nothing more is written of it.
        self.is_attached = True
        self.backlog = Backlog()
        # Pending messages that are charged to the budget of all positions.
        self.charged = 0
        # The number of the last decision whose dead letters are stored, and the next decision, while they are not.
        self.decision_number = 0
        self.decision: list[DeadMessage] | None = None
        # The last messages that became dead letters: it is too late to acknowledge one of them.
        self.dead_lettered: dict[int, None] = {}
        # Counted since the broker started. `failed`: negative acknowledgements and missed deadlines.
        self.sent = self.retried = self.acked = self.failed = 0
        self.lost = self.expired = 0
        # The group's generation at the last reset: what was delivered before comes again, or not at all.
        self.since = 0
        # The damage that was met last. With the policy `stop` nothing is read there.
        self.damage: LogDamaged | None = None
        # Messages that were found not to have expired, and until when: no need to read them again before.
        self._unexpired: dict[int, int] = {}
        # How much more may be written as changes before the whole position is written again.
        self._weight = 0
        # The fields beside the inflight ones, as they were last written.
        self._written: PositionRecord = {}

    def is_done(self, offset: int) -> bool:
        """Return whether a message was acknowledged, as far as is known."""
        return offset < self.inflight.next and not self.inflight.is_pending(offset) and offset not in self.dead_lettered

    def is_stopped_at(self, offset: int) -> bool:
        """Return whether the message there is known to be damaged, and must not be skipped."""
        damage = self.damage
        return damage is not None and damage.holds(offset) and self.partition.policy.on_damage is OnDamage.STOP

    @property
    def stopped(self) -> LogDamaged | None:
        """The damage that keeps it from reading on, if any."""
        return self.damage if self.is_stopped_at(self.inflight.next) else None

    def lag(self) -> int:
        return len(self.inflight) + max(0, self.partition.served - self.inflight.next)

    def reset(self, offset: int, generation: int) -> None:
        """Go on from `offset`."""
        self.inflight.reset(offset)
        self.dead_lettered.clear()
        self.since = generation

    def review(self, now_us: int, deliveries_max: int) -> Review:
        """Apply what happened without anybody saying so: retention dropped messages, or deadlines are over. Messages
        that were delivered `deliveries_max` times are dead then; 0: no limit."""
        inflight, start = self.inflight, self.partition.start
        lost = 0
        is_behind = start > inflight.floor
        if is_behind:
            lost = max(0, start - inflight.next) + inflight.forget_below(start)
            self.lost += lost
        expired = inflight.expire(now_us)
        self.failed += expired
        if deliveries_max:
            inflight.kill_exhausted(deliveries_max)
        return Review(lost, is_behind or bool(expired))

    def requeue(self, offsets: Sequence[int], now_us: int) -> None:
        """Deliver messages that became dead letters again, as if for the first time."""
        self.inflight.requeue(offsets, now_us)
        for offset in offsets:
            self.dead_lettered.pop(offset, None)

    # Dead letters.

    def has_dead(self) -> bool:
        """Return whether there are messages to store as dead letters, all of them readable."""
        dead = self.decision or self.inflight.dead()
        return bool(dead) and dead[-1][0] < self.partition.served

    def finish_decision(self) -> int:
        """The dead letters of the decision are stored. Return how many those are."""
        assert self.decision is not None
        offsets = [dead.offset for dead in self.decision]
        self.inflight.finish_dead(offsets)
        self.decision_number += 1
        self.decision = None
        self.dead_lettered |= dict.fromkeys(offsets)
        for offset in list(self.dead_lettered)[:-_DEAD_LETTERED_MAX]:
            del self.dead_lettered[offset]
        return len(offsets)

    # Messages that expired, or were removed by compaction or retention.

    def skip(self, upto: int, expired: Run) -> int:
        """Read on at `upto`: nothing before it is for this group. Return how many messages before it expired."""
        self.inflight.take([], upto, 0, 0)
        return self.count_expired(expired.below(upto))

    def drop(self, offsets: Sequence[int], expired: Run) -> int:
        """Give up messages that wait for redelivery and cannot be read any more. Return how many of them expired."""
        self.inflight.ack_many(offsets)
        return self.count_expired(expired, set(offsets)) if expired.values else 0

    def count_expired(self, expired: Run, among: Collection[int] | None = None) -> int:
        """Count messages as expired: all of them, or those at certain offsets. Return how many."""
        count = len(expired) if among is None else sum(offset in among for offset in expired.all_offsets())
        self.expired += count
        return count

    def may_expire(self, offset: int, wall_us: int) -> bool:
        """Return whether the message there may have expired since it was last read."""
        return self._unexpired.get(offset, wall_us) <= wall_us

    def note_unexpired(self, run: Run) -> None:
        """Remember that the first of these messages has not expired."""
        ttl_us = run.ttls.get(0)
        until_us = NEVER_US if ttl_us is None else run.append_time + ttl_us
        # Two are of interest: the next message to redeliver, and the next one to deliver for the first time.
        self._unexpired = dict([*self._unexpired.items(), (run.offset(0), until_us)][-2:])

    # Records.

    def to_json(self, now_us: int) -> PositionRecord:
        """Return the whole position."""
        return {**self.inflight.snapshot(now_us), **self._own_fields()}

    @classmethod
    def from_json(cls, partition: P, records: Sequence[PositionRecord], now_us: int) -> Position[P]:
        """Restore a position from what was written of it: the whole, then the changes."""
        position = cls(partition, Inflight.restore(records, now_us))
        data = {name: value for record in records for name, value in record.items()}
        position.decision_number = data["buried"]
        position.dead_lettered = dict.fromkeys(data.get("graves", ()))
        position.since = data.get("since", 0)
        position.lost = data.get("lost", 0)
        position.expired = data.get("expired", 0)
        if data["burying"] is not None:
            position.decision = [DeadMessage(offset, attempts) for offset, attempts in data["burying"]]
        return position

    def save(self, now_us: int) -> tuple[PositionRecord, bool]:
        """Return what to write now, and whether that is the whole position, not only the changes since the last call.

        If the write fails, call `unsave`.
        """
        fields = self._own_fields()
        changes = self.inflight.changes(now_us)
        if changes is not None and fields != self._written:
            changes |= fields
        self._weight -= 0 if changes is None else weight(changes) + _RECORD_WEIGHT
        self._written = fields
        self.inflight.mark()
        if changes is not None and self._weight > 0:
            return changes, False
        whole = self.to_json(now_us)
        self._weight = weight(whole)
        return whole, True

    def unsave(self) -> None:
        """Write the whole position next time."""
        self.inflight.unmark()

    def _own_fields(self) -> PositionRecord:
        return {
            "buried": self.decision_number,
            "burying": self.decision and [list(dead) for dead in self.decision],
            "graves": list(self.dead_lettered),
            "since": self.since,
            "lost": self.lost,
            "expired": self.expired,
        }
