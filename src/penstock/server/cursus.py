"""Cursus' commands, for one connection, one after the other.

A command is written with its arguments in order, as in Cursus' documents, or with their names. Asked in order, messages
come as they are, one in each frame; asked by name, they come in batches, which tell offsets and keys. A CONSUME in
order ends with the connection, because nothing else could say that no more come; one that follows goes on until the
next command, if it is not refused.

A group is one of Penstock's, named `<topic>:<group>`, and partition p belongs to consumer p % consumers. SUBSCRIBE
makes this connection one or more of them: what it is sent is done. JOIN_GROUP makes it one that reads with CONSUME,
and says with COMMIT_OFFSET what is done. A member that joined and says nothing more loses its partitions after the
session timeout, though its connection lasts; one that subscribed has them as long as its connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.address import join
from penstock.broker.flow import Flow
from penstock.broker.group import Group, Mode
from penstock.broker.intake import Receipt, Stored
from penstock.broker.member import Member, Place
from penstock.broker.partition import Partition
from penstock.broker.start import Start
from penstock.broker.topic import ServedTopic
from penstock.errors import BadRequest, OffsetOutOfRange, PenstockError, StaleCommit, Unauthorized, UnknownTopic
from penstock.headers import lines
from penstock.run import Run, payload_bytes
from penstock.server import calls
from penstock.server.gate import credentials
from penstock.server.pending_replies import SLICE_MESSAGES
from penstock.storage.log import State
from penstock.storage.policy import PARTITIONS_MAX
from penstock.storage.store import outcome
from penstock.wire import prefixed
from penstock.wire.prefixed import Command, Packing, Records

if TYPE_CHECKING:
    from penstock.server.prefixed import Frame, PrefixedSession

logger = logging.getLogger(__name__)

DEFAULT_GROUP: Final = "default-group"
DEFAULT_PARTITIONS: Final = 4
# What one CONSUME by name gives, as that is one batch: messages, and about so many bytes of them.
BATCH_MESSAGES_MAX: Final = prefixed.RECORDS_MAX
BATCH_BYTES_MAX: Final = 16 << 20
WAIT_MS_MAX: Final = 60_000
# A frame that is longer, or packed, is read in a worker.
INLINE_BYTES_MAX: Final = 64 << 10
# Whoever waits for messages hears this often that the server is there, at the least.
KEEP_ALIVE_S: Final = 5.0

_KEEP_ALIVE: Final = prefixed.frame(b"")
_STREAMS: Final = ("CONSUME", "STREAM")
_HOUR_MS: Final = 3_600_000


class Cursus:
    def __init__(self, session: PrefixedSession) -> None:
        self._session = session
        self._broker = session.broker
        self._packing = Packing.NONE
        config = session.server.config.server
        self._session_us = config.session_timeout_ms * 1000
        self._keep_alive_s = min(KEEP_ALIVE_S, config.heartbeat_s, config.session_timeout_ms / 2000)
        # What it is sent as batches, of what it has subscribed to.
        self._by_name: set[str] = set()
        # A CONSUME that goes on.
        self._following: asyncio.Task[None] | None = None

    def credentials(self, frame: Frame) -> Mapping[str, Any] | None:
        command = _auth(frame)
        return None if command is None else credentials(command.arguments)

    def deny(self, frame: Frame) -> None:
        if _auth(frame) is None:
            self._say_error(Unauthorized("say AUTH user=<user> password=<password>, or AUTH token=<token>, first"))
        else:
            self._say_error(Unauthorized("the broker does not know this user or token"))

    def do(self, frames: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        self._stop_following()
        frame = frames.popleft()
        assert isinstance(frame, bytes), "the dialect is Cursus"
        if prefixed.is_packed(frame) or len(frame) > INLINE_BYTES_MAX:
            return self._do_later(frame, frames)
        try:
            request, packing = _read(frame)
        except PenstockError as error:
            self._say_error(error)
            return None
        return self._do(request, packing, frames)

    async def _do_later(self, frame: bytes, frames: deque[Frame]) -> None:
        """As `do`, for a frame that takes a while to unpack and read."""
        try:
            request, packing = await self._session.server.work(_read, frame)
        except PenstockError as error:
            self._say_error(error)
            return
        await self._do(request, packing, frames)

    def _do(
        self, request: Command | Records, packing: Packing | None, frames: deque[Frame]
    ) -> Coroutine[Any, Any, None]:
        if packing is not None:
            self._packing = packing
        if not isinstance(request, Command):
            return self._answer_later(self._publish_batch(request))
        if request.verb == "PUBLISH":
            return self._answer_later(self._publish(request, frames))
        return self._answer_later(self._run(request), ends=request.verb in _STREAMS and not request.is_named)

    async def _run(self, command: Command) -> None:
        arguments = command.arguments
        match command.verb:
            case "CREATE":
                self._say(await self._create(arguments))
            case "DELETE":
                self._say(await self._delete(arguments))
            case "LIST":
                names = sorted(topic.topic.name for topic in self._broker.topics if not topic.is_internal)
                self._say(", ".join(names) or "(no topics)")
            case "DESCRIBE":
                self._say_json(self._describe(arguments))
            case "SUBSCRIBE":
                self._say(await self._subscribe(command))
            case "CONSUME":
                await self._consume(command)
            case "STREAM":
                self._follow(command)
            case "REGISTER_GROUP":
                topic, name = _needed(arguments, "topic"), _needed(arguments, "group")
                await self._group(topic, name, Start.EARLIEST)
                self._say(f"✅ Group '{name}' registered for topic '{topic}'")
            case "JOIN_GROUP":
                self._say(await self._join(arguments))
            case "SYNC_GROUP":
                group, member = self._member(arguments)
                self._say(f"OK assignments={_assignments(group, member)}")
            case "LEAVE_GROUP":
                _, member = self._member(arguments)
                owner = cast("PrefixedSession", member.sink)
                owner.leave(owner.group_of(member)[0])
                self._say(f"✅ Left group '{arguments['group']}'")
            case "HEARTBEAT":
                self._member(arguments)
                self._say("OK")
            case "COMMIT_OFFSET":
                entry = (_number(arguments, "partition", "invalid partition ID"), _offset(arguments))
                await self._commit(arguments, [entry])
                self._say("OK")
            case "BATCH_COMMIT":
                entries = _read_offsets(_needed(arguments, "offsets"))
                self._member(arguments)
                await self._commit(arguments, entries)
                self._say(f"OK batched={len(entries)}")
            case "FETCH_OFFSET":
                self._say(str(await self._committed(arguments)))
            case "GROUP_STATUS":
                self._say_json(self._status(arguments))
            case "AUTH":
                self._say("OK")
            case "HELP":
                self._say("\n".join(["Available commands:", *(f"  {prefixed.usage(verb)}" for verb in prefixed.VERBS)]))
            case "EXIT":
                self._session.peer.close()

    # Topics.

    async def _create(self, arguments: Mapping[str, str]) -> str:
        name = _needed(arguments, "topic")
        wrong = "partitions must be a positive integer"
        partitions = _number(arguments, "partitions", wrong, default=DEFAULT_PARTITIONS)
        if not 0 < partitions <= PARTITIONS_MAX:
            raise BadRequest(f"{wrong}, {PARTITIONS_MAX} at the most")
        policy: dict[str, int] = {}
        if hours := _number(arguments, "retention_hours", "retention_hours must be an integer", default=0):
            policy["retain_ms"] = hours * _HOUR_MS
        if size := _number(arguments, "retention_bytes", "retention_bytes must be an integer", default=0):
            policy["retain_bytes"] = size
        there = self._broker.topics.get(name.encode())
        if there is not None:
            partitions = max(partitions, there.topic.partitions)
        call = "create_topic" if there is None else "alter_topic"
        request = {"call": call, "name": name, "partitions": partitions, "policy": policy}
        topic = await calls.call(self._session.server, request)
        return f"✅ Topic '{name}' now has {topic['partitions']} partitions"

    async def _delete(self, arguments: Mapping[str, str]) -> str:
        name = _needed(arguments, "topic")
        try:
            await self._broker.delete_topic(name.encode())
        except UnknownTopic:
            raise UnknownTopic(f"topic '{name}' not found") from None
        return f"🗑️ Topic '{name}' deleted"

    def _describe(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        topic = self._session.topic_of(_needed(arguments, "topic").encode())
        here = self._address
        return {
            "status": "OK",
            "topic": topic.topic.name,
            "partitions": [
                {
                    "id": partition.number,
                    "leader": here,
                    "replicas": [here],
                    "isr": [here],
                    "leo": partition.end,
                    "hwm": partition.log.committed,
                }
                for partition in topic.partitions
            ],
        }

    @property
    def _address(self) -> str:
        server = self._session.server
        return join(server.hosts[0], server.ports.get("quiet", 0))

    # In.

    async def _publish(self, command: Command, frames: deque[Frame]) -> None:
        """This one and those right behind it go together; each has its answer, in order."""
        run = Run([], [])
        # The index in the run of each that is in it, or why it is not.
        outcomes: list[tuple[Command, int | PenstockError]] = []
        # Topics that messages can go to, so that each is looked up once.
        known: dict[str, bytes] = {}
        following: Command | None = command
        while following is not None:
            try:
                self._add(run, following, known)
                outcomes.append((following, len(run) - 1))
            except PenstockError as error:
                outcomes.append((following, error))
            is_full = run.partition is not None or len(outcomes) >= SLICE_MESSAGES
            following = None if is_full else self._next_publish(frames, command)
        stored = await self._store_as(_claim(command), run) if run.values else []
        parts = []
        for asked, found in outcomes:
            parts.append(self._packed(_told(asked, stored[found] if isinstance(found, int) else found, self._address)))
        self._session.peer.answer(b"".join(parts))

    def _next_publish(self, frames: deque[Frame], first: Command) -> Command | None:
        """Take the next command, if it publishes, to wherever the broker wants and as the same producer as the
        first."""
        if not frames or not isinstance(frames[0], bytes) or not frames[0].startswith(b"PUBLISH "):
            return None
        try:
            command = prefixed.read_command(frames[0])
            if "partition" in command.arguments or _claim(command) != _claim(first):
                return None
        except PenstockError:
            return None
        frames.popleft()
        return command

    def _add(self, run: Run, command: Command, known: dict[str, bytes]) -> None:
        arguments = command.arguments
        topic = _needed(arguments, "topic")
        if topic not in known:
            self._session.topic_of(topic.encode())
            known[topic] = topic.encode()
        size = sum(len(arguments.get(name, "").encode()) for name in ("key", "producerId"))
        self._session.check_size(len(command.message), size)
        index = len(run)
        if command.is_named:
            self._add_named(run, index, arguments)
        run.subjects.append(known[topic])
        run.values.append(command.message)

    def _add_named(self, run: Run, index: int, arguments: Mapping[str, str]) -> None:
        """What can only be said by name."""
        if arguments.get("acks", "1") not in ("0", "1", "-1", "all"):
            raise BadRequest("invalid acks: 0, 1, -1 or all")
        sequence, _ = _sequence(arguments), _epoch(arguments)
        partition = _number(arguments, "partition", "invalid partition ID") if "partition" in arguments else None
        claim = _claim_of(arguments)
        if claim is not None:
            run.headers[index] = _identity(claim, sequence)
        if "key" in arguments:
            run.keys[index] = arguments["key"].encode()
        run.partition = partition

    async def _publish_batch(self, records: Records) -> None:
        """A producer's batch: all of it, or what is not stored is told."""
        self._session.topic_of(records.topic)
        if len(records.records) > SLICE_MESSAGES:
            run, claim = await self._session.server.work(_run, records, self._session.check_size)
        else:
            run, claim = _run(records, self._session.check_size)
        stored = await self._store_as(claim, run) if run.values else []
        failure = next((each for each in stored if isinstance(each, PenstockError)), None)
        if failure is not None:
            raise failure
        if records.acks == "0":
            self._say("OK")
            return
        offsets = [each.offset for each in stored if isinstance(each, Stored)]
        first, last = (records.records[0], records.records[-1]) if records.records else (None, None)
        self._say_json(
            {
                "status": "OK",
                "last_offset": max(offsets, default=0),
                "producer_id": first.producer.decode(errors="replace") if first else "",
                "producer_epoch": first.epoch if first else 0,
                "seq_start": first.sequence if first else 0,
                "seq_end": last.sequence if last else 0,
                "leader": self._address,
            }
        )

    async def _store_as(self, claim: Claim | None, run: Run) -> list[Stored | PenstockError]:
        """As `_store`; all of it is refused if a producer under a newer epoch has taken over."""
        if claim is None:
            return await self._store(run)
        topic = self._session.topic_of(claim.topic)
        try:
            async with self._broker.epochs.publishing(topic.topic.id, claim.producer, claim.epoch):
                return await self._store(run)
        except PenstockError as error:
            self._session.refused_publishes(len(run), error)
            return [error] * len(run)

    async def _store(self, run: Run) -> list[Stored | PenstockError]:
        """What became of each message, when it is decided."""
        decided: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        waits = self._session.publish(run, decided.set_result)
        if waits is not None:
            await waits
        return (await decided).stored()

    # Out: SUBSCRIBE.

    async def _subscribe(self, command: Command) -> str:
        arguments = command.arguments
        topic, name = _needed(arguments, "topic"), arguments.get("group", DEFAULT_GROUP)
        consumers = _number(arguments, "consumers", "consumers must be a positive integer", default=1)
        if not 0 < consumers <= PARTITIONS_MAX:
            raise BadRequest(f"consumers must be a positive integer, {PARTITIONS_MAX} at the most")
        group = await self._group(topic, name, Start.LATEST)
        membership = _group_name(topic, name)
        if membership in self._session.memberships:
            raise BadRequest(f"subscribed to '{topic}' already")
        if command.is_named:
            self._by_name.add(membership)
        flow = self._session.server.flow
        await self._session.join(
            membership, group, [Member(b"%d" % number, self._session, flow) for number in range(consumers)]
        )
        return f"✅ Subscribed to '{topic}'"

    def send(self, member: Member, place: Place, run: Run, _attempts: Mapping[int, int] | None) -> None:
        name, group = self._session.group_of(member)
        by_name = name in self._by_name
        self._session.send_in_turn(run, partial(self._write_run, place.name, place.number, run, by_name=by_name))
        with suppress(StaleCommit):
            # It is shared out anew, and whoever has the partition now gets this again.
            group.commit((place.topic_id, place.number), run.end, group.generation, _nobody_asked)

    def fail(self, member: Member, error: PenstockError) -> None:
        name, _ = self._session.group_of(member)
        self._session.leave(name)
        self._say_error(error)

    def _write_run(self, topic: bytes, partition: int, run: Run, *, by_name: bool) -> None:
        self._session.peer.write(_encode(topic, partition, run, self._packing, by_name=by_name))

    async def _write_slowly(self, partition: Partition, run: Run, *, by_name: bool) -> None:
        """As `_write_run`, of what may be as large as it likes."""
        arguments = (partition.name, partition.number, run, self._packing)
        self._session.peer.write(await self._session.server.work(_encode, *arguments, by_name=by_name))

    # Out: CONSUME.

    async def _consume(self, command: Command) -> None:
        arguments = command.arguments
        match arguments.get("follow", "false").lower():
            case "follow" | "tail" | "true":
                self._follow(command)
                return
            case "false":
                pass
            case _:
                raise BadRequest(f"invalid CONSUME syntax. Expected: {prefixed.usage('CONSUME')}")
        partitions = self._partitions(command)
        count = _number(arguments, "batch", "invalid batch", default=BATCH_MESSAGES_MAX)
        wait_ms = min(_number(arguments, "wait_ms", "invalid wait_ms", default=0), WAIT_MS_MAX)
        self._hear(arguments, wait_ms * 1000)
        places = [(partition, self._begin(partition, arguments)) for partition in partitions]
        sent = await self._send_ranges(places, count, command)
        if not sent and wait_ms:
            await _any_grown(places, wait_ms)
            sent = await self._send_ranges(places, count, command)
        if not command.is_named:
            self._session.peer.close()
        elif not sent:
            self._write_run(partitions[0].name, partitions[0].number, Run([], []), by_name=True)

    async def _send_ranges(self, places: list[tuple[Partition, int]], count: int, command: Command) -> int:
        if command.is_named:
            count_max = min(max(1, count), BATCH_MESSAGES_MAX)
            return sum([await self._send_batch(partition, offset, count_max) for partition, offset in places])
        return sum([await self._send_all(partition, offset) for partition, offset in places])

    async def _send_batch(self, partition: Partition, offset: int, count_max: int) -> int:
        """Send one batch of what there is from an offset on, up to so many; return how many those are."""
        gathered = Run([], [])
        offsets: list[int] = []
        size = 0
        while len(offsets) < count_max and size < BATCH_BYTES_MAX and not self._session.peer.is_closing:
            found = await partition.read(offset)
            if found is None:
                break
            run, offset = found.run, found.following
            self._broker.figures.expired += len(found.expired)
            if len(offsets) + len(run) > count_max:
                run = run.select(range(count_max - len(offsets)))
            if run.values:
                size += payload_bytes(run)
                gathered.extend(run)
                offsets += run.all_offsets()
        if offsets:
            gathered.base_offset, gathered.offsets = offsets[0], offsets
            await self._write_slowly(partition, gathered, by_name=True)
            self._count_sent(partition, gathered)
        return len(offsets)

    async def _send_all(self, partition: Partition, offset: int) -> int:
        """Send all that there is now from an offset on, as fast as the client takes it; return how many those are."""
        until = partition.served
        sent = 0
        while offset < until and not self._session.peer.is_closing:
            found = await partition.read(offset)
            if found is None:
                break
            run, offset = found.run, found.following
            self._broker.figures.expired += len(found.expired)
            run = run.below(until) if run.values else run
            if run.values:
                await self._write_slowly(partition, run, by_name=False)
                self._count_sent(partition, run)
                sent += len(run)
                await self._session.peer.drained()
        return sent

    def _count_sent(self, partition: Partition, run: Run) -> None:
        self._session.peer.count_sent(len(run), payload_bytes(run))
        partition.sent += len(run)

    def _partitions(self, command: Command) -> list[Partition]:
        """Of the topic that is asked for, or of those whose names match."""
        name = _needed(command.arguments, "topic")
        number = _number(command.arguments, "partition", "invalid partition ID")
        topics: Iterable[ServedTopic]
        if len(name) > prefixed.PATTERN_CHARS_MAX:
            raise BadRequest(f"a topic has at most {prefixed.PATTERN_CHARS_MAX} characters here")
        if "*" in name or "?" in name:
            pattern = re.compile(".*".join(".".join(map(re.escape, part.split("?"))) for part in name.split("*")))
            topics = [
                topic
                for topic in self._broker.topics
                if not topic.is_internal and topic.refusal is None and pattern.fullmatch(topic.topic.name)
            ]
        else:
            topics = [self._session.topic_of(name.encode())]
        found = [topic.partitions[number] for topic in topics if number < len(topic.partitions)]
        if not topics:
            raise UnknownTopic(f"topic '{name}' does not exist")
        if not found:
            raise BadRequest("invalid partition ID")
        return found

    def _begin(self, partition: Partition, arguments: Mapping[str, str]) -> int:
        """An offset that is asked for; else where the group has come to; else what it says for that case."""
        offset = _offset(arguments, default=0)
        if offset:
            return offset
        group = self._broker.groups.get(_group_name(partition.name.decode(), arguments.get("group", "")).encode())
        position = group.positions.get((partition.topic_id, partition.number)) if group is not None else None
        if position is not None:
            return position.inflight.floor
        return partition.served if arguments.get("autoOffsetReset", "").lower() == "latest" else 0

    # Out: CONSUME that follows, and STREAM.

    def _follow(self, command: Command) -> None:
        partitions = self._partitions(command)
        if len(partitions) > 1:
            raise BadRequest("one topic can be followed, not several")
        self._hear(command.arguments)
        begin = self._begin(partitions[0], command.arguments)
        by_name = command.is_named or command.verb == "STREAM"
        self._following = self._session.spawn(self._supervise(partitions[0], begin, by_name=by_name))

    async def _supervise(self, partition: Partition, offset: int, *, by_name: bool) -> None:
        try:
            await self._stream(partition, offset, by_name=by_name)
        except PenstockError as error:
            self._say_error(error)
            self._session.peer.close()

    async def _stream(self, partition: Partition, offset: int, *, by_name: bool) -> None:
        peer = self._session.peer
        while not peer.is_closing:
            await peer.drained()
            found = await partition.read(offset)
            if found is not None:
                run, offset = found.run, found.following
                self._broker.figures.expired += len(found.expired)
                if run.values:
                    await self._write_slowly(partition, run, by_name=by_name)
                    self._count_sent(partition, run)
                continue
            if partition.log.state is State.CLOSED:
                if by_name:
                    self._say(f"STREAM_CONTROL type=CLOSE reason=removed offset={offset}")
                peer.close()
                return
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await partition.grown(offset)
            except TimeoutError:
                peer.write(_KEEP_ALIVE)

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    # Groups that read for themselves.

    async def _group(self, topic: str, name: str, start: Start) -> Group:
        self._session.topic_of(topic.encode())
        full = _group_name(topic, name).encode()
        group = self._broker.groups.get(full)
        if group is None:
            group = await self._broker.create_group(full, topic.encode(), Mode.PARTITIONED, start=start)
        if group.mode is not Mode.PARTITIONED:
            raise BadRequest(f"the group '{name}' of '{topic}' is a shared one: use another name")
        return group

    async def _join(self, arguments: Mapping[str, str]) -> str:
        topic, name, wanted = (_needed(arguments, each) for each in ("topic", "group", "member"))
        group = await self._group(topic, name, Start.EARLIEST)
        given = f"{wanted}-{secrets.randbelow(10_000):04d}"
        member = Member(given.encode(), self._session, Flow())
        # It is pushed nothing.
        member.credit = 0
        self._live_on(member)
        await self._session.join(f"{_group_name(topic, name)}/{given}", group, [member])
        return f"OK generation={group.generation} member={given} assignments={_assignments(group, member)}"

    def _member(self, arguments: Mapping[str, str]) -> tuple[Group, Member]:
        """Whoever asks: a client may say HEARTBEAT over another connection."""
        topic, name, wanted = (_needed(arguments, each) for each in ("topic", "group", "member"))
        group = self._broker.groups.get(_group_name(topic, name).encode())
        if group is None:
            raise BadRequest(f"group '{name}' not found")
        for member in group.members:
            if member.sid == wanted.encode() and member.expires_us is not None:
                self._live_on(member)
                generation = arguments.get("generation", str(group.generation))
                if generation != str(group.generation):
                    raise StaleCommit(f"GEN_MISMATCH expected={group.generation} actual={generation}")
                return group, member
        raise BadRequest(f"member {wanted} not found in group")

    def _hear(self, arguments: Mapping[str, str], wait_us: int = 0) -> None:
        """A command that may name a member says that it is alive, and will be silent while it waits."""
        group = self._broker.groups.get(_group_name(arguments["topic"], arguments.get("group", "")).encode())
        for member in group.members if group is not None else ():
            if member.sid == arguments.get("member", "").encode() and member.expires_us is not None:
                self._live_on(member, wait_us)

    def _live_on(self, member: Member, wait_us: int = 0) -> None:
        member.expires_us = self._broker.clock.monotonic_us() + wait_us + self._session_us

    async def _commit(self, arguments: Mapping[str, str], entries: list[tuple[int, int]]) -> None:
        topic, name = _needed(arguments, "topic"), _needed(arguments, "group")
        member = None
        if "member" in arguments:
            group, member = self._member(arguments)
        else:
            group = await self._group(topic, name, Start.EARLIEST)
        places = [(self._place(group, number), number, offset) for number, offset in entries]
        for place, number, offset in places:
            floor = group.positions[place].inflight.floor
            if member is not None and member not in group.owner(group.positions[place]):
                raise StaleCommit(f"NOT_OWNER partition={number} member={arguments['member']}")
            if offset < floor:
                raise BadRequest(f"offset_regression partition={number} committed={floor} offset={offset}")
        waits = []
        for place, _, offset in places:
            settled, done = outcome()
            try:
                group.commit(place, offset, group.generation, partial(done, offset))
            except OffsetOutOfRange as error:
                raise BadRequest(f"invalid offset: {error}") from None
            waits.append(settled)
        await asyncio.gather(*waits)

    def _place(self, group: Group, number: int) -> tuple[int, int]:
        for place, position in group.positions.items():
            if position.partition.number == number:
                return place
        raise BadRequest("invalid partition ID")

    async def _committed(self, arguments: Mapping[str, str]) -> int:
        topic, name = _needed(arguments, "topic"), _needed(arguments, "group")
        number = _number(arguments, "partition", "invalid partition ID")
        partitions = self._session.topic_of(topic.encode()).partitions
        if number >= len(partitions):
            raise BadRequest("invalid partition ID")
        group = self._broker.groups.get(_group_name(topic, name).encode())
        return 0 if group is None else group.positions[self._place(group, number)].inflight.floor

    def _status(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        name, topic = _needed(arguments, "group"), arguments.get("topic")
        groups = [group for group in self._broker.groups.values() if topic in (None, group.pattern.decode())]
        found = [group for group in groups if group.name == _group_name(group.pattern.decode(), name).encode()]
        if not found:
            raise BadRequest(f"group '{name}' not found")
        if len(found) > 1:
            raise BadRequest(f"group '{name}' is there for {len(found)} topics: say topic=<topic>, too")
        [group] = found
        return {
            "group_name": name,
            "topic_name": group.pattern.decode(),
            "state": "Stable" if group.members else "Empty",
            "generation": group.generation,
            "member_count": len(group.members),
            "partition_count": len(group.positions),
            "members": [
                {"member_id": member.sid.decode(errors="replace"), "assignments": _partitions_of(group, member)}
                for member in group.members
            ],
        }

    # Answers.

    def refuse(self, error: PenstockError) -> None:
        self._say_error(error)

    def beat(self, _silent_s: float) -> float:
        now_us = self._broker.clock.monotonic_us()
        for name, [(member, group), *_] in list(self._session.memberships.items()):
            if member.expires_us is not None and member.expires_us <= now_us:
                logger.warning(
                    "group %s: the member %s of %s was silent for %d ms and loses its partitions",
                    (group.name or b"").decode(),
                    member.sid.decode(),
                    self._session.address,
                    self._session_us // 1000,
                )
                self._session.leave(name)
        # Who joined a group and asks for messages expects nothing but answers.
        if any(member.expires_us is None for [(member, _), *_] in self._session.memberships.values()):
            self._session.peer.write(_KEEP_ALIVE)
        return self._keep_alive_s

    def end(self) -> None:
        self._stop_following()

    async def _answer_later(self, coroutine: Coroutine[Any, Any, None], *, ends: bool = False) -> None:
        """`ends`: whoever asked reads to the end of the connection, also when it is refused."""
        try:
            await coroutine
        except PenstockError as error:
            self._say_error(error)
            if ends:
                self._session.peer.close()

    def _say(self, text: str) -> None:
        self._session.peer.answer(self._packed(text.encode()))

    def _say_json(self, value: object) -> None:
        self._say(json.dumps(value))

    def _say_error(self, error: PenstockError) -> None:
        self._say(f"ERROR: {error}")

    def _packed(self, payload: bytes) -> bytes:
        return prefixed.frame(prefixed.pack(payload, self._packing))


def _encode(topic: bytes, partition: int, run: Run, packing: Packing, *, by_name: bool) -> bytes:
    """Return the frames of a run."""
    if by_name:
        return prefixed.frame(prefixed.pack(prefixed.run_batch(topic, partition, run), packing))
    return b"".join([prefixed.frame(prefixed.pack(value, packing)) for value in run.values])


def _read(frame: bytes) -> tuple[Command | Records, Packing | None]:
    """Return what is in a frame, and how it is packed; a sign of life is not."""
    payload, found = prefixed.unpack(frame)
    packing = found if payload else None
    if prefixed.is_batch(payload):
        return prefixed.read_batch(payload), packing
    topic, payload = prefixed.open_envelope(payload)
    if topic and not prefixed.is_command(payload):
        return Records(topic, -1, [prefixed.Record(0, payload)], acks="0"), packing
    return prefixed.read_command(payload), packing


def _auth(frame: Frame) -> Command | None:
    """Return the AUTH command in a frame that is not packed, if it is one."""
    try:
        command = prefixed.read_command(prefixed.open_envelope(frame)[1]) if isinstance(frame, bytes) else None
    except PenstockError:
        return None
    return command if command is not None and command.verb == "AUTH" else None


def _told(command: Command, outcome: Stored | PenstockError, address: str) -> bytes:
    """What a publisher is told, in the form in which it asked."""
    arguments = command.arguments
    if isinstance(outcome, PenstockError):
        return f"ERROR: {outcome}".encode()
    if not command.is_named:
        return f"📤 Published to '{arguments['topic']}'".encode()
    if arguments.get("acks") == "0":
        return b"OK"
    sequence = int(arguments.get("seqNum", "0"))
    return json.dumps(
        {
            "status": "OK",
            "last_offset": outcome.offset,
            "producer_id": arguments.get("producerId", ""),
            "producer_epoch": int(arguments.get("epoch", "0")),
            "seq_start": sequence,
            "seq_end": sequence,
            "leader": address,
        }
    ).encode()


class Claim(NamedTuple):
    """As whom messages are published that are stored once."""

    topic: bytes
    producer: str
    epoch: int


def _claim(command: Command) -> Claim | None:
    return _claim_of(command.arguments) if command.is_named else None


def _claim_of(arguments: Mapping[str, str]) -> Claim | None:
    if arguments.get("isIdempotent", "").lower() != "true" and not _sequence(arguments):
        return None
    return Claim(_needed(arguments, "topic").encode(), _needed(arguments, "producerId"), _epoch(arguments))


def _sequence(arguments: Mapping[str, str]) -> int:
    return _number(arguments, "seqNum", "invalid seqNum", default=0)


def _epoch(arguments: Mapping[str, str]) -> int:
    return _number(arguments, "epoch", "invalid epoch", default=0)


def _run(records: Records, check_size: Callable[..., None]) -> tuple[Run, Claim | None]:
    run = Run([records.topic] * len(records.records), [record.value for record in records.records])
    claims = set()
    for index, record in enumerate(records.records):
        if records.is_idempotent:
            claim = Claim(records.topic, record.producer.decode(errors="replace"), record.epoch)
            run.headers[index] = _identity(claim, record.sequence)
            claims.add(claim)
        if record.key:
            run.keys[index] = record.key
        check_size(len(record.value), len(record.key), len(run.headers.get(index, b"")))
    if len(claims) > 1:
        raise BadRequest(f"an idempotent batch of {len(claims)} producers or epochs: send one batch for each")
    if records.partition >= 0:
        run.partition = records.partition
    return run, next(iter(claims), None)


def _identity(claim: Claim, sequence: int) -> bytes:
    """A number that a producer gave makes the message one that is stored once."""
    return lines(Msg_ID=f"{claim.producer}/{claim.epoch}/{sequence}")


async def _any_grown(places: list[tuple[Partition, int]], wait_ms: int) -> None:
    waits = [asyncio.ensure_future(partition.grown(offset)) for partition, offset in places]
    await asyncio.wait(waits, timeout=wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def _group_name(topic: str, group: str) -> str:
    return f"{topic}:{group}"


def _partitions_of(group: Group, member: Member) -> list[int]:
    positions = sorted(group.positions.values(), key=lambda position: position.partition.number)
    return [position.partition.number for position in positions if member in group.owner(position)]


def _assignments(group: Group, member: Member) -> str:
    return f"[{','.join(map(str, _partitions_of(group, member)))}]"


def _needed(arguments: Mapping[str, str], name: str) -> str:
    value = arguments.get(name)
    if not value:
        raise BadRequest("missing topic name" if name == "topic" else f"missing {name} parameter")
    return value


def _number(arguments: Mapping[str, str], name: str, wrong: str, *, default: int | None = None) -> int:
    value = arguments.get(name, None if default is None else str(default))
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadRequest(wrong)
    return int(value)


def _offset(arguments: Mapping[str, str], *, default: int | None = None) -> int:
    return _number(arguments, "offset", "invalid offset", default=default)


def _read_offsets(text: str) -> list[tuple[int, int]]:
    """P0:100,P1:200"""
    entries = text.split(",")
    if len(entries) > PARTITIONS_MAX:
        raise BadRequest(f"invalid offsets: {len(entries)} of them, {PARTITIONS_MAX} are allowed")
    found = []
    for entry in entries:
        matched = re.fullmatch(r"P(\d{1,9}):(\d{1,18})", entry)
        if matched is None:
            raise BadRequest(f"invalid offsets: {entry!r} is not like P0:100")
        found.append((int(matched[1]), int(matched[2])))
    return found


def _nobody_asked(_error: PenstockError | None) -> None:
    pass
