"""A group without I/O: its members, its positions, and what members say of messages. The time is an argument.

In a *shared* group each message goes to one member, which acknowledges it. A message that is not acknowledged in time,
is refused, or was with a member that left is redelivered; after the last attempt it becomes a dead letter. In a
*partitioned* group each partition is assigned to one member, partition p to member p % members; it commits an offset.

Times are monotonic microseconds, unless they are called `wall_us`: those are microseconds since 1970. The methods for
what members say return the position that must be written, or None if there is nothing to do: the message is done, is a
dead letter, or another member has it. `delivery.py` decides which messages go to which member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple

from penstock.broker.inflight import Inflight, PositionRecord
from penstock.broker.member import Deliveries, Member
from penstock.broker.position import NEVER_US, P, PartitionId, Position
from penstock.broker.position_budget import PENDING_BYTES, PositionBudget
from penstock.errors import OffsetOutOfRange, StaleCommit
from penstock.log.policy import Policy
from penstock.model import headers


class Mode(StrEnum):
    SHARED = "shared"
    PARTITIONED = "partitioned"


class Acknowledged(NamedTuple):
    # How many messages are done now, and were not before.
    done: int
    # Offsets that cannot be acknowledged: dead letters, and messages that were not delivered since the broker started.
    refused: Sequence[int]


class GroupState(Generic[P]):
    def __init__(self, mode: Mode, generation: int, budget: PositionBudget, position_bytes: int) -> None:
        """`position_bytes`: what a position takes of the budget."""
        self.mode = mode
        # It ascends with every change of the members and every reset: commits made under an earlier one are refused.
        self.generation = generation
        self.members: list[Member] = []
        self.positions: dict[PartitionId, Position[P]] = {}
        # Topics that are not delivered for now.
        self.held: set[int] = set()
        self.redelivered = self.dead_lettered = 0
        # Whose turn it is: members get messages one after the other.
        self.turn = 0
        # When the first of the current members joined.
        self.since_wall_us = 0
        self.budget = budget
        self._position_bytes = position_bytes
        # How many members have joined since the broker started.
        self.joined = 0
        # Of the member that left last.
        self._last_deliveries = Deliveries()

    # Members.

    def join(self, member: Member, wall_us: int) -> None:
        self.joined += 1
        member.number = self.joined
        member.out = 0
        if not self.members:
            self.since_wall_us = wall_us
        self.members.append(member)
        self._rebalance()

    def leave(self, member: Member, now_us: int) -> None:
        """Remove a member; messages that it has are redelivered to the others at once."""
        if member not in self.members:
            return
        self.members.remove(member)
        self._last_deliveries = member.deliveries
        if self.mode is Mode.SHARED:
            for position in self.positions.values():
                position.inflight.release_all(member.number, now_us)
        self._rebalance()

    def _rebalance(self) -> None:
        self.generation += 1
        if self.mode is Mode.PARTITIONED:
            # The new owner of a partition begins where the last one has committed.
            for position in self.positions.values():
                position.inflight.reset(position.inflight.floor)

    def owners(self, position: Position[P]) -> Sequence[Member]:
        """Return the members that messages of a partition go to."""
        if self.mode is Mode.SHARED or not self.members:
            return self.members
        return [self.members[position.partition.number % len(self.members)]]

    def recount(self) -> None:
        """Count what each member has. Topics that were deleted and positions that were reset take messages away."""
        held: Counter[int] = Counter()
        for position in self.positions.values():
            held.update(position.inflight.held())
        for member in self.members:
            member.out = held[member.number]

    def correct(self, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        """Members had `before` in one position, and have `after` now. The other positions are not looked at."""
        for member in self.members:
            if (number := member.number) in before:
                member.out = max(0, (member.out or 0) - before[number] + after.get(number, 0))

    def deliveries_max(self, policy: Policy) -> int:
        """Return after how many deliveries a message becomes a dead letter; 0: never.

        The member with the highest limit decides and, while there is none, the last one that left: what it had is not
        dead because it left.
        """
        limits = [member.deliveries.of(policy) for member in self.members] or [self._last_deliveries.of(policy)]
        return 0 if 0 in limits else max(limits)

    # Positions.

    def attach(self, partition: P, start: int, records: Sequence[PositionRecord], now_us: int) -> None:
        """Read a partition too, from `start`, or from where stored records say."""
        if records:
            position = Position.from_json(partition, records, now_us)
            # Also if the wall clock was set back.
            self.generation = max(self.generation, position.since)
        else:
            position = Position(partition, Inflight(start))
        key = (partition.topic_id, partition.number)
        assert key not in self.positions, "a group reads a partition once"
        self.positions[key] = position
        self.budget.take(self._position_bytes)

    def detach(self, key: PartitionId) -> Position[P] | None:
        """Stop reading a partition."""
        position = self.positions.pop(key, None)
        if position is not None:
            self._give_up(position)
        return position

    def stop(self) -> None:
        """Change nothing more. The positions can still be looked at."""
        for position in self.positions.values():
            self._give_up(position)

    def _give_up(self, position: Position[P]) -> None:
        position.is_attached = False
        self.budget.give_back(self._position_bytes + position.charged * PENDING_BYTES)
        position.charged = 0

    def of_topic(self, topic_id: int) -> list[Position[P]]:
        return [position for key, position in self.positions.items() if key[0] == topic_id]

    def is_held(self, position: Position[P]) -> bool:
        return position.partition.topic_id in self.held

    # Requests of members.

    def ack(self, position: Position[P], offsets: Sequence[int]) -> Acknowledged:
        """Messages are done."""
        inflight = position.inflight
        owners = Counter(map(inflight.owner, offsets))
        count = inflight.ack_many(offsets)
        if count:
            position.acked += count
            for owner, held in owners.items():
                self._take_from(owner, held)
        if count == len(offsets):
            return Acknowledged(count, ())
        return Acknowledged(count, [offset for offset in offsets if not position.is_done(offset)])

    def fail(
        self, key: PartitionId, offset: int, member: Member | None, reason: str, again_us: int | None
    ) -> Position[P] | None:
        """A message could not be handled: redeliver it from `again_us` on; None: it is dead. `member`: who says so."""
        position = self._find(key, offset, member)
        if position is None:
            return None
        inflight, reason = position.inflight, headers.reason(reason)
        owner = inflight.owner(offset)
        if not (inflight.kill(offset, reason) if again_us is None else inflight.nack(offset, again_us, reason)):
            return None
        position.failed += 1
        self._take_from(owner, 1)
        return position

    def release(self, key: PartitionId, offset: int, member: Member, now_us: int) -> Position[P] | None:
        """`member` did not look at a message: redeliver it at once, and do not count this delivery."""
        position = self._find(key, offset, member)
        if position is None or not position.inflight.release(offset, now_us):
            return None
        self._take_from(member.number, 1)
        return position

    def extend(self, key: PartitionId, offset: int, member: Member | None, now_us: int) -> bool:
        """Begin the deadline of a message anew. Nothing is written for that."""
        position = self._find(key, offset, member)
        return position is not None and position.inflight.extend(offset, self.deadline_us(position, now_us))

    def commit(self, key: PartitionId, offset: int, generation: int) -> Position[P]:
        """All messages of a partition below `offset` are done; in partitioned groups."""
        if generation != self.generation:
            raise StaleCommit(f"the group is at generation {self.generation}, not {generation}: join it again")
        position = self.position(key)
        if offset > position.partition.served:
            raise OffsetOutOfRange(offset, position.partition.start, position.partition.served)
        if offset > position.inflight.floor:
            position.acked += position.inflight.ack_upto(offset - 1)
            if offset > position.inflight.next:
                # A consumer that stores its position elsewhere was not delivered anything here.
                position.inflight.take([], offset, 0, 0)
        return position

    def reset(self, offsets: Mapping[Position[P], int]) -> None:
        """Go on from these offsets, which may be lower than what is done."""
        self._rebalance()
        for position, offset in offsets.items():
            position.reset(offset, self.generation)

    def position(self, key: PartitionId) -> Position[P]:
        if key not in self.positions:
            raise StaleCommit(f"the group does not read partition {key[1]} of a topic with id {key[0]}")
        return self.positions[key]

    def deadline_us(self, position: Position[P], now_us: int) -> int:
        """Return until when a message that is delivered now must be acknowledged."""
        if self.mode is Mode.PARTITIONED:
            return NEVER_US
        return now_us + position.partition.policy.ack_deadline_ms * 1000

    def _find(self, key: PartitionId, offset: int, member: Member | None) -> Position[P] | None:
        """Return the position of a message, unless another member than `member` has it now."""
        position = self.positions.get(key)
        if position is None or member is None:
            return position
        return position if position.inflight.owner(offset) in (None, member.number) else None

    def _take_from(self, number: int | None, count: int) -> None:
        """The member with this number has `count` messages less."""
        for member in self.members:
            if member.number == number and member.out:
                member.out = max(0, member.out - count)
