"""Transactions, in an event loop: messages for several topics that are stored together, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Protocol, Self

from penstock.batch import Batch
from penstock.client import tracing
from penstock.client.link import Link
from penstock.client.outgoing import ABSENT, Prepared, check_size, prepare
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.clock import Clock
from penstock.errors import BadRequest, Closed, StaleLayout
from penstock.headers import hash_key
from penstock.run import Run
from penstock.wire.binary import Append, Stage, stage_frame

# So much of a stage is on its way to the broker before whoever appends waits.
ON_THE_WAY_BYTES: Final = 16 << 20
# Messages of a transaction are gathered to batches of about this size.
GATHER_BYTES: Final = 256 << 10


class Home(Protocol):
    """What a client does for its transactions."""

    async def _layout(self, subject: str) -> Layout: ...

    async def commit_transaction(
        self, name: str, number: int, offsets: Sequence[int], *, once: bool = False
    ) -> bool: ...

    async def abort_transaction(self, name: str, number: int) -> None: ...


class AsyncStage:
    """A part of a transaction: batches that are stored, and which nobody reads before it is committed.

    `close` gives what `commit_transaction` takes. Parts of other processes are given with it.
    """

    def __init__(self, home: Home, link: Link, name: str, number: int) -> None:
        """`AsyncClient.stage` makes them."""
        self._home = home
        self._link = link
        self._name = name
        self._number = number
        self._layouts: dict[str, Layout] = {}
        self._asked: list[asyncio.Task[int]] = []
        self._on_the_way: dict[asyncio.Task[int], int] = {}
        # What the broker said of the first that it refused.
        self._failure: BaseException | None = None
        self.is_done = False

    async def append(self, topic: str, partition: int, batch: Batch) -> None:
        """Stage a batch for a partition. Raises what the broker said of earlier ones, if it refused them."""
        if self.is_done:
            return
        layout = self._layouts.get(topic)
        if layout is None:
            layout = self._layouts[topic] = await self._home._layout(topic)
            if layout.name.decode() != topic:
                raise BadRequest(f"{topic} is a subject of the topic {layout.name.decode()}, and no topic itself")
        while self._on_the_way and sum(self._on_the_way.values()) + batch.size > ON_THE_WAY_BYTES:
            await asyncio.wait(self._on_the_way, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure
        task = asyncio.ensure_future(self._ask(layout, partition, batch))
        self._asked.append(task)
        self._on_the_way[task] = batch.size
        task.add_done_callback(self._answered)

    async def close(self) -> list[int]:
        """Wait until all of it is on the disk; where it is staged."""
        offsets = await asyncio.gather(*self._asked)
        return [] if self.is_done else offsets

    def _answered(self, task: asyncio.Task[int]) -> None:
        del self._on_the_way[task]
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    async def _ask(self, layout: Layout, partition: int, batch: Batch) -> int:
        try:
            return await self._send(layout, partition, batch)
        except StaleLayout:
            # More partitions than were known: the one that was chosen is still there.
            layout = self._layouts[layout.name.decode()] = await self._home._layout(layout.name.decode())
            return await self._send(layout, partition, batch)

    async def _send(self, layout: Layout, partition: int, batch: Batch) -> int:
        stage = Stage(Append(layout.id, partition, layout.partitions), self._name.encode(), self._number)
        what = f"stage a part of transaction {self._name}"
        answer = await self._link.ask(lambda number: stage_frame(number, stage, batch.data), what, is_repeatable=True)
        offset = int(answer["offset"])
        self.is_done = self.is_done or offset < 0
        return offset


class AsyncTransaction:
    """Messages that are stored together when the `with` block ends, or not at all if it raises."""

    def __init__(
        self, home: Home, stage: AsyncStage, link: Link, clock: Clock, name: str, number: int, *, once: bool
    ) -> None:
        """`AsyncClient.transaction` makes them."""
        self._home = home
        self._stage = stage
        self._link = link
        self._clock = clock
        self._name = name
        self._number = number
        self._once = once
        self._layouts: dict[str, Layout] = {}
        self._runs: dict[tuple[Layout, int], tuple[Run, bool]] = {}
        # Messages that may go to any partition; each transaction begins with another one.
        self._loose = (hash_key(name.encode()) + number) * PIECE_MESSAGES
        self._is_over = False
        # Whether it had been committed before: then nothing is stored.
        self.is_duplicate = False

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
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        ttl: float | timedelta | str | None = None,
    ) -> None:
        """Add a message. An id is stored with it and known afterwards; the transaction itself is stored once anyway."""
        self._check_open()
        headers = tracing.created(subject, headers)
        message = prepare(subject, value, json, key, headers, message_id, None, ttl, self._clock.now_us())
        layout = self._layouts.get(subject)
        if layout is None:
            layout = self._layouts[subject] = await self._home._layout(subject)
        check_size(len(message.value), self._link.hello.payload_bytes_max)
        partition = layout.choose(message.subject.encode(), message.key)
        if partition is None:
            partition = self._loose // PIECE_MESSAGES % layout.partitions
            self._loose += 1
        place = (layout, partition)
        run, asks = self._runs.get(place) or (Run([], []), False)
        _add(run, message)
        self._runs[place] = (run, asks or message.asks)
        if run.size >= GATHER_BYTES:
            await self._send(place)

    async def commit(self) -> bool:
        """Store all of it; False if the transaction had been committed before."""
        self._check_open()
        self._is_over = True
        for place in list(self._runs):
            await self._send(place)
        offsets = await self._stage.close()
        if offsets or not self._once:
            is_new = await self._home.commit_transaction(self._name, self._number, offsets, once=self._once)
            self.is_duplicate = not is_new
        return not self.is_duplicate

    async def abort(self) -> None:
        """Store nothing of it."""
        if not self._is_over:
            self._is_over = True
            self._runs.clear()
            await self._home.abort_transaction(self._name, self._number)

    def _check_open(self) -> None:
        if self._is_over:
            raise Closed("the transaction is over")

    async def _send(self, place: tuple[Layout, int]) -> None:
        layout, partition = place
        run, asks = self._runs.pop(place)
        batch = run.encode(layout.name, self._clock.now_us(), asks=asks)
        await self._stage.append(layout.name.decode(), partition, batch)


def _add(run: Run, message: Prepared) -> None:
    index = len(run)
    run.subjects.append(message.subject.encode())
    run.values.append(message.value)
    run.size += len(message.value) + len(message.key or b"") + len(message.headers or b"") + 32
    if message.key is not None:
        run.keys[index] = message.key
    if message.headers is not None:
        run.headers[index] = message.headers
    if message.is_tombstone:
        run.tombstones.add(index)
    if message.ttl_us is not None:
        run.ttls[index] = message.ttl_us
