"""A data directory looked at from outside: which logs it holds and what is in them, without opening a store.

Nothing is recovered, cut off or created, so what is wrong is seen as it is; and what is wrong with one log does
not keep anyone from looking at the others.

A broker may have the directory open. Then its files change while they are looked at: what seems wrong is looked at
again, and what is being written at the end of a log is not torn.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadDirectory, DirectoryInUse, LogDamaged, PenstockError
from penstock.storage import recovery
from penstock.storage.files import OsFiles
from penstock.storage.format import FORMAT_NAME, check_format
from penstock.storage.policy import Topic
from penstock.storage.recovery import Examined
from penstock.storage.segment import Found, OpenSegments, Segment
from penstock.storage.state import STATE_TOPIC, read_changes

_DATA_NAMES: Final = frozenset({"LOCK", FORMAT_NAME, "meta.db", "topics"})
# How often something is looked at again while a broker changes it.
_LIVE_TRIES: Final = 3


class Health(Enum):
    OK = "ok"
    TORN = "torn"  # what was not acknowledged will be cut off
    DAMAGED = "damaged"  # something that was durable cannot be read
    REFUSED = "refused"  # a store would not open it, for what `problems` says


@dataclass(frozen=True, slots=True)
class InspectedLog:
    """A log and whose it is; None where that is not known."""

    directory: Path
    topic_id: int | None
    topic_name: str | None
    partition: int | None
    segments: list[Segment]
    # Why a store would refuse the directory, whatever the segments hold.
    problems: list[str]
    is_piped: bool = False
    # Whether a broker has it open.
    is_live: bool = False

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def start(self) -> int:
        return self.segments[0].base if self.segments else 0


@dataclass(frozen=True, slots=True)
class Inspection:
    directory: Path
    logs: list[InspectedLog]
    # What is in the directory and should not be.
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    log: InspectedLog
    # None: it could not be read to the end, and `problems` says why.
    report: recovery.Report | None
    problems: list[str]

    @property
    def state(self) -> Health:
        if self.report is not None and self.report.damage:
            return Health.DAMAGED
        if self.report is None or self.problems or self.report.unsupported:
            return Health.REFUSED
        return Health.TORN if self.report.torn_bytes and not self.log.is_live else Health.OK

    @property
    def sound(self) -> bool:
        return self.state in (Health.OK, Health.TORN)


@contextmanager
def inspect(directory: Path) -> Iterator[Inspection]:
    """Look at a data directory, or at the directory of one log. Unless a store has it open, none can meanwhile."""
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
    """Read every byte of a log, and tell what is there."""
    verdict = _verify(log, progress)
    for _ in range(_LIVE_TRIES if log.is_live else 0):
        if verdict.sound:
            break
        # Retention or compaction may have been faster; what is damaged is so again.
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
    )


def _verify(log: InspectedLog, progress: Callable[[int], object] | None) -> Verdict:
    try:
        return Verdict(log, recovery.verify(log.segments, progress), log.problems)
    except (PenstockError, OSError) as error:
        return Verdict(log, None, [*log.problems, explain(error, log.directory)])


def walk(log: InspectedLog, offset: int = 0) -> Iterator[tuple[Segment, Examined]]:
    """All that a log holds from `offset` on, and whatever is wrong where it is wrong."""
    segments = log.segments
    while len(segments) > 1 and segments[1].base <= offset:
        segments = segments[1:]
    for segment, item in recovery.examine(segments):
        if _reaches(item, offset):
            yield segment, item


def explain(error: PenstockError | OSError, path: Path | None = None) -> str:
    """One line on what happened and where: at `path`, if the error does not know."""
    if isinstance(error, PenstockError):
        return str(error)
    text = error.strerror or str(error)
    where = error.filename or path
    if isinstance(error, PermissionError):
        text += ": run this as the user who owns it"
    return f"{where}: {text}" if where else text


def _data_directory_of(log_directory: Path) -> Path | None:
    """The data directory that a log is in, by the way that leads there."""
    parents = log_directory.resolve().parents
    if len(parents) > 2 and parents[1].name == "topics" and (parents[2] / "LOCK").exists():
        return parents[2]
    return None


@contextmanager
def _held(data_directory: Path | None) -> Iterator[bool]:
    """Keep stores away, or tell that one has the directory open. Where there is no LOCK none has, and none is made; nor
    can one have it open where nothing can be written."""
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
    """Look at a data directory that is held, or that a broker has open; the state topic is the first of its logs."""
    found = _inspect_data(files, directory, is_live=is_live)
    for _ in range(_LIVE_TRIES if is_live else 0):
        if not found.problems:
            break
        # A topic may have been made or deleted meanwhile.
        found = _inspect_data(files, directory, is_live=is_live)
    return found


def _inspect_data(files: OsFiles, directory: Path, *, is_live: bool) -> Inspection:
    check_format(files, directory)
    topics = directory / "topics"
    state = _inspect_log(files, topics / str(STATE_TOPIC) / "0", STATE_TOPIC, None, 0, is_live=is_live)
    known, deleted = _read_topics(state)
    logs = [state]
    problems: list[str] = []
    on_disk = _numbers(topics, problems) - {STATE_TOPIC}
    for topic_id in sorted(on_disk | (known or {}).keys()):
        topic = (known or {}).get(topic_id)
        if topic is None and topic_id in deleted:
            continue
        if topic is None and known is not None:
            problems.append(
                f"{topics / str(topic_id)} is of no known topic: move it elsewhere, "
                f"or restore {topics / str(STATE_TOPIC)}, which names the topics"
            )
        name = topic.name if topic else None
        partitions = _numbers(topics / str(topic_id), problems)
        expected = set(range(topic.partitions)) if topic else partitions
        for partition in sorted(partitions | expected):
            path = topics / str(topic_id) / str(partition)
            if partition not in expected:
                problems.append(f"{path} is of no partition that topic {name} has: move it elsewhere")
            piped = topic is not None and topic.origin is not None
            logs.append(_inspect_log(files, path, topic_id, name, partition, is_piped=piped, is_live=is_live))
    return Inspection(directory, logs, problems)


def _inspect_log(
    files: OsFiles,
    directory: Path,
    topic_id: int | None = None,
    topic_name: str | None = None,
    partition: int | None = None,
    *,
    is_piped: bool = False,
    is_live: bool = False,
) -> InspectedLog:
    try:
        segments, problems = recovery.find_segments(files, OpenSegments(), directory, "pread")
    except OSError as error:
        segments, problems = [], [explain(error, directory)]
    return InspectedLog(directory, topic_id, topic_name, partition, segments, problems, is_piped, is_live)


def _numbers(directory: Path, problems: list[str]) -> set[int]:
    """The directories whose name is a number; anything else there is a problem."""
    numbers = set()
    for name in os.listdir(directory) if directory.exists() else ():
        if name.isdecimal() and str(int(name)) == name and (directory / name).is_dir():
            numbers.add(int(name))
        else:
            problems.append(f"{directory / name} does not belong there: move it elsewhere")
    return numbers


def _read_topics(state: InspectedLog) -> tuple[dict[int, Topic] | None, set[int]]:
    """The topics by their ids, and the ids of those whose files are being removed.

    None if the state topic cannot be read, for then any name may be out of date.
    """
    values: dict[int, dict[str, Any]] = {}
    try:
        for _, item in walk(state):
            if state.problems or isinstance(item, PenstockError):
                return None, set()
            if isinstance(item, Found) and item.batch.count:
                for change in read_changes(item.batch):
                    if change.kind == "topic":
                        values[int(change.key)] = change.value or {}
    except (PenstockError, OSError):
        return None, set()
    topics = {number: Topic.from_json(number, value) for number, value in values.items() if "name" in value}
    return topics, {number for number, value in values.items() if "deleted" in value}


def _reaches(item: Examined, offset: int) -> bool:
    match item:
        case Found(batch=batch):
            return batch.end > offset or batch.base_offset >= offset
        case LogDamaged(first=first, last=last):
            return last is None or last > offset or first >= offset
        case _:
            return True
