"""A run: consecutive messages, decoded.

The messages that a protocol reads from a socket, that a log collects for the next write, and that are delivered to a
reader are all runs. Work on single messages is done here in C loops, or not at all: the broker creates no object per
message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from penstock.errors import BatchTooLarge
from penstock.model import headers
from penstock.model.batch import BATCH_BYTES_MAX, Batch, Buffer, Columns, Compression, encode

# The maximum overhead of a batch, whatever columns it has: the header and the padding of every column; and per message
# 20 bytes of offsets in five columns, 8 of its timestamp, 4 of its delta, and six bits.
RUN_BYTES: Final = 256
MESSAGE_BYTES: Final = 33


class Run:
    """`values` and `subjects` have the same length. Optional fields are dicts from index to value."""

    __slots__ = (
        "append_time",
        "base_offset",
        "batch",
        "bytes_to",
        "headers",
        "is_live",
        "keys",
        "offsets",
        "partition",
        "replies",
        "size",
        "subjects",
        "times",
        "timestamp",
        "timestamps",
        "tombstones",
        "ttls",
        "values",
    )

    def __init__(self, subjects: list[bytes], values: list[bytes]) -> None:
        self.subjects = subjects
        self.values = values
        self.keys: dict[int, bytes] = {}
        self.replies: dict[int, bytes] = {}
        self.headers: dict[int, bytes] = {}
        # µs: the publisher's timestamps, if given.
        self.times: dict[int, int] = {}
        # µs: the TTLs of messages that expire, counted from `append_time`, which is 0 until they are stored.
        self.ttls: dict[int, int] = {}
        self.append_time = 0
        # Messages that delete their key.
        self.tombstones: set[int] = set()
        # The partition of the whole run, if the publisher chose it.
        self.partition: int | None = None
        # Whether it is only delivered to current subscribers and not stored, whatever the subject.
        self.is_live = False
        # µs: the timestamp of all messages, unless they differ; 0: not stored yet.
        self.timestamp = 0
        self.timestamps: Sequence[int] | None = None
        # The same messages as a stored batch, if available.
        self.batch: Batch | None = None
        self.base_offset = 0
        # The offset of each message if compaction left holes. None: base_offset, base_offset + 1, ...
        self.offsets: Sequence[int] | None = None
        # An upper bound of the size of its batch, if already known from the wire or the log.
        self.size = 0
        # Cumulative sizes of the messages, computed by `fitting`.
        self.bytes_to: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        return self.base_offset + len(self.values) if self.offsets is None else self.offsets[-1] + 1

    @property
    def subject(self) -> bytes | None:
        """Return the subject of all messages, if they have only one."""
        subjects = self.subjects
        first = subjects[0]
        # Mostly the same objects, so this compares pointers: 6 ns per message.
        return first if subjects.count(first) == len(subjects) else None

    @property
    def is_plain(self) -> bool:
        """Return whether the messages have only values and subjects."""
        return not (self.replies or self.headers or self.keys or self.times or self.tombstones)

    def offset(self, index: int) -> int:
        return self.base_offset + index if self.offsets is None else self.offsets[index]

    def time_us(self, index: int) -> int:
        return self.timestamp if self.timestamps is None else self.timestamps[index]

    def all_offsets(self) -> Sequence[int]:
        if self.offsets is None:
            return range(self.base_offset, self.base_offset + len(self.values))
        return self.offsets

    def extend(self, run: Run) -> None:
        shift = len(self.values)
        self.bytes_to = None
        self.subjects += run.subjects
        self.values += run.values
        for mine, others in ((self.keys, run.keys), (self.replies, run.replies), (self.headers, run.headers)):
            if others:
                mine.update((shift + index, item) for index, item in others.items())
        self.times.update((shift + index, time_us) for index, time_us in run.times.items())
        self.ttls.update((shift + index, ttl_us) for index, ttl_us in run.ttls.items())
        self.tombstones.update(shift + index for index in run.tombstones)

    def select(self, indices: Sequence[int]) -> Run:
        """Return some of the messages; `indices` ascend."""
        first, count = indices[0], len(indices)
        is_slice = indices[-1] - first == count - 1
        if is_slice:
            chosen = Run(self.subjects[first : first + count], self.values[first : first + count])
        else:
            chosen = Run([self.subjects[i] for i in indices], [self.values[i] for i in indices])
        chosen.timestamp = self.timestamp
        chosen.append_time = self.append_time
        if self.timestamps is not None:
            chosen.timestamps = [self.timestamps[i] for i in indices]
        if not self.is_plain:
            chosen.tombstones = {new for new, old in enumerate(indices) if old in self.tombstones}
            for name in ("keys", "replies", "headers", "times", "ttls"):
                items: dict[int, bytes] | dict[int, int] = getattr(self, name)
                setattr(chosen, name, {new: items[old] for new, old in enumerate(indices) if old in items})
        if self.offsets is not None or not is_slice:
            chosen.offsets = [self.offset(i) for i in indices]
        chosen.base_offset = self.offset(first)
        return chosen

    def at_least(self, offset: int) -> Run:
        """Return the messages with at least this offset."""
        if offset <= self.base_offset:
            return self
        first = bisect_left(self.all_offsets(), offset)
        return self.select(range(first, len(self))) if first < len(self) else Run([], [])

    def window(self, offset: int, count: int) -> Run:
        """Return the first `count` messages with at least this offset."""
        first = bisect_left(self.all_offsets(), offset)
        last = min(first + count, len(self))
        if last - first == len(self):
            return self
        return self.select(range(first, last)) if first < last else Run([], [])

    def below(self, offset: int) -> Run:
        """Return the messages below this offset."""
        count = bisect_left(self.all_offsets(), offset)
        if count == len(self):
            return self
        return self.select(range(count)) if count else Run([], [])

    def split_expired(self, now_us: int) -> tuple[Run, Run]:
        """Return the messages that have not expired, and those that have."""
        if not self.ttls or not self.append_time:
            return self, Run([], [])
        age_us = now_us - self.append_time
        expired = [index for index, ttl_us in sorted(self.ttls.items()) if ttl_us <= age_us]
        if not expired:
            return self, Run([], [])
        gone = set(expired)
        left = [index for index in range(len(self)) if index not in gone]
        return self.select(left) if left else Run([], []), self.select(expired)

    def stamp(self, now_us: int) -> None:
        """Set the time of storing; messages with a publisher's timestamp keep it."""
        self.timestamp = self.append_time = now_us
        if self.times:
            self.timestamps = [self.times.get(index, now_us) for index in range(len(self.values))]

    def encode(
        self,
        topic: bytes,
        timestamp: int,
        *,
        producer: int = 0,
        sequence: int = 0,
        compression: Compression = Compression.NONE,
        asks: bool = False,
    ) -> Batch:
        """Encode the run as a batch to store. A subject that equals the topic's name is omitted."""
        return self._encode(topic, timestamp, producer=producer, sequence=sequence, compression=compression, asks=asks)

    def stored(self, topic: bytes) -> Buffer:
        """Return the stored messages as the bytes of a batch with their offsets."""
        if self.batch is not None:
            return self.batch.data
        if self.offsets is None:
            batch = self._encode(topic, self.timestamp)
        else:
            deltas = [offset - self.base_offset for offset in self.offsets]
            batch = self._encode(topic, self.timestamp, deltas=deltas, span=deltas[-1] + 1)
        batch.stamp(self.base_offset, append_time=0)
        return batch.data

    def _encode(
        self,
        topic: bytes,
        timestamp: int,
        *,
        deltas: Sequence[int] | None = None,
        span: int | None = None,
        producer: int = 0,
        sequence: int = 0,
        compression: Compression = Compression.NONE,
        asks: bool = False,
    ) -> Batch:
        subjects: Sequence[bytes | None] | None = self.subjects
        if self.subject == topic:
            subjects = None
        elif topic in self.subjects:
            subjects = [None if subject == topic else subject for subject in self.subjects]
        count = len(self.values)
        return encode(
            self.values,
            timestamp=timestamp,
            timestamps=self.timestamps,
            deltas=deltas,
            span=span,
            subjects=subjects,
            keys=_column(self.keys, count),
            replies=_column(self.replies, count),
            headers=_column(self.headers, count),
            tombstones=[index in self.tombstones for index in range(count)] if self.tombstones else None,
            producer=producer,
            sequence=sequence,
            compression=compression,
            asks=asks or bool(self.ttls),
        )


