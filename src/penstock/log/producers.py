"""Remembers what each producer and each source has appended, so that a batch that is sent again is stored once.

A producer numbers its batches 0, 1, 2, … in each partition. The log takes exactly the next one, recognises the last
few, and refuses a gap: the batches in between were lost on the way. A source (a parent broker, a delayed message, a
part of a transaction) has ascending positions with gaps; a position that is not higher is a duplicate.

This is never more durable than the batches: it is read from them when a log is opened, and the head of each segment has
a snapshot of what came before.
"""

from __future__ import annotations

import struct
from typing import Final

from penstock.errors import CorruptBatch, OutOfSequence, TooManySources
from penstock.model.batch import Batch

# A producer may have this many batches in flight. All of them are recognised after a reconnect.
IN_FLIGHT_MAX: Final = 16
# The least recently used producer is forgotten first. If it comes back, it must begin again with a new ID.
PRODUCERS_MAX: Final = 10_000
# The messages of a forgotten source would be stored again. So new sources are refused instead.
SOURCES_MAX: Final = 65_536

_COUNTS: Final = struct.Struct("<II")
_PRODUCER: Final = struct.Struct("<QI")
_PAIR: Final = struct.Struct("<QQ")
_SOURCE: Final = struct.Struct("<QQQ")


class Producers:
    __slots__ = ("_batches", "_sources")

    def __init__(self) -> None:
        # producer -> (sequence, base offset) of its last batches, oldest first; the producers by last use
        self._batches: dict[int, list[tuple[int, int]]] = {}
        # source -> (position, base offset) of its last batches, oldest first
        self._sources: dict[int, list[tuple[int, int]]] = {}

    def find(self, batch: Batch, source: int, position: int) -> int | None:
        """Return the offset of the original if this batch is a duplicate, or None if it is new."""
        if source:
            seen = self._sources.get(source)
            if seen is None and len(self._sources) >= SOURCES_MAX:
                raise TooManySources(
                    f"this partition has messages of {len(self._sources)} sources, the limit: delete groups that are "
                    f"not used any more if it stores dead letters, or push to another topic"
                )
            return seen[-1][1] if seen and position <= seen[-1][0] else None
        if not batch.producer:
            return None
        batches = self._batches.get(batch.producer)
        if batches is None:
            if batch.sequence:
                raise OutOfSequence(
                    f"unknown producer {batch.producer}: begin again with a new producer ID at sequence 0"
                )
            return None
        last = batches[-1][0]
        if batch.sequence == last + 1:
            return None
        for sequence, offset in batches:
            if sequence == batch.sequence:
                return offset
        raise OutOfSequence(
            f"producer {batch.producer} sent sequence {batch.sequence}, but {last + 1} is next: "
            f"send the missing batches first"
        )

    def is_duplicate(self, batch: Batch) -> bool:
        """Return whether a producer's batch was appended before, as far as is known."""
        try:
            return self.find(batch, 0, 0) is not None
        except OutOfSequence:
            return False

    def position(self, source: int) -> int:
        """Return the last position of a source; 0 if it has none."""
        seen = self._sources.get(source)
        return seen[-1][0] if seen else 0

    @property
    def sources(self) -> int:
        return len(self._sources)

    def forget_source(self, source: int) -> None:
        """Forget a source that is used no more. A restart remembers it again, until the next segment begins."""
        self._sources.pop(source, None)

    def note(self, batch: Batch) -> None:
        """Note that `batch` was appended, at its base offset."""
        if batch.source:
            self._sources.setdefault(batch.source, []).append((batch.position, batch.base_offset))
        elif batch.producer:
            batches = self._batches.pop(batch.producer, [])
            batches.append((batch.sequence, batch.base_offset))
            self._batches[batch.producer] = batches

    def settle(self, batch: Batch) -> None:
        """Note that `batch` is written, and forget earlier ones that nobody may send again."""
        table, number, keep = self._sources, batch.source, 1
        if not batch.source:
            table, number, keep = self._batches, batch.producer, IN_FLIGHT_MAX
        entries = table.get(number)
        if entries is None:
            return
        settled = sum(offset <= batch.base_offset for _, offset in entries)
        del entries[: max(0, settled - keep)]
        while len(self._batches) > PRODUCERS_MAX:
            del self._batches[next(iter(self._batches))]

    def forget(self, offset: int) -> None:
        """Forget the batches from `offset` on, which were rejected."""
        for table in (self._batches, self._sources):
            for number, entries in list(table.items()):
                while entries and entries[-1][1] >= offset:
                    entries.pop()
                if not entries:
                    del table[number]

    def snapshot(self, offset: int) -> bytes:
        """Return what is known of the batches below `offset`, for `restore`."""
        parts = []
        producers = sources = 0
        for number, entries in self._batches.items():
            below = [entry for entry in entries if entry[1] < offset][-IN_FLIGHT_MAX:]
            if below:
                producers += 1
                parts.append(_PRODUCER.pack(number, len(below)))
                parts.extend(_PAIR.pack(*entry) for entry in below)
        for number, entries in self._sources.items():
            below = [entry for entry in entries if entry[1] < offset][-1:]
            if below:
                sources += 1
                parts.append(_SOURCE.pack(number, *below[0]))
        return _COUNTS.pack(producers, sources) + b"".join(parts)

    @classmethod
    def restore(cls, snapshot: bytes) -> Producers:
        found = cls()
        if not snapshot:
            return found
        try:
            producers, sources = _COUNTS.unpack_from(snapshot)
            at = _COUNTS.size
            for _ in range(producers):
                number, count = _PRODUCER.unpack_from(snapshot, at)
                at += _PRODUCER.size
                pairs = snapshot[at : at + count * _PAIR.size]
                found._batches[number] = list(_PAIR.iter_unpack(pairs))
                at += count * _PAIR.size
            for _ in range(sources):
                number, position, offset = _SOURCE.unpack_from(snapshot, at)
                at += _SOURCE.size
                found._sources[number] = [(position, offset)]
        except struct.error as error:
            raise CorruptBatch(f"invalid snapshot of producers: {error}") from error
        return found
