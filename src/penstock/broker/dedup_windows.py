"""The IDs of stored messages, read from the logs: the window of a topic is read when it is first needed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from penstock.broker.dedup import ENTRIES_MAX, DedupBudget, DedupWindow
from penstock.broker.delay import Delays
from penstock.broker.opened import in_worker_if_large
from penstock.broker.partition import Partition
from penstock.broker.topic import ServedTopic, Topics
from penstock.clock import Clock
from penstock.health import Usage
from penstock.log.policy import PARTITIONS_MAX, OnDamage
from penstock.log.policy import Dedup as DedupMode
from penstock.model import headers
from penstock.model.batch import Batch

_READ_BYTES: Final = 1 << 20
# Identities that are examined before others may use the loop: less than a millisecond.
_SLICE: Final = 500
# The place of an ID whose message is not in its topic yet.
UNPLACED: Final = -1


class Identity(NamedTuple):
    """The dedup identity of a message, and its place."""

    identity: bytes
    place: int
    # Only of a delayed message.
    subject: bytes | None


class DedupHost(Protocol):
    """The broker, as far as dedup windows need it."""

    clock: Clock
    topics: Topics
    delays: Delays | None


class DedupWindows:
    def __init__(self, host: DedupHost, ids_max: int = ENTRIES_MAX) -> None:
        """`ids_max`: the IDs of messages that each topic remembers."""
        self._host = host
        self._ids_max = ids_max
        self._budget = DedupBudget()

    def usage(self) -> dict[str, Usage]:
        return {"dedup_bytes": self._budget.usage}

    async def open(self, topic: ServedTopic) -> None:
        """Give a topic its window, if it needs one and has none."""
        if topic.dedup is None and topic.topic.policy.dedup is not DedupMode.OFF:
            window = await self._read(topic)
            # Another publisher may have had the same need, and published since.
            if topic.dedup is None:
                topic.dedup = window

    def is_noted(self, partition: Partition, batch: Batch) -> bool:
        """Return whether `note` must be called for a batch."""
        topic = self._host.topics.by_id(partition.topic_id)
        return topic is not None and not topic.takes_opaque(asks=batch.asks)

    async def identities(self, partition: Partition, batch: Batch) -> Sequence[Identity]:
        """Return the arguments of `note` for a stored batch."""
        topic = self._host.topics.by_id(partition.topic_id)
        return [] if topic is None else await self._identities(topic, partition, batch)

    def note(self, partition: Partition, identities: Sequence[Identity], append_time: int) -> None:
        """Remember the IDs of messages that were stored without being published, so that they are not published
        again."""
        topic = self._host.topics.by_id(partition.topic_id)
        if topic is not None and topic.dedup is not None:
            for identity, place, _ in identities:
                topic.dedup.add(identity, place, append_time)

    async def _read(self, topic: ServedTopic) -> DedupWindow:
        """Return the IDs of the topic's messages within the window, including delayed ones."""
        policy = topic.topic.policy
        since_us = self._host.clock.now_us() - policy.dedup_window_us
        # The identities of each batch, with its time. They are never sorted one by one, which would take 0.1 s.
        found: list[tuple[int, list[Identity]]] = []
        count = 0
        partitions = list(topic.partitions)
        if self._host.delays is not None:
            partitions.append(self._host.delays.partition)
        for partition in partitions:
            cursor = partition.cursor(0)
            await cursor.seek_time(since_us)
            # Damaged IDs are lost; new messages are accepted all the same.
            while cursor.offset < partition.log.committed and (
                batches := await cursor.read_batches(_READ_BYTES, OnDamage.SKIP)
            ):
                for batch in batches:
                    identities = await self._identities(topic, partition, batch)
                    found.append((batch.append_time, identities))
                    count += len(identities)
                    if count > 2 * self._ids_max:
                        count = _forget_oldest(found, count, self._ids_max)
                cursor.offset = batches[-1].end
        window = DedupWindow(policy.dedup_window_us, self._ids_max, self._budget)
        for append_time, identities in sorted(found, key=_append_time):
            async for some in _sliced(identities):
                for identity, place, _ in some:
                    window.add(identity, place, append_time)
        return window

    async def _identities(self, topic: ServedTopic, partition: Partition, batch: Batch) -> list[Identity]:
        """Return the identities of a stored batch without holding up the loop."""
        is_late = partition not in topic.partitions
        number = None if is_late else partition.number
        read = partial(_read_identities, batch, topic.topic.policy.dedup, number, self._ids_max)
        found = await in_worker_if_large(batch, read)
        if not is_late:
            return found
        kept: list[Identity] = []
        async for some in _sliced(found):
            kept += [
                each for each in some if each.subject is not None and self._host.topics.owner(each.subject) is topic
            ]
        return kept


def packed(partition: int, offset: int) -> int:
    """Return partition and offset as one number: a hundred thousand tuples would take twice the memory."""
    return offset * PARTITIONS_MAX + partition


def unpacked(place: int | None) -> tuple[int, int]:
    if place is None or place == UNPLACED:
        return -1, -1
    offset, partition = divmod(place, PARTITIONS_MAX)
    return partition, offset


def payload_identity(value: bytes) -> bytes:
    # Not a hash that can be forged: an equal one drops the message.
    return hashlib.blake2b(value, digest_size=16).digest()


_append_time = itemgetter(0)


def _read_identities(batch: Batch, mode: DedupMode, partition: int | None, ids_max: int) -> list[Identity]:
    """Return the identities of a batch, of its newest messages if they are many. `partition`: None if they are
    delayed."""
    columns = batch.columns()
    identities: Iterable[bytes | None]
    if mode is DedupMode.PAYLOAD:
        identities = map(payload_identity, columns.values())
    elif (blocks := columns.headers()) is not None:
        identities = (headers.identity(block) if block else None for block in blocks)
    else:
        return []
    subjects = columns.subjects() if partition is None else None
    found: deque[Identity] = deque(maxlen=ids_max)
    for identity, offset, subject in zip(identities, columns.offsets(), subjects or repeat(None), strict=False):
        if identity is not None:
            place = UNPLACED if partition is None else packed(partition, offset)
            found.append(Identity(identity, place, subject))
    return list(found)


def _forget_oldest(found: list[tuple[int, list[Identity]]], count: int, ids_max: int) -> int:
    """Drop the oldest batches while enough are left without them. Return how many identities are left."""
    found.sort(key=_append_time)
    dropped = 0
    while count - len(found[dropped][1]) >= ids_max:
        count -= len(found[dropped][1])
        dropped += 1
    del found[:dropped]
    return count


async def _sliced(items: list[Identity]) -> AsyncIterator[list[Identity]]:
    """Yield some at a time, and let others use the loop in between."""
    for begin in range(0, len(items), _SLICE):
        yield items[begin : begin + _SLICE]
        await asyncio.sleep(0)
