"""What a connection has published and was not told of yet. When the server stops, these answers are given first."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from penstock.broker.intake import Receipt, Refusals
from penstock.run import Run

if TYPE_CHECKING:
    from penstock.server.connection import Connection


class Owing:
    def __init__(self, session: Connection, paid: Callable[[], None]) -> None:
        """`paid` is called once: when the server stops and no answer is owed any more."""
        self._session = session
        self._paid = paid
        self._count = 0
        self.is_stopping = False

    def begin(self, messages: int) -> None:
        """So many were published, and wait for one answer."""
        self._session.peer.in_messages += messages
        self._count += 1

    def end(self, failed: int) -> None:
        """It was given; so many of them are not stored."""
        self._session.server.counters.failed_publishes += failed
        self._count -= 1
        if self.is_stopping and not self._count:
            self._paid()

    def stop(self) -> None:
        """Nothing more is published."""
        self._count += 1
        self.is_stopping = True
        self.end(0)

    def publish(
        self, run: Run, told: Callable[[Receipt], None], refusals: Refusals | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """Now, or when there is a topic and room for it: what is returned is to be awaited. `told` gets what became of
        it."""
        if refusals or not self._session.broker.is_ready(run):
            return self._publish_later(run, told, refusals or {})
        self._publish(run, told, {})
        return None

    async def _publish_later(self, run: Run, told: Callable[[Receipt], None], refusals: Refusals) -> None:
        self._publish(run, told, {**await self._session.broker.make_ready(run), **refusals})

    def _publish(self, run: Run, told: Callable[[Receipt], None], refusals: Refusals) -> None:
        def done(receipt: Receipt) -> None:
            told(receipt)
            self.end(len(receipt.failed))

        self.begin(len(run))
        self._session.broker.publish(run, self._session.guard(done), refusals or None)
