"""A member: one subscription of one connection, alone or among others that share the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from penstock.broker.flow import Flow, TokenBucket
from penstock.errors import PenstockError
from penstock.log.policy import DELIVERIES_DEFAULT, Policy
from penstock.model.run import Run, fitting
from penstock.security.permissions import is_denied
from penstock.security.quotas import Meter

# What an open connection is given at once of what is stored, unless one message is larger. Runs that are gathered from
# publishes have no more.
DELIVERY_BYTES_MAX: Final = 1 << 20


class Place(Protocol):
    """A partition, as far as the receiver of its messages needs it."""

    topic_id: int
    name: bytes
    # Whether messages published there are stored.
    keeps: bool

    @property
    def number(self) -> int: ...


class Sink(Protocol):
    """The connection that a member is of."""

    # Whether it receives its own messages.
    echo: bool
    # The name of the connection.
    name: str
    address: str

    @property
    def meter(self) -> Meter | None:
        """Return what counts the subscriptions of its user; None: nobody does."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether it takes more now. When it does again, it wakes the readers of its members."""
        ...

    @property
    def takes_unstored(self) -> bool:
        """Return whether it takes more messages that are not stored: they cannot be read again later."""
        ...

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        """Send messages to a member. `attempts`: the delivery attempt of redelivered messages, by index."""
        ...

    def has_published(self, place: Place, offset: int) -> bool:
        """Return whether the message came from this connection; for connections without echo."""
        ...

    def fail(self, member: Member, error: PenstockError) -> None:
        """End a member: its next message cannot be read, or its group was deleted."""
        ...


class RefreshSignal(StrEnum):
    """The notice of a refresh that members receive."""

    RESET = "RESET"  # forget your copy of the topic: all of it is delivered again
    READY = "READY"  # all of it was delivered


@dataclass(frozen=True, slots=True, eq=False)
class RefreshNotice:
    """A signal about a topic. The member calls `answered` when it has acted on it."""

    signal: RefreshSignal
    topic: bytes
    answered: Callable[[], None]


class Deliveries(NamedTuple):
    """How often a message is delivered before it becomes a dead letter. 0: no limit."""

    # Overrides the setting of the topic; None: the topic decides.
    limit: int | None = None
    # If the topic says nothing either.
    default: int = DELIVERIES_DEFAULT

    def of(self, policy: Policy) -> int:
        limits = (self.limit, policy.deliveries_max, self.default)
        return next(limit for limit in limits if limit is not None)


