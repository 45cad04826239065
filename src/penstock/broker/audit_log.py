"""The audit trail on disk: events go to the topic `$audit`, which is created with the first of them.

It is a topic like any other: retained, readable by its name, backed up. Only its name is special: no wildcard matches
it, and clients cannot publish to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.awaiting import settled
from penstock.broker.topic import ServedTopic, Topics
from penstock.errors import PenstockError
from penstock.health import Health
from penstock.log.policy import Dedup, Policy
from penstock.model.run import Run
from penstock.model.subject import AUDIT_SUBJECT
from penstock.outcome import Outcome
from penstock.security.audit import Audit

if TYPE_CHECKING:
    from penstock.broker.changes import TopicChanges


POLICY: Final = Policy(dedup=Dedup.OFF, retain_ms=90 * 86_400_000, retain_bytes=256 << 20)
# Events that are stored at once, and how long to wait after a failure.
_EVENTS_MAX: Final = 1000
_RETRY_S: Final = 1.0


class AuditHost(Protocol):
    """The broker, as far as the trail needs it."""

    health: Health
    topics: Topics
    changes: TopicChanges

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class AuditLog:
    def __init__(self, audit: Audit, host: AuditHost) -> None:
        self._audit = audit
        self._host = host
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Store events as they are recorded, and those that were recorded before."""
        self._audit.on_event = self._begin
        if self._audit.is_on:
            self._begin()

    def _begin(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = self._host.spawn(self._write())

    async def _write(self) -> None:
        while events := self._audit.take(_EVENTS_MAX):
            try:
                topic = await self._topic()
                values = [json.dumps(event, separators=(",", ":")).encode() for event in events]
                outcome = Outcome()
                topic.partitions[0].append(Run([AUDIT_SUBJECT] * len(values), values), outcome)
                await settled(outcome)
            except PenstockError as error:
                self._audit.put_back(events)
                self._host.health.report("audit trail", f"events cannot be stored: {error}")
                await asyncio.sleep(_RETRY_S)
            else:
                self._host.health.clear("audit trail")

    async def _topic(self) -> ServedTopic:
        topic = self._host.topics.get(AUDIT_SUBJECT) or await self._host.changes.make(AUDIT_SUBJECT, 1, POLICY)
        if topic.refusal is not None:
            raise topic.refusal
        return topic
