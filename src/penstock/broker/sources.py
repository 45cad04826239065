"""Appending what comes from within the broker: under the number of its source, so that it is stored once."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Protocol

from penstock.broker.partition import Partition
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.run import Run


class Timed(Protocol):
    clock: Clock


def source_number(*names: object) -> int:
    """A number for a source of messages that no other one has."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


async def append_once(host: Timed, target: Partition, run: Run, source: int, number: int) -> int:
    """Append a run, and wait until it is committed; not again, if this number of this source was appended before."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def done(offset: int, error: PenstockError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(offset)
        else:
            future.set_exception(error)

    target.append_batch(run.encode(target.name, host.clock.now_us()), source, number, done)
    return await future
