"""Where a reader begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from penstock.broker.partition import Partition


class Start(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


class AtOffset(NamedTuple):
    """In each partition alike; at its end, if it is not there yet."""

    offset: int


class AtTime(NamedTuple):
    """With what was appended then (µs since 1970) or later."""

    time_us: int


class AtPositions(NamedTuple):
    """Positions by topic ID and partition. Partitions that are not listed are new, and read from their beginning."""

    offsets: Mapping[tuple[int, int], int]


Begin = Start | AtOffset | AtTime | AtPositions


async def offset_of(begin: Begin, partition: Partition) -> int:
    """Nothing is awaited, but for a time."""
    match begin:
        case Start.LATEST:
            return partition.served
        case Start.EARLIEST:
            return partition.start
        case AtOffset(offset):
            wanted = offset
        case AtTime(time_us):
            wanted = await asyncio.get_running_loop().run_in_executor(None, partition.log.offset_at, time_us)
        case AtPositions(offsets):
            wanted = offsets.get((partition.topic_id, partition.number), partition.start)
    return min(max(wanted, partition.start), partition.served)


async def offsets_of(begin: Begin, partitions: Iterable[Partition]) -> dict[Partition, int]:
    return {partition: await offset_of(begin, partition) for partition in partitions}
