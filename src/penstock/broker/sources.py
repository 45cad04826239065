"""Append messages from within the broker, each once, in batches of limited size.

The broker first decides: a record in the state topic says which messages go where, under a number that ascends. Then it
appends the messages of that decision to their targets. The position of each batch in its target's log says how much has
arrived: the number of the decision, and the count of its messages up to the last one in the batch. A decision that was
interrupted continues behind the last batch that arrived. So it does not matter how the messages are cut into batches,
nor whether retention removed some of them meanwhile.

Older versions appended a decision as one batch, at its number, under another source.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from penstock.awaiting import settled
from penstock.broker.partition import Partition
from penstock.broker.subscription import Loop
from penstock.clock import Clock
from penstock.errors import BrokerError, PenstockError
from penstock.health import Health
from penstock.model.run import Run, message_bytes
from penstock.outcome import Outcome
from penstock.store.store import Store

# The most messages of a decision, and about the most bytes; a larger message has a decision of its own.
DECISION_MESSAGES_MAX: Final = 1000
DECISION_BYTES_MAX: Final = 4 << 20
# About the most bytes of a batch: a reader opens all of it to get one message. A larger message has its own batch.
PART_BYTES: Final = 4 << 20
# Bits of a position that count the messages of a decision.
_COUNT_BITS: Final = 32
_ALL: Final = 1 << _COUNT_BITS
# Messages that are handled in one turn of the loop.
_PAUSE_MESSAGES: Final = 100


class DecisionSource:
    """Identifies a source of decisions in the logs that it appends to. No other source has the same names."""

    def __init__(self, *names: object) -> None:
        # Positions of older versions: the number of the decision.
        self.whole = source_number(*names)
        self.parts = source_number("parts", *names)


class DecisionAppender:
    """Appends the messages of one decision to their targets. An interrupted one is repeated with the same messages."""

    def __init__(self, store: Store, clock: Clock, source: DecisionSource | None, number: int) -> None:
        """Without a source, messages that were appended before are appended again."""
        self._store = store
        self._clock = clock
        self._source = source
        self._number = number
        # By target: messages for the next batch, and the count of the decision's messages up to the last of them.
        self._waiting: dict[Partition, tuple[Run, int]] = {}
        self._bytes: dict[Partition, int] = {}

    def arrived(self, target: Partition) -> int:
        """Return how many messages of the decision, from its first, were appended to a target or skipped there."""
        if self._source is None:
            return 0
        if target.log.producers.position(self._source.whole) >= self._number:
            return _ALL
        return max(0, target.log.producers.position(self._source.parts) - (self._number << _COUNT_BITS))

    async def begin(self, target: Partition) -> int:
        """Wait until all that was appended to a target before is stored; then return what `arrived` does."""
        if self.arrived(target):
            await _stored(target)
        return self.arrived(target)

    async def add(self, target: Partition, index: int, run: Run) -> None:
        """Append one message, which is the decision's `index`th, unless it has arrived. Call `end` after the last."""
        if index < self.arrived(target):
            return
        size = message_bytes(run, 0)
        if target in self._waiting and self._bytes[target] + size > PART_BYTES:
            await self._append(target)
        if target in self._waiting:
            together, _ = self._waiting[target]
            together.extend(run)
            self._waiting[target] = together, index + 1
            self._bytes[target] += size
        else:
            self._waiting[target] = run, index + 1
            self._bytes[target] = size

    async def end(self) -> None:
        """Append the rest, and wait until it is stored."""
        for target in list(self._waiting):
            await self._append(target)

    async def _append(self, target: Partition) -> None:
        run, count = self._waiting.pop(target)
        await self._store.rounds.unflushed.room()
        batch = run.encode(target.name, self._clock.now_us())
        if self._source is None:
            target.append_batch(batch, 0, 0, None)
        else:
            target.append_batch(batch, self._source.parts, self._number << _COUNT_BITS | count, None)
        await _stored(target)


async def _stored(target: Partition) -> None:
    """Wait until all that was appended to a target is committed. In a log that a transaction holds, wait only until it
    is on the disk: the log is released when other logs have caught up, which can take long."""
    outcome = Outcome()
    if target.log.is_held:
        target.log.when_durable(outcome)
    else:
        target.log.when_committed(outcome)
    await settled(outcome)


async def pause(index: int) -> None:
    """Let other tasks run now and then in a loop over messages. To read and shape a message takes about 10 µs."""
    if index % _PAUSE_MESSAGES == _PAUSE_MESSAGES - 1:
        await asyncio.sleep(0)


def expected(error: Exception, health: Health, part: str, what: str) -> PenstockError:
    """Return an error that a client may see. An unexpected one is reported as a fault."""
    if isinstance(error, PenstockError):
        return error
    health.fault(part, what, error)
    return BrokerError(f"internal error in {part}, {what}: {error!r}")


async def sleep(loop: Loop, us: int) -> None:
    over = asyncio.Event()
    loop.call_at(loop.clock.monotonic_us() + us, over.set)
    await over.wait()


def source_number(*names: object) -> int:
    """Return a number for a source of messages that no other source has."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