def batch_bytes(run: Run) -> int:
    """Return an upper bound of the size of the run's batch, close to it, for any encoding.

    This is the one calculation of a run's size. Every intake compares it with BATCH_BYTES_MAX, and `split` cuts by it.
    """
    if run.size:
        return run.size
    size = RUN_BYTES + sum(map(len, run.values)) + sum(map(len, run.subjects)) + MESSAGE_BYTES * len(run.values)
    for items in (run.keys, run.replies, run.headers):
        if items:
            size += sum(map(len, items.values()))
    return size


def payload_bytes(run: Run) -> int:
    """Return the bytes of the values, keys and headers."""
    size = sum(map(len, run.values))
    for items in (run.keys, run.headers):
        if items:
            size += sum(map(len, items.values()))
    return size


def message_bytes(run: Run, index: int) -> int:
    """Return the share of one message in `batch_bytes`."""
    size = MESSAGE_BYTES + len(run.values[index]) + len(run.subjects[index])
    for items in (run.keys, run.replies, run.headers):
        if index in items:
            size += len(items[index])
    return size


def fitting(run: Run, bytes_max: int) -> int:
    """Return how many of the first messages fit into `bytes_max`: at least one.

    The run must not change any more: the sizes are cached, because many readers may ask.
    """
    if not run.size:
        run.size = batch_bytes(run)
    if run.size <= bytes_max:
        return len(run)
    if run.bytes_to is None:
        run.bytes_to = list(accumulate(_message_sizes(run)))
    return max(1, bisect_right(run.bytes_to, bytes_max - RUN_BYTES))


