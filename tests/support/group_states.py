"""A group without I/O, as tests give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.broker import delivery
from penstock.broker.delivery import Dispatch, Found
from penstock.broker.flow import Flow, Overflow
from penstock.broker.group_state import GroupState, Mode
from penstock.broker.member import Member, Place
from penstock.broker.position_budget import PositionBudget
from penstock.errors import PenstockError
from penstock.log.policy import Policy
from penstock.model.run import Run

SECOND = 1_000_000


DEADLINE = 5 * SECOND


KEY = (1, 0)


@dataclass(slots=True, eq=False)
class Log:
    """A partition with a message at each offset from `start` to `served`."""

    number: int = 0
    start: int = 0
    served: int = 10
    policy: Policy = field(default_factory=Policy)
    topic_id: int = 1
    name: bytes = b"orders"
    keeps: bool = True


class Connection:
    """A connection that takes everything; what it is sent is in the dispatches."""

    name = address = ""
    meter = None

    @property
    def takes_unstored(self) -> bool:
        return self.is_open

    def __init__(self, *, echo: bool = True) -> None:
        self.echo = echo
        self.is_open = True

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        raise AssertionError("the state machine sends nothing")

    def has_published(self, _place: Place, _offset: int) -> bool:
        return True

    def fail(self, member: Member, error: PenstockError) -> None:
        raise AssertionError("the state machine sends nothing")


class Given:
    """A group that reads partitions of one topic, with members that have joined."""

    def __init__(
        self,
        *,
        members: int = 1,
        logs: int = 1,
        mode: Mode = Mode.SHARED,
        buffer: int = 100,
        budget: PositionBudget | None = None,
        policy: Policy | None = None,
        overflow: Overflow = Overflow.BLOCK,
    ) -> None:
        self.state = GroupState[Log](mode, 0, budget or PositionBudget(1 << 30), 100)
        self.logs = [Log(number, policy=policy or Policy()) for number in range(logs)]
        for log in self.logs:
            self.state.attach(log, 0, (), 0)
        self.positions = list(self.state.positions.values())
        self.position, self.log = self.positions[0], self.logs[0]
        self.members = [
            Member(b"%d" % number, Connection(), Flow(buffer=buffer, overflow=overflow)) for number in range(members)
        ]
        for member in self.members:
            self.state.join(member, 0)

    def deliver(self, *, at_us: int = 0, until: int | None = None) -> Dispatch:
        """Deliver what the log has from the next offset on."""
        begin = delivery.next_delivery(self.state, self.position, at_us)
        if begin is None:
            return Dispatch()
        return delivery.deliver(self.state, self.position, begin, self.read(begin, until), at_us)

    def redeliver(self, *, at_us: int = 0, missing: tuple[int, ...] = ()) -> Dispatch:
        """Redeliver what is due."""
        delivery.review(self.state, self.position, at_us, dead_letters=True)
        first = delivery.next_redelivery(self.state, self.position, at_us)
        if first is None:
            return Dispatch()
        return delivery.redeliver(self.state, self.position, first, self.read(first, missing=missing), at_us)

    def read(self, begin: int, until: int | None = None, missing: tuple[int, ...] = ()) -> Found:
        until = self.log.served if until is None else until
        return run_of(*(offset for offset in range(begin, until) if offset not in missing)), until, Run([], [])

    def reset(self, offset: int) -> None:
        self.state.reset({self.position: offset})


def run_of(*offsets: int) -> Run:
    run = Run([b"orders"] * len(offsets), [b"%d" % offset for offset in offsets])
    run.offsets = list(offsets)
    run.base_offset = offsets[0] if offsets else 0
    return run


def outline(dispatch: Dispatch) -> list[tuple[int, list[int], list[int] | None]]:
    """Return the number of each member, the offsets that it gets, and their attempts."""
    return [
        (
            member.number,
            list(run.all_offsets()),
            None if attempts is None else [attempts[index] for index in range(len(run))],
        )
        for member, run, attempts in dispatch.deliveries
    ]
