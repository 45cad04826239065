"""What a log has seen of each producer and each source, so that a batch sent again is stored once.

A producer numbers its batches 0, 1, 2, … in each partition; the log takes exactly the next one, knows the last
few again, and refuses a gap: the batches between were lost on the way. A source (a parent broker, a delayed
message, a part of a transaction) has positions that ascend with gaps; one that is not higher was seen before.

This is never more durable than the batches that it speaks of: it is read from them when a log is opened, and
a snapshot at the head of each segment says what came before it.
"""

from __future__ import annotations

import struct
from typing import Final

from penstock.batch import Batch
from penstock.errors import CorruptBatch, OutOfSequence, TooManySources

# A producer may have this many batches on the way at once: all of them are known again after a reconnect.
IN_FLIGHT_MAX: Final = 16
# The least recently heard are forgotten first; one that comes back later must begin again under a new id.
PRODUCERS_MAX: Final = 10_000
# A source that is forgotten would have its messages stored again. So a new one is refused instead.
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
        """The offset at which this batch is in the log already, or None if it is new."""
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
                    f"producer {batch.producer} is not known here: begin again with a new producer id at sequence 0"
                )
            return None
        last = batches[-1][0]
        if batch.sequence == last + 1:
            return None
        for sequence, offset in batches:
            if sequence == batch.sequence:
                return offset
        raise OutOfSequence(
            f"producer {batch.producer} sent sequence {batch.sequence}, {last + 1} is next: send what is missing first"
        )

    def position(self, source: int) -> int:
        """The last position of a source; 0 if there is none."""
        seen = self._sources.get(source)
        return seen[-1][0] if seen else 0

    @property
    def sources(self) -> int:
        return len(self._sources)

    def forget_source(self, source: int) -> None:
        """Forget a source that will never send anything again."""
        self._sources.pop(source, None)

    def note(self, batch: Batch) -> None:
        """`batch` was appended, at its base offset."""
        if batch.source:
            self._sources.setdefault(batch.source, []).append((batch.position, batch.base_offset))
        elif batch.producer:
            batches = self._batches.pop(batch.producer, [])
            batches.append((batch.sequence, batch.base_offset))
            self._batches[batch.producer] = batches

    def settle(self, batch: Batch) -> None:
        """`batch` will not be taken back: of what came before it, only what may be asked for again is kept."""
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
        """Batches from `offset` on were taken back."""
        for table in (self._batches, self._sources):
            for number, entries in list(table.items()):
                while entries and entries[-1][1] >= offset:
                    entries.pop()
                if not entries:
                    del table[number]

    def snapshot(self, offset: int) -> bytes:
        """All that is known of the batches below `offset`."""
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
            raise CorruptBatch(f"a snapshot of producers that cannot be read: {error}") from error
        return found
