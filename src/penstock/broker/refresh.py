"""A refresh: every consumer of a topic forgets its copy of it, and all of the topic is delivered again.

    IDLE              the topic was never refreshed
    RESET_SENT        RESET is being sent to the members of the group; nothing of the topic is delivered from now on
    WAITING_FOR_ACKS  RESET was sent to the members that are connected; all must answer
    REPLAYING         the group went back to the start of the topic, and has not acknowledged all that was there then
    READY_SENT        the group has; READY is being sent to the members, and all must answer
    COMPLETED         all have answered
    ABORTED           a member did not answer or come back in time

Groups are refreshed side by side, each at its own pace; the state of a topic is that of the group that is furthest
behind. Each state is stored before anything is done that it allows, and the positions of a group are written together
with the state that moves them. So after a restart every refresh continues in its state, and members that reconnect are
sent the signal again that they may have missed: a signal may come twice, and must be harmless the second time.

Members that disconnected are waited for by name: a connection has no other identity that lasts. All waiting is bounded.
A refresh that is aborted before the group went back leaves the group where it was; members that were sent RESET get an
error, and their subscriptions end. After that a refresh can only continue: members that reconnect later get READY.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.broker.group import Group
from penstock.broker.member import Member, RefreshNotice, RefreshSignal
from penstock.broker.partition import Partition
from penstock.broker.position import Position
from penstock.broker.sources import sleep
from penstock.broker.subscription import Loop
from penstock.broker.topic import ServedTopic, Topics
from penstock.errors import PenstockError, RefreshAborted, RefreshConflict, UnknownTopic
from penstock.store.meta import Change
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.groups import Groups

logger = logging.getLogger(__name__)

# The pause after a state could not be written.
_RETRY_US: Final = 1_000_000
_KIND: Final = "refresh"
# Limits on the record of a refresh: the members that it names, the length of a name, and the names in a reason.
MEMBERS_MAX: Final = 1000
_NAME_MAX: Final = 256
_LISTED_MAX: Final = 10


class RefreshState(StrEnum):
    IDLE = "IDLE"
    RESET_SENT = "RESET_SENT"
    WAITING_FOR_ACKS = "WAITING_FOR_ACKS"
    REPLAYING = "REPLAYING"
    READY_SENT = "READY_SENT"
    COMPLETED = "COMPLETED"
    ABORTED = "ABORTED"


# The states of a running refresh, in their order; and those in which the group has not gone back yet.
_ACTIVE: Final = (
    RefreshState.RESET_SENT,
    RefreshState.WAITING_FOR_ACKS,
    RefreshState.REPLAYING,
    RefreshState.READY_SENT,
)
_RESETTING: Final = (RefreshState.RESET_SENT, RefreshState.WAITING_FOR_ACKS)


class RefreshHost(Loop, Protocol):
    """The broker, as far as a refresh needs it."""

    store: Store
    topics: Topics
    groups: Groups


class MemberLabel(NamedTuple):
    """A member that may be disconnected."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.name else self.address


