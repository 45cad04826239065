"""All groups: joining, creating, resetting and deleting them, and the memory for their positions."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.awaiting import settled
from penstock.broker.group import Group, GroupHost
from penstock.broker.group_state import Mode
from penstock.broker.inflight import PositionRecord
from penstock.broker.member import Member
from penstock.broker.partition import Partition
from penstock.broker.start import Begin, Start, offset_of, offsets_of
from penstock.broker.subscriptions import Members
from penstock.broker.topic import ServedTopic, Topics, is_reserved
from penstock.errors import (
    BadSubject,
    GroupConflict,
    PenstockError,
    TooManyGroups,
    TooManyTopics,
    UnknownGroup,
    UnknownTopic,
)
from penstock.health import Usage
from penstock.model.subject import check_group_name, is_readable, matches
from penstock.outcome import Outcome
from penstock.store.meta import Change

if TYPE_CHECKING:
    from penstock.broker.refresh import Refreshes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GroupsHost(GroupHost, Protocol):
    """The broker, as far as the table of groups needs it."""

    topics: Topics
    refreshes: Refreshes

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T: ...

    def dead_letters_of(self, group: Group) -> ServedTopic | None: ...


class Groups:
    """It has more than 25 methods because it is also a mapping of groups by name."""

    def __init__(self, host: GroupsHost, members: Members, groups_max: int) -> None:
        self._host = host
        self._members = members
        self._groups_max = groups_max
        self._named: dict[bytes, Group] = {}
        # With those that have no name, which end with their last member.
        self.all: dict[Group, None] = {}
        # Named groups that are being created.
        self._creating: dict[bytes, asyncio.Future[None]] = {}

    def get(self, name: bytes) -> Group | None:
        return self._named.get(name)

    def __getitem__(self, name: bytes) -> Group:
        """Return a group. Raises UnknownGroup."""
        found = self._named.get(name)
        if found is None:
            raise UnknownGroup(f"there is no group {name.decode(errors='replace')}")
        return found

    def __contains__(self, name: bytes) -> bool:
        return name in self._named

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups that have a name."""
        return iter(self._named.values())

    def __len__(self) -> int:
        return len(self._named)

    @property
    def usage(self) -> Usage:
        return Usage(len(self._named) + len(self._creating), self._groups_max)

    def reading(self, partition: Partition) -> list[Group]:
        return [group for group in self.all if partition.place in group.positions]

    def served(self, subject: bytes) -> list[Group]:
        """Return the groups with a member that gets what is published under a subject now."""
        return [group for group in self.all if group.members and matches(group.pattern, subject)]

    # Members.

    async def join(
        self,
        name: bytes | None,
        pattern: bytes,
        member: Member,
        mode: Mode = Mode.SHARED,
        *,
        start: Begin = Start.LATEST,
    ) -> Group:
        """Add `member` to a group, or to a new one without a name. A group that does not exist is created, and begins
        at `start`."""
        self._members.check()
        if name is None:
            group = self._begin_unnamed(pattern, mode)
        else:
            creating = self._creating.get(name)
            if creating is not None:
                await asyncio.shield(creating)
            group = self._named.get(name) or await self.create(name, pattern, mode, start=start)
            if (group.pattern, group.mode) != (pattern, mode):
                raise GroupConflict(
                    f"the group {name.decode()} is {group.mode} and reads {group.pattern.decode()}: use another name"
                )
            self._host.refreshes.check(group, member)
            if member.on_refresh is not None and not group.refreshes:
                self._remember_refreshes(group)
        # Checked again: others may have come while the group was created.
        self._members.add(member, pattern)
        group.join(member)
        self._host.refreshes.changed(group)
        return group

    def leave(self, group: Group, member: Member) -> None:
        self._members.remove(member)
        group.leave(member)
        self._host.refreshes.changed(group)
        if group.name is None and not group.members:
            del self.all[group]
            group.stop()

    def _begin_unnamed(self, pattern: bytes, mode: Mode) -> Group:
        group = Group(None, pattern, mode, self._host)
        self._check_positions(group)
        self.all[group] = None
        self._attach(group, {partition: partition.served for partition in self._host.topics.matching(pattern)})
        group.dispatcher.start()
        return group

    def _remember_refreshes(self, group: Group) -> None:
        """Wait for the members of this group in every refresh from now on. The write is not awaited: a member that
        joins again says so again."""
        assert group.name is not None
        group.refreshes = True
        try:
            self._host.store.state.write([Change("group", group.name.decode(), _describe(group))])
        except PenstockError as error:
            logger.warning("cannot store that group %s takes part in refreshes: %s", group.name.decode(), error)

    # Changes.

    async def create(
        self, name: bytes, pattern: bytes, mode: Mode = Mode.SHARED, *, start: Begin = Start.LATEST
    ) -> Group:
        """Create a group that is remembered, with its positions."""
        if not is_readable(pattern):
            raise BadSubject(f"{pattern.decode(errors='replace')!r} is not a pattern")
        check_group_name(name)
        if name in self._named or name in self._creating:
            raise GroupConflict(f"the group {name.decode()} already exists")
        count = len(self._named) + len(self._creating)
        if count >= self._groups_max:
            raise TooManyGroups(
                f"there are {count} groups, so {name.decode()} is not created: delete some, or raise server.groups_max"
            )
        created: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creating[name] = created
        group = Group(name, pattern, mode, self._host, secrets.token_hex(8))
        await self._host.to_its_end(self._store(group, start, created))
        return group

    async def _store(self, group: Group, start: Begin, created: asyncio.Future[None]) -> None:
        assert group.name is not None
        try:
            await self._write(group, start)
            self._named[group.name] = group
            group.dispatcher.start()
        finally:
            del self._creating[group.name]
            created.set_result(None)

    async def _write(self, group: Group, start: Begin) -> None:
        assert group.name is not None
        offsets = await offsets_of(start, self._host.topics.matching(group.pattern))
        self._check_positions(group)
        # Topics that are created from now on are for the group too; it can be joined when it is stored.
        self.all[group] = None
        self._attach(group, offsets)
        changes = [Change("group", group.name.decode(), _describe(group))]
        changes += group.writer.snapshots(group.positions.values())
        try:
            await self._host.store.write_state(changes)
        except BaseException:
            del self.all[group]
            group.stop()
            raise

    async def reset(
        self, name: bytes, start: Begin, *, topic: bytes | None = None, partition: int | None = None
    ) -> None:
        """Move a group to another place, in all that it reads or in a part of it. Wait until that is stored."""
        group = self[name]
        if topic is not None:
            self._host.topics.named(topic)
        chosen = [
            position.partition
            for position in group.positions.values()
            if topic in (None, position.partition.name) and partition in (None, position.partition.number)
        ]
        if not chosen:
            raise UnknownTopic(f"the group {name.decode()} reads nothing of that kind")
        offsets = {each: await offset_of(start, each) for each in chosen}
        waits = []
        for each, offset in offsets.items():
            outcome = Outcome()
            group.reset(each.place, offset, outcome)
            waits.append(settled(outcome))
        await asyncio.gather(*waits)

    async def delete(self, name: bytes) -> None:
        await self._host.to_its_end(self._delete(name))

    async def _delete(self, name: bytes) -> None:
        group = self[name]
        del self._named[name]
        del self.all[group]
        group.stop()
        for member in list(group.members):
            member.sink.fail(member, UnknownGroup(f"the group {name.decode()} was deleted"))
        changes = [Change("group", name.decode(), None)]
        changes += group.writer.removals(position.partition for position in group.positions.values())
        changes += self._host.refreshes.forget_group(group)
        await self._host.store.write_state(changes)
        for position in group.positions.values():
            self.forget_letters(group, position.partition)

    def forget_letters(self, group: Group, origin: Partition) -> None:
        """The group stores no more dead letters of a partition."""
        topic = self._host.dead_letters_of(group)
        if topic is not None:
            group.dead_letters.forget(origin, topic)

    # Positions.

    def restore(self, name: str, value: dict[str, Any]) -> None:
        """Open a group as it was when the broker stopped."""
        pattern, mode = value["pattern"].encode(), Mode(value["mode"])
        group = self._named[name.encode()] = Group(name.encode(), pattern, mode, self._host, value["identity"])
        group.refreshes = value.get("refreshes", False)
        self.all[group] = None
        for partition in self._host.topics.matching(pattern):
            group.attach(partition, partition.start, self._position_records(group.writer.key(partition)))

    def _position_records(self, key: str) -> list[PositionRecord]:
        state = self._host.store.state
        whole = state.get("position", key)
        return [] if whole is None else [whole, *state.additions("position", key)]

    def add_partition(self, partition: Partition) -> None:
        """Let the groups that match it read a new partition: all of it, because they are older."""
        for group in self.all:
            if group.matches(partition.name) and not is_reserved(partition.name):
                group.attach(partition, partition.start)

    def _attach(self, group: Group, offsets: Mapping[Partition, int]) -> None:
        """Let a group read all that matches, from these offsets; partitions without one from their beginning."""
        for partition in self._host.topics.matching(group.pattern):
            group.attach(partition, offsets.get(partition, partition.start))

    def _check_positions(self, group: Group) -> None:
        count, budget = len(self._host.topics.matching(group.pattern)), self._host.position_budget
        if not budget.fits(count * group.position_bytes):
            raise TooManyGroups(
                f"there is no room for {count} positions of a group that reads {group.pattern.decode()}: positions use "
                f"{budget.usage.used} of {budget.usage.limit} bytes: delete groups that nobody uses, or raise "
                "server.position_bytes_max"
            )

    @contextmanager
    def reserve_positions(self, name: bytes, partitions: int) -> Iterator[None]:
        """Reserve memory for new partitions of a topic: each group that reads it needs a position in each."""
        groups = [group for group in self.all if group.matches(name) and not is_reserved(name)]
        size, budget = partitions * sum(group.position_bytes for group in groups), self._host.position_budget
        if not budget.fits(size):
            raise TooManyTopics(
                f"topic {name.decode()} cannot get {partitions} partitions: {len(groups)} groups read it, and their "
                f"positions use {budget.usage.used} of {budget.usage.limit} bytes: delete groups that nobody "
                "uses, or raise server.position_bytes_max"
            )
        budget.take(size)
        try:
            yield
        finally:
            # The positions that were created have taken it.
            budget.give_back(size)


def _describe(group: Group) -> dict[str, Any]:
    """Return what is remembered of a group."""
    return {
        "pattern": group.pattern.decode(),
        "mode": group.mode,
        "identity": group.identity,
        "refreshes": group.refreshes,
    }
