"""A refresh: every consumer of a topic forgets what it has of it, and is given all of it again.

    IDLE              the topic was never refreshed
    RESET_SENT        RESET goes to the members of the group, which is given nothing of the topic from now on
    WAITING_FOR_ACKS  it has gone to those who are there; all must answer
    REPLAYING         the group went back to the start of the topic, and has not done all that was there then
    READY_SENT        it has: READY goes to the members, and all must answer
    COMPLETED         they have
    ABORTED           somebody was waited for in vain

Groups are refreshed side by side, each at its own pace; a topic is in the state of the one that is furthest behind.
Each state is in the state topic before anything is done that it allows, and the positions of a group are written
together with the state that moves them. So after a restart everything goes on in the state that it was in, and members
that come back are told again what they may have missed: a word may come twice, and must do no harm the second time.

Whoever was a member is waited for by its name, because a connection has no other that lasts. What is waited for is
bounded. Before the group went back, giving up leaves it where it was; those who were told RESET are told that it was
in vain, and their subscriptions end. After that it can only go on: READY is owed to who comes back later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from penstock.broker.group import Group, Position
from penstock.broker.member import Member, Notice, Word
from penstock.broker.subscription import Loop
from penstock.broker.topic import ServedTopic, Topics
from penstock.errors import PenstockError, RefreshAborted, RefreshConflict, UnknownTopic
from penstock.storage.meta import Change
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

# Until the next try, when a state cannot be written.
_RETRY_US: Final = 1_000_000
_KIND: Final = "refresh"
# Limits on the record of a refresh: how many members it names, how much of a name, and how many a reason lists.
MEMBERS_MAX: Final = 1000
_NAME_MAX: Final = 256
_LISTED_MAX: Final = 10


class State(StrEnum):
    IDLE = "IDLE"
    RESET_SENT = "RESET_SENT"
    WAITING_FOR_ACKS = "WAITING_FOR_ACKS"
    REPLAYING = "REPLAYING"
    READY_SENT = "READY_SENT"
    COMPLETED = "COMPLETED"
    ABORTED = "ABORTED"


# Those in which something is under way, in their order; and the ones of them in which the group has not gone back yet.
_ACTIVE: Final = (State.RESET_SENT, State.WAITING_FOR_ACKS, State.REPLAYING, State.READY_SENT)
_RESETTING: Final = (State.RESET_SENT, State.WAITING_FOR_ACKS)


class Host(Loop, Protocol):
    """The broker, as far as a refresh needs it."""

    store: Store
    topics: Topics
    groups: dict[bytes, Group]


class Who(NamedTuple):
    """A member that was there once, as people know it."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.name else self.address


