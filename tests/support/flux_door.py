"""Helpers for tests of Flux's dialect."""

from __future__ import annotations

from itertools import count

from tests.support.server import Flux, Message

# Nothing of `patient` is delivered again while a test runs, all of `quick` is at once.
TOPICS = """
[topics.patient]
ack_deadline_ms = "1h"
[topics.quick]
ack_deadline_ms = 500
deliveries_max = 3
"""
NUMBERS = count()


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


def pulled(client: Flux, subject: str, wanted: int = 100_000) -> list[bytes]:
    """What a subject holds, as far as this client has not asked for it before."""
    client.send(f"PULL {subject} {wanted}\r\n")
    messages, number = client.until_ok()
    assert len(messages) == int(number)
    return payloads(messages)
