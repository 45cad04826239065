"""Dead letters: messages that a group could not handle. They are listed, looked at, and sent to their subject again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from penstock.broker import headers
from penstock.broker.mover import Mover
from penstock.broker.partition import Partition
from penstock.broker.topic import ServedTopic
from penstock.clock import Clock
from penstock.run import Run
from penstock.storage.store import Store
from penstock.subject import matches


class Host(Protocol):
    clock: Clock
    store: Store

    async def owner(self, subject: bytes) -> ServedTopic: ...


class DeadLetter(NamedTuple):
    partition: int
    offset: int
    # Where it was published, and where it lies in its topic.
    subject: bytes
    topic: bytes
    origin_partition: int
    origin_offset: int
    group: bytes
    reason: bytes
    attempts: int
    value: bytes
    headers: bytes
    is_redriven: bool


class DeadLetters:
    def __init__(self, topic: ServedTopic, host: Host) -> None:
        self.topic = topic
        self._host = host
        self._movers = {
            partition: Mover(f"redriven {partition.topic_id}/{partition.number}", partition, host, self._target)
            for partition in topic.partitions
        }

    async def list(self, pattern: bytes = b">", *, redriven: bool = False) -> AsyncIterator[DeadLetter]:
        """Those whose own subject matches, oldest first; with `redriven`, also those that were sent again."""
        for partition, mover in self._movers.items():
            offset = partition.start
            while (found := await partition.read(offset)) is not None:
                run, offset = found
                for index in range(len(run)):
                    is_redriven = mover.is_moved(run.offset(index))
                    letter = _letter(partition, run, index, is_redriven) if redriven or not is_redriven else None
                    if letter is not None and matches(pattern, letter.subject):
                        yield letter

    async def peek(self, partition: int, offset: int) -> DeadLetter | None:
        async for letter in self.list(redriven=True):
            if (letter.partition, letter.offset) == (partition, offset):
                return letter
        return None

    async def redrive(self, pattern: bytes = b">", count: int | None = None) -> int:
        """Publish them to their subjects again, each once, though it may be interrupted and called again; how many."""
        chosen: dict[int, list[int]] = {}
        taken = 0
        async for letter in self.list(pattern):
            if count is not None and taken >= count:
                break
            chosen.setdefault(letter.partition, []).append(letter.offset)
            taken += 1
        for partition, mover in self._movers.items():
            await mover.finish()
            if partition.number in chosen:
                await mover.move(chosen[partition.number])
        return taken

    async def _target(self, run: Run) -> tuple[Partition, Run]:
        subject = headers.value_of(run.headers.get(0, b""), b"Dead-Letter-Subject")
        assert subject is not None
        topic = await self._host.owner(subject)
        again = Run([subject], run.values)
        again.keys = run.keys
        block = headers.without(run.headers[0], b"dead-letter-")
        if block:
            again.headers[0] = block
        return topic.choose(subject, run.keys.get(0)), again


def _letter(partition: Partition, run: Run, index: int, is_redriven: bool) -> DeadLetter | None:
    """None if it is a message that somebody published there."""
    block = run.headers.get(index, b"")
    subject = headers.value_of(block, b"Dead-Letter-Subject")
    if subject is None:
        return None

    def field(name: bytes) -> bytes:
        return headers.value_of(block, b"Dead-Letter-" + name) or b""

    return DeadLetter(
        partition.number,
        run.offset(index),
        subject,
        field(b"Topic"),
        int(field(b"Partition") or -1),
        int(field(b"Offset") or -1),
        field(b"Group"),
        field(b"Reason"),
        int(field(b"Attempts") or 0),
        run.values[index],
        headers.without(block, b"dead-letter-"),
        is_redriven,
    )