class Refreshes:
    """The last refresh of each topic that had one."""

    def __init__(self, host: Host) -> None:
        """As they were when the broker stopped; nothing goes on before `start`."""
        self._host = host
        self._refreshes: dict[int, Refresh] = {}
        self._beginning = asyncio.Lock()
        found = dict(host.store.state.items(_KIND))
        for key, value in found.items():
            topic = host.topics.by_id(int(key)) if "/" not in key else None
            if topic is not None:
                self._refreshes[int(key)] = Refresh(value["started_us"], {})
        for key, value in found.items():
            topic_id, slash, name = key.partition("/")
            refresh, group = self._refreshes.get(int(topic_id)), host.groups.get(name.encode())
            if slash and refresh is not None and group is not None:
                topic = host.topics.by_id(int(topic_id))
                assert topic is not None
                refresh.courses[name.encode()] = Course(topic, group, host, value)

    def start(self) -> None:
        for topic_id, refresh in self._refreshes.items():
            topic = self._host.topics.by_id(topic_id)
            for course in refresh.courses.values():
                # Of a topic that cannot be opened nothing can be replayed.
                if course.is_active and topic is not None and topic.refusal is None:
                    course.start()

    def of(self, topic: ServedTopic) -> Refresh | None:
        return self._refreshes.get(topic.topic.id)

    async def begin(self, topic: ServedTopic) -> Refresh:
        """Refresh a topic; if that is under way, what is. Raises RefreshConflict if a member would not understand it.

        A group some of whose members do not is refused, not replayed: half of it would have forgotten what it had,
        and the other half would take all that comes again for new.
        """
        if topic.refusal is not None:
            raise topic.refusal
        topic_id = topic.topic.id
        async with self._beginning:
            known = self._refreshes.get(topic_id)
            if known is not None and known.is_active:
                return known
            courses = {group.name or b"": Course(topic, group, self._host) for group in self._consumers(topic)}
            refresh = self._refreshes[topic_id] = Refresh(self._host.clock.now_us(), courses)
            changes = [Change(_KIND, str(topic_id), {"started_us": refresh.started_us})]
            changes += [course.change() for course in courses.values()]
            if known is not None:
                changes += [course.gone() for name, course in known.courses.items() if name not in courses]
            try:
                await self._host.store.write_state(changes)
            except PenstockError:
                self._restore(topic_id, refresh, known)
                raise
            if self._refreshes.get(topic_id) is not refresh:
                raise UnknownTopic(f"the topic {topic.topic.name} was deleted meanwhile")
            for course in refresh.courses.values():
                course.start()
            return refresh

    def check(self, group: Group, member: Member) -> None:
        """Whether it may join now: one that would not understand must not be given what is replayed."""
        if member.hears is None and any(course.is_active for course in self._courses(group)):
            raise RefreshConflict(
                f"the group {(group.name or b'').decode()} is being refreshed, and this member would not understand it:"
                " subscribe with on_reset, come back later, or use another group"
            )

    def changed(self, group: Group) -> None:
        """A member came or went."""
        for course in self._courses(group):
            course.changed()

    def forget_topic(self, topic_id: int) -> list[Change]:
        """It is deleted; what is to be written for that."""
        refresh = self._refreshes.pop(topic_id, None)
        if refresh is None:
            return []
        for course in refresh.courses.values():
            course.stop()
        return [Change(_KIND, str(topic_id), None), *(course.gone() for course in refresh.courses.values())]

    def forget_group(self, group: Group) -> list[Change]:
        """The same, of a group."""
        changes = []
        for course in self._courses(group):
            course.stop()
            changes.append(course.gone())
        for refresh in self._refreshes.values():
            refresh.courses.pop(group.name or b"", None)
        return changes

    def _restore(self, topic_id: int, refresh: Refresh, known: Refresh | None) -> None:
        """It did not begin: the one before it is the last."""
        if self._refreshes.get(topic_id) is refresh:
            del self._refreshes[topic_id]
            if known is not None:
                self._refreshes[topic_id] = known

    def _courses(self, group: Group) -> list[Course]:
        found = [refresh.courses.get(group.name or b"") for refresh in self._refreshes.values()]
        return [course for course in found if course is not None and course.group is group]

    def _consumers(self, topic: ServedTopic) -> list[Group]:
        """The groups whose members understand a refresh; of those that nobody is in now, the ones whose members did."""
        consumers, deaf = [], []
        for group in self._host.groups.values():
            if not group.matches(topic.name):
                continue
            able = [member for member in group.members if member.hears is not None]
            if able or (group.refreshes and not group.members):
                consumers.append(group)
            if able:
                deaf += [_who(member) for member in group.members if member.hears is None]
        if deaf:
            raise RefreshConflict(
                f"{topic.topic.name} cannot be refreshed, because members of a group that is to be do not understand"
                f" it: {_listed(deaf)}; let them subscribe with on_reset, or in a group of their own"
            )
        return consumers


class Refresh:
    """The refresh of a topic: a course for each group."""

    def __init__(self, started_us: int, courses: dict[bytes, Course]) -> None:
        self.started_us = started_us
        self.courses = courses

    @property
    def state(self) -> State:
        states = {course.state for course in self.courses.values()}
        behind = next((state for state in _ACTIVE if state in states), State.COMPLETED)
        return State.ABORTED if behind is State.COMPLETED and State.ABORTED in states else behind

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def reason(self) -> str:
        """Why it was given up, if it was."""
        reasons = [(name.decode(), course.reason) for name, course in self.courses.items() if course.reason]
        return "; ".join(f"group {name}: {reason}" for name, reason in reasons)


