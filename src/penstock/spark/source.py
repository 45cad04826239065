"""The source: topics as batches and streams of rows.

The driver plans with offsets (`catalogue`, `offsets`); tasks fetch stored batches and pass them on as Arrow
(`columns`).

A stream begins with an empty batch, whose end is where reading starts: Spark logs only ends, so this pins the start.
A stream also respects `endingOffsets` and similar options: it reads up to that point and then finds nothing more. With
Trigger.AvailableNow it ends there.
"""

# Method names are Spark's.
# ruff: noqa: N802

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from penstock.client.sync import Client
from penstock.errors import GroupConflict, OffsetOutOfRange, PenstockError, UnknownGroup, UnknownTopic
from penstock.spark.catalogue import Holding, Holdings, SourceCatalogue, report_loss, report_lost_offsets
from penstock.spark.columns import Condition, SparkColumns, schema
from penstock.spark.offsets import OffsetRange, Offsets, share, split
from penstock.spark.options import Assigned, Names, ReadOptions, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# How long `latestOffset` waits for new messages, so that an idle stream does not poll 90 times a second. The pauses are
# those between two looks while there are messages that the batch does not take yet; they double up to the maximum.
POLL_S: Final = 0.5
_PAUSE_S: Final = 0.005
_PAUSE_S_MAX: Final = 0.04

_LOG: Final = logging.getLogger("penstock.spark")


@dataclass(frozen=True)
class LogSlice(InputPartition):
    """Offsets that one task reads from the log."""

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True)
class ArchivedSlice(InputPartition):
    """Offsets that one task reads from the archive."""

    topic: str
    slice: Any


