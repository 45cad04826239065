"""A process that appends until it is killed, and says on stdout what was acknowledged.

    python -m tests.support.appender DIR

Each line is written after the acknowledgement, in one piece: `topic offset value`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from penstock.log.log import Log
from penstock.log.policy import Durability, Policy
from penstock.model.batch import encode
from penstock.store.store import Store, StoreSettings

POLICIES = {
    "synced": Policy(segment_bytes=16_384),
    "written": Policy(segment_bytes=16_384, durability=Durability.FLUSH),
}


async def append_for_ever(store: Store, topic: str, log: Log, life: str) -> None:
    number = 0
    while True:
        values = [f"{life}-{number + place}".encode() for place in range(number % 7 + 1)]
        number += len(values)
        offset = await store.append(log, encode(values, timestamp=number))
        lines = [f"{topic} {offset + place} {value.decode()}\n" for place, value in enumerate(values)]
        os.write(sys.stdout.fileno(), "".join(lines).encode())


async def main(directory: Path) -> None:
    store = Store(directory, settings=StoreSettings(upkeep_ms=20))
    known = {topic.name for topic in store.topics}
    for name in POLICIES.keys() - known:
        store.create_topic(name, policy=POLICIES[name])
    async with asyncio.TaskGroup() as group:
        group.create_task(store.run())
        for topic in store.topics:
            for writer in range(3):
                life = f"{os.getpid()}.{writer}"
                group.create_task(append_for_ever(store, topic.name, store.log(topic.id), life))


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
