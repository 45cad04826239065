"""Looks at a data directory from outside: at its logs and what is in them, without opening a store.

Nothing is recovered, cut off or created, so damage is seen as it is. Damage in one log does not hide the others.

A broker may have the directory open, and change files meanwhile. Then everything that seems wrong is checked again, and
unfinished bytes at the end of a log are not a torn tail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadDirectory, DirectoryInUse, LogDamaged, PenstockError
from penstock.log import examine, log_files
from penstock.log.examine import Examined
from penstock.log.files import OsFiles
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Topic
from penstock.log.scan import Found
from penstock.log.segment import Segment, log_name
from penstock.log.witness import NOBODY, Witness
from penstock.store import witnesses
from penstock.store.format import FORMAT_NAME, check_format
from penstock.store.meta import look_into
from penstock.store.state import STATE_TOPIC, read_changes

_DATA_NAMES: Final = frozenset({"LOCK", FORMAT_NAME, "meta.db", "topics"})
# How often to look again while a broker has the directory open.
_LIVE_TRIES: Final = 3


class LogHealth(Enum):
    OK = "ok"
    TORN = "torn"  # what was not acknowledged will be cut off
    DAMAGED = "damaged"  # something that was durable cannot be read
    REFUSED = "refused"  # a store would not open it, for what `problems` says


@dataclass(frozen=True, slots=True)
class InspectedLog:
    """A log, and its topic and partition, or None if they are not known."""

    directory: Path
    topic_id: int | None
    topic_name: str | None
    partition: int | None
    segments: list[Segment]
    # Why a store would refuse the directory, regardless of its segments.
    problems: list[str]
    is_piped: bool = False
    # Whether a broker has it open.
    is_live: bool = False
    # Where its `.start` file says that it begins, and how far it once reached.
    marked: int | None = None
    witness: Witness = NOBODY

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def start(self) -> int:
        if self.marked is not None:
            return self.marked
        return self.segments[0].base if self.segments else 0


@dataclass(frozen=True, slots=True)
class Inspection:
    directory: Path
    logs: list[InspectedLog]
    # Files that do not belong in the directory.
    problems: list[str]
    # The IDs of topics that are not in the state topic; empty if it cannot be read.
    orphans: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    log: InspectedLog
    # None: the log could not be read to the end, and `problems` says why.
    report: examine.Report | None
    problems: list[str]

    @property
    def state(self) -> LogHealth:
        if self.report is not None and self.report.damage:
            return LogHealth.DAMAGED
        if self.report is None or self.problems or self.report.unsupported:
            return LogHealth.REFUSED
        return LogHealth.TORN if self.report.torn_bytes and not self.log.is_live else LogHealth.OK

    @property
    def sound(self) -> bool:
        return self.state in (LogHealth.OK, LogHealth.TORN)


@contextmanager
def inspect(directory: Path) -> Iterator[Inspection]:
    """Look at a data directory, or at the directory of one log. It stays locked unless a store has it open already."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise BadDirectory(f"{directory} {what}: name a data directory, or the directory of one log")
    names = frozenset(os.listdir(directory))
    data_directory = directory if names & _DATA_NAMES else _data_directory_of(directory)
    if data_directory is None and not any(name.endswith(".log") for name in names):
        raise BadDirectory(f"{directory} is neither a data directory nor the directory of a log: name one that is")
    files = OsFiles(read_only=True)
    with _held(data_directory) as is_live:
        if data_directory is None:
            yield Inspection(directory, [_inspect_log(files, directory)], [])
        elif data_directory is directory:
            yield inspect_data(files, directory, is_live=is_live)
        else:
            logs = inspect_data(files, data_directory, is_live=is_live).logs
            here = [log for log in logs if log.directory.resolve() == directory.resolve()]
            yield Inspection(directory, here or [_inspect_log(files, directory, is_live=is_live)], [])


