"""QB, the Python broker's protocol: every frame is a message. Numbers are in network order.

    u32 total · u32 kind · u64 sequence · u64 timestamp, ms · u32 length · properties · u32 length · body

`total` is the size of the whole frame. Properties are `key=value`, each followed by a zero byte. The client chooses the
sequence of a request, and the ACK repeats it; the sequence of a DATA is the offset of its message. Some clients do not
count the four bytes of `total` itself, and some write both lengths before the properties. The reader detects the style
of a client from its first messages, and replies use the same.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.errors import BadRequest

# Limit of the properties of one message: each needs more memory than its bytes.
PROPERTIES_MAX: Final = 1024

LENGTH: Final = struct.Struct(">I")
HEAD: Final = struct.Struct(">IIQQI")
HEAD_BOTH: Final = struct.Struct(">IIQQII")
# Bytes of a message besides properties and body.
FIXED_BYTES: Final = HEAD_BOTH.size


class Style(NamedTuple):
    """How a client writes its frames."""

    counts_itself: bool = True
    lengths_first: bool = False


_STYLE: Final = Style()


class Kind(IntEnum):
    DATA = 1
    ACK = 2
    HEARTBEAT = 3
    CREATE_TOPIC = 4
    CREATE_SUBSCRIPTION = 5
    DELETE_SUBSCRIPTION = 6
    SUBSCRIBE = 7
    UNSUBSCRIBE = 8
    PUBLISH = 9


class QbMessage(NamedTuple):
    """A received message; `kind` may be unknown."""

    kind: int
    sequence: int
    timestamp_ms: int
    properties: bytes
    body: bytes


def message(
    kind: Kind, sequence: int, timestamp_ms: int, properties: bytes = b"", body: bytes = b"", style: Style = _STYLE
) -> bytes:
    size = FIXED_BYTES + len(properties) + len(body)
    total = size if style.counts_itself else size - LENGTH.size
    if style.lengths_first:
        return HEAD_BOTH.pack(total, kind, sequence, timestamp_ms, len(properties), len(body)) + properties + body
    head = HEAD.pack(total, kind, sequence, timestamp_ms, len(properties))
    return b"".join((head, properties, LENGTH.pack(len(body)), body))


def properties(fields: Mapping[str, object]) -> bytes:
    """Encode properties. Raise BadRequest if one of them would be read as something else."""
    parts = []
    for name, value in fields.items():
        text = str(value)
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise BadRequest(f"a property {name!r} cannot be sent: a name has no =, and nothing has a zero byte")
        parts.append(f"{name}={text}\0")
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError:
        raise BadRequest("a property is not text") from None


def read_properties(block: bytes) -> dict[str, str]:
    """Decode properties. Of several with the same name, the last one counts."""
    try:
        text = block.decode()
    except UnicodeDecodeError:
        raise BadRequest("Invalid properties: they are not UTF-8") from None
    if block.count(b"\0") > PROPERTIES_MAX:
        raise BadRequest(f"Invalid properties: {block.count(bytes(1))} of them, {PROPERTIES_MAX} are allowed")
    found = {}
    for item in text.removesuffix("\0").split("\0") if text else ():
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise BadRequest(f"Invalid properties: {item[:100]!r} is not key=value")
        found[name] = value
    return found
