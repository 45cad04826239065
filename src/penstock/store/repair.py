"""Repairs a data directory that no broker has open: moves damaged bytes to a quarantine, so that all logs are sound.

Each damaged range is first copied to `<data>/quarantine`, with a description beside it, and synced. Then the segment is
rewritten without it and renamed into place. After an interruption, the next repair finds the same damage and does the
same again. The lost offsets stay empty: they are not given out again, and readers skip them.

Records that the state topic has lost may be in `meta.db`: then they are written to the state topic again. A topic in
neither of them is adopted under a given name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from penstock.clock import Clock, SystemClock
from penstock.errors import BadDirectory, PenstockError
from penstock.log import compaction, examine, log_files, retention
from penstock.log.files import Files, OsFiles
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy, Topic
from penstock.log.scan import Damage, Found
from penstock.log.segment import Segment
from penstock.log.tail import TailBudget
from penstock.model.batch import NO_SEGMENT, Batch, Control, encode_control
from penstock.model.subject import owns
from penstock.outcome import Outcome
from penstock.store import inspect
from penstock.store.format import claim_format
from penstock.store.meta import Change, Meta, look_into
from penstock.store.state import STATE_TOPIC, StoreState, read_changes

QUARANTINE: Final = "quarantine"
REPORT: Final = "report.json"
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Bytes of a segment from `position` to before `stop`, and the offsets that are lost with them."""

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
class Repaired:
    quarantined: list[Quarantined]
    # Problems that are left for the operator.
    problems: list[str]
    report: Path | None
    # Whether records of the state topic were lost.
    is_state_hit: bool
    # How many of them were in `meta.db`, and the names of adopted topics, by ID.
    restored: int = 0
    adopted: dict[int, str] = field(default_factory=dict)


