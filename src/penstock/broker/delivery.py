"""Choose the next messages of a group, and their members. No I/O: messages and the time are arguments.

For each position the caller asks for the next offset to read (`next_redelivery`, `next_delivery`, `next_check`), reads
there, and passes on what it found; the returned Dispatch says what to do. Others may change the group while the caller
reads, so what was found counts only as far as it is still wanted.

What was found is (messages, the offset to read on from, messages left out because they expired), all of subjects that
the group wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from penstock.broker.group_state import GroupState, Mode
from penstock.broker.member import Member, share_out
from penstock.broker.position import NEVER_US, P, Position, Review
from penstock.broker.position_budget import PENDING_BYTES, PENDING_FEW
from penstock.model.run import Run

Found = tuple[Run, int, Run]


class Save(Enum):
    """When a position must be written."""

    NO = 0
    LATER = 1  # within a second: if it is not, the same messages are passed over again
    NOW = 2


class MemberRun(NamedTuple):
    """Messages to send to a member."""

    member: Member
    run: Run
    # By index, which delivery of the message this is; None: the first of all of them.
    attempts: Mapping[int, int] | None


class Dispatch(NamedTuple):
    """The decision about messages that were read."""

    deliveries: Sequence[MemberRun] = ()
    # Whether to ask for the next offset again.
    is_more: bool = False
    save: Save = Save.NO
    # Messages that are counted as expired.
    expired: int = 0


_END: Final = Dispatch()


def review(state: GroupState[P], position: Position[P], now_us: int, *, dead_letters: bool) -> Review:
    """Apply what happened since the last time, before anything is delivered. `dead_letters`: whether the topic may have
    any."""
    policy = position.partition.policy
    # Before a member has joined since the start there is no limit: its own may be higher than the topic's.
    is_limited = state.mode is Mode.SHARED and state.joined and dead_letters and policy.dead_letters
    limit = state.deliveries_max(policy) if is_limited else 0
    before = position.inflight.held()
    reviewed = position.review(now_us, limit)
    if reviewed.is_changed:
        state.correct(before, position.inflight.held())
    return reviewed


# Redelivery.


def next_redelivery(state: GroupState[P], position: Position[P], now_us: int) -> int | None:
    """Return the first offset to redeliver, if there is one and a member has room for it."""
    first = position.inflight.back(now_us, 1)
    # A piped log that a power cut shortened is filled again from its origin: the message is not gone.
    if not first or first[0] >= position.partition.served or position.is_stopped_at(first[0]):
        return None
    return first[0] if _has_room(state, position, now_us) else None


def redeliver(state: GroupState[P], position: Position[P], first: int, found: Found | None, now_us: int) -> Dispatch:
    """Redeliver messages that were found at `first`."""
    if state.is_held(position):
        return _END
    inflight, members = position.inflight, state.owners(position)
    room = max((member.flow.buffer for member in members if member.flow), default=0) * len(members)
    back = inflight.back(now_us, room)
    if not back:
        return _END
    run, following, expired = found or (Run([], []), first + 1, Run([], []))
    index_of = {run.offset(index): index for index in range(len(run))}
    gone = [offset for offset in back if first <= offset < following and offset not in index_of]
    if gone:
        return Dispatch(is_more=True, save=Save.NOW, expired=position.drop(gone, expired))
    again = [offset for offset in back if offset in index_of]
    if not again:
        return Dispatch(is_more=back[0] < first)
    chosen = run.select([index_of[offset] for offset in again])
    shares, shared = share_out(position.partition, chosen, members, state.turn, now_us)
    state.turn += shared
    deliveries = []
    for share in shares:
        part = share.of(chosen)
        offsets = part.all_offsets()
        inflight.retake(offsets, share.member.number, state.deadline_us(position, now_us))
        attempts = {index: inflight.attempts(offset) for index, offset in enumerate(offsets)}
        deliveries.append(MemberRun(share.member, part, attempts))
        position.sent += len(part)
    position.retried += shared
    state.redelivered += shared
    return Dispatch(deliveries, bool(shares) or shared == len(again), Save.NOW if shared else Save.NO)


# First delivery.


def drop_overflow(state: GroupState[P], position: Position[P]) -> int:
    """Skip messages of a group without a name that is too far behind, if its member asks for that. Return how many."""
    flow = state.members[0].flow if state.members else None
    if flow is None:
        return 0
    begin = position.inflight.next
    dropped = position.backlog.begin(flow, begin, position.partition.served) - begin
    if dropped <= 0:
        return 0
    for member in state.members:
        member.dropped += dropped
    position.inflight.take([], begin + dropped, 0, 0)
    return dropped


def next_delivery(state: GroupState[P], position: Position[P], now_us: int) -> int | None:
    """Return the next offset to deliver, if there is room for it."""
    begin = position.inflight.next
    if position.is_stopped_at(begin) or not _pending_room(state, position):
        return None
    return begin if _has_room(state, position, now_us) else None


def deliver(state: GroupState[P], position: Position[P], begin: int, found: Found, now_us: int) -> Dispatch:
    """Deliver messages that were found at `begin`."""
    inflight = position.inflight
    if state.is_held(position):
        return _END
    if inflight.next != begin:
        return Dispatch(is_more=True)
    run, following, expired = found
    if position.backlog.until is not None and following > position.backlog.until:
        following = position.backlog.until
        run = run.below(following)
    if not run.values:
        return Dispatch(is_more=True, save=Save.LATER, expired=position.skip(following, expired))
    room = _pending_room(state, position)
    if not room:
        return _END
    offered = run if len(run) <= room else run.select(range(room))
    shares, shared = share_out(position.partition, offered, state.owners(position), state.turn, now_us)
    state.turn += shared
    if not shared:
        return _END
    deliveries = [MemberRun(share.member, share.of(offered), None) for share in shares]
    upto = following if shared == len(run) else run.offset(shared)
    if deliveries:
        each = [(delivery.member.number, delivery.run.all_offsets()) for delivery in deliveries]
        inflight.share(each, upto, state.deadline_us(position, now_us))
        position.sent += sum(len(delivery.run) for delivery in deliveries)
    else:
        # All of it was published by members that do not want what they publish.
        inflight.take([], upto, 0, 0)
    return Dispatch(deliveries, is_more=True, expired=position.count_expired(expired.below(upto)))


# Messages that are not delivered.


def next_check(position: Position[P], now_us: int, wall_us: int) -> int | None:
    """Return the next offset at which a message may have expired or been removed: the first to redeliver, and the first
    that was not delivered yet. None if both are known to be there."""
    candidates = (*position.inflight.back(now_us, 1), position.inflight.next)
    for offset in candidates:
        if not position.is_stopped_at(offset) and position.may_expire(offset, wall_us):
            return offset
    return None


def skip_expired(state: GroupState[P], position: Position[P], offset: int, found: Found) -> Dispatch:
    """Pass over messages that expired or were removed, found at `offset`."""
    run, following, expired = found
    if state.is_held(position) or offset > position.inflight.next:
        return _END
    first = run.offset(0) if run.values else following
    dispatch = Dispatch(is_more=True)
    if offset < position.inflight.next:
        if run.values and first == offset:
            position.note_unexpired(run)
        elif position.inflight.is_pending(offset):
            dispatch = Dispatch(is_more=True, save=Save.NOW, expired=position.drop([offset], expired))
        return dispatch
    if first > offset:
        dispatch = Dispatch(is_more=True, save=Save.LATER, expired=position.skip(first, expired))
    if run.values:
        position.note_unexpired(run)
    return dispatch


# Timers and room.


def next_us(state: GroupState[P], now_us: int) -> int | None:
    """Return when there may be more to deliver: a deadline or a delay is over, or a member's rate allows more."""
    served = [position for position in state.positions.values() if not state.is_held(position)]
    moments = [moment for position in served if (moment := position.inflight.next_us()) is not None]
    moments += [moment for member in state.members if (moment := member.ready_us(now_us)) is not None]
    first = min(moments, default=NEVER_US)
    return None if first >= NEVER_US else first


def _has_room(state: GroupState[P], position: Position[P], now_us: int) -> bool:
    return not state.is_held(position) and any(member.has_room(now_us) for member in state.owners(position))


def _pending_room(state: GroupState[P], position: Position[P]) -> int:
    """Return how many more messages may be pending."""
    pending = len(position.inflight)
    if position.is_attached:
        state.budget.take((pending - position.charged) * PENDING_BYTES)
        position.charged = pending
    if state.budget.is_short and state.mode is Mode.SHARED:
        return max(0, PENDING_FEW - pending)
    # In a partitioned group pending messages are forgotten with their member.
    return position.inflight.room()