class Refreshes:
    """The last refresh of each topic that had one."""

    def __init__(self, host: RefreshHost) -> None:
        """Restore the refreshes from the state topic. They continue after `start`."""
        self._host = host
        self._refreshes: dict[int, TopicRefresh] = {}
        self._beginning = asyncio.Lock()
        found = dict(host.store.state.items(_KIND))
        for key, value in found.items():
            topic = host.topics.by_id(int(key)) if "/" not in key else None
            if topic is not None:
                self._refreshes[int(key)] = TopicRefresh(value["started_us"], {})
        for key, value in found.items():
            topic_id, slash, name = key.partition("/")
            refresh, group = self._refreshes.get(int(topic_id)), host.groups.get(name.encode())
            if slash and refresh is not None and group is not None:
                topic = host.topics.by_id(int(topic_id))
                assert topic is not None
                refresh.groups[name.encode()] = GroupRefresh(topic, group, host, value)

    def start(self) -> None:
        for topic_id, refresh in self._refreshes.items():
            topic = self._host.topics.by_id(topic_id)
            for each in refresh.groups.values():
                # A topic that cannot be opened cannot be replayed.
                if each.is_active and topic is not None and topic.refusal is None:
                    each.start()

    def of(self, topic: ServedTopic) -> TopicRefresh | None:
        return self._refreshes.get(topic.topic.id)

    async def begin(self, topic: ServedTopic) -> TopicRefresh:
        """Begin to refresh a topic, unless that is running, and return the refresh.

        Raises RefreshConflict if only some members of a group take part in refreshes: the others would take the
        replayed messages for new ones.
        """
        if topic.refusal is not None:
            raise topic.refusal
        topic_id = topic.topic.id
        async with self._beginning:
            known = self._refreshes.get(topic_id)
            if known is not None and known.is_active:
                return known
            groups = {group.name or b"": GroupRefresh(topic, group, self._host) for group in self._consumers(topic)}
            refresh = self._refreshes[topic_id] = TopicRefresh(self._host.clock.now_us(), groups)
            changes = [Change(_KIND, str(topic_id), {"started_us": refresh.started_us})]
            changes += [each.change() for each in groups.values()]
            if known is not None:
                changes += [each.gone() for name, each in known.groups.items() if name not in groups]
            try:
                await self._host.store.write_state(changes)
            except PenstockError:
                self._restore(topic_id, refresh, known)
                raise
            if self._refreshes.get(topic_id) is not refresh:
                raise UnknownTopic(f"the topic {topic.topic.name} was deleted meanwhile")
            for each in refresh.groups.values():
                each.start()
            return refresh

    def check(self, group: Group, member: Member) -> None:
        """Raise RefreshConflict if a member may not join now: it would take the replayed messages for new ones."""
        if member.on_refresh is None and any(each.is_active for each in self._of_group(group)):
            raise RefreshConflict(
                f"the group {(group.name or b'').decode()} is being refreshed, and this member does not take part:"
                " subscribe with on_reset, join it later, or use another group"
            )

    def changed(self, group: Group) -> None:
        """Note that a member joined or left."""
        for each in self._of_group(group):
            each.changed()

    def forget_topic(self, topic_id: int) -> list[Change]:
        """End the refresh of a deleted topic, and return what to write."""
        refresh = self._refreshes.pop(topic_id, None)
        if refresh is None:
            return []
        for each in refresh.groups.values():
            each.stop()
        return [Change(_KIND, str(topic_id), None), *(each.gone() for each in refresh.groups.values())]

    def forget_group(self, group: Group) -> list[Change]:
        """End the refreshes of a deleted group, and return what to write."""
        changes = []
        for each in self._of_group(group):
            each.stop()
            changes.append(each.gone())
        for refresh in self._refreshes.values():
            refresh.groups.pop(group.name or b"", None)
        return changes

    def _restore(self, topic_id: int, refresh: TopicRefresh, known: TopicRefresh | None) -> None:
        """Undo `begin`: the refresh before it is the last one."""
        if self._refreshes.get(topic_id) is refresh:
            del self._refreshes[topic_id]
            if known is not None:
                self._refreshes[topic_id] = known

    def _of_group(self, group: Group) -> list[GroupRefresh]:
        found = [refresh.groups.get(group.name or b"") for refresh in self._refreshes.values()]
        return [each for each in found if each is not None and each.group is group]

    def _consumers(self, topic: ServedTopic) -> list[Group]:
        """Return the groups whose members take part in refreshes, and those without members whose last ones did."""
        consumers, others = [], []
        for group in self._host.groups:
            if not group.matches(topic.name):
                continue
            able = [member for member in group.members if member.on_refresh is not None]
            if able or (group.refreshes and not group.members):
                consumers.append(group)
            if able:
                others += [_label(member) for member in group.members if member.on_refresh is None]
        if others:
            raise RefreshConflict(
                f"{topic.topic.name} cannot be refreshed: some members of a group take part in refreshes, and these do"
                f" not: {_listed(others)}; let them subscribe with on_reset, or in a group of their own"
            )
        return consumers


class TopicRefresh:
    """The refresh of a topic: one of each group that takes part."""

    def __init__(self, started_us: int, groups: dict[bytes, GroupRefresh]) -> None:
        self.started_us = started_us
        self.groups = groups

    @property
    def state(self) -> RefreshState:
        states = {each.state for each in self.groups.values()}
        behind = next((state for state in _ACTIVE if state in states), RefreshState.COMPLETED)
        return RefreshState.ABORTED if behind is RefreshState.COMPLETED and RefreshState.ABORTED in states else behind

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def reason(self) -> str:
        """Why it was aborted, if it was."""
        reasons = [(name.decode(), each.reason) for name, each in self.groups.items() if each.reason]
        return "; ".join(f"group {name}: {reason}" for name, reason in reasons)


