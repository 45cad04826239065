"""Restore to an earlier point: compute where to cut each log of a restored store, and cut it.

A log is cut at the start of a batch, so messages that were stored together are dropped together. A cut to a time is
before the first batch that was appended later; a cut to an offset is before the batch that holds it.

A transaction is kept whole or dropped whole. It could be read only after its last batch was appended, and until then
its logs were held. So if a cut to a time drops one of its batches, it goes back to its first batch in every log: the
rest is exactly what could be read at that time. A cut to an offset is refused if it would split a transaction.

The state topic is not cut, because its older values are gone: topics, groups and their positions are those of the
backup. A cut log never reuses the dropped offsets, so positions after the cut stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.broker.transactions import PARTS_BITS, SOURCE
from penstock.errors import BadBackup
from penstock.log.log import Log
from penstock.log.policy import Topic
from penstock.log.scan import Found
from penstock.store.meta import Change
from penstock.store.state import StoreState
from penstock.store.store import Store


class PartitionName(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class ToTime:
    time_us: int


@dataclass(frozen=True, slots=True)
class ToOffsets:
    offsets: Mapping[PartitionName, int]


@dataclass(frozen=True, slots=True)
class CutLog:
    place: PartitionName
    offset: int
    messages: int
    # Dropped messages that the broker itself had stored: dead letters, redriven and delayed messages. Most are lost.
    moved: int


def find_cuts(store: Store, to: ToTime | ToOffsets, ends: Mapping[PartitionName, int]) -> dict[PartitionName, int]:
    """Return the offset at which to cut each log. `ends`: the end of each log in the backup."""
    logs = dict(_logs(store))
    if isinstance(to, ToTime):
        cuts = {place: max(log.start, log.offset_at(to.time_us + 1)) for place, log in logs.items()}
        return _keep_transactions_whole(logs, cuts)
    cuts = {place: _checked(logs, place, offset, ends) for place, offset in to.offsets.items()}
    asked = {place: cuts.get(place, log.committed) for place, log in logs.items()}
    whole = _keep_transactions_whole(logs, asked)
    if broken := [place for place in whole if whole[place] < asked[place]]:
        place = broken[0]
        raise BadBackup(
            f"a transaction was stored in several partitions, and {place} has its part from offset {whole[place]} on: "
            f"give --offset {place}:{whole[place]} as well, or --time"
        )
    return cuts


def cut(store: Store, cuts: Mapping[PartitionName, int]) -> list[CutLog]:
    """Cut the logs; return those that lost messages."""
    logs, done = dict(_logs(store)), []
    for place, offset in cuts.items():
        messages = moved = 0
        kept = offset
        for found in _batches(logs[place], offset):
            kept = min(kept, found.batch.base_offset)
            messages += found.batch.count
            moved += found.batch.count if found.batch.source not in (0, SOURCE) else 0
        if messages:
            logs[place].upkeep.truncate(offset)
            done.append(CutLog(place, kept, messages, moved))
    return done


def undecided(state: StoreState, time_us: int) -> list[Change]:
    """Return the changes that drop transactions committed after a time, which a broker would store at its start."""
    changes = []
    for number, decided in state.items("decided"):
        last = state.get("transaction", decided["name"])
        if last is not None and last["time_us"] > time_us and last["number"] == decided["number"]:
            changes.append(Change("decided", number, None))
    return changes


def _logs(store: Store) -> Iterator[tuple[PartitionName, Log]]:
    """Yield the logs that can be cut: not those of the broker's own state, and not copies of piped topics."""
    for topic in store.topics:
        if _is_cut(topic):
            for partition in range(topic.partitions):
                if (topic.id, partition) not in store.catalogue.refused:
                    yield PartitionName(topic.name, partition), store.log(topic.id, partition)


def _is_cut(topic: Topic) -> bool:
    return not topic.is_internal and topic.origin is None


def _checked(
    logs: Mapping[PartitionName, Log], place: PartitionName, offset: int, ends: Mapping[PartitionName, int]
) -> int:
    if place not in logs:
        raise BadBackup(f"the backup has no {place} that can be cut: it has {', '.join(map(str, logs)) or 'none'}")
    log = logs[place]
    if not log.start <= offset <= ends[place]:
        raise BadBackup(f"offset {offset} is out of range: {place} has {log.start} to {ends[place]} in this backup")
    return next((found.batch.base_offset for found in _batches(log, offset)), offset)


def _batches(log: Log, offset: int) -> Iterator[Found]:
    """Yield the batches that end after an offset."""
    for segment, following in zip(log.segments, [*log.segments[1:], None], strict=True):
        if following is not None and following.base <= offset:
            continue
        for found in segment.scan():
            if isinstance(found, Found) and found.batch.count and found.batch.end > offset:
                yield found


def _keep_transactions_whole(
    logs: Mapping[PartitionName, Log], cuts: Mapping[PartitionName, int]
) -> dict[PartitionName, int]:
    """Return cuts moved back such that none splits a transaction."""
    parts = {place: list(_transactions(log)) for place, log in logs.items()}
    found = dict(cuts)
    while True:
        gone = {number for place, each in parts.items() for number, offset in each if offset >= found[place]}
        moved = False
        for place, each in parts.items():
            first = min((offset for number, offset in each if number in gone), default=found[place])
            if first < found[place]:
                found[place] = first
                moved = True
        if not moved:
            return found


def _transactions(log: Log) -> Iterator[tuple[int, int]]:
    """Yield the number of each transaction with a batch in the log, and the offset of the batch."""
    for found in _batches(log, log.start):
        if found.batch.source == SOURCE:
            yield found.batch.position >> PARTS_BITS, found.batch.base_offset
