"""Appending what comes from within the broker: under the number of its source, so that it is stored once."""

from __future__ import annotations

import hashlib
from typing import Protocol

from penstock.broker.partition import Partition
from penstock.clock import Clock
from penstock.run import Run
from penstock.storage.store import outcome


class Timed(Protocol):
    clock: Clock


def source_number(*names: object) -> int:
    """A number for a source of messages that no other one has."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


async def append_once(host: Timed, target: Partition, run: Run, source: int, number: int) -> int:
    """Append a run, and wait until it is committed; not again, if this number of this source was appended before."""
    settled, done = outcome()
    target.append_batch(run.encode(target.name, host.clock.now_us()), source, number, done)
    return await settled
