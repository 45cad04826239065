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
from penstock.errors import PenstockError
from penstock.model.batch import OFFSET_MAX
from penstock.model.run import Run
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
        if run.is_live:
            self._note_unstored(run)
        if run.replies and self._dialect.wants_no_responders:
            self._tell_no_responders(run)
        if is_long(run):
            return self._publish_slices(run)
        if not self._broker.intake.is_ready(run, self._publisher):
            return self._prepare(run)
        self._publish(run)
        return None

    async def _publish_slices(self, run: Run) -> None:
        for piece in slices(run):
            refusals = None
            if not self._broker.intake.is_ready(piece, self._publisher):
                refusals = await self._broker.intake.make_ready(piece, self._publisher)
            if self._session.peer.is_closing:
                return
            self._publish(piece, refusals)
            await asyncio.sleep(0)

    async def _prepare(self, run: Run) -> None:
        self._publish(run, await self._broker.intake.make_ready(run, self._publisher))

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
        reasons = {index: f"STORAGE {error.code} {error}" for index, error in receipt.failed.items()}
        if not self._dialect.is_nats:
            return text.acknowledgements(receipt.count, list(receipt.duplicates), reasons)
        is_verbose = self._dialect.is_verbose
        if not reasons:
            return text.acknowledgements(receipt.count) if is_verbose else b""
        if is_verbose:
            lines = [b"+OK\r\n"] * receipt.count
            for index, reason in reasons.items():
                lines[index] = text.violation("Publish", subjects[index], reason)
            return b"".join(lines)
        counts = Counter((subjects[index], reason) for index, reason in reasons.items())
        return b"".join(
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

    def _tell_no_responders(self, run: Run) -> None:
        besides = None if self._session.echo else self._session
        for index, reply in run.replies.items():
            if is_route(reply) and not self._broker.is_served(run.subjects[index], besides):
                self._tell_no_responder(run.subjects[index], reply)

    def _tell_no_responder(self, subject: bytes, reply: bytes) -> None:
        for member, reader in self._session.subscriptions.values():
            # Not to a member of a queue group, as in nats-server.
            if not (isinstance(reader, Subscription) and reader.queue) and matches(reader.pattern, reply):
                self._session.peer.write(text.no_responders(reply, member.sid, subject))
                return