class Course:
    """The refresh of one group, from RESET to READY."""

    def __init__(self, topic: ServedTopic, group: Group, host: Host, found: Mapping[str, Any] | None = None) -> None:
        """A new one; or one that was under way, as it was `found` in the state topic."""
        self.group = group
        self.state = State.RESET_SENT
        # Why it was given up.
        self.reason = ""
        # Whether the group went back to the start: then it is owed its READY, whatever happens.
        self._is_reset = False
        # By partition, the offset up to which it is replayed.
        self._until: dict[int, int] = {}
        # Who is there, and who was and is not. Those who are there are asked: None once they have answered.
        self._present: dict[Member, None] = {}
        self._asked: dict[Member, Notice | None] = {}
        self._missing: list[Who] = []
        self._topic = topic.name
        self._topic_id = topic.topic.id
        self._host = host
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if found is None:
            self._look()
        else:
            self.state, self.reason = State(found["state"]), found["reason"]
            self._is_reset = found["is_reset"]
            self._until = dict(found["until"])
            self._missing = [Who(*who) for who in found["members"]]

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def left(self) -> int:
        """How many offsets are to be replayed still."""
        if self.state is not State.REPLAYING:
            return 0
        return sum(max(0, self._until.get(p.partition.number, 0) - p.inflight.floor) for p in self._positions())

    def waits_for(self) -> list[str]:
        """Who is to answer, or to come back."""
        if not self.is_active:
            return []
        unanswered = [_who(member) for member, notice in self._asked.items() if notice is not None]
        if not unanswered and not self._missing and not self._present:
            return ["any member of the group"]
        return [str(who) for who in (*unanswered, *self._missing)]

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
        """A member came or went."""
        is_owed = self.state is State.ABORTED and self._is_reset
        if is_owed and any(map(_is_able, self.group.members)) and (self._task is None or self._task.done()):
            self.start()
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    # Its way.

    async def _supervise(self) -> None:
        try:
            await self._run()
        except _Overdue as overdue:
            await self._abort(str(overdue))
        except Exception as error:  # noqa: BLE001 - a bug of ours ends this refresh only
            self._host.store.health.fault("refresh", f"{self._topic!r} for group {self.group.name!r}", error)
            await self._abort("internal error")

    async def _run(self) -> None:
        if self.state is State.ABORTED:
            # Somebody came back to whom READY is owed.
            await self._enter(State.REPLAYING)
        if self.state in _RESETTING:
            await self._reset()
        if self.state is State.REPLAYING:
            await self._replay()
        assert self.state is State.READY_SENT
        await self._ask(Word.READY)
        await self._enter(State.COMPLETED)

    async def _reset(self) -> None:
        self.group.held.add(self._topic_id)
        await self._ask(Word.RESET)
        # In memory first, and written in the same turn: what else is written of these positions is behind it.
        self.group.restart(self._topic_id)
        self._until = {position.partition.number: position.partition.served for position in self._positions()}
        self._is_reset = True
        await self._enter(State.REPLAYING, with_positions=True)
        self._end()

    async def _replay(self) -> None:
        empty_us: int | None = None
        self.group.watchers[self.wake] = None
        try:
            while True:
                self._woken.clear()
                self._look()
                if not self.left:
                    break
                now_us = self._host.clock.monotonic_us()
                empty_us = None if self._present else (now_us if empty_us is None else empty_us)
                if empty_us is not None and now_us >= empty_us + self._limit_us:
                    raise _Overdue(f"nobody was there for {self._limit_us / 1e6:g} s")
                await self._wait(None if empty_us is None else empty_us + self._limit_us)
        finally:
            del self.group.watchers[self.wake]
        # With the positions: READY must not be remembered better than what it rests upon.
        await self._enter(State.READY_SENT, with_positions=True)

    async def _ask(self, word: Word) -> None:
        """Tell all, those who come meanwhile too, and wait until all of them have answered."""
        self._asked = {}
        until_us = self._host.clock.monotonic_us() + self._limit_us
        while True:
            self._woken.clear()
            self._look()
            for member in self._present:
                if member not in self._asked:
                    self._tell(member, word)
            if self.state is State.RESET_SENT:
                await self._enter(State.WAITING_FOR_ACKS)
                continue
            if self._asked and not any(self._asked.values()) and not self._missing:
                return
            if self._host.clock.monotonic_us() >= until_us:
                raise _Overdue(f"{_listed(self.waits_for())} did not answer {word} within {self._limit_us / 1e6:g} s")
            await self._wait(until_us)

    def _tell(self, member: Member, word: Word) -> None:
        def answered() -> None:
            if self._asked.get(member) is notice:
                self._asked[member] = None
                self.wake()

        notice = self._asked[member] = Notice(word, self._topic, answered)
        assert member.hears is not None
        member.hears(notice)

    def _look(self) -> None:
        """Who came and who went since the last time."""
        members = list(filter(_is_able, self.group.members))
        for member in [member for member in self._present if member not in members]:
            del self._present[member]
            self._asked.pop(member, None)
            if len(self._missing) < MEMBERS_MAX:
                self._missing.append(_who(member))
        for member in members:
            if member not in self._present:
                self._present[member] = None
                back = next((who for who in self._missing if who.name == _who(member).name), None)
                if back is not None:
                    self._missing.remove(back)

    async def _abort(self, reason: str) -> None:
        logger.warning("the refresh of %s for group %s is given up: %s", self._topic, self.group.name, reason)
        await self._enter(State.ABORTED, reason=reason)
        told = [] if self._is_reset else list(self._asked)
        error = RefreshAborted(
            f"the refresh of {self._topic.decode()} was given up, because {reason}: nothing comes again, so keep what"
            " you had before RESET, and subscribe again to go on from there"
        )
        for member in told:
            if member in self.group.members:
                member.sink.fail(member, error)
        self._asked = {}
        self._end()

    async def _enter(self, state: State, *, with_positions: bool = False, reason: str = "") -> None:
        """Write it, and only then be in it."""
        while True:
            # At each try the positions as they are then: the group may have written newer ones in between.
            positions = self.group.changes(self._topic_id) if with_positions else []
            try:
                await self._host.store.write_state([Change(_KIND, self._key, self._to_json(state, reason)), *positions])
                break
            except PenstockError as error:
                logger.error("the refresh of %s cannot go on, tried again: %s", self._topic.decode(), error)
                await self._pause(_RETRY_US)
        self.state, self.reason = state, reason

    def _end(self) -> None:
        """The group is given messages of the topic again."""
        self.group.held.discard(self._topic_id)
        self.group.wake()

    async def _wait(self, until_us: int | None) -> None:
        """Until something happened that may matter, or a moment has come."""
        timer = None if until_us is None else self._host.call_at(until_us, self.wake)
        try:
            await self._woken.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _pause(self, us: int) -> None:
        over = asyncio.Event()
        self._host.call_at(self._host.clock.monotonic_us() + us, over.set)
        await over.wait()

    def _positions(self) -> list[Position]:
        return self.group.positions_of(self._topic_id)

    @property
    def _limit_us(self) -> int:
        return max(position.partition.policy.refresh_wait_ms for position in self._positions()) * 1000

    @property
    def _key(self) -> str:
        return f"{self._topic_id}/{(self.group.name or b'').decode()}"

    def _to_json(self, state: State, reason: str) -> dict[str, Any]:
        return {
            "state": state,
            "reason": reason,
            "is_reset": self._is_reset,
            "until": list(self._until.items()),
            "members": [*map(_who, self._present), *self._missing][:MEMBERS_MAX],
        }


class _Overdue(Exception):
    """Somebody was waited for in vain."""


def _is_able(member: Member) -> bool:
    return member.hears is not None


def _who(member: Member) -> Who:
    return Who(member.sink.name[:_NAME_MAX], member.sink.address)


def _listed(names: Sequence[object]) -> str:
    listed = ", ".join(map(str, names[:_LISTED_MAX]))
    return listed if len(names) <= _LISTED_MAX else f"{listed} and {len(names) - _LISTED_MAX} more"