class BatchReader(DataSourceReader):
    """Reads a batch between two sets of offsets, both known before it begins."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        self._options = options
        self._shape = SparkColumns(schema(wanted), _condition(options))
        self._wanted = _RangeFilters()

    def partitions(self) -> Sequence[InputPartition]:
        catalogue = SourceCatalogue(self._options)
        holdings = catalogue.look()
        starts, ends = catalogue.starts(holdings), catalogue.ends(holdings)
        for place in holdings:
            # If a loss is not an error, the remaining messages may begin after the end.
            is_lost = not self._options.fails_on_loss and ends[place] < holdings[place].earliest
            if starts[place] > ends[place] and not is_lost:
                raise ValueError(
                    f"{place} would be read from {starts[place]} to {ends[place]}: the end must not be before the start"
                )
        ranges = [self._wanted.narrow(OffsetRange(place, starts[place], ends[place])) for place in holdings]
        return _plan(self._options, catalogue, holdings, ranges)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _read(self._options, self._shape, partition)


class FilteringReader(BatchReader):
    """The reader for filter pushdown. Elsewhere Spark refuses readers with `pushFilters`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that can be applied exactly, and return the others to Spark."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, given: Filter) -> bool:
        match given:
            case IsNotNull(attribute=("topic" | "partition" | "offset" | "timestamp" | "subject",)):
                return True
            case EqualTo(attribute=("subject",), value=str(subject)):
                return self._take_subjects([subject])
            case In(attribute=("subject",), value=subjects) if all(isinstance(each, str) for each in subjects):
                return self._take_subjects(subjects)
            case In(attribute=("topic" | "partition" as name,), value=values):
                return self._wanted.take(name, _is_in, frozenset(values))
            case EqualTo() | GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
                return self._compare(given)
        return False

    def _take_subjects(self, subjects: Iterable[str]) -> bool:
        chosen = frozenset(subject.encode() for subject in subjects)
        known = self._shape.condition.subjects
        return self._set_condition(subjects=chosen if known is None else known & chosen)

    def _compare(self, given: Any) -> bool:
        match given.attribute, given.value:
            case (("topic",), str(value)) if isinstance(given, EqualTo):
                return self._wanted.take("topic", operator.eq, value)
            case ("partition",), int(value):
                return self._wanted.take("partition", _COMPARISONS[type(given)], value)
            case ("offset",), int(value):
                return self._wanted.take_offset(type(given), value)
            # The producer sets the time of a message, so it does not bound offsets: only the rows can be filtered.
            case ("timestamp",), datetime(tzinfo=zone) as moment if zone is not None:
                times = (*self._shape.condition.times, (_ARROW_COMPARISONS[type(given)], _instant(moment)))
                return self._set_condition(times=times)
        return False

    def _set_condition(self, **changes: Any) -> bool:
        self._shape = replace(self._shape, condition=replace(self._shape.condition, **changes))
        return True


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream, batch after batch."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        self._options = options
        self._shape = SparkColumns(schema(wanted), _condition(options))
        self._catalogue = SourceCatalogue(options)
        # With Trigger.AvailableNow: the offsets when the query began.
        self._target: dict[TopicPartition, Holding] | None = None
        self._last_batch_at = time.monotonic()

    def initialOffset(self) -> dict[str, Any]:
        """Return no offsets: Spark does not store them. The first batch pins where reading begins."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.offsets_max is not None:
            return ReadMaxRows(options.offsets_max)
        if options.bytes_max is not None:
            return ReadMaxBytes(options.bytes_max)
        if options.offsets_min is not None:
            return ReadMinRows(options.offsets_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._catalogue.look(must_exist=False)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch. Wait a little if there is nothing new."""
        if not start:
            return self._begin().to_json()
        begin = Offsets.from_json(start)
        until, pause = time.monotonic() + POLL_S, 0.0
        while True:
            end = self._next(begin, limit)
            if end != begin:
                self._last_batch_at = time.monotonic()
                return end.to_json()
            left = until - time.monotonic()
            if self._target is not None or left <= pause or not self._wait(begin, left):
                # The same object, so that Spark sees no difference.
                return start
            # There are messages that this batch does not take: it waits for more, or has reached its end.
            time.sleep(pause)
            pause = min(max(2 * pause, _PAUSE_S), _PAUSE_S_MAX)

    def _wait(self, begin: Offsets, seconds: float) -> bool:
        """Wait until the broker has more messages; return whether it has."""
        positions = [(begin.ids[place.topic], place.partition, end) for place, end in begin.ends.items()]
        if not positions:
            time.sleep(seconds)
            return True
        try:
            return self._catalogue.client.wait(positions, seconds)
        except UnknownTopic:
            return True  # `_next` reports it

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end of the log, regardless of limits. Spark derives the lag from it."""
        holdings = self._catalogue.look(must_exist=False, at_archive=False)
        return _offsets(holdings, {place: held.end for place, held in holdings.items()}).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if not start:
            return []
        begin, stop = Offsets.from_json(start), Offsets.from_json(end)
        holdings = self._catalogue.look(must_exist=False)
        ranges = [OffsetRange(place, _begin_of(place, begin, stop.ids), offset) for place, offset in stop.ends.items()]
        served = [each for each in ranges if each.size > 0 and self._is_served(each, holdings, stop)]
        return _plan(self._options, self._catalogue, holdings, served)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _read(self._options, self._shape, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the offsets to the group, for display. The checkpoint counts, so a failure is only logged."""
        if self._options.group is None or not end:
            return
        try:
            commit(self._options, end)
        except (PenstockError, ValueError) as error:
            _LOG.warning("group %s: the offsets of the query could not be committed: %s", self._options.group, error)

    def stop(self) -> None:
        """Keep the client: it belongs to the process."""

    def _begin(self) -> Offsets:
        holdings = self._until_target(self._catalogue.look())
        if self._options.group is not None:
            for name in {place.topic for place in holdings}:
                _open_group(self._catalogue.client, self._options, name)
        self._catalogue.check_ends(holdings)
        return _offsets(holdings, self._catalogue.starts(holdings))

    def _next(self, begin: Offsets, limit: ReadLimit) -> Offsets:
        seen = self._catalogue.look(must_exist=False, at_archive=False)
        self._check_topics(begin, seen)
        holdings = self._until_target(seen)
        ids = _ids(holdings)
        starts = {place: _begin_of(place, begin, ids) for place in holdings}
        _check_not_behind(starts, seen)
        ends = self._catalogue.stream_ends(holdings)
        # Messages that are gone do not count. They are reported when the batch is planned.
        available = {
            place: max(0, ends[place] - max(start, holdings[place].earliest)) for place, start in starts.items()
        }
        if not isinstance(limit, ReadAllAvailable):
            if self._waits_for_more(sum(available.values())):
                return begin
            ends = self._limited(holdings, starts, available)
        return _offsets(holdings, {place: max(start, ends[place]) for place, start in starts.items()})

    def _limited(
        self, holdings: Holdings, starts: Mapping[TopicPartition, int], available: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        firsts = {place: max(start, holdings[place].earliest) for place, start in starts.items()}
        shares = dict(available)
        if self._options.offsets_max is not None:
            shares = share(available, self._options.offsets_max)
        ends = {place: firsts[place] + shares.get(place, 0) if available[place] else starts[place] for place in starts}
        if self._options.bytes_max is not None:
            waiting = [place for place, count in available.items() if count]
            for place in waiting:
                size = -(-self._options.bytes_max // len(waiting))
                try:
                    after = self._catalogue.client.offset_after(place.topic, place.partition, firsts[place], size)
                except OffsetOutOfRange:
                    # Dropped just now: the next look sees the new start.
                    after = starts[place]
                ends[place] = min(ends[place], after)
        return ends

    def _waits_for_more(self, available: int) -> bool:
        """Whether there are fewer messages than a batch should have, and time left to wait for more."""
        least = self._options.offsets_min
        if least is None or available >= least or self._target is not None:
            return False
        return time.monotonic() - self._last_batch_at < self._options.delay_s

    def _until_target(self, holdings: dict[TopicPartition, Holding]) -> dict[TopicPartition, Holding]:
        if self._target is None:
            return holdings
        return {
            place: replace(held, end=min(held.end, self._target[place].end))
            for place, held in holdings.items()
            if place in self._target
        }

    def _check_topics(self, begin: Offsets, holdings: Holdings) -> None:
        ids = _ids(holdings)
        for name, number in begin.ids.items():
            if name not in ids:
                report_loss(self._options, f"topic {name} was deleted with unread messages", "continue without it")
            elif ids[name] != number:
                report_loss(
                    self._options, f"topic {name} was deleted and created again", "read the new one from its beginning"
                )

    def _is_served(self, wanted: OffsetRange, holdings: Holdings, stop: Offsets) -> bool:
        held = holdings.get(wanted.place)
        if held is None or held.topic_id != stop.ids[wanted.place.topic]:
            what = f"{wanted.place}: offsets {wanted.start} to {wanted.end - 1} are gone, their topic was deleted"
            report_loss(self._options, what, "continue without them")
            return False
        return True


def commit(options: ReadOptions, end: Mapping[str, Any]) -> None:
    """Commit an end, as in Spark's `sources[].endOffset`, to the group in the options.

    A group has one pattern. So a single topic uses the group of that name; if several can be read, each topic has a
    group of its own, `<group>-<topic>`.
    """
    client = options.broker.connect()
    offsets = Offsets.from_json(end)
    for name in offsets.ids:
        group = _open_group(client, options, name)
        for place, offset in offsets.ends.items():
            if place.topic == name:
                client.commit(group, name, place.partition, offset)


def group_of(options: ReadOptions, topic: str) -> str:
    """Return the name of the group for a topic."""
    assert options.group is not None
    return options.group if _is_single(options) else f"{options.group}-{topic}"


def _open_group(client: Client, options: ReadOptions, topic: str) -> str:
    """Return the name of the group for a topic. Create the group if it does not exist."""
    name = group_of(options, topic)
    try:
        found = client.group(name)
    except UnknownGroup:
        pattern = options.subjects[0].decode() if len(options.subjects) == 1 and _is_single(options) else topic
        try:
            found = client.create_group(name, pattern, mode="partitioned", start="earliest")
        except GroupConflict:
            found = client.group(name)
    if found.mode != "partitioned":
        raise ValueError(
            f"group {name} is {found.mode}, not partitioned: its members ack single messages. Use another group"
        )
    return name


def _is_single(options: ReadOptions) -> bool:
    match options.topics:
        case Names(names):
            return len(names) == 1
        case Assigned(places):
            return len({place.topic for place in places}) == 1
    return False


def _ids(holdings: Holdings) -> dict[str, int]:
    return {place.topic: held.topic_id for place, held in holdings.items()}


def _offsets(holdings: Holdings, ends: dict[TopicPartition, int]) -> Offsets:
    return Offsets(_ids(holdings), ends)


def _check_not_behind(starts: Mapping[TopicPartition, int], holdings: Holdings) -> None:
    """Raise RuntimeError if a log is shorter than before: its offsets mean other messages now."""
    for place, start in starts.items():
        if start > holdings[place].end:
            raise RuntimeError(
                f"{place} was read up to {start}, but now ends at {holdings[place].end}: the broker has other data "
                "than before. Start over with another checkpoint"
            )


def _begin_of(place: TopicPartition, begin: Offsets, ids: Mapping[str, int]) -> int:
    """Return where to continue in a partition. One that the last batch did not have is new, and read from offset 0."""
    if begin.ids.get(place.topic) != ids[place.topic]:
        return 0
    return begin.ends.get(place, 0)


# Planning.


def _plan(
    options: ReadOptions, catalogue: SourceCatalogue, holdings: Holdings, ranges: Iterable[OffsetRange]
) -> list[InputPartition]:
    archived: list[InputPartition] = []
    logged: list[OffsetRange] = []
    for each in ranges:
        place, held = each.place, holdings[each.place]
        first, last = (each.end, each.end) if held.archived is None else held.archived
        if (part := _clip(each, first, last)).size > 0:
            slices = catalogue.archive.slices(place.topic, place.partition, part.start, part.end)
            archived += [ArchivedSlice(place.topic, found) for found in slices]
        for part in (_clip(each, 0, first), _clip(each, last, each.end)):
            logged += _still_there(options, part, held)
    parts = split(logged, partitions_min=options.partitions_min, records_max=options.records_max)
    return archived + [
        LogSlice(part.place.topic, holdings[part.place].topic_id, part.place.partition, part.start, part.end)
        for part in parts
    ]


def _clip(whole: OffsetRange, start: int, end: int) -> OffsetRange:
    return OffsetRange(whole.place, max(whole.start, start), min(whole.end, end))


def _still_there(options: ReadOptions, wanted: OffsetRange, held: Holding) -> list[OffsetRange]:
    """Return the part of a range that the log has, if any. Report the rest as lost."""
    if wanted.size <= 0:
        return []
    if wanted.start < held.start:
        report_lost_offsets(options, wanted.place, wanted.start, min(wanted.end, held.start))
    if wanted.end > held.end:
        what = f"{wanted.place}: offsets {held.end} to {wanted.end - 1} existed before, and are gone"
        report_loss(options, what, f"read to {held.end}")
    kept = _clip(wanted, held.start, held.end)
    return [kept] if kept.size > 0 else []


class _RangeFilters:
    """The filters on topics, partitions and offsets."""

    def __init__(self) -> None:
        self._tests: list[tuple[str, Callable[[Any, Any], bool], Any]] = []
        self._start = 0
        self._end: int | None = None

    def take(self, name: str, test: Callable[[Any, Any], bool], value: Any) -> bool:
        self._tests.append((name, test, value))
        return True

    def take_offset(self, kind: type[Filter], value: int) -> bool:
        if kind in (EqualTo, GreaterThan, GreaterThanOrEqual):
            self._start = max(self._start, value + 1 if kind is GreaterThan else value)
        if kind in (EqualTo, LessThan, LessThanOrEqual):
            end = value if kind is LessThan else value + 1
            self._end = end if self._end is None else min(self._end, end)
        return True

    def narrow(self, whole: OffsetRange) -> OffsetRange:
        for name, test, value in self._tests:
            if not test(getattr(whole.place, name), value):
                return OffsetRange(whole.place, whole.start, whole.start)
        end = whole.end if self._end is None else min(whole.end, self._end)
        return OffsetRange(whole.place, max(whole.start, self._start), end)


def _is_in(value: object, values: frozenset[object]) -> bool:
    return value in values


_COMPARISONS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
_ARROW_COMPARISONS: Final[dict[type[Filter], str]] = {
    EqualTo: "equal",
    GreaterThan: "greater",
    GreaterThanOrEqual: "greater_equal",
    LessThan: "less",
    LessThanOrEqual: "less_equal",
}


def _instant(moment: datetime) -> pyarrow.Scalar:
    return pyarrow.scalar(moment, pyarrow.timestamp("us", tz="UTC"))


def _condition(options: ReadOptions) -> Condition:
    return Condition(patterns=options.subjects or None)


# Tasks.


def _read(options: ReadOptions, shape: SparkColumns, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(partition, LogSlice):
        return shape.shape(_fetch(options, shape, partition), partition.topic, partition.partition)
    if isinstance(partition, ArchivedSlice):
        from penstock.spark.archive import Archive

        return shape.archived(Archive.read(partition.slice, shape.archived_schema), partition.topic)
    # Spark's placeholder in a plan without partitions.
    return iter(())


def _fetch(options: ReadOptions, shape: SparkColumns, wanted: LogSlice) -> Iterator[pyarrow.RecordBatch]:
    """Fetch stored batches, from the first offset to the last."""
    client = options.broker.connect()
    kept = _kept_from(client, options, wanted)
    if kept > wanted.start:
        report_lost_offsets(options, wanted.place, wanted.start, min(kept, wanted.end))
    offset = max(wanted.start, kept)
    while offset < wanted.end:
        # With expired messages: a batch that Spark runs again must have the same rows.
        parts = client.fetch(
            wanted.topic, wanted.partition, offset, end=wanted.end, arrow=True, columns=shape.stored, expired=True
        )
        try:
            yield from parts
            break
        except (OffsetOutOfRange, UnknownTopic) as error:
            # Retention dropped messages, or somebody deleted the topic, while this was reading.
            what = f"{wanted.place}: {error}, it was dropped before it was read"
            report_loss(options, what, "continue with the rest")
            kept = _kept_from(client, options, wanted)
            if kept <= offset:
                raise
            offset = kept
    # IDs are never reused: if the topic is the same now, it was the same all the time.
    _kept_from(client, options, wanted)


def _kept_from(client: Client, options: ReadOptions, wanted: LogSlice) -> int:
    """Return where the log begins; the end of the slice if the topic has been replaced."""
    try:
        topic = client.topic(wanted.topic)
    except UnknownTopic:
        topic = None
    if topic is None or topic.id != wanted.topic_id:
        what = f"{wanted.place}: offsets {wanted.start} to {wanted.end - 1} are gone, their topic was deleted"
        report_loss(options, what, "continue without them")
        return wanted.end
    return topic.positions[wanted.partition].start
