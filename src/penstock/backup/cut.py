"""Restore to an earlier moment: where each log of a restored store is cut.

A log is cut where a batch begins, so a message goes with those that were stored together with it. To a time: before
the first batch that was appended later. To an offset: before the batch that holds it.

A transaction is kept whole or not at all. It could be read only once the last of its batches was appended, and until
then its logs were held. So where one of its batches goes, a cut to a time goes back to its first batch in every log:
what is left is what could be read at that time. A cut to an offset names the partitions that it is about, and is
refused if it would break a transaction.

The state topic is not cut, because older values of it are gone: topics, groups and their positions are those of
the backup. A log that is cut never gives out the offsets of what was cut off, so positions behind the cut stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.broker.transactions import PARTS_BITS, SOURCE
from penstock.errors import BadBackup
from penstock.storage.log import Log
from penstock.storage.meta import Change
from penstock.storage.policy import Topic
from penstock.storage.segment import Found
from penstock.storage.state import State
from penstock.storage.store import Store


class Place(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class ToTime:
    time_us: int


@dataclass(frozen=True, slots=True)
class ToOffsets:
    offsets: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class CutLog:
    place: Place
    offset: int
    messages: int
    # Those of them that the broker had moved there: dead letters, redriven and delayed messages. Not all come again.
    moved: int


def find_cuts(store: Store, to: ToTime | ToOffsets, ends: Mapping[Place, int]) -> dict[Place, int]:
    """Return the offset at which each log is to be cut. `ends`: where what was backed up of each ends."""
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


def cut(store: Store, cuts: Mapping[Place, int]) -> list[CutLog]:
    """Cut the logs; return those that had anything there."""
    logs, done = dict(_logs(store)), []
    for place, offset in cuts.items():
        messages = moved = 0
        kept = offset
        for found in _batches(logs[place], offset):
            kept = min(kept, found.batch.base_offset)
            messages += found.batch.count
            moved += found.batch.count if found.batch.source not in (0, SOURCE) else 0
        if messages:
            logs[place].truncate(offset)
            done.append(CutLog(place, kept, messages, moved))
    return done


def undecided(state: State, time_us: int) -> list[Change]:
    """Forget the transactions that were committed after a time, and would be stored when the broker starts."""
    changes = []
    for number, decided in state.items("decided"):
        last = state.get("transaction", decided["name"])
        if last is not None and last["time_us"] > time_us and last["number"] == decided["number"]:
            changes.append(Change("decided", number, None))
    return changes


def _logs(store: Store) -> Iterator[tuple[Place, Log]]:
    """The logs that can be cut. Those of the broker itself belong to its state; piped ones are a copy of another's."""
    for topic in store.topics:
        if _is_cut(topic):
            for partition in range(topic.partitions):
                if (topic.id, partition) not in store.catalogue.refused:
                    yield Place(topic.name, partition), store.log(topic.id, partition)


def _is_cut(topic: Topic) -> bool:
    return not topic.is_internal and topic.origin is None


def _checked(logs: Mapping[Place, Log], place: Place, offset: int, ends: Mapping[Place, int]) -> int:
    if place not in logs:
        raise BadBackup(f"the backup has no {place} that can be cut: it has {', '.join(map(str, logs)) or 'none'}")
    log = logs[place]
    if not log.start <= offset <= ends[place]:
        raise BadBackup(f"offset {offset} is not in {place}, which holds {log.start} to {ends[place]} in this backup")
    return next((found.batch.base_offset for found in _batches(log, offset)), offset)


def _batches(log: Log, offset: int) -> Iterator[Found]:
    """The batches with messages that reach beyond an offset."""
    for segment, following in zip(log.segments, [*log.segments[1:], None], strict=True):
        if following is not None and following.base <= offset:
            continue
        for found in segment.scan():
            if isinstance(found, Found) and found.batch.count and found.batch.end > offset:
                yield found


def _keep_transactions_whole(logs: Mapping[Place, Log], cuts: Mapping[Place, int]) -> dict[Place, int]:
    """Return cuts further back, such that no transaction has one part before a cut and another behind."""
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
    """The number of each transaction that has a batch in a log, and the offset of the batch."""
    for found in _batches(log, log.start):
        if found.batch.source == SOURCE:
            yield found.batch.position >> PARTS_BITS, found.batch.base_offset
