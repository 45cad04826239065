"""APPEND, PUBLISH and STAGE: check a producer's batch, and store it.

The broker stores the producer's bytes untouched. A batch is opened only if someone must examine its messages: for
PUBLISH, and where messages have IDs or delays. A large batch is checked in a worker, one at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.intake import Receipt, Refusals, Stored
from penstock.broker.topic import RESERVED, ServedTopic, check_lines
from penstock.doors.binary.frames import error_fields
from penstock.doors.publishing import SLICE_MESSAGES, publish, track
from penstock.errors import BadHeader, BadRequest, BadSubject, BatchTooLarge, NoResponders, PenstockError
from penstock.model import headers
from penstock.model.batch import HEADER_BYTES, Batch, Buffer, accept_columns
from penstock.model.run import Run, open_batch
from penstock.model.subject import is_subject, whole_topic
from penstock.outcome import Outcome
from penstock.security.permissions import Action
from penstock.wire import binary
from penstock.wire.binary import Type

if TYPE_CHECKING:
    from penstock.doors.binary.dialect import Binary
    from penstock.doors.session import Session

# A larger batch is checked in a worker.
INLINE_BYTES_MAX: Final = 1 << 20
INLINE_MESSAGES_MAX: Final = 4096
PUBLISH_MESSAGES_MAX: Final = 1 << 17

_Waits = Coroutine[Any, Any, None] | None


class _Checked(NamedTuple):
    """A sound batch, and its messages if they are needed."""

    batch: Batch
    run: Run | None = None
    # Its distinct subjects, if the publisher may not publish to any.
    subjects: Collection[bytes] = ()


class Producing:
    def __init__(self, dialect: Binary) -> None:
        self._dialect = dialect
        self._session = dialect.session
        self._broker = dialect.session.broker

    # APPEND.

    def append(self, number: int, payload: bytes | bytearray) -> _Waits:
        to, data = binary.read_append(payload)
        topic = self._broker.topics.public(to.topic_id, self._session.checked)
        return self._check(data, topic, partial(self._append_checked, number, to))

    def _append_checked(self, number: int, to: binary.Append, checked: _Checked) -> _Waits:
        batch, run, subjects = checked
        self._authorize(to.topic_id, subjects)
        if run is not None:
            return self._publish_run(number, run, self._tell_appended)
        if not self._broker.intake.is_batch_ready(to.topic_id):
            return self._append_later(number, to, batch)
        self._append_batch(number, to, batch)
        return None

    async def _append_later(self, number: int, to: binary.Append, batch: Batch) -> None:
        self._append_batch(number, to, batch, await self._broker.intake.prepare_batch(to.topic_id, batch))

    def _append_batch(self, number: int, to: binary.Append, batch: Batch, refusal: PenstockError | None = None) -> None:
        def store(outcome: Outcome) -> dict[str, Any]:
            # One that is stored already is not refused, even if the schema has changed since.
            if refusal is not None and not self._broker.intake.is_stored(to.topic_id, to.partition, batch):
                raise refusal
            appended = self._broker.intake.append(*to, batch, outcome)
            return {"offset": appended.offset, "duplicate": appended.is_duplicate}

        self._store(number, batch, store)

    def _store(self, number: int, batch: Batch, store: Callable[[Outcome], dict[str, Any]]) -> None:
        """Store a batch, and answer the request when it is stored."""
        outcome = Outcome()
        fields: dict[str, Any] = {}
        try:
            fields = store(outcome)
        except PenstockError as error:
            outcome.settle(error)
        outcome.then(self._session.guard(partial(self._dialect.settle, number, fields)))
        track(self._session, outcome, batch.count, len(batch.data))

    # STAGE.

    def stage(self, number: int, payload: bytes | bytearray) -> _Waits:
        stage, data = binary.read_stage(payload)
        topic = self._broker.topics.public(stage.to.topic_id, self._session.checked)
        return self._check(data, topic, partial(self._stage_checked, number, stage), is_staged=True)

    def _stage_checked(self, number: int, stage: binary.StageTarget, checked: _Checked) -> _Waits:
        self._session.authorize(Action.TRANSACTIONS, stage.name)
        self._authorize(stage.to.topic_id, checked.subjects)
        if self._broker.transactions is None or not self._broker.intake.is_batch_ready(stage.to.topic_id):
            return self._stage_later(number, stage, checked.batch)
        self._stage_batch(number, stage, checked.batch)
        return None

    async def _stage_later(self, number: int, stage: binary.StageTarget, batch: Batch) -> None:
        await self._broker.open_transactions()
        self._stage_batch(number, stage, batch, await self._broker.intake.prepare_batch(stage.to.topic_id, batch))

    def _stage_batch(
        self, number: int, stage: binary.StageTarget, batch: Batch, refusal: PenstockError | None = None
    ) -> None:
        transactions = self._broker.transactions
        assert transactions is not None, "they are open"

        def store(outcome: Outcome) -> dict[str, Any]:
            # A transaction that was committed before is not refused, even if the schema has changed since.
            if refusal is not None and not transactions.is_decided(stage.name, stage.number):
                raise refusal
            return {"offset": transactions.stage(*stage, batch, outcome)}

        self._store(number, batch, store)

    def _authorize(self, topic_id: int, subjects: Collection[bytes]) -> None:
        """Raise PermissionDenied unless the client may publish a batch with these subjects."""
        identity = self._session.checked
        if identity is None:
            return
        name = self._broker.topics.public(topic_id, identity).name
        for subject in () if identity.may_publish_all(whole_topic(name)) else subjects or (name,):
            if not identity.may_publish(subject):
                raise identity.refuse(Action.PUBLISH, subject)
        identity.meter.check_rates(self._broker.clock.monotonic_us())

    # PUBLISH.

    def publish(self, number: int, payload: bytes | bytearray) -> _Waits:
        def publish_checked(checked: _Checked) -> _Waits:
            assert checked.run is not None, "it is opened"
            if checked.run.replies and len(checked.run) == 1:
                # A request. Requests among other messages are not examined: each would look at every group.
                self._session.authorize_publish(checked.run.subjects[0])
                self._check_served(checked.run.subjects[0])
            return self._publish_run(number, checked.run, self._tell_published)

        return self._check(payload, None, publish_checked)

    def _check_served(self, subject: bytes) -> None:
        if not refusal(subject) and not self._broker.is_served(subject):
            raise NoResponders(f"nobody is subscribed to {subject.decode(errors='replace')!r}: nothing was published")

    def _publish_run(self, number: int, run: Run, answer: Callable[[int, Receipt], None]) -> _Waits:
        receipt, waits = publish_run(self._session, run)
        receipt.outcome.then(self._session.guard(lambda _: answer(number, receipt)))
        return waits

    def _tell_appended(self, number: int, receipt: Receipt) -> None:
        if receipt.error is not None:
            self._dialect.answer_error(number, receipt.error)
            return
        stored = [each for each in receipt.stored() if isinstance(each, Stored)]
        duplicates = sum(each.is_duplicate for each in stored)
        is_duplicate = duplicates == len(stored)
        self._dialect.answer(number, {"offset": stored[0].offset, "duplicate": is_duplicate, "duplicates": duplicates})

    def _tell_published(self, number: int, receipt: Receipt) -> None:
        if receipt.count <= SLICE_MESSAGES:
            self._dialect.answer(number, {"receipts": list(map(_receipt, receipt.stored()))})
            return
        self._session.replies.begin()
        self._session.spawn(self._tell_slowly(number, receipt.stored()))

    async def _tell_slowly(self, number: int, stored: list[Stored | PenstockError]) -> None:
        """Answer a PUBLISH of many messages: encoding the receipts takes a while."""
        parts = []
        for begin in range(0, len(stored), SLICE_MESSAGES):
            receipts = list(map(_receipt, stored[begin : begin + SLICE_MESSAGES]))
            parts.append(json.dumps(receipts, separators=(",", ":"))[1:-1])
            await asyncio.sleep(0)
        data = f'{{"receipts":[{",".join(parts)}]}}'.encode()
        self._session.peer.answer(binary.frame(Type.RESULT, number, data))
        self._session.replies.end()

    # Checking.

    def _check(
        self,
        data: Buffer,
        topic: ServedTopic | None,
        then: Callable[[_Checked], _Waits],
        *,
        is_staged: bool = False,
    ) -> _Waits:
        """Check a producer's batch, and continue with it: at once, or in a worker if it is large."""
        if len(data) > INLINE_BYTES_MAX or (len(data) >= HEADER_BYTES and _is_large(Batch(data))):
            return self._check_later(data, topic, then, is_staged=is_staged)
        return then(self._checked(data, topic, is_staged=is_staged))

    async def _check_later(
        self, data: Buffer, topic: ServedTopic | None, then: Callable[[_Checked], _Waits], *, is_staged: bool
    ) -> None:
        async with self._session.shared.tasks.large:
            waits = then(await self._session.work(self._checked, data, topic, is_staged=is_staged))
            if waits is not None:
                await waits

    def _checked(self, data: Buffer, topic: ServedTopic | None, *, is_staged: bool) -> _Checked:
        """Return a sound batch, and its messages if someone must examine them."""
        batch, columns = accept_columns(data)
        if batch.plain_length > self._session.shared.settings.payload_bytes_max:
            self._session.shared.settings.check_size(columns.largest())
        check_lines(batch, None if topic is None else topic.name, columns)
        subjects: Collection[bytes] = ()
        if self._session.checked is not None and topic is not None and batch.has("subject"):
            subjects = {subject or topic.name for subject in columns.subjects() or ()}
        if topic is None:
            if batch.count > PUBLISH_MESSAGES_MAX:
                raise BatchTooLarge(f"{batch.count} messages in one PUBLISH, {PUBLISH_MESSAGES_MAX} are allowed")
            return _Checked(batch, open_batch(batch, b"", columns=columns))
        now_us = self._broker.clock.now_us()
        asked = [headers.read(block, now_us) for block in columns.distinct("headers")] if batch.asks else []
        if is_staged:
            if any(each.due_us for each in asked):
                raise BadHeader("a delayed message cannot be part of a transaction")
            return _Checked(batch, subjects=subjects)
        # A TTL is for readers: the batch is stored as it came.
        asks_more = any(each.identity is not None or each.due_us is not None for each in asked)
        if topic.takes_opaque(asks=asks_more):
            return _Checked(batch, subjects=subjects)
        if asks_more and batch.producer:
            raise BadRequest("a batch whose messages ask for something has no producer: their ids tell repetitions")
        run = open_batch(batch, topic.name, columns=columns)
        for block in run.headers.values():
            headers.read(block, now_us)
        return _Checked(batch, run, subjects)


def publish_run(session: Session, run: Run) -> tuple[Receipt, _Waits]:
    """Publish messages of any subjects. Those whose subject is invalid are refused, and the others are stored."""
    refusals: Refusals = {subject: error for subject in set(run.subjects) if (error := refusal(subject))}
    return publish(session, run, refusals)


def refusal(subject: bytes) -> PenstockError | None:
    if is_subject(subject) and not subject.startswith(RESERVED):
        return None
    return BadSubject(f"nothing can be published to {subject.decode(errors='replace')!r}")


def _is_large(batch: Batch) -> bool:
    """Return whether it takes long to check a batch, as far as its header can be believed."""
    return batch.count > INLINE_MESSAGES_MAX or batch.plain_length > INLINE_BYTES_MAX


def _receipt(stored: Stored | PenstockError) -> object:
    if isinstance(stored, Stored):
        return [stored.topic.decode(), stored.partition, stored.offset, stored.is_duplicate]
    return error_fields(stored)
