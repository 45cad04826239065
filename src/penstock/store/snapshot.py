"""A snapshot: all logs of a store as they were at one moment, while a backup copies them.

`committed` of all logs is taken in one turn of the event loop, so the logs are consistent: every message that
the state topic mentions is in the snapshot too. Each segment then gets a hard link in `<data>/snapshots/<id>/`,
so retention, compaction and the deletion of a topic take nothing away from the snapshot. The last segment of a log ends
with the last committed batch.

The files of a log that cannot be opened are part of the snapshot as they are.

The listing describes the snapshot in JSON. It is the file behind the segments, and can be read like them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.clock import Clock
from penstock.errors import AppendFailed, BadRequest, Closed, Overloaded, ReadFailed
from penstock.log import log_files
from penstock.log.files import File, Files
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Topic
from penstock.log.scan import Found
from penstock.log.segment import Segment
from penstock.log.witness import PartitionId
from penstock.store.catalogue import TopicCatalogue
from penstock.store.changes import Steps, Work

logger = logging.getLogger(__name__)

DIRECTORY: Final = "snapshots"
# Snapshots at once. One that nobody reads ends after a while, because it keeps room that retention would free.
SNAPSHOTS_MAX: Final = 8
SNAPSHOT_IDLE_US: Final = 3_600_000_000


class SnapshotMark(NamedTuple):
    """A log at the moment of the snapshot: its segments with their readable bytes, and `committed`, if it is known."""

    topic_id: int
    topic: str | None
    partition: int
    number: int | None
    segments: Sequence[tuple[Segment, int]]
    start: int
    committed: int | None
    is_piped: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class ListedSegment:
    base: int
    bytes: int
    # Of `Files.version`.
    version: str


@dataclass(frozen=True, slots=True)
class ListedLog:
    """The segments of all logs, in order, are the files 0, 1, 2, … of the snapshot."""

    topic_id: int
    topic: str | None
    partition: int
    number: int | None
    start: int
    committed: int | None
    is_piped: bool
    problem: str | None
    segments: list[ListedSegment]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ListedLog:
        segments = [ListedSegment(**segment) for segment in value["segments"]]
        return cls(**{**value, "segments": segments})


@dataclass(frozen=True, slots=True)
class SnapshotListing:
    time_us: int
    logs: list[ListedLog]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> SnapshotListing:
        value = json.loads(data)
        return cls(value["time_us"], [ListedLog.from_json(log) for log in value["logs"]])


class Snapshot:
    """Any thread may read and close it."""

    def __init__(self, files: Files, directory: Path, time_us: int, marks: Sequence[SnapshotMark], now_us: int) -> None:
        """Link every segment. Nothing may drop or rewrite segments meanwhile."""
        self._files = files
        self._directory = directory
        self._lock = threading.Lock()
        self._open: tuple[int, File] | None = None
        self._is_closed = False
        # When it was last used, on the monotonic clock.
        self.used_us = now_us
        self._sizes: list[int] = []
        try:
            files.make_directory(directory)
            listing = SnapshotListing(time_us, [self._link_log(mark) for mark in marks])
            self._write_listing(listing.encode())
        except BaseException as error:
            with contextlib.suppress(OSError):
                clear(files, directory)
            if isinstance(error, OSError):
                raise AppendFailed(
                    f"{directory}: a snapshot needs hard links to the segments, and one failed: {error}"
                ) from error
            raise

    @property
    def listing(self) -> tuple[int, int]:
        """Return the number of the file with the listing, and its bytes."""
        return len(self._sizes) - 1, self._sizes[-1]

    def read(self, number: int, position: int, length: int, now_us: int = 0) -> bytes:
        """Return bytes of a file, fewer only at its end. Raises ReadFailed if the disk fails."""
        if not 0 <= number < len(self._sizes):
            raise BadRequest(f"invalid file {number}: the snapshot has files 0 to {len(self._sizes) - 1}")
        size = self._sizes[number]
        with self._lock:
            self.used_us = max(self.used_us, now_us)
            if self._is_closed:
                raise Closed("the snapshot has ended")
            try:
                if self._open is None or self._open[0] != number:
                    self._release()
                    self._open = number, self._files.open(self._path(number))
                return self._open[1].read(max(0, min(length, size - position)), position)
            except OSError as error:
                raise ReadFailed(f"{self._path(number)}: cannot be read: {error}") from error

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._release()
        clear(self._files, self._directory)

    def _link_log(self, mark: SnapshotMark) -> ListedLog:
        listed = []
        followings = [segment.base for segment, _ in mark.segments[1:]]
        for place, (segment, size) in enumerate(mark.segments):
            path = self._path(len(self._sizes))
            self._files.link(segment.path, path)
            version = self._files.version(path)
            is_last = False
            if mark.committed is not None and (place == len(followings) or followings[place] > mark.committed):
                # The following segments are not committed, or there are none.
                size, is_last = _size_below(segment, mark.committed, size), True
            self._sizes.append(size)
            listed.append(ListedSegment(segment.base, size, version))
            if is_last:
                break
        return ListedLog(
            mark.topic_id,
            mark.topic,
            mark.partition,
            mark.number,
            mark.start,
            mark.committed,
            mark.is_piped,
            mark.problem,
            listed,
        )

    def _write_listing(self, data: bytes) -> None:
        file = self._files.create(self._path(len(self._sizes)))
        try:
            file.write(data, 0)
        finally:
            file.close()
        self._sizes.append(len(data))

    def _path(self, number: int) -> Path:
        return self._directory / str(number)

    def _release(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


class Snapshots:
    """The open snapshots of a store."""

    def __init__(self, files: Files, directory: Path, clock: Clock) -> None:
        """`directory` is the data directory."""
        self._files = files
        self._directory = directory
        self._clock = clock
        self._snapshots: dict[Snapshot, None] = {}

    def take(self, catalogue: TopicCatalogue, open_segments: OpenSegments) -> Steps[Snapshot]:
        """Take a snapshot of all logs. Nobody may drop or rewrite segments meanwhile."""
        # Changes run one at a time, so requests that arrive together cannot pass the limit.
        if len(self._snapshots) >= SNAPSHOTS_MAX:
            raise Overloaded(f"{SNAPSHOTS_MAX} snapshots are open, the limit: wait until a backup has ended")
        # All marks are taken before the first step, because they must be of one moment.
        time_us, now_us = self._clock.now_us(), self._clock.monotonic_us()
        names = {topic.id: topic.name for topic in catalogue.topics}
        marks = [_mark(place, catalogue.logs[place], names.get(place[0])) for place in sorted(catalogue.logs)]
        refused = {place: (catalogue.topic(place[0]), str(catalogue.refused[place])) for place in catalogue.refused}
        made: list[Snapshot] = []

        def link() -> None:
            others = [self._mark_refused(place, *refused[place], open_segments) for place in sorted(refused)]
            path = self._directory / DIRECTORY / secrets.token_hex(8)
            made.append(Snapshot(self._files, path, time_us, [*marks, *others], now_us))

        yield Work(link)
        [snapshot] = made
        self._snapshots[snapshot] = None
        return snapshot

    def to_drop(self, *, is_full: bool) -> list[Snapshot]:
        """Return the snapshots that nobody reads, or all if the disk is full."""
        horizon_us = self._clock.monotonic_us() - SNAPSHOT_IDLE_US
        found = [snapshot for snapshot in self._snapshots if is_full or snapshot.used_us < horizon_us]
        for _ in found:
            logger.warning("a snapshot ends: %s", "the disk is full" if is_full else "nobody reads it")
        return found

    def end(self, snapshot: Snapshot) -> None:
        """Close a snapshot. For any thread."""
        self._snapshots.pop(snapshot, None)
        try:
            snapshot.close()
        except OSError as error:
            logger.warning("a snapshot cannot be removed, the next start tries again: %s", error)

    def end_all(self) -> None:
        for snapshot in list(self._snapshots):
            self.end(snapshot)

    def _mark_refused(self, place: PartitionId, topic: Topic, reason: str, open_segments: OpenSegments) -> SnapshotMark:
        """Return a log that cannot be opened: its files, unchecked."""
        path = self._directory / "topics" / str(place[0]) / str(place[1])
        found = log_files.list_log(self._files, open_segments, path, "pread")
        segments = [(segment, segment.size) for segment in found.segments]
        start = segments[0][0].base if segments else 0
        return SnapshotMark(
            place[0], topic.name, place[1], None, segments, start, None, topic.origin is not None, reason
        )


def _mark(place: PartitionId, log: Log, topic: str | None) -> SnapshotMark:
    segments = [(segment, segment.size) for segment in log.segments]
    # Messages missing at the end of a segment are in no file, so the reader of a snapshot could not find them.
    sizes = {segment.path: size for segment, size in segments}
    missing = [str(each) for each in log.damage if each.position >= sizes.get(each.path, 0)]
    problem = "; ".join(missing) or None
    return SnapshotMark(
        place[0], topic, place[1], log.number, segments, log.start, log.committed, log.terms.is_piped, problem
    )


def clear(files: Files, directory: Path) -> None:
    """Remove the files of a snapshot."""
    for name in files.sizes(directory):
        files.remove(directory / name)
    with contextlib.suppress(FileNotFoundError):
        files.remove_directory(directory)


def clear_all(files: Files, data_directory: Path) -> None:
    """Remove the snapshots of a killed process."""
    for name in files.sizes(data_directory / DIRECTORY):
        clear(files, data_directory / DIRECTORY / name)


def _size_below(segment: Segment, committed: int, size: int) -> int:
    """Return how many of the first `size` bytes hold messages below `committed`."""
    for found in segment.scan(segment.index.floor(committed)[0]):
        if isinstance(found, Found) and found.batch.end > committed:
            return min(found.position, size)
    return size
