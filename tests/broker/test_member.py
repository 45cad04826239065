"""Messages are shared out: each to one member, in order, in turn, and to none more than it takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.flow import Flow
from penstock.broker.member import DELIVERY_BYTES_MAX, Member, Place, Share, share_out
from penstock.errors import PenstockError
from penstock.model.run import Run

NOW_US: Final = 1_000_000


class Partition:
    topic_id = 1
    name = b"orders"
    keeps = True
    number = 0


PLACE: Final = Partition()


@dataclass
class Connection:
    is_open: bool = True
    echo: bool = True
    name: str = ""
    address: str = ""
    meter = None
    published: Collection[int] = ()
    sent: list[tuple[bytes, list[bytes], Mapping[int, int] | None]] = field(default_factory=list)

    @property
    def takes_unstored(self) -> bool:
        return self.is_open

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        assert place is PLACE
        self.sent.append((member.sid, run.values, attempts))

    def has_published(self, place: Place, offset: int) -> bool:
        assert place is PLACE
        return offset in self.published

    def fail(self, member: Member, error: PenstockError) -> None:
        raise error


def member_of(
    connection: Connection | None = None,
    flow: Flow | None = None,
    *,
    credit: int | None = None,
    remaining: int | None = None,
    out: int | None = None,
) -> Member:
    member = Member(b"1", connection or Connection(), flow)
    member.credit, member.remaining, member.out = credit, remaining, out
    return member


def run_of(count: int, base_offset: int = 0) -> Run:
    run = Run([b"orders"] * count, [b"%d" % index for index in range(count)])
    run.base_offset = base_offset
    return run


def share(run: Run, members: Sequence[Member], turn: int = 0) -> tuple[list[list[int]], int]:
    """Which messages each of the members gets, and how many of the first are done."""
    shares, shared = share_out(PLACE, run, members, turn, NOW_US)
    indices = {id(member): range(len(run)) if taken is None else taken for member, taken in shares}
    assert len(indices) == len(shares)
    assert all(indices.values())
    return [list(indices.get(id(member), [])) for member in members], shared


# ---- without limits


def test_one_member_gets_the_run_as_it_is() -> None:
    run = run_of(3)
    shares, shared = share_out(PLACE, run, [member_of()], 0, NOW_US)

    assert shared == 3
    assert shares[0].of(run) is run


def test_members_get_messages_in_turn() -> None:
    assert share(run_of(7), [member_of() for _ in range(3)]) == ([[0, 3, 6], [1, 4], [2, 5]], 7)


def large_run(count: int) -> Run:
    return Run([b"orders"] * count, [bytes(DELIVERY_BYTES_MAX // 3)] * count)


def test_a_connection_is_given_so_many_bytes_at_once() -> None:
    assert share(large_run(5), [member_of()]) == ([[0, 1]], 2)
    assert share(large_run(5), [member_of(), member_of()]) == ([[0], [1]], 2)
    assert share(large_run(5), [member_of(credit=1), member_of(credit=1)]) == ([[0], [1]], 2)


def test_a_message_that_is_larger_than_that_is_given_alone() -> None:
    run = Run([b"orders"] * 3, [bytes(DELIVERY_BYTES_MAX), b"", b""])

    assert share(run, [member_of()]) == ([[0]], 1)


def test_what_is_not_stored_is_given_at_once() -> None:
    live = Partition()
    live.keeps = False
    run = large_run(5)

    assert share_out(live, run, [member := member_of()], 0, NOW_US) == ([Share(member, None)], 5)


@pytest.mark.parametrize("turn", [1, 4, 301])
def test_the_turn_says_who_is_first(turn: int) -> None:
    assert share(run_of(4), [member_of() for _ in range(3)], turn) == ([[2], [0, 3], [1]], 4)


def test_there_may_be_fewer_messages_than_members() -> None:
    assert share(run_of(2), [member_of() for _ in range(4)], 3) == ([[1], [], [], [0]], 2)


def test_a_member_whose_connection_takes_no_more_is_passed_over() -> None:
    members = [member_of(), member_of(Connection(is_open=False)), member_of()]

    assert share(run_of(4), members) == ([[0, 2], [], [1, 3]], 4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("credit", [None, 5])
def test_nothing_is_shared_while_no_connection_takes_more(count: int, credit: int | None) -> None:
    members = [member_of(Connection(is_open=False), credit=credit) for _ in range(count)]

    assert share(run_of(4), members) == ([[]] * count, 0)


def test_nothing_is_shared_among_nobody() -> None:
    assert share_out(PLACE, run_of(4), [], 0, NOW_US) == ([], 0)


def test_a_share_has_the_messages_with_their_offsets() -> None:
    run = run_of(5, base_offset=100)
    run.headers[3] = b"A: b\r\n"

    part = Share(member_of(), range(1, 5, 2)).of(run)

    assert part.values == [b"1", b"3"]
    assert [part.offset(index) for index in range(2)] == [101, 103]
    assert part.headers == {1: b"A: b\r\n"}


# ---- with limits


@pytest.mark.parametrize("member", [member_of(credit=2), member_of(remaining=2)], ids=["credit", "remaining"])
def test_a_member_gets_no_more_than_it_may(member: Member) -> None:
    assert share(run_of(5), [member]) == ([[0, 1]], 2)


def test_a_member_holds_no_more_unacknowledged_than_its_buffer() -> None:
    assert share(run_of(5), [member_of(flow=Flow(buffer=10), out=7)]) == ([[0, 1, 2]], 3)
    assert share(run_of(5), [member_of(flow=Flow(buffer=10), out=12)]) == ([[]], 0)


def test_a_member_gets_no_more_at_once_than_its_burst() -> None:
    assert share(run_of(5), [member_of(flow=Flow(rate=1, burst=3))]) == ([[0, 1, 2]], 3)


def test_of_several_limits_the_least_counts() -> None:
    member = member_of(flow=Flow(rate=1, burst=4, buffer=10), out=7, credit=2, remaining=5)

    assert share(run_of(9), [member]) == ([[0, 1]], 2)


def test_who_has_room_gets_what_others_have_none_for() -> None:
    members = [member_of(credit=1), member_of(), member_of(credit=2)]

    assert share(run_of(8), members) == ([[0], [1, 3, 5, 6, 7], [2, 4]], 8)


def test_what_nobody_has_room_for_waits() -> None:
    assert share(run_of(8), [member_of(credit=1), member_of(credit=2)], 1) == ([[1], [0, 2]], 3)


def test_the_turn_passes_over_one_that_has_no_room() -> None:
    assert share(run_of(2), [member_of(credit=5), member_of(credit=0)], 1) == ([[0, 1], []], 2)


def test_tokens_that_are_not_used_are_given_back() -> None:
    members = [member_of(flow=Flow(rate=1, burst=10)) for _ in range(2)]

    share(run_of(4), members)

    assert [member.room(99, NOW_US) for member in members] == [8, 8]


def test_a_rate_gives_more_with_time() -> None:
    member = member_of(flow=Flow(rate=2, burst=3))

    assert member.ready_us(NOW_US) == NOW_US
    assert member.room(5, NOW_US) == 3
    assert member.ready_us(NOW_US) == NOW_US + 500_000
    assert member.room(5, NOW_US + 500_000) == 1


@pytest.mark.parametrize(
    "member",
    [
        member_of(),
        member_of(credit=0),
        member_of(flow=Flow(rate=1), credit=0),
        member_of(flow=Flow(rate=1), remaining=0),
        member_of(flow=Flow(rate=1, buffer=5), out=5),
    ],
    ids=["no limit", "no rate", "no credit", "none remaining", "a full buffer"],
)
def test_what_no_moment_brings_is_not_waited_for(member: Member) -> None:
    assert member.ready_us(NOW_US) is None


def test_a_member_whose_connection_takes_no_more_waits_for_no_moment() -> None:
    connection = Connection()
    member = member_of(connection, Flow(rate=1, burst=1))
    member.room(1, NOW_US)
    connection.is_open = False

    assert member.ready_us(NOW_US) is None


def test_a_new_flow_counts_from_now_on() -> None:
    member = member_of(flow=Flow(rate=1, burst=1))

    member.set_flow(Flow(rate=1, burst=7), 5)
    assert member.room(9, NOW_US) == 5

    member.set_flow(Flow(), None)
    assert member.room(9, NOW_US) == 9
    assert member.is_unlimited


def test_what_a_member_gets_is_counted_against_its_limits() -> None:
    connection = Connection()
    member = member_of(connection, Flow(), credit=5, remaining=4, out=3)

    member.gets(PLACE, run_of(2), {0: 2})

    assert (member.delivered, member.credit, member.remaining, member.out) == (2, 3, 2, 5)
    assert connection.sent == [(b"1", [b"0", b"1"], {0: 2})]


# ---- echo


def test_a_connection_without_echo_does_not_get_its_own() -> None:
    alone = member_of(Connection(echo=False, published={1, 2}))

    assert share(run_of(4), [alone]) == ([[0, 3]], 4)


def test_what_one_may_not_have_another_gets() -> None:
    members = [member_of(Connection(echo=False, published={0, 1, 2})), member_of()]

    taken, shared = share(run_of(3), members)

    assert (taken, shared) == ([[], [0, 1, 2]], 3)


def test_the_offset_says_whose_a_message_is() -> None:
    alone = member_of(Connection(echo=False, published={101}))

    assert share(run_of(3, base_offset=100), [alone]) == ([[0, 2]], 3)


def test_what_only_one_without_room_may_have_waits() -> None:
    members = [member_of(Connection(echo=False, published={1})), member_of(credit=0)]

    assert share(run_of(3), members) == ([[0], []], 1)


def test_what_only_one_whose_connection_takes_no_more_may_have_waits() -> None:
    members = [member_of(Connection(echo=False, published={1})), member_of(Connection(is_open=False))]

    assert share(run_of(3), members) == ([[0], []], 1)


def test_without_echo_the_turn_says_who_is_first_too() -> None:
    members = [member_of(Connection(echo=False)), member_of(), member_of()]

    assert share(run_of(4), members, 1) == ([[2], [0, 3], [1]], 4)


# ---- any members


@st.composite
def any_member(draw: st.DrawFn) -> Member:
    connection = Connection(
        is_open=draw(st.sampled_from([True, True, True, False])),
        echo=draw(st.sampled_from([True, True, False])),
        published=draw(st.sets(st.integers(0, 12))),
    )
    member = member_of(connection)
    match draw(st.sampled_from(["none", "none", "credit", "remaining", "out", "rate"])):
        case "credit":
            member.credit = draw(st.integers(0, 6))
        case "remaining":
            member.remaining = draw(st.integers(0, 6))
        case "out":
            member.flow = Flow(buffer=draw(st.integers(1, 6)))
            member.out = draw(st.integers(0, 7))
        case "rate":
            member.set_flow(Flow(rate=1, burst=draw(st.integers(1, 6))), None)
    return member


def room_of(member: Member) -> int:
    room = member.room(1000, NOW_US)
    member.refund(room)
    return room


def may_have(member: Member, offset: int) -> bool:
    connection = member.sink
    assert isinstance(connection, Connection)
    return connection.echo or offset not in connection.published


MEMBERS: Final = st.lists(any_member(), min_size=1, max_size=4)


@given(st.integers(1, 12), MEMBERS, st.integers(0, 9))
@settings(max_examples=500, deadline=None)
def test_each_message_goes_to_one_who_may_have_it_as_long_as_there_is_room(
    count: int, members: list[Member], turn: int
) -> None:
    rooms = [room_of(member) for member in members]

    taken, shared = share(run_of(count), members, turn)

    # Each once, each in order, no more than there is room for, and nobody's own.
    assert all(indices == sorted(indices) and len(indices) <= room for indices, room in zip(taken, rooms, strict=True))
    owner = {index: member for member, indices in zip(members, taken, strict=True) for index in indices}
    assert len(owner) == sum(map(len, taken))
    assert all(may_have(member, index) for index, member in owner.items())
    # The first are done: what is in no share nobody may have.
    assert owner.keys() <= set(range(shared))
    for index in set(range(shared)) - owner.keys():
        assert not any(may_have(member, index) for member in members)
    # And what waits waits because those who may have it have no room left.
    if shared < count:
        left = [room - len(indices) for room, indices in zip(rooms, taken, strict=True)]
        assert not any(room and may_have(member, shared) for member, room in zip(members, left, strict=True))


@given(st.integers(1, 12), MEMBERS, st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_tokens_are_taken_for_what_is_shared_and_for_nothing_else(count: int, members: list[Member], turn: int) -> None:
    rooms = [room_of(member) for member in members]

    taken, _ = share(run_of(count), members, turn)

    for member, indices, room in zip(members, taken, rooms, strict=True):
        if member.bucket is not None:
            assert room_of(member) == room - len(indices)


@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=20), st.booleans())
@settings(deadline=None)
def test_over_many_runs_everyone_gets_as_many(several: int, counts: list[int], is_limited: bool) -> None:
    members = [member_of(credit=1000 if is_limited else None) for _ in range(several)]
    turn = 0
    totals = [0] * several
    for count in counts:
        taken, shared = share(run_of(count), members, turn)
        turn += shared
        totals = [total + len(indices) for total, indices in zip(totals, taken, strict=True)]

    assert sum(totals) == sum(counts)
    assert max(totals) - min(totals) <= 1
