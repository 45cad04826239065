"""Reading a partition's history: FETCH by FETCH, one of them always ahead of the application."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from penstock.batch import Batch
from penstock.client.link import Link
from penstock.client.message import Delivery
from penstock.client.protocol import Batches
from penstock.errors import CorruptBatch
from penstock.run import read_ttls
from penstock.wire.binary import Fetch, fetch_frame

# What one FETCH brings: enough that asking costs little, and two of them fit into memory anywhere.
FETCH_BYTES: Final = 4 << 20
# How long the broker waits for more messages before it says that there are none.
WAIT_S: Final = 10.0

# The time by the broker's clock.
Now = Callable[[], int]
Part = Any
# What the application gets of a batch: its part from one offset to another.
Shape = Callable[[Batch, int, int | None], Part]


class PartitionPlace(NamedTuple):
    topic: str
    topic_id: int
    partition: int


async def read(
    link: Link, place: PartitionPlace, offset: int, end: int | None, count: int | None, shape: Shape, *, follow: bool
) -> AsyncGenerator[list[Part], None]:
    """Parts (they have a length) from an offset on, those of one FETCH at a time. Without `follow` it ends at `end`,
    which must be committed."""
    left = count
    if left == 0 or (end is not None and offset >= end):
        return
    ahead = asyncio.ensure_future(_fetch(link, place, offset, end, follow=follow))
    try:
        while True:
            batches = list(_walk((await ahead).data))
            if not batches and not follow:
                return
            begin, offset = offset, batches[-1].end if batches else offset
            is_last = end is not None and offset >= end
            if not is_last:
                ahead = asyncio.ensure_future(_fetch(link, place, offset, end, follow=follow))
            parts = []
            for batch in batches:
                part = shape(batch, begin, end)
                if left is not None:
                    part = part[:left]
                    left -= len(part)
                if len(part):
                    parts.append(part)
                if left == 0:
                    break
            if parts:
                yield parts
            if is_last or left == 0:
                return
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def messages_of(place: PartitionPlace, now_us: Now | None) -> Shape:
    """`now_us`: what has expired by then is left out; None: nothing is."""

    def shape(batch: Batch, begin: int, end: int | None) -> Part:
        delivery = Delivery(batch, place.topic, place.topic_id, place.partition)
        found = delivery.messages(begin, end)
        if (expired := _expired(batch, now_us)) is not None:
            gone = {delivery.offsets[index] for index in expired}
            return [message for message in found if message.offset not in gone]
        return found

    return shape


def record_batches_of(columns: Sequence[str] | None, now_us: Now | None) -> Shape:
    """Arrow record batches that share the bytes of what was fetched; `now_us` as in `messages_of`."""
    try:
        from penstock import arrow
    except ImportError as error:
        raise ImportError("arrow=True needs pyarrow: pip install 'penstock[arrow]'") from error
    names = tuple(arrow.TYPES) if columns is None else tuple(columns)
    if unknown := set(names) - set(arrow.TYPES):
        raise ValueError(f"no such columns: {', '.join(sorted(unknown))}; there are {', '.join(arrow.TYPES)}")

    def shape(batch: Batch, begin: int, end: int | None) -> Part:
        found = arrow.decode(batch, names)
        expired = _expired(batch, now_us)
        if expired is None and batch.base_offset >= begin and (end is None or batch.end <= end):
            return found
        offsets = batch.columns().offsets()
        first = bisect_left(offsets, begin)
        last = len(offsets) if end is None else bisect_left(offsets, end)
        if expired is not None:
            return arrow.take(found, [index for index in range(first, last) if index not in expired])
        return found.slice(first, max(0, last - first))

    return shape


def _expired(batch: Batch, now_us: Now | None) -> Collection[int] | None:
    """Which messages of a batch have expired, if some have."""
    if now_us is None or not batch.asks:
        return None
    age_us = now_us() - batch.append_time
    blocks = {index: block for index, block in enumerate(batch.columns().headers() or ()) if block is not None}
    return {index for index, ttl_us in read_ttls(blocks).items() if ttl_us <= age_us} or None


def _fetch(link: Link, place: PartitionPlace, offset: int, end: int | None, *, follow: bool) -> Awaitable[Batches]:
    wait_s = WAIT_S if follow else 0
    fetch = Fetch(place.topic_id, place.partition, round(wait_s * 1000), offset, end or 0, FETCH_BYTES)
    return link.ask(
        lambda number: fetch_frame(number, fetch),
        f"fetch {place.topic}/{place.partition} at {offset}",
        is_repeatable=True,
        # Who follows waits for a broker that is away as well.
        timeout_s=math.inf if follow else None,
    )


def _walk(view: memoryview) -> Iterator[Batch]:
    position = 0
    while position < len(view):
        batch = Batch.at(view, position)
        if batch is None:
            raise CorruptBatch("the broker's answer ends within a batch")
        position += batch.size
        # What a log notes for itself has no messages.
        if batch.count:
            yield batch
