"""The topics that are read, what the broker and the archive hold of them, and where reading begins and ends."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from penstock.errors import UnknownTopic
from penstock.spark.options import (
    EARLIEST,
    LATEST,
    Assigned,
    AtEdge,
    AtOffsets,
    AtTimestamp,
    AtTimestamps,
    Bound,
    Matching,
    Names,
    ReadOptions,
    TopicPartition,
)

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.client.values import Topic
    from penstock.spark.archive import Archive

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOG: Final = logging.getLogger("penstock.spark")


@dataclass(frozen=True, slots=True)
class Holding:
    """The offsets of a partition: `start` to `end` in the log, and `archived` in the archive."""

    topic_id: int
    start: int
    end: int
    archived: tuple[int, int] | None = None

    @property
    def earliest(self) -> int:
        return self.start if self.archived is None else min(self.start, self.archived[0])


Holdings = Mapping[TopicPartition, Holding]


class SourceCatalogue:
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._archive: Archive | None = None
        self._archived: dict[str, dict[int, tuple[int, int]]] = {}

    @property
    def client(self) -> Client:
        return self._options.broker.connect()

    @property
    def archive(self) -> Archive:
        """Return the archive. The options must name one."""
        if self._archive is None:
            from penstock.spark.archive import Archive

            assert self._options.archive is not None
            self._archive = Archive(self._options.archive)
        return self._archive

    def look(self, *, must_exist: bool = True, at_archive: bool = True) -> dict[TopicPartition, Holding]:
        """Return the current offsets. Named topics that do not exist are an error, or are left out.

        Without `at_archive` the ranges of the archive are those of the last call: waiting for messages must not read
        the manifest again and again.
        """
        if at_archive:
            self._archived.clear()
        wanted = self._options.topics
        found = {topic.name: topic for topic in self._topics()}
        match wanted:
            case Names(names):
                places = [
                    TopicPartition(name, number)
                    for name in names
                    for number in self._partitions(found, name, must_exist)
                ]
            case Matching(expression):
                names = tuple(name for name in sorted(found) if expression.fullmatch(name))
                places = [
                    TopicPartition(name, number)
                    for name in names
                    for number in self._partitions(found, name, must_exist)
                ]
            case Assigned(places_wanted):
                places = []
                for place in places_wanted:
                    numbers = self._partitions(found, place.topic, must_exist)
                    if place.partition in numbers:
                        places.append(place)
                    elif must_exist:
                        raise ValueError(
                            f"assign has partition {place.partition} of {place.topic}, which has {len(numbers)} of them"
                        )
        return self._holdings(found, places)

    def _topics(self) -> list[Topic]:
        """Return the topics of the broker. A single topic is requested by name: there may be thousands of others."""
        wanted = self._options.topics
        if isinstance(wanted, Names) and len(wanted.topics) == 1:
            try:
                return [self.client.topic(wanted.topics[0])]
            except UnknownTopic:
                pass
        return self.client.topics()

    def _partitions(self, found: Mapping[str, Topic], name: str, must_exist: bool) -> range:
        topic = found.get(name)
        if topic is None:
            if not must_exist:
                return range(0)
            nearest = difflib.get_close_matches(name, found, 1)
            hint = (
                f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(found)[:20]) or 'none'}"
            )
            raise UnknownTopic(f"unknown topic {name!r} at {self._options.broker.servers}: {hint}")
        if topic.refused is not None:
            raise RuntimeError(f"topic {name} cannot be read: {topic.refused}")
        return range(len(topic.positions))

    def _holdings(self, found: Mapping[str, Topic], places: list[TopicPartition]) -> dict[TopicPartition, Holding]:
        holdings = {}
        for place in places:
            topic = found[place.topic]
            position = topic.positions[place.partition]
            holdings[place] = Holding(topic.id, position.start, position.committed, self._archived_of(place))
        return holdings

    def _archived_of(self, place: TopicPartition) -> tuple[int, int] | None:
        if self._options.archive is None:
            return None
        if place.topic not in self._archived:
            self._archived[place.topic] = self.archive.ranges(place.topic)
        return self._archived[place.topic].get(place.partition)

    # Where reading begins and ends.

    def starts(self, holdings: Holdings) -> dict[TopicPartition, int]:
        """Return the start offset of each partition. Offsets that are gone are reported when they are planned."""
        bound = self._options.start
        found = self._resolve(bound, holdings)
        if isinstance(bound, AtTimestamp | AtTimestamps):
            for place, offset in found.items():
                self._check_start_time(bound, place, offset, holdings[place])
        return found

    def ends(self, holdings: Holdings) -> dict[TopicPartition, int]:
        """Return the end offset of each partition for a batch, where the messages must exist."""
        return self._resolve(self._options.end, holdings)

    def check_ends(self, holdings: Holdings) -> None:
        """Raise ValueError if a stream has an end in some partitions only."""
        match self._options.end:
            case AtOffsets(name, given) | AtTimestamps(name, given):
                _check_places(name, given, holdings)

    def stream_ends(self, holdings: Holdings) -> dict[TopicPartition, int]:
        """Return how far a stream may read now.

        It waits for an end offset that does not exist yet, and reads nothing of partitions that its options do not
        name.
        """
        match self._options.end:
            case AtOffsets(_, offsets):
                ends = {place: offsets.get(place, 0) for place in holdings}
                return {
                    place: held.end if ends[place] == LATEST else min(held.end, ends[place])
                    for place, held in holdings.items()
                }
            case AtTimestamps(_, times_ms):
                return {
                    place: self._offset_at(place, times_ms[place], held) if place in times_ms else 0
                    for place, held in holdings.items()
                }
            case bound:
                return self._resolve(bound, holdings)

    def _resolve(self, bound: Bound, holdings: Holdings) -> dict[TopicPartition, int]:
        match bound:
            case AtEdge(edge):
                return {place: held.earliest if edge == EARLIEST else held.end for place, held in holdings.items()}
            case AtOffsets(name, offsets):
                _check_places(name, offsets, holdings)
                return {place: _offset(name, place, offsets[place], held) for place, held in holdings.items()}
            case AtTimestamp(_, time_ms):
                return {place: self._offset_at(place, time_ms, held) for place, held in holdings.items()}
            case AtTimestamps(name, times_ms):
                _check_places(name, times_ms, holdings)
                return {place: self._offset_at(place, times_ms[place], held) for place, held in holdings.items()}

    def _offset_at(self, place: TopicPartition, time_ms: int, held: Holding) -> int:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
        offset = min(self.client.offset_at(place.topic, place.partition, moment), held.end)
        if offset <= held.start and held.earliest < held.start:
            raise ValueError(
                f"{place}: messages stored at {moment.isoformat()} are in the archive, which has no storage times: use "
                "offsets, or filter by the timestamp column"
            )
        return offset

    def _check_start_time(
        self, bound: AtTimestamp | AtTimestamps, place: TopicPartition, offset: int, held: Holding
    ) -> None:
        if offset >= held.end and self._options.is_late_start_error:
            raise ValueError(
                f"{place} has no message stored at {bound.name} or later: choose an earlier time, or set "
                "startingOffsetsByTimestampStrategy=latest to begin with the next message"
            )


def report_lost_offsets(options: ReadOptions, place: TopicPartition, first: int, end: int) -> None:
    """Report that offsets `first` to `end`, excluded, are gone."""
    what = f"{place}: offsets {first} to {end - 1} are gone, dropped before they were read"
    report_loss(options, what, f"continue from {end}")


def report_loss(options: ReadOptions, what: str, otherwise: str) -> None:
    """Report messages that should be read and are gone: raise RuntimeError, or log a warning if the user chose that."""
    if options.fails_on_loss:
        raise RuntimeError(
            f"{what}. Set failOnDataLoss=false to {otherwise}, or start over with another checkpoint; to prevent it, "
            "increase the retention of the topic, or run the query more often"
        )
    _LOG.warning("%s: reading will %s (failOnDataLoss=false)", what, otherwise)


def _check_places(name: str, given: Mapping[TopicPartition, int], holdings: Holdings) -> None:
    if missing := sorted(set(holdings) - set(given)):
        raise ValueError(f"{name} lacks {', '.join(map(str, missing[:10]))}: it must name every partition that is read")
    if unknown := sorted(set(given) - set(holdings)):
        raise ValueError(f"{name} has {', '.join(map(str, unknown[:10]))}, which is not read")


def _offset(name: str, place: TopicPartition, offset: int, held: Holding) -> int:
    match offset:
        case -2:
            return held.earliest
        case -1:
            return held.end
    if offset > held.end:
        raise ValueError(f"{name} is {offset} for {place}, whose offsets are {held.earliest} to {held.end}")
    return offset
