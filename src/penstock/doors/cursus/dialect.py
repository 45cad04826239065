"""Cursus' dialect for one connection: a match over its commands, and topics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from penstock.address import join
from penstock.broker.member import Member, Place
from penstock.broker.start import Start
from penstock.broker.topic import visible_topics
from penstock.doors.cursus.arguments import needed, number, offset_of, read_offsets
from penstock.doors.cursus.consuming import KEEP_ALIVE, Consuming, encode
from penstock.doors.cursus.groups import Groups, assignments
from penstock.doors.cursus.producing import Producing
from penstock.doors.dialect import ConnectionType, Ending
from penstock.doors.gate import credentials
from penstock.doors.prefixed import Memberships, admit, disconnect, open_reader, topic_of
from penstock.doors.session import Session
from penstock.errors import BadRequest, PenstockError, StaleCommit, Unauthorized, UnknownTopic
from penstock.log.policy import PARTITIONS_MAX
from penstock.model.run import Run, payload_bytes
from penstock.outcome import Outcome
from penstock.security.permissions import Action
from penstock.wire import cursus
from penstock.wire.cursus import Command, Packing, Records
from penstock.wire.prefixed import frame

logger = logging.getLogger(__name__)

DEFAULT_PARTITIONS: Final = 4
# A frame that is larger, or packed, is read in a worker.
INLINE_BYTES_MAX: Final = 64 << 10
# A client that waits for messages gets a sign of life at least this often.
KEEP_ALIVE_S: Final = 5.0

_STREAMS: Final = ("CONSUME", "STREAM")
_HOUR_MS: Final = 3_600_000


class Cursus:
    type: ConnectionType = "prefixed"

    def __init__(self, session: Session) -> None:
        self.session = session
        self._broker = session.broker
        self.codec = open_reader(session)
        # How the client packs its frames.
        self.packing = Packing.NONE
        settings = session.shared.settings
        self.keep_alive_s = min(KEEP_ALIVE_S, settings.heartbeat_s, settings.session_timeout_ms / 2000)
        session.ping_at = asyncio.get_running_loop().time() + self.keep_alive_s
        self._memberships = Memberships(session)
        self._groups = Groups(session, self._memberships)
        self._producing = Producing(self)
        self._consuming = Consuming(self, self._groups)
        session.at_end.append(self._consuming.stop_following)

    def credentials(self, event: bytes) -> Mapping[str, Any] | None:
        command = _auth(event)
        return None if command is None else credentials(command.arguments)

    def admitted(self) -> None:
        admit(self.session, self.codec)

    def deny(self, event: bytes, error: PenstockError) -> None:
        if _auth(event) is None:
            self._say_error(Unauthorized("say AUTH user=<user> password=<password>, or AUTH token=<token>, first"))
        else:
            self._say_error(error)
        self.session.peer.close()

    def do(self, events: deque[bytes]) -> Coroutine[Any, Any, None] | None:
        self._consuming.stop_following()
        data = events.popleft()
        if cursus.is_packed(data) or len(data) > INLINE_BYTES_MAX:
            return self._do_later(data, events)
        return self._do(*_read(data), events)

    async def _do_later(self, data: bytes, events: deque[bytes]) -> None:
        """As `do`, for a frame that takes a while to unpack and read."""
        await self._do(*await self.session.shared.tasks.work(_read, data), events)

    def _do(
        self, request: Command | Records, packing: Packing | None, events: deque[bytes]
    ) -> Coroutine[Any, Any, None]:
        if packing is not None:
            self.packing = packing
        if not isinstance(request, Command):
            return self._producing.publish_batch(request)
        if request.verb == "PUBLISH":
            return self._producing.publish(request, events)
        if request.verb in _STREAMS and not request.is_named:
            return self._run_to_end(request)
        return self._run(request)

    async def _run_to_end(self, command: Command) -> None:
        """Run a command whose client reads to the end of the connection, also if it is refused."""
        try:
            await self._run(command)
        except PenstockError as error:
            self._say_error(error)
            self.session.peer.close()

    async def _run(self, command: Command) -> None:
        # One line for each command, and few of them need more: it is a table.
        arguments, groups = command.arguments, self._groups
        match command.verb:
            case "CREATE":
                self.say(await self._create(arguments))
            case "DELETE":
                self.say(await self._delete(arguments))
            case "LIST":
                names = sorted(topic.topic.name for topic in visible_topics(self._broker.topics, self.session.checked))
                self.say(", ".join(names) or "(no topics)")
            case "DESCRIBE":
                self.say_json(self._describe(arguments))
            case "SUBSCRIBE":
                self.say(await groups.subscribe(command))
            case "CONSUME":
                await self._consuming.consume(command)
            case "STREAM":
                self._consuming.follow(command)
            case "REGISTER_GROUP":
                topic, name = needed(arguments, "topic"), needed(arguments, "group")
                await groups.register(topic, name, Start.EARLIEST)
                self.say(f"✅ Group '{name}' registered for topic '{topic}'")
            case "JOIN_GROUP":
                self.say(await groups.join(arguments))
            case "SYNC_GROUP":
                self.say(f"OK assignments={assignments(*groups.member(arguments))}")
            case "LEAVE_GROUP":
                groups.leave(arguments)
                self.say(f"✅ Left group '{arguments['group']}'")
            case "HEARTBEAT":
                groups.member(arguments)
                self.say("OK")
            case "COMMIT_OFFSET":
                entry = (number(arguments, "partition", "invalid partition ID"), offset_of(arguments))
                await groups.commit(arguments, [entry])
                self.say("OK")
            case "BATCH_COMMIT":
                entries = read_offsets(needed(arguments, "offsets"))
                groups.member(arguments)
                await groups.commit(arguments, entries)
                self.say(f"OK batched={len(entries)}")
            case "FETCH_OFFSET":
                self.say(str(groups.committed(arguments)))
            case "GROUP_STATUS":
                self.say_json(groups.status(arguments))
            case "AUTH":
                self.say("OK")
            case "HELP":
                self.say("\n".join(["Available commands:", *(f"  {cursus.usage(verb)}" for verb in cursus.VERBS)]))
            case "EXIT":
                self.session.peer.close()

    # Topics.

    async def _create(self, arguments: Mapping[str, str]) -> str:
        name = needed(arguments, "topic")
        wrong = "partitions must be a positive integer"
        partitions = number(arguments, "partitions", wrong, default=DEFAULT_PARTITIONS)
        if not 0 < partitions <= PARTITIONS_MAX:
            raise BadRequest(f"{wrong}, {PARTITIONS_MAX} at the most")
        policy: dict[str, int] = {}
        if hours := number(arguments, "retention_hours", "retention_hours must be an integer", default=0):
            policy["retain_ms"] = hours * _HOUR_MS
        if size := number(arguments, "retention_bytes", "retention_bytes must be an integer", default=0):
            policy["retain_bytes"] = size
        # Of those that it may not, it is not told which exist.
        self.session.authorize(Action.TOPIC_CREATE, name.encode())
        there = self._broker.topics.get(name.encode())
        if there is not None:
            partitions = max(partitions, there.topic.partitions)
        call = "create_topic" if there is None else "alter_topic"
        request = {"call": call, "name": name, "partitions": partitions, "policy": policy}
        topic = await self.session.shared.calls.call(request, self.session.identity)
        return f"✅ Topic '{name}' now has {topic['partitions']} partitions"

    async def _delete(self, arguments: Mapping[str, str]) -> str:
        name = needed(arguments, "topic")
        try:
            await self.session.shared.calls.call({"call": "delete_topic", "name": name}, self.session.identity)
        except UnknownTopic:
            raise UnknownTopic(f"topic '{name}' not found") from None
        return f"🗑️ Topic '{name}' deleted"

    def _describe(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        name = needed(arguments, "topic").encode()
        if self.session.checked is not None and not self.session.checked.shows_topic(name):
            raise self.session.checked.refuse(Action.SUBSCRIBE, name)
        topic = topic_of(self.session, name)
        here = self.address
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
    def address(self) -> str:
        """Where clients of this protocol find the leader of every partition: here."""
        node = self.session.shared.node
        return join(node.hosts[0], node.ports.get("quiet", 0))

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, _attempts: Mapping[int, int] | None) -> None:
        name, group = self._memberships.find(member)
        by_name = name in self._groups.by_name
        self.session.peer.count_sent(len(run), payload_bytes(run))
        self.session.send_in_turn(run, partial(self.write_run, place.name, place.number, run, by_name=by_name))
        with suppress(StaleCommit):
            # The partitions were assigned anew, and the new owner of this one gets the messages again.
            group.commit((place.topic_id, place.number), run.end, group.state.generation, Outcome())

    def write_run(self, topic: bytes, partition: int, run: Run, *, by_name: bool) -> None:
        self.session.peer.write(encode(topic, partition, run, self.packing, by_name=by_name))

    def fail(self, member: Member, error: PenstockError) -> None:
        name, _ = self._memberships.find(member)
        self._memberships.leave(name)
        self._say_error(error)

    # Keep-alive and the end.

    def keep_alive(self, _silent_s: float) -> float:
        now_us = self._broker.clock.monotonic_us()
        for name, member, group in self._memberships:
            if member.expires_us is not None and member.expires_us <= now_us:
                logger.warning(
                    "group %s: the member %s of %s was silent for %d ms and loses its partitions",
                    (group.name or b"").decode(),
                    member.sid.decode(),
                    self.session.address,
                    self._groups.session_us // 1000,
                )
                self._memberships.leave(name)
        # A client that joined a group and asks for messages expects nothing but replies.
        if any(member.expires_us is None for _, member, _ in self._memberships):
            self.session.peer.write(KEEP_ALIVE)
        return self.keep_alive_s

    def disconnect(self, reason: Ending | PenstockError) -> None:
        disconnect(self.session, reason, self._say_error)

    # Replies.

    def refuse(self, _event: bytes | None, error: PenstockError) -> None:
        self._say_error(error)

    def say(self, text: str) -> None:
        self.session.peer.answer(self.packed(text.encode()))

    def say_json(self, value: object) -> None:
        self.say(json.dumps(value))

    def _say_error(self, error: PenstockError) -> None:
        self.say(f"ERROR: {error}")

    def packed(self, payload: bytes) -> bytes:
        return frame(cursus.pack(payload, self.packing))


def _read(data: bytes) -> tuple[Command | Records, Packing | None]:
    """Return what is in a frame, and how it is packed; None for a sign of life, which tells nothing about that."""
    payload, found = cursus.unpack(data)
    packing = found if payload else None
    if cursus.is_batch(payload):
        return cursus.read_batch(payload), packing
    topic, payload = cursus.open_envelope(payload)
    if topic and not cursus.is_command(payload):
        return Records(topic, -1, [cursus.Record(0, payload)], acks="0"), packing
    return cursus.read_command(payload), packing


def _auth(data: bytes) -> Command | None:
    """Return the AUTH command in a frame that is not packed, if it is one."""
    try:
        command = cursus.read_command(cursus.open_envelope(data)[1])
    except PenstockError:
        return None
    return command if command.verb == "AUTH" else None
