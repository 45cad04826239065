"""What is stored: batches of 500 messages of 100 bytes, as text that compresses the way telemetry does."""

from __future__ import annotations

from random import Random
from typing import Final

from penstock.model.batch import Batch, Compression, encode

MESSAGES: Final = 500
VALUE_BYTES: Final = 100
TIMESTAMP: Final = 1_700_000_000_000_000


def make_values(seed: int = 1) -> list[bytes]:
    random = Random(seed)
    values = []
    for number in range(MESSAGES):
        text = (
            f'{{"id":{number},"device":"meter-{random.randrange(10_000):04}","volt":{random.gauss(230, 2):.3f},'
            f'"ampere":{random.expovariate(0.2):.4f},"ok":{str(random.random() < 0.97).lower()}}}'
        )
        values.append(text.encode().ljust(VALUE_BYTES)[:VALUE_BYTES])
    return values


def store(compression: Compression = Compression.NONE) -> bytes:
    """The bytes of such a batch as they are in a log."""
    batch = encode(make_values(), timestamp=TIMESTAMP, compression=compression)
    batch.stamp(0, append_time=TIMESTAMP, durable_bytes=0)
    return bytes(batch.data)


STORED: Final = store()


def ready(count: int) -> list[Batch]:
    """Batches as a door hands them to a log: each with bytes of its own."""
    return [Batch(bytearray(STORED)) for _ in range(count)]
