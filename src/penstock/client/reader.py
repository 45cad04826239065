"""Reading the stored messages of a partition: one FETCH is always ahead of the application."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, Final

from penstock.client.link import Link
from penstock.client.message import Delivery
from penstock.client.protocol import Batches
from penstock.errors import CorruptBatch
from penstock.model.batch import Batch
from penstock.model.run import read_ttls
from penstock.wire.binary import Fetch, fetch_frame

# The size of one FETCH: large enough that requests cost little, and two fit into memory anywhere.
FETCH_BYTES: Final = 4 << 20
# How long the broker waits for new messages before it answers that there are none.
WAIT_S: Final = 10.0

# The time by the broker's clock, in µs; None: expired messages are wanted too.
Now = Callable[[], int] | None
# The messages of a batch that the application gets, between two offsets: a list, or an Arrow record batch.
Part = Any
Shape = Callable[[Batch, int, int | None], Part]


class PartitionReader:
    def __init__(self, link: Link, topic: str, topic_id: int, partition: int) -> None:
        self._link = link
        self._topic = topic
        self._topic_id = topic_id
        self._partition = partition

    async def messages(
        self, offset: int, end: int | None, count: int | None, now_us: Now, *, follow: bool
    ) -> AsyncGenerator[list[Any], None]:
        """Yield lists of messages from an offset on, one list for each FETCH. Without `follow`, stop at `end`, which
        must be committed."""

        def shape(batch: Batch, begin: int, end: int | None) -> Part:
            delivery = Delivery(batch, self._topic, self._topic_id, self._partition)
            found = delivery.messages(begin, end)
            if (expired := _expired(batch, now_us)) is not None:
                gone = {delivery.offsets[index] for index in expired}
                return [message for message in found if message.offset not in gone]
            return found

        async with aclosing(self._read(offset, end, count, shape, follow=follow)) as parts:
            async for several in parts:
                yield list(chain.from_iterable(several))

    def record_batches(
        self,
        offset: int,
        end: int | None,
        count: int | None,
        columns: Sequence[str] | None,
        now_us: Now,
        *,
        follow: bool,
    ) -> AsyncGenerator[list[Any], None]:
        """Yield lists of Arrow record batches, as `messages` does. They share the bytes of the FETCH."""
        try:
            from penstock.model import arrow
        except ImportError as error:
            raise ImportError("arrow=True needs pyarrow: pip install 'penstock[arrow]'") from error
        names = tuple(arrow.TYPES) if columns is None else tuple(columns)
        if unknown := set(names) - set(arrow.TYPES):
            raise ValueError(f"unknown columns: {', '.join(sorted(unknown))}; choose from {', '.join(arrow.TYPES)}")

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

        return self._read(offset, end, count, shape, follow=follow)

    async def _read(
        self, offset: int, end: int | None, count: int | None, shape: Shape, *, follow: bool
    ) -> AsyncGenerator[list[Part], None]:
        left = count
        if left == 0 or (end is not None and offset >= end):
            return
        ahead = asyncio.ensure_future(self._fetch(offset, end, follow=follow))
        try:
            while True:
                batches = list(_walk((await ahead).data))
                if not batches and not follow:
                    return
                begin, offset = offset, batches[-1].end if batches else offset
                is_last = end is not None and offset >= end
                if not is_last:
                    ahead = asyncio.ensure_future(self._fetch(offset, end, follow=follow))
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

    def _fetch(self, offset: int, end: int | None, *, follow: bool) -> Awaitable[Batches]:
        wait_s = WAIT_S if follow else 0
        fetch = Fetch(self._topic_id, self._partition, round(wait_s * 1000), offset, end or 0, FETCH_BYTES)
        return self._link.ask(
            lambda number: fetch_frame(number, fetch),
            f"fetch {self._topic}/{self._partition} at {offset}",
            is_repeatable=True,
            # With `follow`, also wait for a broker that is away.
            timeout_s=math.inf if follow else None,
        )


def _expired(batch: Batch, now_us: Now) -> Collection[int] | None:
    """Return the indexes of the messages that have expired; None if there are none."""
    if now_us is None or not batch.asks:
        return None
    age_us = now_us() - batch.append_time
    blocks = {index: block for index, block in enumerate(batch.columns().headers() or ()) if block is not None}
    return {index for index, ttl_us in read_ttls(blocks).items() if ttl_us <= age_us} or None


def _walk(view: memoryview) -> Iterator[Batch]:
    position = 0
    while position < len(view):
        batch = Batch.at(view, position)
        if batch is None:
            raise CorruptBatch("the broker's answer ends within a batch")
        position += batch.size
        # Control batches of the log have no messages.
        if batch.count:
            yield batch
