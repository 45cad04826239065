"""Format a received message for printing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.cli.text import Document, iso, put, shown

if TYPE_CHECKING:
    from penstock.client.message import Message


def line(message: Message) -> str:
    """Return subject, partition:offset and value; mark redeliveries and tombstones."""
    parts = [shown(message.subject.encode(), alone=False), f"{message.partition}:{message.offset}"]
    if message.attempts > 1:
        parts.append(f"(delivery {message.attempts})")
    parts.append("(tombstone)" if message.deleted else shown(message.value, alone=True))
    return "  ".join(parts)


def document(message: Message) -> Document:
    """Return all fields of the message, in the format that `penstock publish --file` reads."""
    made: Document = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": iso(message.timestamp_us),
        "timestamp_us": message.timestamp_us,
        "subject": message.subject,
    }
    if message.attempts > 1:
        made["attempts"] = message.attempts
    if message.key is not None:
        put(made, "key", message.key)
    if message.headers:
        made["headers"] = message.headers
    if message.deleted:
        made["tombstone"] = True
    else:
        put(made, "value", message.value)
    return made


def json_line(message: Message) -> str:
    return json.dumps(document(message))
