"""PUBLISH, and batches of a producer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.awaiting import settled
from penstock.broker.intake import Stored
from penstock.doors.cursus.arguments import needed, number
from penstock.doors.prefixed import topic_of
from penstock.doors.publishing import SLICE_MESSAGES, publish
from penstock.errors import BadRequest, PenstockError
from penstock.model.headers import lines
from penstock.model.run import Run
from penstock.wire import cursus
from penstock.wire.cursus import Command, Records

if TYPE_CHECKING:
    from penstock.doors.cursus.dialect import Cursus


class Producing:
    def __init__(self, dialect: Cursus) -> None:
        self._dialect = dialect
        self._session = dialect.session

    async def publish(self, command: Command, events: deque[bytes]) -> None:
        """Publish this message together with those right behind it. Each has its reply, in order."""
        run = Run([], [])
        # The index in the run of each message that is in it, or why it is not.
        outcomes: list[tuple[Command, int | PenstockError]] = []
        # Topics that can be published to: each is looked up once.
        known: dict[str, bytes] = {}
        following: Command | None = command
        while following is not None:
            try:
                self._add(run, following, known)
                outcomes.append((following, len(run) - 1))
            except PenstockError as error:
                outcomes.append((following, error))
            is_full = run.partition is not None or len(outcomes) >= SLICE_MESSAGES
            following = None if is_full else self._next_publish(events, command)
        stored = await self._store_as(_claim(command), run) if run.values else []
        parts = []
        for asked, found in outcomes:
            outcome = stored[found] if isinstance(found, int) else found
            parts.append(self._dialect.packed(_reply(asked, outcome, self._dialect.address)))
        self._session.peer.answer(b"".join(parts))

    def _next_publish(self, events: deque[bytes], first: Command) -> Command | None:
        """Take the next command if it is a PUBLISH of the same producer as the first, without a partition."""
        if not events or not events[0].startswith(b"PUBLISH "):
            return None
        try:
            command = cursus.read_command(events[0])
            if "partition" in command.arguments or _claim(command) != _claim(first):
                return None
        except PenstockError:
            return None
        events.popleft()
        return command

    def _add(self, run: Run, command: Command, known: dict[str, bytes]) -> None:
        arguments = command.arguments
        topic = needed(arguments, "topic")
        if topic not in known:
            self._session.authorize_publish(topic.encode())
            topic_of(self._session, topic.encode())
            known[topic] = topic.encode()
        size = sum(len(arguments.get(name, "").encode()) for name in ("key", "producerId"))
        self._session.shared.settings.check_size(len(command.message), size)
        index = len(run)
        if command.is_named:
            self._add_named(run, index, arguments)
        run.subjects.append(known[topic])
        run.values.append(command.message)

    def _add_named(self, run: Run, index: int, arguments: Mapping[str, str]) -> None:
        """Add what is only possible with named arguments."""
        if arguments.get("acks", "1") not in ("0", "1", "-1", "all"):
            raise BadRequest("invalid acks: 0, 1, -1 or all")
        sequence, _ = _sequence(arguments), _epoch(arguments)
        partition = number(arguments, "partition", "invalid partition ID") if "partition" in arguments else None
        claim = _claim_of(arguments)
        if claim is not None:
            run.headers[index] = _identity(claim, sequence)
        if "key" in arguments:
            run.keys[index] = arguments["key"].encode()
        run.partition = partition

    async def publish_batch(self, records: Records) -> None:
        """Store a producer's batch, and reply; raise the first error if a message is not stored."""
        self._session.authorize_publish(records.topic)
        topic_of(self._session, records.topic)
        if len(records.records) > SLICE_MESSAGES:
            run, claim = await self._session.shared.tasks.work(_run, records, self._session.shared.settings.check_size)
        else:
            run, claim = _run(records, self._session.shared.settings.check_size)
        stored = await self._store_as(claim, run) if run.values else []
        failure = next((each for each in stored if isinstance(each, PenstockError)), None)
        if failure is not None:
            raise failure
        if records.acks == "0":
            self._dialect.say("OK")
            return
        offsets = [each.offset for each in stored if isinstance(each, Stored)]
        first, last = (records.records[0], records.records[-1]) if records.records else (None, None)
        self._dialect.say_json(
            {
                "status": "OK",
                "last_offset": max(offsets, default=0),
                "producer_id": first.producer.decode(errors="replace") if first else "",
                "producer_epoch": first.epoch if first else 0,
                "seq_start": first.sequence if first else 0,
                "seq_end": last.sequence if last else 0,
                "leader": self._dialect.address,
            }
        )

    async def _store_as(self, claim: Claim | None, run: Run) -> list[Stored | PenstockError]:
        """As `_store`. All of it is refused if a producer with a newer epoch has taken over."""
        if claim is None:
            return await self._store(run)
        topic = topic_of(self._session, claim.topic)
        try:
            async with self._session.broker.epochs.publishing(topic.topic.id, claim.producer, claim.epoch):
                return await self._store(run)
        except PenstockError as error:
            self._session.refused_publishes(len(run), error)
            return [error] * len(run)

    async def _store(self, run: Run) -> list[Stored | PenstockError]:
        """Return what became of each message, when that is decided."""
        receipt, waits = publish(self._session, run)
        if waits is not None:
            await waits
        with suppress(PenstockError):  # each message has its own
            await settled(receipt.outcome)
        return receipt.stored()