class Member:
    __slots__ = (
        "bucket",
        "credit",
        "delivered",
        "deliveries",
        "denied",
        "dropped",
        "expires_us",
        "flow",
        "on_refresh",
        "number",
        "out",
        "remaining",
        "sid",
        "sink",
    )

    def __init__(self, sid: bytes, sink: Sink, flow: Flow | None = None, number: int = 0) -> None:
        self.sid = sid
        self.sink = sink
        self.number = number
        # None: it gets everything that its connection takes.
        self.flow = flow
        self.bucket = TokenBucket(flow.rate, flow.burst) if flow and flow.rate else None
        # In pull mode: how many messages it may still get; None: messages are pushed.
        self.credit: int | None = None
        # How many more it gets before it ends; None: it does not end.
        self.remaining: int | None = None
        # Messages that it has not acknowledged; None: it need not acknowledge.
        self.out: int | None = None
        # When it is taken for gone unless it says something before; None: it is there as long as its connection.
        self.expires_us: int | None = None
        # Called with the notices of a refresh; None: it does not take part in refreshes.
        self.on_refresh: Callable[[RefreshNotice], None] | None = None
        # In a shared group: after how many deliveries it gives a message up.
        self.deliveries = Deliveries()
        # Patterns of subjects that its user may not read.
        self.denied: tuple[bytes, ...] = ()
        self.delivered = 0
        self.dropped = 0

    @property
    def takes_all(self) -> bool:
        """Whether it may get every message: those that its connection has published, and whatever their subject."""
        return self.sink.echo and not self.denied

    def may_get(self, place: Place, run: Run, index: int) -> bool:
        if self.denied and is_denied(self.denied, run.subjects[index]):
            return False
        return self.sink.echo or not self.sink.has_published(place, run.offset(index))

    def set_flow(self, flow: Flow, credit: int | None) -> None:
        self.flow = flow
        self.bucket = TokenBucket(flow.rate, flow.burst) if flow.rate else None
        self.credit = credit

    @property
    def is_unlimited(self) -> bool:
        return (
            self.bucket is None
            and self.credit is None
            and self.remaining is None
            and self.out is None
            and self.takes_all
        )

    def takes(self, *, stored: bool) -> bool:
        return self.sink.is_open if stored else self.sink.takes_unstored

    def room(self, wanted: int, now_us: int, *, stored: bool = True) -> int:
        """Return how many of the wanted messages it can take now, and take the tokens for them; `refund` returns unused
        ones."""
        if not self.takes(stored=stored):
            return 0
        room = wanted
        if self.credit is not None:
            room = min(room, self.credit)
        if self.remaining is not None:
            room = min(room, self.remaining)
        if self.out is not None:
            assert self.flow is not None
            room = min(room, max(0, self.flow.buffer - self.out))
        if self.bucket is not None:
            room = self.bucket.take(room, now_us)
        return room

    def has_room(self, now_us: int) -> bool:
        """Return whether it can take a message now."""
        room = self.room(1, now_us)
        self.refund(room)
        return room > 0

    def refund(self, count: int) -> None:
        if self.bucket is not None:
            self.bucket.refund(count)

    def gets(self, place: Place, run: Run, attempts: Mapping[int, int] | None = None) -> None:
        count = len(run)
        self.delivered += count
        if self.credit is not None:
            self.credit -= count
        if self.remaining is not None:
            self.remaining -= count
        if self.out is not None:
            self.out += count
        self.sink.send(self, place, run, attempts)

    def ready_us(self, now_us: int) -> int | None:
        """Return when its rate lets it take more; None if it waits for something else."""
        if self.bucket is None or not self.sink.is_open or self.credit == 0 or self.remaining == 0:
            return None
        if self.out is not None and self.flow is not None and self.out >= self.flow.buffer:
            return None
        return self.bucket.ready_us(now_us)


class Share(NamedTuple):
    member: Member
    # Which messages of the run; None: all.
    indices: Sequence[int] | None

    def of(self, run: Run) -> Run:
        return run if self.indices is None else run.select(self.indices)


def share_out(place: Place, run: Run, members: Sequence[Member], turn: int, now_us: int) -> tuple[list[Share], int]:
    """Share out messages in turn among the members with room. Return the shares, and how many messages they have.

    These are the first messages of the run; the rest waits. Messages that are not stored cannot wait, so all of them
    are shared out.
    """
    count = fitting(run, DELIVERY_BYTES_MAX) if place.keeps else len(run)
    if len(members) == 1 and (member := members[0]).takes_all:
        room = member.room(count, now_us, stored=place.keeps)
        return ([Share(member, None if room == len(run) else range(room))] if room else []), room
    if all(member.is_unlimited for member in members):
        ready = [member for member in members if member.takes(stored=place.keeps)]
        several = len(ready)
        shares = [Share(ready[(turn + i) % several], range(i, count, several)) for i in range(min(several, count))]
        return shares, count if ready else 0
    return _share_out_limited(place, run, count, members, turn, now_us)


def _share_out_limited(
    place: Place, run: Run, count: int, members: Sequence[Member], turn: int, now_us: int
) -> tuple[list[Share], int]:
    rooms = [member.room(count, now_us, stored=place.keeps) for member in members]
    taken: list[list[int]] = [[] for _ in members]
    shared = 0
    if all(member.takes_all for member in members):
        several = len(members)
        at = turn % several
        while shared < count and any(rooms):
            while not rooms[at]:
                at = (at + 1) % several
            taken[at].append(shared)
            rooms[at] -= 1
            at = (at + 1) % several
            shared += 1
    else:
        for index in range(count):
            others = [i for i, member in enumerate(members) if member.may_get(place, run, index)]
            able = [i for i in others if rooms[i]]
            if able:
                chosen = able[(turn + index) % len(able)]
                taken[chosen].append(index)
                rooms[chosen] -= 1
            elif others:
                break
            # else nobody here gets it: it is from the only one that could, or nobody may read it
            shared = index + 1
    for member, room in zip(members, rooms, strict=True):
        member.refund(room)
    return [Share(member, indices) for member, indices in zip(members, taken, strict=True) if indices], shared
