"""Which records are valid, and what a reader knows at each position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.checkpoint import Checkpoint, Member
from penstock.cluster.place import Lineage, Place, Trimmable, begin_at, make_checkpoint
from penstock.cluster.record import Kind, Record


def lead(position: int, epoch: int, incarnation: int) -> Record:
    return Record(Kind.LEAD, epoch, incarnation, 0, position, Member(f"node{incarnation}").encode())


def round_(position: int, epoch: int, incarnation: int, number: int) -> Record:
    return Record(Kind.ROUND, epoch, incarnation, number, position, b"")


def walk(*records: Record, place: Place | None = None) -> tuple[Place, list[int]]:
    """Read records in order: where they lead to, and the positions of the valid ones."""
    here = place or Place()
    valid = []
    for record in records:
        after = here.after(record)
        if after is not None:
            valid.append(record.position)
        here = after or here.skip(record)
    return here, valid


@pytest.mark.parametrize(
    ("record", "valid"),
    [
        (round_(9, 2, 20, 6), True),
        (round_(9, 2, 20, 5), False),  # a copy
        (round_(9, 2, 20, 7), False),  # too early: one before it was displaced
        (round_(9, 1, 20, 6), False),  # an earlier leader
        (round_(9, 2, 21, 6), False),
        (round_(9, 3, 20, 6), False),
        (lead(9, 3, 21), True),
        (lead(9, 4, 21), True),
        (lead(9, 2, 21), False),
        (lead(9, 1, 21), False),
    ],
)
def test_what_is_valid_after_number_5_of_epoch_2(record: Record, valid: bool) -> None:
    assert (Lineage(2, 20, 5).after(record) is not None) is valid


def test_a_late_record_of_an_earlier_leader_displaces_nothing_from_its_order() -> None:
    _, valid = walk(
        lead(0, 1, 10),
        round_(1, 1, 10, 1),
        lead(2, 2, 20),
        round_(3, 2, 20, 1),
        round_(4, 1, 10, 2),  # late: it took the position of 2
        round_(5, 2, 20, 3),  # a first copy, before its turn
        round_(6, 2, 20, 2),
        round_(7, 2, 20, 3),
        round_(8, 2, 20, 3),
    )

    assert valid == [0, 1, 2, 3, 6, 7]


def test_a_place_knows_the_leader_the_members_and_the_rounds() -> None:
    join = Record(Kind.JOIN, 1, 10, 2, 2, Member("b", "b:1").encode())
    again = Record(Kind.JOIN, 1, 10, 3, 3, Member("b", "b:2").encode())
    other = Record(Kind.JOIN, 1, 10, 4, 4, Member("c", "c:1").encode())
    leave = Record(Kind.LEAVE, 1, 10, 6, 6, Member("c").encode())
    place, valid = walk(
        lead(0, 1, 10), round_(1, 1, 10, 1), join, again, other, round_(5, 1, 10, 5), leave, round_(7, 1, 10, 7)
    )

    assert len(valid) == 8
    assert place.leader == "node10"
    assert place.members == (Member("b", "b:2"),)
    assert place.rounds == ((1, 2), (5, 6), (7, 8))


def test_a_node_that_begins_at_a_checkpoint_knows_what_one_that_read_everything_does() -> None:
    records = [lead(0, 1, 10), *(round_(n, 1, 10, n) for n in range(1, 5)), lead(5, 2, 20), round_(6, 2, 20, 1)]
    place, _ = walk(*records)
    more = [round_(7, 2, 20, 2)]
    now, _ = walk(*more, place=place)
    checkpoint = Record(Kind.CHECKPOINT, 2, 20, 3, 8, make_checkpoint(place, "chunks").encode())

    read, _ = walk(checkpoint, round_(9, 2, 20, 4), place=now)
    begun, _ = walk(*more, checkpoint, round_(9, 2, 20, 4), place=begin_at(checkpoint))

    assert begun == read
    assert read.rounds == ((7, 8), (9, 10))
    assert read.trimmable == Trimmable(8, 7, ((1, 5), (6, 7)))
    assert Checkpoint.decode(checkpoint).previous is None
    assert make_checkpoint(read, "").previous == 8


def test_a_record_before_the_place_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        replace(Place(), position=10).after(lead(9, 1, 10))