def repair(
    directory: Path,
    *,
    adopt: Mapping[int, str] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    files: Files | None = None,
    clock: Clock | None = None,
) -> Repaired:
    """Repair every log of a data directory. `progress` is called with the bytes that were read, and all bytes.

    `adopt` has names, by ID, for directories of unknown topics. Raises DirectoryInUse while a process has the directory
    open.
    """
    if not (directory / "LOCK").exists():
        raise BadDirectory(f"{directory} is not a data directory: name the one that holds LOCK and topics")
    files = files or OsFiles()
    lock = files.lock(directory / "LOCK")
    try:
        claim_format(files, directory)
        work = _Repair(directory, files, clock or SystemClock(), progress)
        return work.run(adopt or {})
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

    def run(self, adopt: Mapping[int, str]) -> Repaired:
        # The state topic comes first: it names the others.
        [state, *_] = inspect.inspect_data(OsFiles(read_only=True), self._directory).logs
        self._total = state.size
        restored = 0
        adopted: dict[int, str] = {}
        with look_into(self._directory / "meta.db", is_live=False) as meta:
            base = state.segments[-1].base if state.segments else 0
            # An older one may lack deletions that were compacted away since.
            is_recent = meta is not None and meta.applied() >= base
            self._repair_log(state)
            is_state_hit = bool(self._found)
            if meta is not None and is_recent and is_state_hit and not self._problems:
                restored = self._restore_state(state, meta)
            inspection = inspect.inspect_data(OsFiles(read_only=True), self._directory)
            if inspection.orphans or adopt:
                adopted = self._adopt(inspection, adopt, meta)
                inspection = inspect.inspect_data(OsFiles(read_only=True), self._directory)
        self._problems += inspection.problems
        logs = inspection.logs[1:]
        self._total += sum(log.size for log in logs)
        for log in logs:
            self._repair_log(log)
        report = self._write_report() if self._found else None
        return Repaired(self._found, self._problems, report, is_state_hit, restored, adopted)

    def _restore_state(self, inspected: inspect.InspectedLog, meta: Meta) -> int:
        """Write the records to the state topic that it has lost and `meta.db` has; return how many."""
        known = {(kind, key): value for kind, key, value in meta.state()}
        with self._opened(inspected) as log, closing(Meta(None)) as unused:
            state = StoreState(log, unused)
            there = {(kind, key): value for kind, key, value in state.everything()}
            # Everything below this offset is in `meta.db`; later records override it.
            for change in _changes_from(log, meta.applied()):
                known[change.kind, change.key] = change.value
            keys = sorted(known.keys() | there.keys())
            changes = [Change(*key, known.get(key)) for key in keys if known.get(key) != there.get(key)]
            self._write_state(log, state, changes)
        return len(changes)

    def _adopt(self, inspection: inspect.Inspection, names: Mapping[int, str], meta: Meta | None) -> dict[int, str]:
        """Create topics for directories of unknown topics; return their names by ID."""
        values = {} if meta is None else {key: value for kind, key, value in meta.state() if kind == "topic"}
        taken = {log.topic_name for log in inspection.logs if log.topic_name is not None}
        if unknown := names.keys() - set(inspection.orphans):
            raise BadDirectory(f"topic {min(unknown)} cannot be adopted: it has no directory, or a name already")
        adopted: list[Topic] = []
        for topic_id in inspection.orphans:
            value = values.get(str(topic_id), {})
            known = Topic.from_json(topic_id, value) if "name" in value else None
            name = names.get(topic_id) or (known.name if known else None)
            conflict = next((other for other in taken if name and _overlap(name, other)), None)
            if conflict is not None:
                self._problems.append(f"topic {topic_id} cannot be {name}, there is {conflict}: adopt it as another")
            elif name is not None:
                taken.add(name)
                partitions = [log.partition or 0 for log in inspection.logs if log.topic_id == topic_id]
                count = max(max(partitions, default=0) + 1, known.partitions if known else 1)
                policy, origin = (known.policy, known.origin) if known else (Policy(), None)
                adopted.append(Topic(topic_id, name, count, policy, origin))
        with self._opened(inspection.logs[0]) as log, closing(Meta(None)) as unused:
            changes = [Change("topic", str(topic.id), topic.to_json()) for topic in adopted]
            self._write_state(log, StoreState(log, unused), changes)
        return {topic.id: topic.name for topic in adopted}

    def _write_state(self, log: Log, state: StoreState, changes: list[Change]) -> None:
        outcome = Outcome()
        if changes:
            state.write(changes, outcome)
            log.flush()
        outcome.check()

    @contextmanager
    def _opened(self, inspected: inspect.InspectedLog) -> Iterator[Log]:
        log = self._open(inspected)
        try:
            yield log
        finally:
            log.close()

    def _repair_log(self, log: inspect.InspectedLog) -> None:
        verdict = inspect.verify(log, self._advance)
        if verdict.state is inspect.LogHealth.DAMAGED:
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

    def _open(self, inspected: inspect.InspectedLog) -> Log:
        return Log(
            inspected.directory,
            policy=Policy(),
            files=self._files,
            clock=self._clock,
            owner=NoRounds(),
            open_segments=OpenSegments(),
            tail_budget=TailBudget(0),
            piped=inspected.is_piped,
            witness=inspected.witness,
        )

    def _set_aside(self, inspected: inspect.InspectedLog) -> None:
        assert inspected.topic_id is not None
        assert inspected.partition is not None
        # Opening the log cuts off a torn tail and seals a damaged last segment: then all damage is in sealed segments.
        log = self._open(inspected)
        log.close()
        if inspected.topic_id == STATE_TOPIC:
            self._keep_meta()
        segments = self._without_intruders(inspected, log.segments)
        previous: Segment | None = None
        for place, (segment, following) in enumerate(pairwise(segments)):
            items = list(segment.scan(check=True))
            damage = [item for item in items if isinstance(item, Damage)]
            batches = [item.batch for item in items if isinstance(item, Found)]
            end = batches[-1].end if batches else segment.base
            wrong = None if damage else examine.misplaced(segment, following, end)
            if wrong is not None and wrong.path != following.path:
                # The end of the file is missing, or the next file. With a foot, nothing is missing any more.
                damage = [Damage(segment.size, segment.size, end, following.base, wrong.reason)]
            if damage:
                for each in damage:
                    self._keep(inspected, segment, each, following.base)
                begun = retention.begun_at(segments, place + 1)
                whole = _complete(batches, segment, previous, following, log.number, begun)
                compaction.rewrite(segment, whole, self._files, lambda old, new: None)
            name = log_files.damaged_name(segment.base)
            if name in self._files.sizes(log.directory):
                self._files.remove(log.directory / name)
                self._files.sync_directory(log.directory)
            previous = segment

    def _without_intruders(self, inspected: inspect.InspectedLog, segments: Sequence[Segment]) -> list[Segment]:
        """Move foreign files away that hold no offset, because the segment before them has all of theirs."""
        kept: list[Segment] = []
        for segment in segments:
            foreign = segment.foreign()
            if foreign and kept and kept[-1].end() > segment.base:
                self._keep(inspected, segment, foreign, segment.base)
                self._files.remove(segment.path)
                self._files.sync_directory(inspected.directory)
            else:
                kept.append(segment)
        return kept

    def _keep(self, log: inspect.InspectedLog, segment: Segment, damage: Damage, following: int) -> None:
        """Copy damaged bytes to the quarantine, durably, with a description."""
        data = bytes(segment.content(damage.position, damage.stop - damage.position))
        directory = self._directory / QUARANTINE / str(log.topic_id) / str(log.partition)
        # The checksum distinguishes it from earlier damage in the same place.
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
        """Keep a copy of `meta.db`: it may have what the state topic has lost."""
        directory, now_us = self._directory / QUARANTINE, self._clock.now_us()
        for suffix in ("", "-wal"):
            path = self._directory / f"meta.db{suffix}"
            if path.exists():
                self._files.make_directory(directory)
                self._write(directory / f"meta-{now_us}.db{suffix}", path.read_bytes())
                self._files.sync_directory(directory)

    def _write_report(self) -> Path:
        """Report everything in the quarantine, also from interrupted repairs."""
        directory = self._directory / QUARANTINE
        found: list[dict[str, Any]] = []
        for topic in sorted(self._files.sizes(directory)):
            for partition in sorted(self._files.sizes(directory / topic)) if topic.isdecimal() else ():
                for name in sorted(self._files.sizes(directory / topic / partition)):
                    if name.endswith(".json"):
                        found.append(json.loads((directory / topic / partition / name).read_bytes()))
        path = directory / REPORT
        aside = directory / f"{REPORT}{log_files.ASIDE_SUFFIX}"
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
    batches: Sequence[Batch], segment: Segment, previous: Segment | None, following: Segment, number: int, begun: int
) -> Iterator[Batch]:
    """Yield the batches of a segment, with a head and a foot if it has none. `begun` is the time for one without
    batches."""
    before = NO_SEGMENT if previous is None else previous.base
    append_time = batches[0].append_time if batches else begun
    if not batches or batches[0].count or batches[0].base_offset != segment.base or not _is_head(batches[0]):
        yield _control(Control(segment.base, before), segment.base, append_time, number)
    yield from batches
    if not batches or batches[-1].count or batches[-1].base_offset != following.base:
        append_time = batches[-1].append_time if batches else append_time
        yield _control(Control(following.base, before), following.base, append_time, number)


def _is_head(batch: Batch) -> bool:
    """Return whether a control batch is a head. The foot of a segment without messages has the same offset."""
    return batch.durable_bytes == 0


def _control(control: Control, offset: int, append_time: int, number: int) -> Batch:
    batch = encode_control(control)
    batch.stamp(offset, append_time=append_time, log=number)
    return batch


def _document(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _overlap(name: str, other: str) -> bool:
    """Return whether a subject would belong to both topics."""
    return owns(name.encode(), other.encode()) or owns(other.encode(), name.encode())


def _changes_from(log: Log, offset: int) -> Iterator[Change]:
    while offset < log.committed and (batches := log.read(max(offset, log.start), _READ_BYTES)):
        for batch in batches:
            yield from read_changes(batch)
            offset = batch.end


class NoRounds:
    """The owner of a log outside a store: the log is written by calls of `flush`."""

    def appended(self, log: Log, size: int) -> None:
        pass

    def settled(self, size: int) -> None:
        pass

    def announce(self) -> None:
        pass

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        raise error

    def damaged(self, log: Log) -> None:
        pass
