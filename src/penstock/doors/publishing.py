"""Publish a run, for dialects that reply when all of it is decided.

A long run is published in slices, between which other connections have a turn. A run whose topic does not exist yet,
or for which there is no room, is published later. Either way there is one receipt. It counts as a reply that is due
until its outcome is settled, so a connection that is stopped gets it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.intake import Receipt, Refusals
from penstock.errors import PenstockError
from penstock.model.run import Run, payload_bytes
from penstock.outcome import Outcome

if TYPE_CHECKING:
    from penstock.doors.session import Session

# Messages that are examined one by one are published this many at a time.
SLICE_MESSAGES: Final = 512


def is_long(run: Run) -> bool:
    """Return whether publishing the run at once would hold up others."""
    return len(run) > SLICE_MESSAGES and not (run.is_plain and run.partition is None and run.subject is not None)


def slices(run: Run) -> Iterator[Run]:
    for begin in range(0, len(run), SLICE_MESSAGES):
        piece = run.select(range(begin, min(begin + SLICE_MESSAGES, len(run))))
        piece.partition = run.partition
        yield piece


def publish(
    session: Session, run: Run, refusals: Refusals | None = None
) -> tuple[Receipt, Coroutine[Any, Any, None] | None]:
    """Publish a run. Return its receipt, and what the events behind must wait for, if anything."""
    if session.checked is not None:
        refusals = {**session.refused(run), **(refusals or {})}
    if is_long(run) or refusals or not session.broker.intake.is_ready(run):
        receipt = Receipt(len(run))
        track(session, receipt.outcome, len(run), payload_bytes(run), receipt)
        return receipt, _publish_later(session, run, receipt, refusals or {})
    # Before the run is handed over: the broker adds to it.
    count, size = len(run), payload_bytes(run)
    receipt = session.broker.intake.publish(run)
    track(session, receipt.outcome, count, size, receipt)
    return receipt, None


def track(session: Session, outcome: Outcome, messages: int, size: int, receipt: Receipt | None = None) -> None:
    """Count messages that a client published. Until the outcome is settled, the session owes it a reply."""
    session.peer.in_messages += messages
    session.peer.in_bytes += size
    if session.checked is not None:
        session.charge(messages, size)
    session.replies.begin()
    outcome.then(session.guard(partial(_decided, session, messages, receipt)))


def _decided(session: Session, messages: int, receipt: Receipt | None, error: PenstockError | None) -> None:
    if error is not None:
        session.refused_publishes(messages if receipt is None else len(receipt.failed), error)
    session.replies.end()


async def _publish_later(session: Session, run: Run, receipt: Receipt, refusals: Refusals) -> None:
    pieces = slices(run) if is_long(run) else [run]
    begin = 0
    for piece in pieces:
        count = len(piece)
        refused = _shifted_refusals(refusals, begin, count)
        if not session.broker.intake.is_ready(piece, refused=refused):
            refused = await session.broker.intake.make_ready(piece, refused=refused)
        part = session.broker.intake.publish(piece, refused or None)
        part.outcome.then(session.guard(partial(_absorb, receipt, part, begin, receipt.part(()))))
        begin += count
        if begin < receipt.count:
            await asyncio.sleep(0)
    receipt.close()


def _absorb(whole: Receipt, part: Receipt, begin: int, absorbed: Outcome, _: PenstockError | None) -> None:
    """Make the receipt of a slice part of the receipt of the whole run."""
    whole.failed.update((begin + index, error) for index, error in part.failed.items())
    whole.duplicates.update((begin + index, found) for index, found in part.duplicates.items())
    whole.late.update((begin + index, name) for index, name in part.late.items())
    whole.places += [(target, offset, _shifted(indices, begin)) for target, offset, indices in part.places]
    absorbed.settle()


def _shifted_refusals(refusals: Refusals, begin: int, count: int) -> Refusals:
    """Return the refusals of a slice: by subject, and by index in the slice."""
    return {
        key if isinstance(key, bytes) else key - begin: error
        for key, error in refusals.items()
        if isinstance(key, bytes) or begin <= key < begin + count
    }


def _shifted(indices: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(indices, range):
        return range(indices.start + by, indices.stop + by)
    return [index + by for index in indices]
