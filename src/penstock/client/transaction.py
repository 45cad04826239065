"""Transactions of an `AsyncClient`: messages to several topics that are stored together, or not at all."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.client import tracing
from penstock.client.calls import Calls
from penstock.client.link import Link
from penstock.client.outgoing import ABSENT, Prepared, check_size, prepare
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.client.values import TTL, Headers
from penstock.errors import BadRequest, Closed, StaleLayout
from penstock.model.batch import Batch
from penstock.model.headers import hash_key
from penstock.model.run import Run
from penstock.wire.binary import Append, StageTarget, stage_frame

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

# `append` waits while more than this is on the way to the broker.
ON_THE_WAY_BYTES: Final = 16 << 20
# The messages of a transaction are gathered in batches of about this size.
GATHER_BYTES: Final = 256 << 10


class AsyncStage:
    """One part of a transaction: batches that are stored, and not readable before the transaction is committed.

    Pass the result of `close` to `commit_transaction`, together with those of the parts of other processes.
    """

    def __init__(self, link: Link, calls: Calls, name: str, number: int) -> None:
        """Use `AsyncClient.stage`."""
        self._link = link
        self._calls = calls
        self._name = name
        self._number = number
        self._layouts: dict[str, Layout] = {}
        self._requests: list[asyncio.Task[int]] = []
        self._on_the_way: dict[asyncio.Task[int], int] = {}
        # The first error of the broker.
        self._failure: BaseException | None = None
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the transaction was already committed: then nothing needs to be staged."""
        return self._is_done

    async def append(self, topic: str, partition: int, batch: Batch) -> None:
        """Stage a batch for a partition. Raise the broker's error if it refused an earlier batch."""
        if self._is_done:
            return
        layout = self._layouts.get(topic)
        if layout is None:
            layout = self._layouts[topic] = await self._calls.layout(topic)
            if layout.name.decode() != topic:
                raise BadRequest(f"invalid topic {topic!r}: it is a subject of the topic {layout.name.decode()!r}")
        while self._on_the_way and sum(self._on_the_way.values()) + batch.size > ON_THE_WAY_BYTES:
            await asyncio.wait(self._on_the_way, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure
        task = asyncio.ensure_future(self._request(layout, partition, batch))
        self._requests.append(task)
        self._on_the_way[task] = batch.size
        task.add_done_callback(self._answered)

    async def close(self) -> list[int]:
        """Wait until all batches are durable, and return the offsets where they are staged."""
        offsets = await asyncio.gather(*self._requests)
        return [] if self._is_done else offsets

    def _answered(self, task: asyncio.Task[int]) -> None:
        del self._on_the_way[task]
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    async def _request(self, layout: Layout, partition: int, batch: Batch) -> int:
        try:
            return await self._send(layout, partition, batch)
        except StaleLayout:
            # The topic has more partitions now. The one that was chosen still exists.
            layout = self._layouts[layout.name.decode()] = await self._calls.layout(layout.name.decode())
            return await self._send(layout, partition, batch)

    async def _send(self, layout: Layout, partition: int, batch: Batch) -> int:
        stage = StageTarget(Append(layout.id, partition, layout.partitions), self._name.encode(), self._number)
        what = f"stage a part of transaction {self._name}"
        answer = await self._link.ask(lambda number: stage_frame(number, stage, batch.data), what, is_repeatable=True)
        offset = int(answer["offset"])
        self._is_done = self._is_done or offset < 0
        return offset


class AsyncTransaction:
    """Messages that are stored together at the end of the `async with` block, or not at all if the block raises."""

    def __init__(self, client: AsyncClient, stage: AsyncStage, name: str, number: int, *, once: bool) -> None:
        """Use `AsyncClient.transaction`."""
        self._client = client
        self._stage = stage
        self._name = name
        self._number = number
        self._once = once
        self._layouts: dict[str, Layout] = {}
        self._runs: dict[tuple[Layout, int], tuple[Run, bool]] = {}
        # A counter of messages that may go to any partition. Each transaction begins with another partition.
        self._spread = (hash_key(name.encode()) + number) * PIECE_MESSAGES
        self._is_over = False
        self._is_duplicate = False

    @property
    def is_duplicate(self) -> bool:
        """Whether the transaction was already committed: then nothing is stored."""
        return self._is_duplicate

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.abort()
        elif not self._is_over:
            await self.commit()

    async def publish(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        message_id: str | None = None,
        ttl: TTL = None,
    ) -> None:
        """Add a message. Its `message_id` deduplicates messages that are published later. The transaction itself is
        stored once in any case."""
        self._check_open()
        headers = tracing.created(subject, headers)
        message = prepare(subject, value, json, key, headers, message_id, None, ttl, self._client._clock.now_us())
        layout = self._layouts.get(subject)
        if layout is None:
            layout = self._layouts[subject] = await self._client._calls.layout(subject)
        check_size(len(message.value), self._client._link.hello.payload_bytes_max)
        partition = layout.choose(message.subject.encode(), message.key)
        if partition is None:
            partition = self._spread // PIECE_MESSAGES % layout.partitions
            self._spread += 1
        place = (layout, partition)
        run, asks = self._runs.get(place) or (Run([], []), False)
        _add(run, message)
        self._runs[place] = (run, asks or message.asks)
        if run.size >= GATHER_BYTES:
            await self._send(place)

    async def commit(self) -> bool:
        """Store all messages. Return False if the transaction was already committed."""
        self._check_open()
        self._is_over = True
        for place in list(self._runs):
            await self._send(place)
        offsets = await self._stage.close()
        if offsets or not self._once:
            is_new = await self._client.commit_transaction(self._name, self._number, offsets, once=self._once)
            self._is_duplicate = not is_new
        return not self._is_duplicate

    async def abort(self) -> None:
        """Discard all messages."""
        if not self._is_over:
            self._is_over = True
            self._runs.clear()
            await self._client.abort_transaction(self._name, self._number)

    def _check_open(self) -> None:
        if self._is_over:
            raise Closed("the transaction is over: begin another one")

    async def _send(self, place: tuple[Layout, int]) -> None:
        layout, partition = place
        run, asks = self._runs.pop(place)
        batch = run.encode(layout.name, self._client._clock.now_us(), asks=asks)
        await self._stage.append(layout.name.decode(), partition, batch)


def _add(run: Run, message: Prepared) -> None:
    run.size += len(message.value) + len(message.key or b"") + len(message.headers or b"") + 32
    message.add_to(run, message.subject.encode(), message.headers)
