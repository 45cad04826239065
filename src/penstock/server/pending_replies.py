"""What a connection has published and was not told of yet. When the server stops, these answers are given first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.intake import Receipt, Refusals
from penstock.errors import PenstockError
from penstock.run import Run, payload_bytes

if TYPE_CHECKING:
    from penstock.server.connection import Connection


# Messages that are looked at one by one are published so many at a time; between two slices others have a turn.
SLICE_MESSAGES: Final = 512


def is_long(run: Run) -> bool:
    """Return whether publishing the run at once would hold others up."""
    return len(run) > SLICE_MESSAGES and not (run.is_plain and run.partition is None and run.subject is not None)


def slices(run: Run) -> Iterator[Run]:
    for begin in range(0, len(run), SLICE_MESSAGES):
        piece = run.select(range(begin, min(begin + SLICE_MESSAGES, len(run))))
        piece.partition = run.partition
        yield piece


class PendingReplies:
    def __init__(self, session: Connection, paid: Callable[[], None]) -> None:
        """`paid` is called once: when the server stops and no answer is owed any more."""
        self._session = session
        self._paid = paid
        self._count = 0
        self.is_stopping = False

    def begin(self, messages: int, size: int = 0) -> None:
        """So many were published, of so many bytes, and wait for one answer."""
        self._session.peer.in_messages += messages
        self._session.peer.in_bytes += size
        self._count += 1

    def end(self, failed: int = 0, error: PenstockError | None = None) -> None:
        """It was given; so many of them are not stored, for this reason."""
        if error is not None:
            self._session.refused_publishes(failed, error)
        self._count -= 1
        if self.is_stopping and not self._count:
            self._paid()

    def stop(self) -> None:
        """Nothing more is published."""
        self._count += 1
        self.is_stopping = True
        self.end()

    def publish(
        self, run: Run, told: Callable[[Receipt], None], refusals: Refusals | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """Now, or when there is a topic and room for it: what is returned is to be awaited. `told` gets what became of
        it."""
        if is_long(run):
            return self._publish_slices(run, told, refusals)
        if refusals or not self._session.broker.is_ready(run):
            return self._publish_later(run, told, refusals or {})
        self._publish(run, told, {})
        return None

    async def _publish_slices(self, run: Run, told: Callable[[Receipt], None], refusals: Refusals | None) -> None:
        """Publish slice by slice; `told` gets one receipt for all of them."""
        self.begin(0)
        receipt = Receipt(len(run), told)
        begin = 0
        for piece in slices(run):
            waits = self.publish(piece, _absorb(receipt, begin), refusals)
            if waits is not None:
                await waits
            begin += len(piece)
            await asyncio.sleep(0)
        receipt.close()
        self.end()

    async def _publish_later(self, run: Run, told: Callable[[Receipt], None], refusals: Refusals) -> None:
        self._publish(run, told, {**await self._session.broker.make_ready(run), **refusals})

    def _publish(self, run: Run, told: Callable[[Receipt], None], refusals: Refusals) -> None:
        def done(receipt: Receipt) -> None:
            told(receipt)
            self.end(len(receipt.failed), receipt.error)

        self.begin(len(run), payload_bytes(run))
        self._session.broker.publish(run, self._session.guard(done), refusals or None)


def _absorb(whole: Receipt, begin: int) -> Callable[[Receipt], None]:
    """Return what makes the receipt of a slice part of that of the whole run."""
    settle = whole.part(())

    def decided(part: Receipt) -> None:
        whole.failed.update((begin + index, error) for index, error in part.failed.items())
        whole.duplicates.update((begin + index, found) for index, found in part.duplicates.items())
        whole.late.update((begin + index, name) for index, name in part.late.items())
        whole.places += [(target, offset, _shifted(indices, begin)) for target, offset, indices in part.places]
        settle(0, None)

    return decided


def _shifted(indices: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(indices, range):
        return range(indices.start + by, indices.stop + by)
    return [index + by for index in indices]