def _message_sizes(run: Run) -> Iterator[int]:
    if run.keys or run.replies or run.headers:
        return (message_bytes(run, index) for index in range(len(run)))
    return (MESSAGE_BYTES + len(value) + len(subject) for value, subject in zip(run.values, run.subjects, strict=True))


def check_size(run: Run, bytes_max: int = BATCH_BYTES_MAX) -> None:
    """Raise BatchTooLarge if a batch of the run could be larger than this."""
    size = batch_bytes(run)
    if size > bytes_max:
        raise BatchTooLarge(
            f"{size} bytes in one batch (values, keys, subjects, replies and headers), "
            f"the limit is {bytes_max}: send less at once"
        )


def split(run: Run, bytes_max: int) -> Iterator[Run]:
    """Split the run into pieces whose batches have at most `bytes_max`; a larger message is a piece by itself."""
    if batch_bytes(run) <= bytes_max:
        yield run
        return
    begin, size = 0, RUN_BYTES
    for index in range(len(run)):
        added = message_bytes(run, index)
        if index > begin and size + added > bytes_max:
            yield run.select(range(begin, index))
            begin, size = index, RUN_BYTES
        size += added
    yield run.select(range(begin, len(run)))


def open_batch(batch: Batch, topic: bytes, from_offset: int = 0, *, columns: Columns | None = None) -> Run:
    """Decode the messages of a batch from an offset on, for a topic. `columns`: the batch's, if already decoded."""
    columns = columns or batch.columns()
    values = columns.values()
    subjects = columns.subjects()
    if subjects is None:
        named = [topic] * len(values)
    else:
        # Equal subjects become one object, so that later comparisons are cheap.
        known: dict[bytes | None, bytes] = {None: topic}
        named = [known.setdefault(subject, subject or topic) for subject in subjects]
    run = Run(named, values)
    run.base_offset = batch.base_offset
    run.timestamp = batch.timestamp
    if columns.timestamps_at >= 0:
        run.timestamps = columns.timestamps()
    if (tombstones := columns.tombstones()) is not None:
        run.tombstones = {index for index, dead in enumerate(tombstones) if dead}
    run.keys = _items(columns.keys())
    run.replies = _items(columns.replies())
    run.headers = _items(columns.headers())
    run.append_time = batch.append_time
    if batch.asks:
        run.ttls = read_ttls(run.headers)
    if columns.deltas_at >= 0:
        run.offsets = columns.offsets()
    run.batch = batch
    return run.at_least(from_offset)


def read_ttls(blocks: Mapping[int, bytes]) -> dict[int, int]:
    """Return the TTLs of these header blocks by index, if they have one."""
    return {index: ttl_us for index, block in blocks.items() if (ttl_us := headers.ttl_us(block)) is not None}


def _column(items: dict[int, bytes], count: int) -> list[bytes | None] | None:
    return [items.get(index) for index in range(count)] if items else None


def _items(column: Iterable[bytes | None] | None) -> dict[int, bytes]:
    return {} if column is None else {index: item for index, item in enumerate(column) if item is not None}
