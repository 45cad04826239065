"""The commands of groups: SUBSCRIBE, REGISTER_GROUP, JOIN_GROUP, COMMIT_OFFSET and their companions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final

from penstock.awaiting import settled
from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.member import Member
from penstock.broker.start import Start
from penstock.doors.cursus.arguments import group_name, needed, number
from penstock.doors.prefixed import Memberships, topic_of
from penstock.doors.session import Session
from penstock.errors import BadRequest, OffsetOutOfRange, StaleCommit
from penstock.log.policy import PARTITIONS_MAX
from penstock.outcome import Outcome
from penstock.wire.cursus import Command

DEFAULT_GROUP: Final = "default-group"


class Groups:
    def __init__(self, session: Session, memberships: Memberships) -> None:
        self._session = session
        self._broker = session.broker
        self._memberships = memberships
        self.session_us = session.shared.settings.session_timeout_ms * 1000
        # Subscriptions whose messages are sent as batches.
        self.by_name: set[str] = set()

    async def subscribe(self, command: Command) -> str:
        arguments = command.arguments
        topic, name = needed(arguments, "topic"), arguments.get("group", DEFAULT_GROUP)
        consumers = number(arguments, "consumers", "consumers must be a positive integer", default=1)
        if not 0 < consumers <= PARTITIONS_MAX:
            raise BadRequest(f"consumers must be a positive integer, {PARTITIONS_MAX} at the most")
        group = await self.register(topic, name, Start.LATEST)
        membership = group_name(topic, name)
        if membership in self._memberships:
            raise BadRequest(f"subscribed to '{topic}' already")
        if command.is_named:
            self.by_name.add(membership)
        flow = self._session.shared.settings.flow
        await self._memberships.join(
            membership, group, [Member(b"%d" % each, self._session, flow) for each in range(consumers)]
        )
        return f"✅ Subscribed to '{topic}'"

    async def register(self, topic: str, name: str, start: Start) -> Group:
        self._session.authorize_join(group_name(topic, name).encode(), topic.encode())
        topic_of(self._session, topic.encode())
        if not name:
            raise BadRequest("missing group parameter")
        full = group_name(topic, name).encode()
        group = self._broker.groups.get(full)
        if group is None:
            group = await self._broker.groups.create(full, topic.encode(), Mode.PARTITIONED, start=start)
        if group.mode is not Mode.PARTITIONED:
            raise BadRequest(f"the group '{name}' of '{topic}' is a shared one: use another name")
        return group

    async def join(self, arguments: Mapping[str, str]) -> str:
        topic, name, wanted = (needed(arguments, each) for each in ("topic", "group", "member"))
        group = await self.register(topic, name, Start.EARLIEST)
        given = f"{wanted}-{secrets.randbelow(10_000):04d}"
        member = Member(given.encode(), self._session, Flow())
        # It reads with CONSUME.
        member.credit = 0
        self._extend_session(member)
        await self._memberships.join(f"{group_name(topic, name)}/{given}", group, [member])
        return f"OK generation={group.state.generation} member={given} assignments={assignments(group, member)}"

    def member(self, arguments: Mapping[str, str]) -> tuple[Group, Member]:
        """Return the member that a command names. It may be a member of another connection."""
        topic, name, wanted = (needed(arguments, each) for each in ("topic", "group", "member"))
        self._authorize(topic, name)
        group = self._broker.groups.get(group_name(topic, name).encode())
        if group is None:
            raise BadRequest(f"group '{name}' not found")
        for member in group.members:
            if member.sid == wanted.encode() and member.expires_us is not None:
                self._extend_session(member)
                generation = arguments.get("generation", str(group.state.generation))
                if generation != str(group.state.generation):
                    raise StaleCommit(f"GEN_MISMATCH expected={group.state.generation} actual={generation}")
                return group, member
        raise BadRequest(f"member {wanted} not found in group")

    def leave(self, arguments: Mapping[str, str]) -> None:
        """End a membership, which may be of another connection."""
        _, member = self.member(arguments)
        assert isinstance(member.sink, Session), "it joined through one"
        memberships = Memberships(member.sink)
        memberships.leave(memberships.find(member)[0])

    def heard(self, arguments: Mapping[str, str], wait_us: int = 0) -> None:
        """Extend the session of the member that a command names, if any, by the time that it will wait."""
        if "member" not in arguments:
            return
        self._authorize(arguments["topic"], arguments.get("group", ""))
        group = self._broker.groups.get(group_name(arguments["topic"], arguments.get("group", "")).encode())
        for member in group.members if group is not None else ():
            if member.sid == arguments.get("member", "").encode() and member.expires_us is not None:
                self._extend_session(member, wait_us)

    def _authorize(self, topic: str, name: str) -> None:
        self._session.authorize_join(group_name(topic, name).encode(), topic.encode())

    def _extend_session(self, member: Member, wait_us: int = 0) -> None:
        member.expires_us = self._broker.clock.monotonic_us() + wait_us + self.session_us

    async def commit(self, arguments: Mapping[str, str], entries: list[tuple[int, int]]) -> None:
        topic, name = needed(arguments, "topic"), needed(arguments, "group")
        member = None
        if "member" in arguments:
            group, member = self.member(arguments)
        else:
            group = await self.register(topic, name, Start.EARLIEST)
        places = [(self._place(group, partition), partition, offset) for partition, offset in entries]
        for place, partition, offset in places:
            floor = group.positions[place].inflight.floor
            if member is not None and member not in group.state.owners(group.positions[place]):
                raise StaleCommit(f"NOT_OWNER partition={partition} member={arguments['member']}")
            if offset < floor:
                raise BadRequest(f"offset_regression partition={partition} committed={floor} offset={offset}")
        waits = []
        for place, _, offset in places:
            try:
                outcome = Outcome()
                group.commit(place, offset, group.state.generation, outcome)
            except OffsetOutOfRange as error:
                raise BadRequest(f"invalid offset: {error}") from None
            waits.append(settled(outcome))
        await asyncio.gather(*waits)

    def _place(self, group: Group, number: int) -> tuple[int, int]:
        for place, position in group.positions.items():
            if position.partition.number == number:
                return place
        raise BadRequest("invalid partition ID")

    def committed(self, arguments: Mapping[str, str]) -> int:
        topic, name = needed(arguments, "topic"), needed(arguments, "group")
        wanted = number(arguments, "partition", "invalid partition ID")
        self._authorize(topic, name)
        partitions = topic_of(self._session, topic.encode()).partitions
        if wanted >= len(partitions):
            raise BadRequest("invalid partition ID")
        group = self._broker.groups.get(group_name(topic, name).encode())
        return 0 if group is None else group.positions[self._place(group, wanted)].inflight.floor

    def status(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        name, topic = needed(arguments, "group"), arguments.get("topic")
        if topic is not None:
            self._authorize(topic, name)
        checked = self._session.checked
        groups = [
            group
            for group in self._broker.groups
            if topic in (None, group.pattern.decode())
            and (checked is None or checked.shows_group(group.name or b"", group.pattern))
        ]
        found = [group for group in groups if group.name == group_name(group.pattern.decode(), name).encode()]
        if not found:
            raise BadRequest(f"group '{name}' not found")
        if len(found) > 1:
            raise BadRequest(f"group '{name}' is there for {len(found)} topics: say topic=<topic>, too")
        [group] = found
        return {
            "group_name": name,
            "topic_name": group.pattern.decode(),
            "state": "Stable" if group.members else "Empty",
            "generation": group.state.generation,
            "member_count": len(group.members),
            "partition_count": len(group.positions),
            "members": [
                {"member_id": member.sid.decode(errors="replace"), "assignments": _partitions_of(group, member)}
                for member in group.members
            ],
        }


def _partitions_of(group: Group, member: Member) -> list[int]:
    positions = sorted(group.positions.values(), key=lambda position: position.partition.number)
    return [position.partition.number for position in positions if member in group.state.owners(position)]


def assignments(group: Group, member: Member) -> str:
    return f"[{','.join(map(str, _partitions_of(group, member)))}]"