def verify(log: InspectedLog, progress: Callable[[int], object] | None = None) -> Verdict:
    """Read every byte of a log, and judge it."""
    verdict = _verify(log, progress)
    for _ in range(_LIVE_TRIES if log.is_live else 0):
        if verdict.sound:
            break
        # Retention or compaction may have been faster. Damage is found again.
        verdict = _verify(look_again(log), None)
    return verdict


def look_again(log: InspectedLog) -> InspectedLog:
    """Return the same log as it is now."""
    return _inspect_log(
        OsFiles(read_only=True),
        log.directory,
        log.topic_id,
        log.topic_name,
        log.partition,
        is_piped=log.is_piped,
        is_live=log.is_live,
        witness=log.witness,
    )


def _verify(log: InspectedLog, progress: Callable[[int], object] | None) -> Verdict:
    try:
        examine.identify(log.segments)
        report = examine.verify(log.segments, progress, start=log.marked, witness=log.witness)
        if not log.segments and not log.problems and (log.witness.end or log.marked):
            first = log.directory / log_name(log.start)
            end = max(log.start + 1, log.witness.end)
            report.damage.append(LogDamaged(first, 0, log.start, end, "all segments are missing"))
        return Verdict(log, report, log.problems)
    except (PenstockError, OSError) as error:
        return Verdict(log, None, [*log.problems, explain(error, log.directory)])


def walk(log: InspectedLog, offset: int = 0) -> Iterator[tuple[Segment, Examined]]:
    """Yield everything a log holds from `offset` on, and what is wrong where it is wrong."""
    segments = log.segments
    examine.identify(segments)
    while len(segments) > 1 and segments[1].base <= offset:
        segments = segments[1:]
    start = log.marked if segments[:1] == log.segments[:1] else None
    for segment, item in examine.examine(segments, start=start, witness=log.witness):
        if _reaches(item, offset):
            yield segment, item


def explain(error: PenstockError | OSError, path: Path | None = None) -> str:
    """Return one line on what happened and where: at `path`, if the error has none."""
    if isinstance(error, PenstockError):
        return str(error)
    text = error.strerror or str(error)
    where = error.filename or path
    if isinstance(error, PermissionError):
        text += ": run this as the user who owns it"
    return f"{where}: {text}" if where else text


def _data_directory_of(log_directory: Path) -> Path | None:
    """Return the data directory that contains a log."""
    parents = log_directory.resolve().parents
    if len(parents) > 2 and parents[1].name == "topics" and (parents[2] / "LOCK").exists():
        return parents[2]
    return None


@contextmanager
def _held(data_directory: Path | None) -> Iterator[bool]:
    """Lock the directory; yield whether a store has it open instead. No LOCK is created: without one, or on a read-only
    file system, no store has it open."""
    path = data_directory / "LOCK" if data_directory else None
    lock = None
    is_live = False
    if path is not None and path.exists():
        try:
            lock = OsFiles().lock(path)
        except DirectoryInUse:
            is_live = True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
    try:
        yield is_live
    finally:
        if lock is not None:
            lock.close()


def inspect_data(files: OsFiles, directory: Path, *, is_live: bool = False) -> Inspection:
    """Look at a data directory that is locked or that a broker has open. The state topic is the first of its logs."""
    found = _inspect_data(files, directory, is_live=is_live)
    for _ in range(_LIVE_TRIES if is_live else 0):
        if not found.problems:
            break
        # A topic may have been created or deleted meanwhile.
        found = _inspect_data(files, directory, is_live=is_live)
    return found