def _reply(command: Command, outcome: Stored | PenstockError, address: str) -> bytes:
    """Return the reply to a PUBLISH, in the form in which it was asked."""
    arguments = command.arguments
    if isinstance(outcome, PenstockError):
        return f"ERROR: {outcome}".encode()
    if not command.is_named:
        return f"📤 Published to '{arguments['topic']}'".encode()
    if arguments.get("acks") == "0":
        return b"OK"
    sequence = int(arguments.get("seqNum", "0"))
    return json.dumps(
        {
            "status": "OK",
            "last_offset": outcome.offset,
            "producer_id": arguments.get("producerId", ""),
            "producer_epoch": int(arguments.get("epoch", "0")),
            "seq_start": sequence,
            "seq_end": sequence,
            "leader": address,
        }
    ).encode()


class Claim(NamedTuple):
    """The producer of messages that are stored once."""

    topic: bytes
    producer: str
    epoch: int


def _claim(command: Command) -> Claim | None:
    return _claim_of(command.arguments) if command.is_named else None


def _claim_of(arguments: Mapping[str, str]) -> Claim | None:
    if arguments.get("isIdempotent", "").lower() != "true" and not _sequence(arguments):
        return None
    return Claim(needed(arguments, "topic").encode(), needed(arguments, "producerId"), _epoch(arguments))


def _sequence(arguments: Mapping[str, str]) -> int:
    return number(arguments, "seqNum", "invalid seqNum", default=0)


def _epoch(arguments: Mapping[str, str]) -> int:
    return number(arguments, "epoch", "invalid epoch", default=0)


def _run(records: Records, check_size: Callable[..., None]) -> tuple[Run, Claim | None]:
    run = Run([records.topic] * len(records.records), [record.value for record in records.records])
    claims = set()
    for index, record in enumerate(records.records):
        if records.is_idempotent:
            claim = Claim(records.topic, record.producer.decode(errors="replace"), record.epoch)
            run.headers[index] = _identity(claim, record.sequence)
            claims.add(claim)
        if record.key:
            run.keys[index] = record.key
        check_size(len(record.value), len(record.key), len(run.headers.get(index, b"")))
    if len(claims) > 1:
        raise BadRequest(f"an idempotent batch of {len(claims)} producers or epochs: send one batch for each")
    if records.partition >= 0:
        run.partition = records.partition
    return run, next(iter(claims), None)


def _identity(claim: Claim, sequence: int) -> bytes:
    """Return the header that lets a message with this number be stored once."""
    return lines(Msg_ID=f"{claim.producer}/{claim.epoch}/{sequence}")
