"""Which records of the shared log are valid, decided alike by everyone who reads in order.

    LEAD with an epoch above all before it    valid: begins this epoch
    any other record                          valid if it is of the current epoch and leader, with the next number
    everything else                           void, as if it were not there

The number keeps the order. A late append of an earlier leader can take a position between two records of the current
one. The current leader then appends the displaced record and all after it again, further on. Their first copies have
numbers that are too high, and later copies have numbers that are too low.

A valid record that is stored without a gap before it stays valid: whoever leads next begins behind it. So everything
that a reader finds in order is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cluster.checkpoint import Checkpoint, Member
from penstock.cluster.record import Kind, Record


@dataclass(frozen=True, slots=True)
class Lineage:
    """The last valid record."""

    epoch: int = 0
    incarnation: int = 0
    number: int = 0

    def after(self, record: Record) -> Lineage | None:
        """Return the lineage with `record`, which comes next; None if it is void."""
        if record.kind is Kind.LEAD:
            return Lineage(record.epoch, record.incarnation) if record.epoch > self.epoch else None
        if (record.epoch, record.incarnation) != (self.epoch, self.incarnation):
            return None
        return Lineage(self.epoch, self.incarnation, record.number) if record.number == self.number + 1 else None


@dataclass(frozen=True, slots=True)
class Trimmable:
    """What a committed checkpoint allows to delete."""

    # The position of the checkpoint, and the one at which it says to begin.
    checkpoint: int
    position: int
    # Ranges of positions: the rounds between the checkpoint before it and `position`.
    rounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What a reader knows at a position: what the valid records below it say, without the rounds themselves.

    A node stores its place with its data. A power cut may leave an older place: rounds are applied again from there.
    """

    # Of the next record to read.
    position: int = 0
    lineage: Lineage = Lineage()
    # The node that leads; empty: none has.
    leader: str = ""
    # The nodes of the cluster, each with its address.
    members: tuple[Member, ...] = ()
    # Where the valid rounds are that the last checkpoint does not hold: ranges of positions.
    rounds: tuple[tuple[int, int], ...] = ()
    # The last checkpoint: it may still have to be trimmed.
    trimmable: Trimmable | None = None

    def skip(self, record: Record) -> Place:
        """Return the place after a void record."""
        return replace(self, position=record.position + 1)

    def after(self, record: Record) -> Place | None:
        """Return the place after `record`; None if it is void. Nothing valid may lie between the two."""
        lineage = self.lineage.after(record)
        if lineage is None:
            return None
        assert record.position >= self.position, f"record {record.position} was read at {self.position}"
        place = replace(self, position=record.position + 1, lineage=lineage)
        match record.kind:
            case Kind.LEAD:
                return replace(place, leader=Member.decode(record).node)
            case Kind.ROUND:
                return replace(place, rounds=_extended(self.rounds, record.position))
            case Kind.JOIN | Kind.LEAVE:
                return replace(place, members=_members(self.members, record))
            case Kind.CHECKPOINT:
                checkpoint = Checkpoint.decode(record)
                trimmable = Trimmable(record.position, checkpoint.position, tuple(checkpoint.rounds))
                return replace(place, rounds=_cut(self.rounds, checkpoint.position), trimmable=trimmable)


def begin_at(record: Record) -> Place:
    """Return the place at which a node begins that has everything in a checkpoint. It reads the checkpoint again."""
    checkpoint = Checkpoint.decode(record)
    return Place(
        checkpoint.position,
        Lineage(checkpoint.epoch, checkpoint.incarnation, checkpoint.number),
        checkpoint.leader,
        tuple(checkpoint.members),
    )


def make_checkpoint(place: Place, content: str) -> Checkpoint:
    """Return a checkpoint of everything below `place`. `content` names where the rounds are stored now."""
    return Checkpoint(
        place.position,
        place.lineage.epoch,
        place.lineage.incarnation,
        place.lineage.number,
        place.leader,
        list(place.members),
        list(place.rounds),
        None if place.trimmable is None else place.trimmable.checkpoint,
        content,
    )


def _extended(ranges: tuple[tuple[int, int], ...], position: int) -> tuple[tuple[int, int], ...]:
    if ranges and ranges[-1][1] == position:
        return (*ranges[:-1], (ranges[-1][0], position + 1))
    return (*ranges, (position, position + 1))


def _cut(ranges: tuple[tuple[int, int], ...], start: int) -> tuple[tuple[int, int], ...]:
    return tuple((max(first, start), end) for first, end in ranges if end > start)


def _members(members: tuple[Member, ...], record: Record) -> tuple[Member, ...]:
    member = Member.decode(record)
    others = tuple(other for other in members if other.node != member.node)
    return others if record.kind is Kind.LEAVE else (*others, member)
