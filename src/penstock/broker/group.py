"""A group: a name, a pattern, and the members that share the messages of subjects that match; it remembers how far they
have come.

    group_state.py         members, positions, and what members say of messages; no I/O
    delivery.py            which messages go to which member; no I/O
    dispatcher.py          reads the partitions, and hands messages to the members
    position_writer.py     writes the positions
    dead_letter_writer.py  stores dead letters

This module joins them: what a member says changes the state, is written, and may let the group deliver more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.broker.dead_letter_writer import DeadLetterWriter, DeadLetterWriterHost
from penstock.broker.dispatcher import Dispatcher
from penstock.broker.group_state import GroupState, Mode
from penstock.broker.inflight import PositionRecord
from penstock.broker.member import Member
from penstock.broker.partition import Partition
from penstock.broker.position import PartitionId, Position
from penstock.broker.position_budget import NAME_COPIES, POSITION_BYTES, PositionBudget
from penstock.broker.position_writer import PositionWriter
from penstock.broker.topic import selects
from penstock.errors import StaleCommit
from penstock.outcome import Outcome
from penstock.store.meta import Change


class GroupHost(DeadLetterWriterHost, Protocol):
    """The broker, as far as a group needs it."""

    position_budget: PositionBudget

    def is_dead_letters(self, topic: bytes) -> bool: ...


class Group:
    def __init__(self, name: bytes | None, pattern: bytes, mode: Mode, host: GroupHost, identity: str = "") -> None:
        """A group without a name is deleted with its last member, and nothing of it is written.

        `identity` distinguishes it from an earlier group of the same name.
        """
        self.name = name
        self.identity = identity
        self.pattern = pattern
        self.mode = mode
        # What a position takes of the room for all positions.
        self.position_bytes = POSITION_BYTES + NAME_COPIES * len(name or b"")
        # Generations begin with the time, so that commits from before a restart are refused.
        self.state = GroupState[Partition](mode, host.clock.now_us(), host.position_budget, self.position_bytes)
        # Those of the state, to be looked at.
        self.members: Sequence[Member] = self.state.members
        self.positions: Mapping[PartitionId, Position[Partition]] = self.state.positions
        # Whether one of its members ever took part in refreshes: then members that are away are waited for.
        self.refreshes = False
        self.writer = PositionWriter(name, host.store.state, host)
        self.dead_letters = DeadLetterWriter(name, identity, self.writer, host)
        self.dispatcher = Dispatcher(
            name,
            pattern,
            self.state,
            self.writer,
            self.dead_letters,
            lambda topic: not host.is_dead_letters(topic),
            host,
        )
        # As of a subscription: connections wake and drain what they read from.
        self.wake, self.drain = self.dispatcher.wake, self.dispatcher.drain
        self._clock = host.clock
        self._is_stopped = False

    def matches(self, topic: bytes) -> bool:
        """Return whether subjects of a topic may match the pattern."""
        return selects(self.pattern, topic)

    def lag(self) -> int:
        """Return how many offsets are not acknowledged; those of other subjects are counted too."""
        return sum(position.lag() for position in self.positions.values())

    @property
    def lost(self) -> int:
        """Messages that retention or a purge dropped before they were acknowledged."""
        return sum(position.lost for position in self.positions.values())

    @property
    def expired(self) -> int:
        """Messages whose TTL ended before they were acknowledged."""
        return sum(position.expired for position in self.positions.values())

    # Its life.

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self.dead_letters.stop()
        self.dispatcher.stop()
        for position in self.positions.values():
            position.partition.groups.pop(self.wake, None)
        self.state.stop()

    def save_all(self) -> None:
        """Write all positions; before a stop."""
        for position in self.positions.values():
            # Whole, so that delays are stored as they are now.
            position.unsave()
            self.writer.save(position)

    # Members and partitions.

    def join(self, member: Member) -> None:
        self.state.join(member, self._clock.now_us())
        self.wake()

    def leave(self, member: Member) -> None:
        """Remove a member; messages that it has are redelivered to the others at once."""
        self.state.leave(member, self._clock.monotonic_us())
        self.wake()

    def attach(self, partition: Partition, start: int, records: Sequence[PositionRecord] = ()) -> None:
        """Read a partition too, from `start`, or from where stored records say."""
        self.state.attach(partition, start, records, self._clock.monotonic_us())
        partition.groups[self.wake] = None
        self.wake()

    def detach(self, partition: Partition) -> None:
        """Stop reading a partition."""
        position = self.state.detach((partition.topic_id, partition.number))
        if position is not None:
            self.writer.forget(position)
            self.dispatcher.forget(partition)
            partition.groups.pop(self.wake, None)

    # Requests of members. A message is named by its partition and its offset.

    def is_stale(self, place: PartitionId, generation: int) -> bool:
        """Return whether a partition was reset since this generation: what was delivered before does not count."""
        position = self.positions.get(place)
        return position is not None and generation < position.since

    def ack(self, place: PartitionId, offset: int, outcome: Outcome) -> bool:
        """Acknowledge a message; `outcome` is settled when that is stored, also if it was acknowledged before.

        Return False if that is not possible: it is a dead letter, or was not delivered since the broker started.
        """
        return not self.ack_many(place, (offset,), outcome)

    def ack_many(self, place: PartitionId, offsets: Sequence[int], outcome: Outcome) -> Sequence[int]:
        """As `ack`, for several. Return those that cannot be acknowledged; if none can, `outcome` is not settled."""
        position = self.positions.get(place)
        if position is None:
            return offsets
        count, refused = self.state.ack(position, offsets)
        if len(refused) == len(offsets):
            return refused
        if count:
            self.wake()
        if count or self.writer.is_unsaved(position):
            # Or they were done before, and that is being written, or could not be.
            self.writer.save(position, outcome)
        else:
            outcome.settle()
        return refused

    def nack(
        self,
        place: PartitionId,
        offset: int,
        delay_us: int,
        member: Member | None = None,
        outcome: Outcome | None = None,
        reason: str = "",
    ) -> bool:
        """Redeliver a message after a while; `outcome` is settled when that is stored. `reason`: why it failed.

        Return False if that is not possible: it is done, a dead letter, or with another member than `member`.
        """
        again_us = self._clock.monotonic_us() + delay_us
        return self._changed(self.state.fail(place, offset, member, reason, again_us), outcome)

    def reject(
        self,
        place: PartitionId,
        offset: int,
        member: Member | None = None,
        outcome: Outcome | None = None,
        reason: str = "",
    ) -> bool:
        """Make a message a dead letter, without further attempts. The rest is as for `nack`."""
        return self._changed(self.state.fail(place, offset, member, reason, None), outcome)

    def release(self, place: PartitionId, offset: int, member: Member) -> bool:
        """Redeliver a message that `member` did not look at; this delivery does not count. Return False as `nack`."""
        return self._changed(self.state.release(place, offset, member, self._clock.monotonic_us()))

    def release_all(self, member: Member) -> None:
        """Release all messages that a member has."""
        for place, position in self.positions.items():
            for offset in position.inflight.taken_by(member.number):
                self.release(place, offset, member)

    def extend(self, place: PartitionId, offset: int, member: Member | None = None) -> bool:
        """Begin the deadline of a message anew. Return False as `nack`."""
        return self.state.extend(place, offset, member, self._clock.monotonic_us())

    def commit(self, place: PartitionId, offset: int, generation: int, outcome: Outcome) -> None:
        """Acknowledge all messages of a partition below `offset`; in partitioned groups."""
        self._changed(self.state.commit(place, offset, generation), outcome)

    # Requests of operators.

    def reset(self, place: PartitionId, offset: int, outcome: Outcome) -> None:
        """Go on from `offset`, which may be lower than what is done."""
        position = self.state.position(place)
        self.state.reset({position: offset})
        self._changed(position, outcome)

    def restart(self, topic_id: int) -> None:
        """Go back to the start of a topic. The caller writes that: see `PositionWriter.snapshots`."""
        self.state.reset({position: position.partition.start for position in self.state.of_topic(topic_id)})
        self.wake()

    def requeue(self, position: Position[Partition], offsets: Sequence[int]) -> list[Change]:
        """Deliver messages that became dead letters again, as if for the first time.

        Return the new position. The caller writes it in this turn of the loop.
        """
        if not position.is_attached:
            raise StaleCommit(f"the group does not read {position.partition.name.decode()} any more")
        position.requeue(offsets, self._clock.monotonic_us())
        self.wake()
        return self.writer.snapshots([position])

    def _changed(self, position: Position[Partition] | None, outcome: Outcome | None = None) -> bool:
        """Write a position that has changed; there may be more to deliver. None: nothing has changed."""
        if position is None:
            return False
        self.writer.save(position, outcome)
        self.wake()
        return True
