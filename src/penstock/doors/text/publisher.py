"""PUB and HPUB: runs to the broker, and a reply for each message."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.intake import Receipt, Refusals
from penstock.broker.member import Place
from penstock.broker.order import Publisher
from penstock.broker.subscription import Subscription
from penstock.doors.publishing import is_long, slices
from penstock.errors import PenstockError, PermissionDenied
from penstock.model.batch import OFFSET_MAX
from penstock.model.run import Run, payload_bytes
from penstock.model.subject import is_literal, is_route, matches
from penstock.wire import text

if TYPE_CHECKING:
    from penstock.doors.text.dialect import Text

# Runs that a connection without echo published last: it does not receive these.
OWN_RUNS_MAX: Final = 1000


class TextPublisher:
    def __init__(self, dialect: Text) -> None:
        self._dialect = dialect
        self._session = dialect.session
        self._broker = dialect.session.broker
        self._publisher = Publisher()
        self._is_publishing = False
        # For a connection without echo: place -> first and last offset of each run that it published.
        self._own: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def publish(self, run: Run) -> Coroutine[Any, Any, None] | None:
        if is_long(run):
            return self._publish_slices(run)
        refused = self._begin(run)
        if refused is not None and run.is_live:
            return None
        if not self._broker.intake.is_ready(run, self._publisher, refused=refused or ()):
            return self._prepare(run, refused)
        self._publish(run, refused)
        return None

    def _begin(self, run: Run) -> Refusals | None:
        """Return why messages are not published, if the client may not; otherwise do what precedes publishing."""
        refused = None
        if self._session.checked is not None:
            refused = self._session.refused(run) or None
            if self._session.checked.meter.buckets:
                self._session.charge(len(run), payload_bytes(run))
            if refused is not None and run.is_live:
                # A run that is not stored has one message.
                self._session.replies.send(self._refusal(run.subjects[0], next(iter(refused.values()))))
                return refused
        if run.is_live:
            self._note_unstored(run)
        if run.replies and self._dialect.wants_no_responders:
            self._tell_no_responders(run, refused or {})
        return refused

    async def _publish_slices(self, run: Run) -> None:
        for piece in slices(run):
            refused = self._begin(piece)
            if not self._broker.intake.is_ready(piece, self._publisher, refused=refused or ()):
                refused = await self._broker.intake.make_ready(piece, self._publisher, refused)
            if self._session.peer.is_closing:
                return
            self._publish(piece, refused)
            await asyncio.sleep(0)

    async def _prepare(self, run: Run, refused: Refusals | None) -> None:
        self._publish(run, await self._broker.intake.make_ready(run, self._publisher, refused))

    def _publish(self, run: Run, refusals: Refusals | None = None) -> None:
        replies = self._session.replies
        reply = replies.reserve()
        subjects = run.subjects

        def done(_error: PenstockError | None) -> None:
            replies.fill(reply, self._lines(receipt, subjects))

        self._is_publishing = True
        receipt = self._broker.intake.publish(run, refusals, self._publisher)
        self._is_publishing = False
        receipt.outcome.then(self._session.guard(done))
        if not self._session.echo:
            for target, offset, indices in receipt.places:
                own = self._own.setdefault((target.topic_id, target.number), [])
                own.append((offset, offset + len(indices) - 1))
                if len(own) > 2 * OWN_RUNS_MAX:
                    del own[:OWN_RUNS_MAX]

    def has_published(self, place: Place, offset: int) -> bool:
        if not place.keeps:
            # A message that is not kept is delivered while it is published, unless it had to wait.
            return place is self._publisher.live or (place is self._broker.live and self._is_publishing)
        own = self._own.get((place.topic_id, place.number), [])
        at = bisect_right(own, (offset, OFFSET_MAX)) - 1
        return at >= 0 and offset <= own[at][1]

    def _lines(self, receipt: Receipt, subjects: Sequence[bytes]) -> bytes:
        """Return the reply to messages with these subjects."""
        if receipt.error is not None:
            self._session.refused_publishes(len(receipt.failed), receipt.error)
        if not self._dialect.is_nats:
            failed = {index: _reason(error) for index, error in receipt.failed.items()}
            return text.acknowledgements(receipt.count, list(receipt.duplicates), failed)
        is_verbose = self._dialect.is_verbose
        denied = [index for index, error in receipt.failed.items() if isinstance(error, PermissionDenied)]
        reasons = {index: _nats_reason(error) for index, error in receipt.failed.items()}
        if not reasons:
            return text.acknowledgements(receipt.count) if is_verbose else b""
        if is_verbose:
            lines = [b"+OK\r\n"] * receipt.count
            for index, reason in reasons.items():
                lines[index] = text.violation("Publish", subjects[index], reason)
            return b"".join(lines)
        # As by nats-server, one for each message.
        lines = [text.violation("Publish", subjects[index]) for index in denied]
        counts = Counter((subjects[index], reason) for index, reason in reasons.items() if reason)
        return b"".join(lines) + b"".join(
            text.violation("Publish", subject, reason if count == 1 else f"{count} messages, {reason}")
            for (subject, reason), count in counts.items()
        )

    def _note_unstored(self, run: Run) -> None:
        """Count messages whose subject or reply subject cannot be stored. As by nats-server, a pedantic client gets an
        error if the subject is not a literal one."""
        self._session.shared.counters.unstored += len(run)
        for subject in run.subjects if self._dialect.is_pedantic else ():
            if not (is_route(subject) and is_literal(subject)):
                self._session.replies.send(text.error("Invalid Publish Subject", is_nats=True))

    def _refusal(self, subject: bytes, error: PenstockError) -> bytes:
        is_nats = self._dialect.is_nats
        return (
            text.violation("Publish", subject, _nats_reason(error))
            if is_nats
            else text.error(_reason(error), is_nats=False)
        )

    def _tell_no_responders(self, run: Run, refused: Refusals) -> None:
        besides = None if self._session.echo else self._session
        for index, reply in run.replies.items():
            if run.subjects[index] in refused or index in refused:
                continue
            if is_route(reply) and not self._broker.is_served(run.subjects[index], besides):
                self._tell_no_responder(run.subjects[index], reply)

    def _tell_no_responder(self, subject: bytes, reply: bytes) -> None:
        for member, reader in self._session.subscriptions.values():
            # Not to a member of a queue group, as in nats-server.
            if not (isinstance(reader, Subscription) and reader.queue) and matches(reader.pattern, reply):
                self._session.peer.write(text.no_responders(reply, member.sid, subject))
                return


def _reason(error: PenstockError) -> str:
    return f"STORAGE {error.code} {error}"


def _nats_reason(error: PenstockError) -> str:
    """Return the reason in a violation; none if the user has no permission, as by nats-server."""
    return "" if isinstance(error, PermissionDenied) else _reason(error)
