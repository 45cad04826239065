"""Repair of a data directory that no broker has open: damaged bytes are set aside, and the logs are sound again.

Each damaged range is first copied to `<data>/quarantine`, with a description beside it, and synced. Then the segment is
written again without it, aside, and renamed into place. Interrupted anywhere, the next repair finds the same damage
and does the same again. The lost offsets stay empty: they are not given out again, and readers pass over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from penstock.batch import NO_SEGMENT, Batch, Control, encode_control
from penstock.clock import Clock, SystemClock
from penstock.errors import BadDirectory, PenstockError
from penstock.storage import compaction, inspect, recovery
from penstock.storage.files import Files, OsFiles
from penstock.storage.log import Log
from penstock.storage.policy import Policy
from penstock.storage.segment import Damage, Found, OpenSegments, Segment
from penstock.storage.state import STATE_TOPIC
from penstock.storage.tail import TailBudget

QUARANTINE: Final = "quarantine"
REPORT: Final = "report.json"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Bytes from `position` to before `stop` of a segment, and the offsets that are lost with them."""

    topic: str | None
    topic_id: int
    partition: int
    file: str
    position: int
    stop: int
    first: int
    next: int
    reason: str
    kept: str
    time_us: int


@dataclass(frozen=True, slots=True)
class Outcome:
    quarantined: list[Quarantined]
    # What is still wrong, and needs somebody.
    problems: list[str]
    report: Path | None
    # Whether records of the state topic are among what was lost.
    is_state_hit: bool


def repair(
    directory: Path,
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
    files: Files | None = None,
    clock: Clock | None = None,
) -> Outcome:
    """Repair every log of a data directory; `progress` is told how many bytes of how many were read.

    Raises DirectoryInUse while a process has it open.
    """
    if not (directory / "LOCK").exists():
        raise BadDirectory(f"{directory} is not a data directory: name the one that holds LOCK and topics")
    files = files or OsFiles()
    lock = files.lock(directory / "LOCK")
    try:
        work = _Repair(directory, files, clock or SystemClock(), progress)
        return work.run()
    finally:
        lock.close()


