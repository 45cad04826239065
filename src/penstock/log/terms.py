"""The settings that a store gives a log. They may change while the log is open."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.log.policy import Policy


@dataclass(slots=True)
class LogTerms:
    policy: Policy
    # Whether the log is a copy of another one: its batches keep the offsets that they have there.
    is_piped: bool
    # Bytes that the whole store retains, if that is limited and this log may be shortened for it.
    store_limit: int | None = None
    # The subject of messages that name none.
    subject: bytes = b""
