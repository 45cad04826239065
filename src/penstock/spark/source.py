"""The source: topics as batches and streams of rows.

The driver plans with offsets (`catalogue`, `offsets`); tasks fetch stored batches and pass them on as Arrow
(`columns`).

Spark logs only the ends of the batches of a stream, so the first end must pin where the stream begins: it has a second
part, `begin`, or the first batch is empty and ends there. A stream also respects `endingOffsets` and similar options:
it reads up to that point and then finds nothing more. With Trigger.AvailableNow it ends there.
"""

# Method names are Spark's.
# ruff: noqa: N802

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock.errors import GroupConflict, OffsetOutOfRange, PenstockError, UnknownGroup, UnknownTopic
from penstock.spark.catalogue import Holding, Holdings, SourceCatalogue, report_loss, report_lost_offsets
from penstock.spark.columns import Condition, SparkColumns, schema
from penstock.spark.offsets import BEGIN, OffsetRange, Offsets, split
from penstock.spark.options import Assigned, Names, ReadOptions, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from penstock.client.sync import Client

# Offsets of a batch that one task reads: a task costs a trigger more than so many rows.
FEW: Final = 2_000
# How long `latestOffset` waits for new messages, so that an idle stream does not poll 90 times a second.
POLL_S: Final = 0.5

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
class FewRows(InputPartition):
    """Slices of several partitions that one task reads."""

    slices: tuple[LogSlice, ...]


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
        ranges = [self._narrow(OffsetRange(place, starts[place], ends[place])) for place in holdings]
        return _plan(self._options, catalogue, holdings, ranges)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _read(self._options, self._shape, partition)

    def _narrow(self, whole: OffsetRange) -> OffsetRange:
        """Return the offsets that filters leave."""
        return whole


class TopicStream(DataSourceStreamReader):
    """Reads a stream, batch after batch: what is the same in all versions of PySpark."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        self._options = options
        self._shape = SparkColumns(schema(wanted), _condition(options))
        self._catalogue = SourceCatalogue(options)

    def initialOffset(self) -> dict[str, Any]:
        """Return no offsets: Spark does not store them. The end of the first batch says where reading begins."""
        return {}

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

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        start = start or end.get(BEGIN, {})
        if not start:
            return []
        begin, stop = Offsets.from_json(start), Offsets.from_json(end)
        holdings = self._catalogue.look(must_exist=False)
        ranges = [OffsetRange(place, _begin_of(place, begin, stop.ids), offset) for place, offset in stop.ends.items()]
        served = [each for each in ranges if each.size > 0 and self._is_served(each, holdings, stop)]
        return _gathered(self._options, _plan(self._options, self._catalogue, holdings, served))

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
        """Return where a new query begins."""
        holdings = self._within(self._catalogue.look())
        if self._options.group is not None:
            for name in {place.topic for place in holdings}:
                _open_group(self._catalogue.client, self._options, name)
        self._catalogue.check_ends(holdings)
        return _offsets(holdings, self._catalogue.starts(holdings))

    def _within(self, holdings: dict[TopicPartition, Holding]) -> dict[TopicPartition, Holding]:
        """Return the part of the holdings that the query may read."""
        return holdings

    def _waiting(self, begin: Offsets) -> _Waiting:
        """Return the messages after `begin`."""
        seen = self._catalogue.look(must_exist=False, at_archive=False)
        self._check_topics(begin, seen)
        holdings = self._within(seen)
        ids = _ids(holdings)
        starts = {place: _begin_of(place, begin, ids) for place in holdings}
        _check_not_behind(starts, seen)
        return _Waiting(holdings, starts, self._catalogue.stream_ends(holdings))

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


class UnlimitedStreamReader(TopicStream):
    """The reader for PySpark 4.0 and 4.1, where each batch reads all messages there are.

    Spark does not say where the batch begins, so limits are impossible; nor does it say whether the query is new. So
    the first end of a run also says where a new query begins, and `partitions` looks there if it is given no start.
    """

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        super().__init__(options, wanted)
        self._last: Offsets | None = None
        _refuse_limits(options)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the end of the log. Wait a little if there is nothing new."""
        if self._last is None:
            begin = self._begin_of_new()
            self._last = self._waiting(Offsets({}, {})).end
            return self._last.to_json() | begin
        if (end := self._waiting(self._last).end) == self._last and self._wait(self._last, POLL_S):
            end = self._waiting(self._last).end
        self._last = end
        return end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start:
            self._waiting(Offsets.from_json(start))  # Report topics that are gone, and logs that are shorter.
        elif BEGIN not in end:
            start = self._begin().to_json()  # raises what `_begin_of_new` ignored
        return super().partitions(start, end)

    def _begin_of_new(self) -> dict[str, Any]:
        """Return where the query begins if it is new. A query that continues must not fail because this is gone."""
        try:
            return {BEGIN: self._begin().to_json()}
        except (PenstockError, RuntimeError, ValueError):
            return {}


def _refuse_limits(options: ReadOptions) -> None:
    limits = {
        "maxOffsetsPerTrigger": options.offsets_max,
        "maxBytesPerTrigger": options.bytes_max,
        "minOffsetsPerTrigger": options.offsets_min,
    }
    for name, given in limits.items():
        if given is not None:
            raise ValueError(f"{name} needs PySpark 4.2 or newer: remove it, or upgrade the cluster")


class _Waiting(NamedTuple):
    """The messages that a stream has not read: what there is, where it is in each partition, and where that ends."""

    holdings: dict[TopicPartition, Holding]
    starts: dict[TopicPartition, int]
    ends: dict[TopicPartition, int]

    @property
    def end(self) -> Offsets:
        return _offsets(self.holdings, {place: max(start, self.ends[place]) for place, start in self.starts.items()})


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


def _gathered(options: ReadOptions, partitions: list[InputPartition]) -> list[InputPartition]:
    """Let one task read all of a small batch, unless the options say how many tasks there are."""
    slices = tuple(each for each in partitions if isinstance(each, LogSlice))
    is_told = options.partitions_min is not None or options.records_max is not None
    if is_told or len(slices) < 2 or sum(each.end - each.start for each in slices) > FEW:
        return partitions
    return [*(each for each in partitions if not isinstance(each, LogSlice)), FewRows(slices)]


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


def _condition(options: ReadOptions) -> Condition:
    return Condition(patterns=options.subjects or None)


# Tasks.


def _read(options: ReadOptions, shape: SparkColumns, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(partition, LogSlice):
        return shape.shape(_fetch(options, shape, partition), partition.topic, partition.partition)
    if isinstance(partition, FewRows):
        return chain.from_iterable(_read(options, shape, each) for each in partition.slices)
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
