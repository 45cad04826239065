"""CONSUME and STREAM: a partition read from an offset on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from penstock.broker.cursor import Cursor
from penstock.broker.partition import Partition
from penstock.broker.topic import ServedTopic
from penstock.doors.cursus.arguments import group_name, needed, number, offset_of
from penstock.doors.cursus.groups import Groups
from penstock.doors.prefixed import topic_of
from penstock.errors import BadRequest, PenstockError, UnknownTopic
from penstock.model.run import Run, payload_bytes
from penstock.model.subject import whole_topic
from penstock.wire import cursus
from penstock.wire.cursus import Command, Packing
from penstock.wire.prefixed import frame

if TYPE_CHECKING:
    from penstock.doors.cursus.dialect import Cursus

# What one CONSUME by name returns, which is one batch: messages, and about how many bytes of them.
BATCH_MESSAGES_MAX: Final = cursus.RECORDS_MAX
BATCH_BYTES_MAX: Final = 16 << 20
WAIT_MS_MAX: Final = 60_000
KEEP_ALIVE: Final = frame(b"")


class Consuming:
    def __init__(self, dialect: Cursus, groups: Groups) -> None:
        self._dialect = dialect
        self._session = dialect.session
        self._broker = dialect.session.broker
        self._groups = groups
        # A CONSUME that follows, or a STREAM.
        self._following: asyncio.Task[None] | None = None

    async def consume(self, command: Command) -> None:
        arguments = command.arguments
        match arguments.get("follow", "false").lower():
            case "follow" | "tail" | "true":
                self.follow(command)
                return
            case "false":
                pass
            case _:
                raise BadRequest(f"invalid CONSUME syntax. Expected: {cursus.usage('CONSUME')}")
        partitions = self._partitions(command)
        count = number(arguments, "batch", "invalid batch", default=BATCH_MESSAGES_MAX)
        wait_ms = min(number(arguments, "wait_ms", "invalid wait_ms", default=0), WAIT_MS_MAX)
        self._groups.heard(arguments, wait_ms * 1000)
        cursors = [partition.cursor(self._begin(partition, arguments)) for partition in partitions]
        sent = await self._send_ranges(cursors, count, command)
        if not sent and wait_ms:
            await self._broker.waiting.any_grown([(each.partition, each.offset) for each in cursors], wait_ms / 1000)
            sent = await self._send_ranges(cursors, count, command)
        if not command.is_named:
            self._session.peer.close()
        elif not sent:
            self._dialect.write_run(partitions[0].name, partitions[0].number, Run([], []), by_name=True)

    async def _send_ranges(self, cursors: list[Cursor], count: int, command: Command) -> int:
        if command.is_named:
            count_max = min(max(1, count), BATCH_MESSAGES_MAX)
            return sum([await self._send_batch(cursor, count_max) for cursor in cursors])
        return sum([await self._send_all(cursor) for cursor in cursors])

    async def _send_batch(self, cursor: Cursor, count_max: int) -> int:
        """Send one batch of the messages from an offset on, up to a number of them. Return how many it has."""
        gathered = Run([], [])
        offsets: list[int] = []
        size = 0
        while len(offsets) < count_max and size < BATCH_BYTES_MAX and not self._session.peer.is_closing:
            found = await cursor.read()
            if found is None:
                break
            run, cursor.offset, expired = found.first(count_max - len(offsets))
            self._broker.figures.expired += len(expired)
            if run.values:
                size += payload_bytes(run)
                gathered.extend(run)
                offsets += run.all_offsets()
        if offsets:
            gathered.base_offset, gathered.offsets = offsets[0], offsets
            await self._write(cursor.partition, gathered, by_name=True)
            self._count_sent(cursor.partition, gathered)
        return len(offsets)

    async def _send_all(self, cursor: Cursor) -> int:
        """Send all messages that are there now from an offset on, as fast as the client takes them. Return how many."""
        cursor.end = cursor.partition.served
        sent = 0
        while not self._session.peer.is_closing and (found := await cursor.read()) is not None:
            run, cursor.offset, expired = found
            self._broker.figures.expired += len(expired)
            if run.values:
                await self._write(cursor.partition, run, by_name=False)
                self._count_sent(cursor.partition, run)
                sent += len(run)
                await self._session.peer.drained()
        return sent

    async def _write(self, partition: Partition, run: Run, *, by_name: bool) -> None:
        """Encode a run of any size in a worker, and write it."""
        arguments = (partition.name, partition.number, run, self._dialect.packing)
        self._session.peer.write(await self._session.work(encode, *arguments, by_name=by_name))

    def _count_sent(self, partition: Partition, run: Run) -> None:
        self._session.peer.count_sent(len(run), payload_bytes(run))
        partition.sent += len(run)

    def _partitions(self, command: Command) -> list[Partition]:
        """Return a partition of the topic that is asked for, or of the topics whose names match."""
        name = needed(command.arguments, "topic")
        wanted = number(command.arguments, "partition", "invalid partition ID")
        topics: Iterable[ServedTopic]
        checked = self._session.checked
        if len(name) > cursus.PATTERN_CHARS_MAX:
            raise BadRequest(f"a topic has at most {cursus.PATTERN_CHARS_MAX} characters here")
        if "*" in name or "?" in name:
            pattern = re.compile(".*".join(".".join(map(re.escape, part.split("?"))) for part in name.split("*")))
            topics = [
                topic
                for topic in self._broker.topics
                if not topic.is_internal and topic.refusal is None and pattern.fullmatch(topic.topic.name)
                if checked is None or checked.allows_all(whole_topic(topic.name))
            ]
        else:
            self._session.authorize_all(whole_topic(name.encode()))
            topics = [topic_of(self._session, name.encode())]
        found = [topic.partitions[wanted] for topic in topics if wanted < len(topic.partitions)]
        if not topics:
            raise UnknownTopic(f"topic '{name}' does not exist")
        if not found:
            raise BadRequest("invalid partition ID")
        return found

    def _begin(self, partition: Partition, arguments: Mapping[str, str]) -> int:
        """Return the offset of the command, else the position of the group, else what `autoOffsetReset` says."""
        offset = offset_of(arguments, default=0)
        if offset:
            return offset
        group = self._broker.groups.get(group_name(partition.name.decode(), arguments.get("group", "")).encode())
        position = group.positions.get((partition.topic_id, partition.number)) if group is not None else None
        if position is not None:
            return position.inflight.floor
        return partition.served if arguments.get("autoOffsetReset", "").lower() == "latest" else 0

    # CONSUME that follows, and STREAM.

    def follow(self, command: Command) -> None:
        partitions = self._partitions(command)
        if len(partitions) > 1:
            raise BadRequest("one topic can be followed, not several")
        self._groups.heard(command.arguments)
        cursor = partitions[0].cursor(self._begin(partitions[0], command.arguments))
        by_name = command.is_named or command.verb == "STREAM"
        self._following = self._session.spawn(self._supervise(cursor, by_name=by_name))

    async def _supervise(self, cursor: Cursor, *, by_name: bool) -> None:
        try:
            await self._stream(cursor, by_name=by_name)
        except PenstockError as error:
            self._dialect.refuse(None, error)
            self._session.peer.close()

    async def _stream(self, cursor: Cursor, *, by_name: bool) -> None:
        peer, partition = self._session.peer, cursor.partition
        while not peer.is_closing:
            await peer.drained()
            found = await cursor.read()
            if found is not None:
                run, cursor.offset, expired = found
                self._broker.figures.expired += len(expired)
                if run.values:
                    await self._write(partition, run, by_name=by_name)
                    self._count_sent(partition, run)
                continue
            if partition.is_closed:
                if by_name:
                    self._dialect.say(f"STREAM_CONTROL type=CLOSE reason=removed offset={cursor.offset}")
                peer.close()
                return
            if not await cursor.wait(self._dialect.keep_alive_s):
                peer.write(KEEP_ALIVE)

    def stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None


def encode(topic: bytes, partition: int, run: Run, packing: Packing, *, by_name: bool) -> bytes:
    """Encode a run: as a batch, or each message in a frame of its own."""
    if by_name:
        return frame(cursus.pack(cursus.run_batch(topic, partition, run), packing))
    return b"".join([frame(cursus.pack(value, packing)) for value in run.values])
