"""Consumers that take part in a refresh, and the states of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.member import Member, Place, RefreshNotice
from penstock.broker.member import RefreshSignal as Signal
from penstock.broker.refresh import GroupRefresh, TopicRefresh
from penstock.broker.refresh import RefreshState as State
from penstock.broker.start import Start
from penstock.errors import PenstockError
from penstock.model.run import Run
from tests.support.brokers import SECOND, Got, Life, Recorder

WAIT: Final = 60 * SECOND
VALUES: Final = [b"0", b"1", b"2", b"3"]
STATE_LOG: Final = "topics/0/0/" + "0" * 20 + ".log"


class Consumer(Recorder):
    """A member that understands a refresh. It keeps a copy of what it got, as one does that is refreshed."""

    def __init__(self, name: str = "ann") -> None:
        super().__init__()
        self.name, self.address = name, "here"
        self.heard: list[RefreshNotice] = []
        self.copy: dict[tuple[int, int, int], bytes] = {}
        self.group: Group | None = None
        self.member = self._new()

    def _new(self) -> Member:
        member = Member(b"1", self, Flow(buffer=1000))
        member.on_refresh = self._hear
        return member

    def _hear(self, notice: RefreshNotice) -> None:
        self.heard.append(notice)
        if notice.signal is Signal.RESET:
            self.copy.clear()

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        before = len(self.got)
        super().send(member, place, run, attempts)
        self.copy |= {(*got.place, got.offset): got.value for got in self.got[before:]}

    def fail(self, member: Member, error: PenstockError) -> None:
        """As a session does it: it is no member any more."""
        super().fail(member, error)
        assert self.group is not None
        self.group.leave(member)

    @property
    def words(self) -> list[Signal]:
        return [notice.signal for notice in self.heard]

    async def join(
        self, life: Life, group: bytes = b"shop", pattern: bytes = b"prices.>", mode: Mode = Mode.SHARED
    ) -> Group:
        """On a connection of its own, each time."""
        self.member = self._new()
        joining = life.broker.groups.join(group, pattern, self.member, mode, start=Start.EARLIEST)
        self.group = await life.do(joining)
        await life.settle()
        return self.group

    async def leave(self, life: Life) -> None:
        assert self.group is not None
        life.broker.groups.leave(self.group, self.member)
        await life.settle()

    async def answer(self, life: Life) -> None:
        """The last that it was told."""
        self.heard[-1].answered()
        await life.settle()

    async def ack_all(self, life: Life) -> list[Got]:
        """What it got since the last time, acknowledged."""
        assert self.group is not None
        got = self.take()
        await life.ack(self.group, *got)
        return got


async def begin(life: Life) -> TopicRefresh:
    refresh = await life.do(life.broker.refresh_topic(b"prices"))
    await life.settle()
    return refresh


def course(life: Life, group: bytes = b"shop") -> GroupRefresh:
    refresh = life.broker.refreshes.of(life.broker.topics.named(b"prices"))
    assert refresh is not None
    return refresh.groups[group]


def state_of(refresh: TopicRefresh) -> State:
    return refresh.state


async def stocked(life: Life, *consumers: Consumer) -> None:
    """A topic with messages, that its consumers have done."""
    await life.stored(b"prices.a", *VALUES)
    for consumer in consumers:
        await consumer.join(life)
        await consumer.ack_all(life)


async def to(state: State, life: Life, ann: Consumer) -> TopicRefresh:
    """A refresh of one consumer, in a state."""
    refresh = await begin(life)
    if state is not State.WAITING_FOR_ACKS:
        await ann.answer(life)
    if state in (State.READY_SENT, State.COMPLETED):
        await ann.ack_all(life)
    if state is State.COMPLETED:
        await ann.answer(life)
    assert state_of(refresh) is state
    return refresh