class _Repair:
    def __init__(self, directory: Path, files: Files, clock: Clock, progress: Callable[[int, int], object]) -> None:
        self._directory = directory
        self._files = files
        self._clock = clock
        self._progress = progress
        self._done = self._total = 0
        self._found: list[Quarantined] = []
        self._problems: list[str] = []

    def run(self) -> Outcome:
        # The state topic comes first: it names the others.
        [state, *_] = inspect.inspect_data(OsFiles(read_only=True), self._directory).logs
        self._total = state.size
        self._repair_log(state)
        is_state_hit = bool(self._found)
        inspection = inspect.inspect_data(OsFiles(read_only=True), self._directory)
        self._problems += inspection.problems
        logs = inspection.logs[1:]
        self._total += sum(log.size for log in logs)
        for log in logs:
            self._repair_log(log)
        report = self._write_report() if self._found else None
        return Outcome(self._found, self._problems, report, is_state_hit)

    def _repair_log(self, log: inspect.InspectedLog) -> None:
        verdict = inspect.verify(log, self._advance)
        if verdict.state is inspect.Health.DAMAGED:
            try:
                self._set_aside(log)
            except (PenstockError, OSError) as error:
                self._problems.append(f"not repaired: {inspect.explain(error, log.directory)}")
                return
            verdict = inspect.verify(inspect.look_again(log))
        if not verdict.sound:
            report = verdict.report
            found = [*verdict.problems, *(map(str, [*report.damage, *report.unsupported]) if report else ())]
            self._problems += [f"not repaired: {problem}" for problem in found]

    def _advance(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _set_aside(self, inspected: inspect.InspectedLog) -> None:
        assert inspected.topic_id is not None
        assert inspected.partition is not None
        # Opening it cuts a torn tail off, and leaves damage in the last segment behind: then all is in sealed ones.
        log = Log(
            inspected.directory,
            policy=Policy(),
            files=self._files,
            clock=self._clock,
            owner=_NoRounds(),
            open_segments=OpenSegments(),
            tail_budget=TailBudget(0),
            piped=inspected.is_piped,
        )
        log.close()
        if inspected.topic_id == STATE_TOPIC:
            self._keep_meta()
        previous: Segment | None = None
        for segment, following in zip(log.segments, log.segments[1:], strict=False):
            items = list(segment.scan(check=True))
            damage = [item for item in items if isinstance(item, Damage)]
            batches = [item.batch for item in items if isinstance(item, Found)]
            end = batches[-1].end if batches else segment.base
            wrong = None if damage else recovery.misplaced(segment, following, end)
            if wrong is not None and wrong.path != following.path:
                # The end of the file is missing, or the file behind it: with a foot nothing is, from here on.
                damage = [Damage(segment.size, segment.size, end, following.base, wrong.reason)]
            if damage:
                for each in damage:
                    self._keep(inspected, segment, each, following.base)
                whole = _complete(batches, segment, previous, following, log.number)
                compaction.rewrite(segment, whole, self._files, lambda old, new: None)
            name = recovery.damaged_name(segment.base)
            if name in self._files.sizes(log.directory):
                self._files.remove(log.directory / name)
                self._files.sync_directory(log.directory)
            previous = segment

    def _keep(self, log: inspect.InspectedLog, segment: Segment, damage: Damage, following: int) -> None:
        """Copy damaged bytes, durably, with what is known of them."""
        data = bytes(segment.content(damage.position, damage.stop - damage.position))
        directory = self._directory / QUARANTINE / str(log.topic_id) / str(log.partition)
        # The checksum tells it from other damage that was in the same place once.
        name = f"{segment.base:020d}-{damage.position}-{crc32c(data):08x}"
        assert log.topic_id is not None
        assert log.partition is not None
        kept = Quarantined(
            topic=log.topic_name,
            topic_id=log.topic_id,
            partition=log.partition,
            file=str(segment.path),
            position=damage.position,
            stop=damage.stop,
            first=damage.first,
            next=following if damage.last is None else damage.last,
            reason=damage.reason,
            kept=str(directory / f"{name}.bytes"),
            time_us=self._clock.now_us(),
        )
        self._files.make_directory(directory)
        self._write(directory / f"{name}.bytes", data)
        self._write(directory / f"{name}.json", _document(asdict(kept)))
        self._files.sync_directory(directory)
        self._found.append(kept)

    def _keep_meta(self) -> None:
        """Keep the projection of the state topic too: it may know what the topic has lost."""
        path = self._directory / "meta.db"
        if path.exists():
            directory = self._directory / QUARANTINE
            self._files.make_directory(directory)
            self._write(directory / f"meta-{self._clock.now_us()}.db", path.read_bytes())
            self._files.sync_directory(directory)

    def _write_report(self) -> Path:
        """Write all that was ever set aside, also by a repair that was interrupted."""
        directory = self._directory / QUARANTINE
        found: list[dict[str, Any]] = []
        for topic in sorted(self._files.sizes(directory)):
            for partition in sorted(self._files.sizes(directory / topic)) if topic.isdecimal() else ():
                for name in sorted(self._files.sizes(directory / topic / partition)):
                    if name.endswith(".json"):
                        found.append(json.loads((directory / topic / partition / name).read_bytes()))
        path = directory / REPORT
        aside = directory / f"{REPORT}{recovery.ASIDE_SUFFIX}"
        self._write(aside, _document(found))
        self._files.rename(aside, path)
        self._files.sync_directory(directory)
        return path

    def _write(self, path: Path, data: bytes) -> None:
        file = self._files.create(path)
        try:
            file.write(data, 0)
            file.sync()
        finally:
            file.close()


def _complete(
    batches: Sequence[Batch], segment: Segment, previous: Segment | None, following: Segment, number: int
) -> Iterator[Batch]:
    """The batches of a segment, with a head and a foot where it has none."""
    before = NO_SEGMENT if previous is None else previous.base
    append_time = batches[0].append_time if batches else following.begun_at()
    if not batches or batches[0].count or batches[0].base_offset != segment.base or not _is_head(batches[0]):
        yield _control(Control(segment.base, before), segment.base, append_time, number)
    yield from batches
    if not batches or batches[-1].count or batches[-1].base_offset != following.base:
        append_time = batches[-1].append_time if batches else append_time
        yield _control(Control(following.base, before), following.base, append_time, number)


def _is_head(batch: Batch) -> bool:
    """A foot of a segment without messages has the head's offset as well, and no snapshot."""
    return batch.durable_bytes == 0


def _control(control: Control, offset: int, append_time: int, number: int) -> Batch:
    batch = encode_control(control)
    batch.stamp(offset, append_time=append_time, log=number)
    return batch


def _document(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


class _NoRounds:
    """The owner of a log to which nothing is appended."""

    def appended(self, log: Log, size: int) -> None:
        raise NotImplementedError

    def settled(self, size: int) -> None:
        pass

    def announce(self) -> None:
        pass

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        raise error

    def damaged(self, log: Log) -> None:
        pass
