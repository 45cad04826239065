"""What happened at the doors since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    connections: int = 0
    refused: int = 0  # connections beyond the limit
    silent: int = 0  # closed because they were not admitted in time
    stale: int = 0  # closed because they did not answer PINGs
    slow: int = 0  # closed because a large frame did not arrive while others waited for its room
    unauthorized: int = 0
    protocol_errors: int = 0
    failed_publishes: int = 0  # messages that were not stored, and whose publisher was told
    unstored: int = 0  # messages that were delivered but not stored, because of their subject or reply subject
    unread: int = 0  # times that a client was not read from because it did not read its replies
    received_bytes: int = 0
    sent_bytes: int = 0
