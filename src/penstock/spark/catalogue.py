"""Which topics are read, what the broker and the archive hold of them, and where reading begins and ends."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from penstock.client.sync import Client
from penstock.errors import UnknownTopic
from penstock.spark import connection
from penstock.spark.options import (
    EARLIEST,
    LATEST,
    Assigned,
    AtEdge,
    AtOffsets,
    AtTime,
    AtTimes,
    Bound,
    BrokerOptions,
    Matching,
    Names,
    ReadOptions,
    TopicPartition,
)

if TYPE_CHECKING:
    from penstock.client.values import Topic
    from penstock.spark.archive import Archive

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOG: Final = logging.getLogger("penstock.spark")


@dataclass(frozen=True, slots=True)
class Holding:
    """What there is of a partition: `start` to `end` in the log, and perhaps some in the archive (`archived`)."""

    topic_id: int
    start: int
    end: int
    archived: tuple[int, int] | None = None

    @property
    def earliest(self) -> int:
        return self.start if self.archived is None else min(self.start, self.archived[0])


Holdings = Mapping[TopicPartition, Holding]


def connect(broker: BrokerOptions) -> Client:
    return connection.client(
        broker.servers, broker.timeout_s, user=broker.user, password=broker.password, token=broker.token
    )


class Catalogue:
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._archive: Archive | None = None
        self._archived: dict[str, dict[int, tuple[int, int]]] = {}

    @property
    def client(self) -> Client:
        return connect(self._options.broker)

    @property
    def archive(self) -> Archive:
        """Only if there is one."""
        if self._archive is None:
            from penstock.spark.archive import Archive

            assert self._options.archive is not None
            self._archive = Archive(self._options.archive)
        return self._archive

    def look(self, *, must_exist: bool = True, at_archive: bool = True) -> dict[TopicPartition, Holding]:
        """What there is now. Topics that are named and are not there are an error, or left out.

        Without `at_archive` what was archived is taken for what it was the last time: whoever only waits for messages
        need not read the books of an archive again and again.
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
                            f"assign has partition {place.partition} of {place.topic}, which has {len(numbers)}"
                        )
        return self._holdings(found, places)

    def _topics(self) -> list[Topic]:
        """One topic is asked for by its name: the broker may have thousands of others."""
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
            raise UnknownTopic(f"there is no topic {name!r} at {self._options.broker.servers}: {hint}")
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
        """What is not there any more from there on is told when it is planned to be read."""
        bound = self._options.start
        found = self._resolve(bound, holdings)
        if isinstance(bound, AtTime | AtTimes):
            for place, offset in found.items():
                self._check_start_time(bound, place, offset, holdings[place])
        return found

    def ends(self, holdings: Holdings) -> dict[TopicPartition, int]:
        """For a batch: all of it must be there."""
        return self._resolve(self._options.end, holdings)

    def check_ends(self, holdings: Holdings) -> None:
        """That a stream is told its end in every partition, if in any."""
        match self._options.end:
            case AtOffsets(name, given) | AtTimes(name, given):
                _check_places(name, given, holdings)

    def stream_ends(self, holdings: Holdings) -> dict[TopicPartition, int]:
        """As far as a stream may go now. Where it ends at an offset that is still to come, it waits for it. Of
        partitions that are newer than what it was told, it reads nothing."""
        match self._options.end:
            case AtOffsets(_, offsets):
                ends = {place: offsets.get(place, 0) for place in holdings}
                return {
                    place: held.end if ends[place] == LATEST else min(held.end, ends[place])
                    for place, held in holdings.items()
                }
            case AtTimes(_, times_ms):
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
            case AtTime(_, time_ms):
                return {place: self._offset_at(place, time_ms, held) for place, held in holdings.items()}
            case AtTimes(name, times_ms):
                _check_places(name, times_ms, holdings)
                return {place: self._offset_at(place, times_ms[place], held) for place, held in holdings.items()}

    def _offset_at(self, place: TopicPartition, time_ms: int, held: Holding) -> int:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
        offset = min(self.client.offset_at(place.topic, place.partition, moment), held.end)
        if offset <= held.start and held.earliest < held.start:
            raise ValueError(
                f"{place}: what was stored at {moment.isoformat()} is in the archive, which knows no times of storing: "
                "use offsets, or filter by the timestamp column"
            )
        return offset

    def _check_start_time(self, bound: AtTime | AtTimes, place: TopicPartition, offset: int, held: Holding) -> None:
        if offset >= held.end and self._options.is_late_start_error:
            raise ValueError(
                f"{place} has no message that was stored at {bound.name} or later: choose an earlier time, or set "
                "startingOffsetsByTimestampStrategy=latest to begin with what comes next"
            )


def tell_lost(options: ReadOptions, place: TopicPartition, first: int, end: int) -> None:
    """Offsets `first` to `end` (not included) are gone."""
    lose(options, f"{place}: offsets {first} to {end - 1} are gone, dropped before they were read", f"go on from {end}")


def lose(options: ReadOptions, what: str, otherwise: str) -> None:
    """Messages that were to be read are not there: that is an error, or a warning where the user said so."""
    if options.fails_on_loss:
        raise RuntimeError(
            f"{what}. Set failOnDataLoss=false to {otherwise}, or begin anew with another checkpoint; to prevent it, "
            "let the topic keep more (its retention), or run the query more often"
        )
    _LOG.warning("%s: reading will %s (failOnDataLoss=false)", what, otherwise)


def _check_places(name: str, given: Mapping[TopicPartition, int], holdings: Holdings) -> None:
    if missing := sorted(set(holdings) - set(given)):
        raise ValueError(
            f"{name} says nothing of {', '.join(map(str, missing[:10]))}: it must name every partition that is read"
        )
    if unknown := sorted(set(given) - set(holdings)):
        raise ValueError(f"{name} has {', '.join(map(str, unknown[:10]))}, which is not among what is read")


def _offset(name: str, place: TopicPartition, offset: int, held: Holding) -> int:
    match offset:
        case -2:
            return held.earliest
        case -1:
            return held.end
    if offset > held.end:
        raise ValueError(f"{name} is {offset} for {place}, which has offsets {held.earliest} to {held.end}")
    return offset