def _inspect_data(files: OsFiles, directory: Path, *, is_live: bool) -> Inspection:
    check_format(files, directory)
    topics = directory / "topics"
    # The witnesses come first: appends meanwhile only make the logs longer.
    with look_into(directory / "meta.db", is_live=is_live) as meta:
        of_state = witnesses.of_state_topic(meta)
        path = topics / str(STATE_TOPIC) / "0"
        state = _inspect_log(files, path, STATE_TOPIC, None, 0, is_live=is_live, witness=of_state)
        values = _read_state(state)
        of_topics = witnesses.of_topics(meta, [(*key, value) for key, value in (values or {}).items()])
    known, deleted = _topics(values)
    found = Inspection(directory, [state], [])
    on_disk = _numbers(topics, found.problems) - {STATE_TOPIC}
    for topic_id in sorted(on_disk | (known or {}).keys()):
        topic = (known or {}).get(topic_id)
        if topic is None and topic_id in deleted:
            continue
        if topic is None and known is not None:
            found.orphans.append(topic_id)
            found.problems.append(
                f"{topics / str(topic_id)} belongs to no known topic: run penstock log repair, with --adopt "
                f"{topic_id}=NAME if it does not find the name, or move the directory elsewhere"
            )
        partitions = _numbers(topics / str(topic_id), found.problems)
        expected = set(range(topic.partitions)) if topic else partitions
        for partition in sorted(partitions | expected):
            path = topics / str(topic_id) / str(partition)
            if topic is not None and partition not in expected:
                found.problems.append(f"{path} belongs to no partition of topic {topic.name}: move it elsewhere")
            name = topic.name if topic else None
            piped = topic is not None and topic.origin is not None
            of_log = NOBODY if piped else of_topics.get((topic_id, partition), NOBODY)
            found.logs.append(
                _inspect_log(files, path, topic_id, name, partition, is_piped=piped, is_live=is_live, witness=of_log)
            )
    return found


def _inspect_log(
    files: OsFiles,
    directory: Path,
    topic_id: int | None = None,
    topic_name: str | None = None,
    partition: int | None = None,
    *,
    is_piped: bool = False,
    is_live: bool = False,
    witness: Witness = NOBODY,
) -> InspectedLog:
    try:
        found = log_files.list_log(files, OpenSegments(), directory, "pread")
    except OSError as error:
        found = log_files.LogListing(problems=[explain(error, directory)])
    return InspectedLog(
        directory,
        topic_id,
        topic_name,
        partition,
        found.segments,
        found.problems,
        is_piped,
        is_live,
        found.start,
        witness,
    )


def _numbers(directory: Path, problems: list[str]) -> set[int]:
    """Return the directories with a number as name. Anything else is a problem."""
    numbers = set()
    for name in os.listdir(directory) if directory.exists() else ():
        if name.isdecimal() and str(int(name)) == name and (directory / name).is_dir():
            numbers.add(int(name))
        else:
            problems.append(f"{directory / name} does not belong there: move it elsewhere")
    return numbers


def _read_state(state: InspectedLog) -> dict[tuple[str, str], Any] | None:
    """Return the values of the state topic, by kind and key. None if it cannot be read: then anything may be stale."""
    values: dict[tuple[str, str], Any] = {}
    try:
        for _, item in walk(state):
            if state.problems or isinstance(item, PenstockError):
                return None
            if isinstance(item, Found) and item.batch.count:
                for kind, key, value in read_changes(item.batch):
                    values[kind, key] = value
    except (PenstockError, OSError):
        return None
    return {key: value for key, value in values.items() if value is not None}


def _topics(values: dict[tuple[str, str], Any] | None) -> tuple[dict[int, Topic] | None, set[int]]:
    """Return the topics by ID, or None if they are not known, and the IDs of topics that are being deleted."""
    if values is None:
        return None, set()
    topics = {int(key): value for (kind, key), value in values.items() if kind == "topic"}
    known = {number: Topic.from_json(number, value) for number, value in topics.items() if "name" in value}
    return known, topics.keys() - known.keys()


def _reaches(item: Examined, offset: int) -> bool:
    match item:
        case Found(batch=batch):
            return batch.end > offset or batch.base_offset >= offset
        case LogDamaged(first=first, last=last):
            return last is None or last > offset or first >= offset
        case _:
            return True
