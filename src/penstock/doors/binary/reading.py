"""FETCH: stored batches as they are. SNAPSHOT and READ: a snapshot of all logs, for a backup."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.partition import Partition
from penstock.doors.requests import SnapshotRequest, read
from penstock.errors import BadRequest, UnknownTopic
from penstock.model.batch import Batch
from penstock.model.subject import whole_topic
from penstock.security.permissions import Action
from penstock.store.snapshot import Snapshot
from penstock.wire import binary
from penstock.wire.binary import Type

if TYPE_CHECKING:
    from penstock.doors.binary.dialect import Binary

# What one FETCH returns, however much it asks for. A larger batch is returned whole.
FETCH_BYTES_MAX: Final = 16 << 20
FETCH_WAIT_MS_MAX: Final = 60_000
# What one READ returns.
READ_BYTES_MAX: Final = 4 << 20


class StoredReading:
    def __init__(self, dialect: Binary) -> None:
        self._dialect = dialect
        self._session = dialect.session
        self._broker = dialect.session.broker
        # One request at a time reads and sends: what it has in memory waits for the client.
        self._sending = asyncio.Lock()
        # Snapshots that this connection has begun, by number. They end with the connection.
        self._snapshots: dict[int, Snapshot] = {}
        self._last_snapshot = 0

    def end(self) -> None:
        for number in list(self._snapshots):
            self._session.spawn(self._end_snapshot(number))

    # FETCH.

    async def fetch(self, number: int, fetch: binary.Fetch) -> None:
        topic = self._broker.topics.public(fetch.topic_id, self._session.checked)
        # Stored batches are sent as they are, with all subjects.
        self._session.authorize_all(whole_topic(topic.name))
        if topic.refusal is not None:
            raise topic.refusal
        if fetch.partition >= len(topic.partitions):
            raise UnknownTopic(f"{topic.topic.name} has no partition {fetch.partition}")
        partition = topic.partitions[fetch.partition]
        served = await self._send_batches(number, fetch, partition, waits=bool(fetch.wait_ms))
        if served is None:
            return
        await partition.cursor(max(fetch.offset, served)).wait(min(fetch.wait_ms, FETCH_WAIT_MS_MAX) / 1000)
        await self._send_batches(number, fetch, partition, waits=False)

    async def _send_batches(self, number: int, fetch: binary.Fetch, partition: Partition, *, waits: bool) -> int | None:
        """Answer with what there is. If there is nothing, and the client waits, return where its next message will
        be at the earliest."""
        log, peer = partition.log, self._session.peer
        async with self._sending:
            await peer.drained()
            await self._session.paid()
            # Before the read: whatever is appended meanwhile comes behind this.
            served = partition.served
            batches = await partition.cursor(fetch.offset).read_batches(min(fetch.bytes_max, FETCH_BYTES_MAX))
            if waits and not batches:
                return served
            wanted = [batch for batch in batches if not fetch.end or batch.base_offset < fetch.end]
            self._count_sent(partition, wanted)
            length = sum(len(batch.data) for batch in wanted)
            head = binary.batches_head(number, log.start, log.committed, length)
            peer.write_parts([head, *(batch.data for batch in wanted)])
            return None

    def _count_sent(self, partition: Partition, batches: list[Batch]) -> None:
        count = sum(batch.count for batch in batches)
        partition.sent += count
        self._session.peer.count_sent(count, sum(len(batch.data) for batch in batches))

    # SNAPSHOT and READ.

    async def snapshot(self, number: int, options: dict[str, Any]) -> None:
        self._session.authorize(Action.ADMIN)
        asked = read(SnapshotRequest, options)
        if asked.end is not None:
            await self._end_snapshot(asked.end)
            self._dialect.answer(number, {})
            return
        snapshot = await self._broker.store.snapshot()
        self._last_snapshot += 1
        self._snapshots[self._last_snapshot] = snapshot
        if not self._session.is_connected:
            await self._end_snapshot(self._last_snapshot)
            return
        file, size = snapshot.listing
        self._dialect.answer(number, {"snapshot": self._last_snapshot, "file": file, "bytes": size})

    async def _end_snapshot(self, snapshot: int) -> None:
        if (found := self._snapshots.pop(snapshot, None)) is not None:
            await self._session.shared.tasks.work(self._broker.store.snapshots.end, found)

    async def read(self, number: int, read: binary.Read) -> None:
        snapshot = self._snapshots.get(read.snapshot)
        if snapshot is None:
            raise BadRequest(f"this connection has no snapshot {read.snapshot}: it may have been lost meanwhile")
        async with self._sending:
            await self._session.peer.drained()
            now_us = self._broker.clock.monotonic_us()
            length = min(read.bytes_max, READ_BYTES_MAX)
            data = await self._session.work(snapshot.read, read.file, read.position, length, now_us)
            self._session.peer.write_parts([binary.head(Type.BYTES, number, len(data)), data])
