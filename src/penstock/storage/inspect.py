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
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadDirectory, DirectoryInUse, LogDamaged, PenstockError
from penstock.storage import recovery, witness
from penstock.storage.files import OsFiles
from penstock.storage.format import FORMAT_NAME, check_format
from penstock.storage.meta import look_into
from penstock.storage.policy import Topic
from penstock.storage.recovery import Examined
from penstock.storage.segment import Found, OpenSegments, Segment, log_name
from penstock.storage.state import STATE_TOPIC, read_changes
from penstock.storage.witness import NOBODY, Witness

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
    # Where it begins, if that is marked, and how far it once reached.
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
    # What is in the directory and should not be.
    problems: list[str]
    # The ids of the topics that the state topic does not know; empty if it cannot be read.
    orphans: list[int] = field(default_factory=list)


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
        witness=log.witness,
    )


def _verify(log: InspectedLog, progress: Callable[[int], object] | None) -> Verdict:
    try:
        recovery.identify(log.segments)
        report = recovery.verify(log.segments, progress, start=log.marked, witness=log.witness)
        if not log.segments and not log.problems and (log.witness.end or log.marked):
            first = log.directory / log_name(log.start)
            end = max(log.start + 1, log.witness.end)
            report.damage.append(LogDamaged(first, 0, log.start, end, "all segments are missing"))
        return Verdict(log, report, log.problems)
    except (PenstockError, OSError) as error:
        return Verdict(log, None, [*log.problems, explain(error, log.directory)])


def walk(log: InspectedLog, offset: int = 0) -> Iterator[tuple[Segment, Examined]]:
    """All that a log holds from `offset` on, and whatever is wrong where it is wrong."""
    segments = log.segments
    recovery.identify(segments)
    while len(segments) > 1 and segments[1].base <= offset:
        segments = segments[1:]
    start = log.marked if segments[:1] == log.segments[:1] else None
    for segment, item in recovery.examine(segments, start=start, witness=log.witness):
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
    # The witnesses come first: what is written meanwhile only makes the logs longer.
    with look_into(directory / "meta.db", is_live=is_live) as meta:
        of_state = witness.of_state_topic(meta)
        path = topics / str(STATE_TOPIC) / "0"
        state = _inspect_log(files, path, STATE_TOPIC, None, 0, is_live=is_live, witness=of_state)
        values = _read_state(state)
        witnesses = witness.of_topics(meta, [(*key, value) for key, value in (values or {}).items()])
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
                f"{topics / str(topic_id)} is of no known topic: run penstock log repair, with --adopt {topic_id}=NAME "
                f"if it does not find the name by itself, or move the directory elsewhere"
            )
        partitions = _numbers(topics / str(topic_id), found.problems)
        expected = set(range(topic.partitions)) if topic else partitions
        for partition in sorted(partitions | expected):
            path = topics / str(topic_id) / str(partition)
            if topic is not None and partition not in expected:
                found.problems.append(f"{path} is of no partition that topic {topic.name} has: move it elsewhere")
            name = topic.name if topic else None
            piped = topic is not None and topic.origin is not None
            of_log = witness.NOBODY if piped else witnesses.get((topic_id, partition), witness.NOBODY)
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
        found = recovery.look_around(files, OpenSegments(), directory, "pread")
    except OSError as error:
        found = recovery.Listing(problems=[explain(error, directory)])
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
    """The directories whose name is a number; anything else there is a problem."""
    numbers = set()
    for name in os.listdir(directory) if directory.exists() else ():
        if name.isdecimal() and str(int(name)) == name and (directory / name).is_dir():
            numbers.add(int(name))
        else:
            problems.append(f"{directory / name} does not belong there: move it elsewhere")
    return numbers


def _read_state(state: InspectedLog) -> dict[tuple[str, str], Any] | None:
    """What the state topic has, by kind and key. None if it cannot be read, for then anything may be out of date."""
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
    """The topics by their ids, None if they are not known, and the ids of those whose files are being removed."""
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
