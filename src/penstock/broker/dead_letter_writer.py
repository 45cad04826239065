"""Stores the dead letters of one group, each exactly once.

First the position says which messages become dead letters, under a number that ascends: a decision. Then the letters
are appended under that number, by which the log of dead letters recognises them if this is repeated. Only then are the
messages done.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from penstock.broker import sources
from penstock.broker.partition import Partition
from penstock.broker.position import DeadMessage, Position
from penstock.broker.position_writer import PositionWriter
from penstock.broker.sources import DecisionAppender, DecisionSource
from penstock.broker.subscription import Loop
from penstock.broker.topic import ServedTopic
from penstock.errors import PenstockError
from penstock.model import headers
from penstock.model.batch import BATCH_BYTES_MAX
from penstock.model.run import Run, batch_bytes, message_bytes
from penstock.store.store import Store

logger = logging.getLogger(__name__)

# The pause after dead letters could not be stored.
_RETRY_US: Final = 1_000_000


class DeadLetterWriterHost(Loop, Protocol):
    """The broker, as far as dead letters are stored in it."""

    store: Store

    async def dead_letter_topic(self) -> ServedTopic:
        """Return the topic of dead letters; it is created when it is first needed."""
        ...

    def dead_letter_subject(self, subject: bytes) -> bytes: ...


class DeadLetterWriter:
    def __init__(
        self, group: bytes | None, identity: str, positions: PositionWriter, host: DeadLetterWriterHost
    ) -> None:
        self._group = group
        self._identity = identity
        self._positions = positions
        self._host = host
        self._problem = f"dead letters of group {(group or b'without a name').decode()}"
        # When to try again, after a failure.
        self.retry_us = 0

    async def store(self, position: Position[Partition], deliveries_max: int) -> int:
        """Store dead letters, as many as one decision covers, and return their number."""
        health = self._host.store.health
        try:
            if position.decision is None:
                position.decision = await self._choose(position) or None
            if position.decision is not None:
                # The decision must be stored before the first of its letters.
                await self._positions.saved(position)
                await self._append(position, position.decision, deliveries_max)
        except Exception as error:  # noqa: BLE001  a bug of ours must not end the group
            if not isinstance(error, PenstockError):
                health.fault("dead letters", f"group {self._group!r} of {position.partition.name!r}", error)
            health.report(self._problem, f"they cannot be stored yet, and are tried again: {error!r}")
            self.retry_us = self._host.clock.monotonic_us() + _RETRY_US
            return 0
        # Without a decision all messages that were dead have expired.
        count = 0 if position.decision is None else position.finish_decision()
        health.clear(self._problem)
        self._positions.save(position)
        return count

    def stop(self) -> None:
        self._host.store.health.clear(self._problem)

    def forget(self, origin: Partition, topic: ServedTopic) -> None:
        """Store no more dead letters of a partition in `topic`."""
        source = self._source(origin)
        for target in topic.partitions:
            target.log.producers.forget_source(source.whole)
            target.log.producers.forget_source(source.parts)

    async def _choose(self, position: Position[Partition]) -> list[DeadMessage]:
        """Return the first messages that are dead, as many as one decision covers. Those that have expired are done.
        Those that cannot be read remain dead, and do not delay the others."""
        chosen: list[DeadMessage] = []
        size = 0
        failed: PenstockError | None = None
        for offset, attempts in position.inflight.dead()[: sources.DECISION_MESSAGES_MAX]:
            try:
                run = await position.partition.cursor(offset).read_message()
            except PenstockError as error:
                failed = error
                continue
            if run is not None and not run.split_expired(self._host.clock.now_us())[0].values:
                position.inflight.finish_dead([offset])
                self._host.figures.expired += position.count_expired(run)
                continue
            size += 0 if run is None else message_bytes(run, 0)
            if chosen and size > sources.DECISION_BYTES_MAX:
                break
            chosen.append(DeadMessage(offset, attempts))
        if failed is not None and not chosen:
            raise failed
        return chosen

    async def _append(self, position: Position[Partition], decision: list[DeadMessage], deliveries_max: int) -> None:
        """Append the letters of a decision, unless they were appended before."""
        topic = await self._host.dead_letter_topic()
        origin = position.partition
        source = self._source(origin) if self._group else None
        appender = DecisionAppender(self._host.store, self._host.clock, source, position.decision_number + 1)
        for target in topic.partitions:
            await appender.begin(target)
        for index, (offset, attempts) in enumerate(decision):
            run = await origin.cursor(offset).read_message()
            if run is None:
                position.lost += 1
                logger.warning("offset %d of %s is gone: it has no dead letter", offset, origin.name.decode())
                continue
            subject = self._host.dead_letter_subject(run.subjects[0])
            target = topic.choose(subject, run.keys.get(0))
            reason = _reason(attempts, position.inflight.reason(offset), deliveries_max)
            await appender.add(target, index, self._letter(origin, run, subject, attempts, reason))
        await appender.end()

    def _source(self, origin: Partition) -> DecisionSource:
        return DecisionSource("dead letters", self._group, self._identity, origin.topic_id, origin.number)

    def _letter(self, origin: Partition, run: Run, subject: bytes, attempts: int, reason: str) -> Run:
        """Return the dead letter of a message."""
        letter = Run([subject], run.values)
        letter.keys, letter.tombstones = run.keys, run.tombstones
        fields = {
            "dead_letter_reason": reason,
            "dead_letter_attempts": attempts,
            "dead_letter_group": (self._group or b"").decode(),
            "dead_letter_subject": run.subjects[0].decode(),
            "dead_letter_topic": origin.name.decode(),
            "dead_letter_partition": origin.number,
            "dead_letter_offset": run.offset(0),
        }
        block = run.headers.get(0, b"")
        # The letter does not expire: the TTL is that of the message, and begins anew when it is redriven.
        if (ttl := headers.value_of(block, headers.TTL)) is not None:
            fields["dead_letter_ttl"] = ttl.decode(errors="replace")
        own = headers.without(block, b"dead-letter-", headers.TTL)
        letter.headers[0] = own + headers.lines(**fields)
        if batch_bytes(letter) > BATCH_BYTES_MAX:
            # The message is as large as a message can be: the letter only says where it is.
            fields["dead_letter_reason"] = f"{reason}; its {len(run.values[0])} bytes have no room in a dead letter"
            letter = Run([subject], [b""])
            letter.headers[0] = headers.lines(**fields, dead_letter_is_empty="true")
        return letter


def _reason(attempts: int, failed: tuple[int, str] | None, deliveries_max: int) -> str:
    """Return why a message is a dead letter.

    `failed`: the last delivery that failed for a known reason, and the reason. `deliveries_max`: 0 for no limit.
    """
    if failed is not None and failed[0] == attempts:
        return failed[1]
    how = "not acknowledged" if 0 < deliveries_max <= attempts else "refused"
    return how if failed is None else f"{how}; delivery {failed[0]} failed: {failed[1]}"