class GroupRefresh:
    """The refresh of one group, from RESET to READY."""

    def __init__(
        self, topic: ServedTopic, group: Group, host: RefreshHost, found: Mapping[str, Any] | None = None
    ) -> None:
        """`found`: what the state topic has of a refresh that began before; None: a new one."""
        self.group = group
        self.state = RefreshState.RESET_SENT
        # Why it was aborted.
        self.reason = ""
        # Whether the group went back to the start: then its members must get READY, whatever happens.
        self._is_reset = False
        # By partition, the offset at which the replay ends.
        self._until: dict[int, int] = {}
        # Members that are connected, the notice that each has not answered (None: it has), and disconnected members.
        self._present: dict[Member, None] = {}
        self._asked: dict[Member, RefreshNotice | None] = {}
        self._missing: list[MemberLabel] = []
        self._topic = topic.name
        self._topic_id = topic.topic.id
        self._host = host
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if found is None:
            self._look()
        else:
            self.state, self.reason = RefreshState(found["state"]), found["reason"]
            self._is_reset = found["is_reset"]
            self._until = dict(found["until"])
            self._missing = [MemberLabel(*label) for label in found["members"]]

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def left(self) -> int:
        """How many offsets are still to be replayed."""
        if self.state is not RefreshState.REPLAYING:
            return 0
        return sum(max(0, self._until.get(p.partition.number, 0) - p.inflight.floor) for p in self._positions())

    def waits_for(self) -> list[str]:
        """Return the members that must answer or reconnect."""
        if not self.is_active:
            return []
        unanswered = [_label(member) for member, notice in self._asked.items() if notice is not None]
        if not unanswered and not self._missing and not self._present:
            return ["any member of the group"]
        return [str(label) for label in (*unanswered, *self._missing)]

    def change(self) -> Change:
        return Change(_KIND, self._key, self._to_json(self.state, self.reason))

    def gone(self) -> Change:
        return Change(_KIND, self._key, None)

    def start(self) -> None:
        self._task = self._host.spawn(self._supervise())

    def stop(self) -> None:
        """The topic or the group is deleted."""
        if self._task is not None:
            self._task.cancel()
        self._end()

    def changed(self) -> None:
        """Note that a member joined or left."""
        lacks_ready = self.state is RefreshState.ABORTED and self._is_reset
        if lacks_ready and any(map(_is_able, self.group.members)) and (self._task is None or self._task.done()):
            self.start()
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    # From state to state.

    async def _supervise(self) -> None:
        try:
            await self._run()
        except _TimedOut as timeout:
            await self._abort(str(timeout))
        except Exception as error:  # noqa: BLE001 - a bug of ours ends this refresh only
            self._host.store.health.fault("refresh", f"{self._topic!r} for group {self.group.name!r}", error)
            await self._abort("internal error")

    async def _run(self) -> None:
        if self.state is RefreshState.ABORTED:
            # A member reconnected that must get READY.
            await self._enter(RefreshState.REPLAYING)
        if self.state in _RESETTING:
            await self._reset()
        if self.state is RefreshState.REPLAYING:
            await self._replay()
        assert self.state is RefreshState.READY_SENT
        await self._ask(RefreshSignal.READY)
        await self._enter(RefreshState.COMPLETED)

    async def _reset(self) -> None:
        self.group.state.held.add(self._topic_id)
        await self._ask(RefreshSignal.RESET)
        # In memory first, and written in the same turn of the loop: later writes of these positions are behind it.
        self.group.restart(self._topic_id)
        self._until = {position.partition.number: position.partition.served for position in self._positions()}
        self._is_reset = True
        await self._enter(RefreshState.REPLAYING, with_positions=True)
        self._end()

    async def _replay(self) -> None:
        empty_us: int | None = None
        self.group.dispatcher.watchers[self.wake] = None
        try:
            while True:
                self._woken.clear()
                self._look()
                if not self.left:
                    break
                now_us = self._host.clock.monotonic_us()
                empty_us = None if self._present else (now_us if empty_us is None else empty_us)
                if empty_us is not None and now_us >= empty_us + self._limit_us:
                    raise _TimedOut(f"no member was connected for {self._limit_us / 1e6:g} s")
                await self._wait(None if empty_us is None else empty_us + self._limit_us)
        finally:
            del self.group.dispatcher.watchers[self.wake]
        # With the positions: READY_SENT must not be stored without the acknowledgements that led to it.
        await self._enter(RefreshState.READY_SENT, with_positions=True)

    async def _ask(self, signal: RefreshSignal) -> None:
        """Send a signal to all members, also to those that join meanwhile, and wait until all have answered."""
        self._asked = {}
        until_us = self._host.clock.monotonic_us() + self._limit_us
        while True:
            self._woken.clear()
            self._look()
            for member in self._present:
                if member not in self._asked:
                    self._send(member, signal)
            if self.state is RefreshState.RESET_SENT:
                await self._enter(RefreshState.WAITING_FOR_ACKS)
                continue
            if self._asked and not any(self._asked.values()) and not self._missing:
                return
            if self._host.clock.monotonic_us() >= until_us:
                raise _TimedOut(
                    f"{_listed(self.waits_for())} did not answer {signal} within {self._limit_us / 1e6:g} s"
                )
            await self._wait(until_us)

    def _send(self, member: Member, signal: RefreshSignal) -> None:
        def answered() -> None:
            if self._asked.get(member) is notice:
                self._asked[member] = None
                self.wake()

        notice = self._asked[member] = RefreshNotice(signal, self._topic, answered)
        assert member.on_refresh is not None
        member.on_refresh(notice)

    def _look(self) -> None:
        """Note which members joined and left since the last time."""
        members = list(filter(_is_able, self.group.members))
        for member in [member for member in self._present if member not in members]:
            del self._present[member]
            self._asked.pop(member, None)
            if len(self._missing) < MEMBERS_MAX:
                self._missing.append(_label(member))
        for member in members:
            if member not in self._present:
                self._present[member] = None
                back = next((label for label in self._missing if label.name == _label(member).name), None)
                if back is not None:
                    self._missing.remove(back)

    async def _abort(self, reason: str) -> None:
        logger.warning("the refresh of %s for group %s is aborted: %s", self._topic, self.group.name, reason)
        await self._enter(RefreshState.ABORTED, reason=reason)
        asked = [] if self._is_reset else list(self._asked)
        error = RefreshAborted(
            f"the refresh of {self._topic.decode()} was aborted: {reason}; nothing is delivered again: keep your copy"
            " from before RESET, and subscribe again to continue from there"
        )
        for member in asked:
            if member in self.group.members:
                member.sink.fail(member, error)
        self._asked = {}
        self._end()

    async def _enter(self, state: RefreshState, *, with_positions: bool = False, reason: str = "") -> None:
        """Store a state, and only then enter it."""
        while True:
            # The positions as they are at this attempt: the group may have written newer ones since the last.
            positions = self.group.writer.snapshots(self._positions()) if with_positions else []
            try:
                await self._host.store.write_state([Change(_KIND, self._key, self._to_json(state, reason)), *positions])
                break
            except PenstockError as error:
                logger.error("the refresh of %s waits until its state can be written: %s", self._topic.decode(), error)
                await sleep(self._host, _RETRY_US)
        self.state, self.reason = state, reason

    def _end(self) -> None:
        """Deliver messages of the topic to the group again."""
        self.group.state.held.discard(self._topic_id)
        self.group.wake()

    async def _wait(self, until_us: int | None) -> None:
        """Wait until woken, or until a moment."""
        timer = None if until_us is None else self._host.call_at(until_us, self.wake)
        try:
            await self._woken.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _positions(self) -> list[Position[Partition]]:
        return self.group.state.of_topic(self._topic_id)

    @property
    def _limit_us(self) -> int:
        return max(position.partition.policy.refresh_wait_ms for position in self._positions()) * 1000

    @property
    def _key(self) -> str:
        return f"{self._topic_id}/{(self.group.name or b'').decode()}"

    def _to_json(self, state: RefreshState, reason: str) -> dict[str, Any]:
        return {
            "state": state,
            "reason": reason,
            "is_reset": self._is_reset,
            "until": list(self._until.items()),
            "members": [*map(_label, self._present), *self._missing][:MEMBERS_MAX],
        }


class _TimedOut(Exception):
    """A member did not answer or reconnect in time."""


def _is_able(member: Member) -> bool:
    return member.on_refresh is not None


def _label(member: Member) -> MemberLabel:
    return MemberLabel(member.sink.name[:_NAME_MAX], member.sink.address)


def _listed(names: Sequence[object]) -> str:
    listed = ", ".join(map(str, names[:_LISTED_MAX]))
    return listed if len(names) <= _LISTED_MAX else f"{listed} and {len(names) - _LISTED_MAX} more"
