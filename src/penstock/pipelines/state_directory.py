"""The state of a pipeline: who runs it, which pipeline it belongs to, and how far that is.

It is kept beside the pipeline's file, in `data`, so that the same file finds it from wherever it is run; or in another
data directory that is named.

    <data>/pipelines/<name>/
           LOCK                  held by the process that runs it
           pipeline.json         which pipeline the checkpoint belongs to
           progress.json         how far it is
           checkpoint/           Spark's: offsets, commits, state

"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from penstock.errors import BadConfig, PenstockError
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.progress import KILLED, RUNNING, Progress
from penstock.spark.offsets import Offsets
from penstock.spark.options import TopicPartition

logger = logging.getLogger(__name__)

# Of a pipeline beside its file; and, where it was run, of one that ran with an earlier version.
DATA: Final = "data"

_LOCK_S: Final = 0.2


def state_of(pipeline: Pipeline, data: str | Path | None = None) -> StateDirectory:
    """Where its state is: in `data`, else beside its file."""
    return StateDirectory(pipeline.directory / DATA if data is None else Path(data), pipeline.name)


def status(name: str, data: str | Path = DATA) -> Progress:
    """Of the last run, or of the one that is under way."""
    home = StateDirectory(Path(data), name)
    found = home.load()
    if found is None:
        there = [each.name for each in statuses(data)]
        raise PenstockError(
            f"no pipeline {name!r} has run with the data in {data}"
            + (f": there are {', '.join(there)}" if there else ", nor any other")
            + ". Name its file instead, or its data directory with --data"
        )
    if found.state == RUNNING and not home.is_locked:
        return replace(found, state=KILLED)
    return found


def statuses(data: str | Path = DATA) -> list[Progress]:
    """Of all that have run with this data directory, by name."""
    found = sorted(Path(data).glob("pipelines/*/progress.json"))
    return [status(path.parent.name, data) for path in found]


@dataclass(frozen=True, slots=True)
class StateDirectory:
    data: Path
    name: str

    @property
    def directory(self) -> Path:
        return self.data / "pipelines" / self.name

    @property
    def checkpoint(self) -> Path:
        return self.directory.resolve() / "checkpoint"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time: two would take the same batches."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "a+") as lock:
            if not _takes(lock):
                lock.seek(0)
                owner = lock.read().strip()
                raise PenstockError(f"pipeline {self.name} is running already, in process {owner}: stop that one first")
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            # Closing it lets go of it.
            yield

    @property
    def is_locked(self) -> bool:
        try:
            with open(self._lock) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def _lock(self) -> Path:
        return self.directory / "LOCK"

    # Whose it is.

    def identify(self, pipeline: Pipeline) -> None:
        """The checkpoint is this pipeline's, or nothing is in it yet; else it is refused."""
        path = self.directory / "pipeline.json"
        ours = json.loads(json.dumps(pipeline.identity))
        if not self.has_begun:
            _write_durably(path, json.dumps(ours, indent=2) + "\n")
            return
        try:
            theirs = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            raise PenstockError(
                f"{path} does not say which pipeline the checkpoint belongs to: use --restart to start over"
            ) from None
        if differing := list(_differences(theirs, ours, "")):
            raise PenstockError(
                f"the checkpoint in {self.directory} belongs to another pipeline: {'; '.join(differing)}. "
                "Give this one another name, or use --restart to start over"
            )

    def refuse_namesake(self, pipeline: Pipeline) -> None:
        """Refuse a second file that has the same name and another sink: it would go on with the state of the first.

        A file that was renamed, moved or deployed anew is the same pipeline.
        """
        before = self.before()
        other = None if before is None else _loaded(before.file)
        if other is not None and other.name == self.name and _target(other) != _target(pipeline):
            if other.path.samefile(pipeline.path):
                return
            raise PenstockError(
                f"the state in {self.directory} belongs to {other.path}, a pipeline with the same name, {self.name!r}, "
                f"and another sink: give one of them another name, or remove {other.path}"
            )

    def refuse_left_behind(self, pipeline: Pipeline) -> None:
        """Refuse to start from scratch beside the file if the state of this file lies in the working directory."""
        old = StateDirectory(Path(DATA), self.name)
        if self.has_begun or not old.has_begun or old.directory.resolve() == self.directory.resolve():
            return
        before = old.before()
        other = None if before is None else _loaded(before.file)
        if other is None or other.name != self.name or other.path.samefile(pipeline.path):
            raise PenstockError(
                f"pipeline {self.name} has its state in {old.directory.resolve()}, and it is now looked for beside the "
                f"file: move that directory to {self.directory}, or name it with --data {old.data.resolve()}"
            )

    @property
    def has_begun(self) -> bool:
        """Whether a batch was ever planned: a run that failed before that binds nobody."""
        return any(self.checkpoint.glob("*/offsets/[0-9]*"))

    # What is in the checkpoint.

    def planned(self) -> dict[TopicPartition, int]:
        """Where the last batch of rows ends that was planned, in each partition."""
        batch = self.batch("rows")
        if batch is None:
            return {}
        found: dict[TopicPartition, int] = {}
        for end in read_ends(self.checkpoint / "rows" / "offsets" / str(batch)):
            for place, offset in Offsets.from_json(end).ends.items():
                found[place] = max(offset, found.get(place, 0))
        return found

    def batch(self, query: str) -> int | None:
        """The number of the last batch of a query that was planned."""
        return max((int(path.name) for path in self._offsets(query) if path.name.isdecimal()), default=None)

    def queries(self) -> list[tuple[str, int]]:
        """The id of each query, and the number of the last batch that was planned."""
        found = []
        for metadata in sorted(self.checkpoint.glob("*/metadata")):
            batch = self.batch(metadata.parent.name)
            found.append((str(json.loads(metadata.read_text())["id"]), -1 if batch is None else batch))
        return found

    def _offsets(self, query: str) -> Iterator[Path]:
        return self.checkpoint.glob(f"{query}/offsets/[0-9]*")

    def discard(self) -> None:
        """Forget all of it, at once: half of a checkpoint is worse than none."""
        aside = self.directory / "discarded"
        shutil.rmtree(aside, ignore_errors=True)
        if self.checkpoint.exists():
            self.checkpoint.replace(aside)
        for name in ("pipeline.json", "progress.json"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)

    # How far it is.

    def save(self, progress: Progress) -> None:
        """Whole or not at all; it is no loss if a power cut takes it."""
        aside = self._progress.with_suffix(".new")
        aside.write_text(json.dumps(asdict(progress)) + "\n")
        aside.replace(self._progress)

    def load(self) -> Progress | None:
        """None if it never ran."""
        try:
            return Progress(**json.loads(self._progress.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise PenstockError(f"{self._progress} cannot be read: the next run writes it anew") from error

    def before(self) -> Progress | None:
        """The run before; that it cannot be read is no reason not to run."""
        try:
            return self.load()
        except PenstockError as error:
            logger.warning("%s", error)
            return None

    @property
    def _progress(self) -> Path:
        return self.directory / "progress.json"


def read_ends(path: Path) -> list[dict[str, Any]]:
    """The ends of a batch, of each source, from Spark's offset log."""
    # A version, what Spark notes for itself, and then a line for each source.
    return [json.loads(line) for line in path.read_text().splitlines()[2:] if line.startswith("{")]


def _loaded(file: str) -> Pipeline | None:
    """None if it is not there any more, or is no pipeline."""
    try:
        return load(file)
    except BadConfig:
        return None


def _target(pipeline: Pipeline) -> tuple[str | None, ...]:
    sink = pipeline.sink
    return () if sink is None else (sink.servers, sink.topic, sink.parquet, sink.archive)


def _takes(lock: IO[str]) -> bool:
    """Who looks whether it is held holds it for a moment, too."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_LOCK_S / 10)


def _write_durably(path: Path, text: str) -> None:
    """A checkpoint whose pipeline is not known is of no use any more."""
    aside = path.with_suffix(".new")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}):
            yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else name)
    elif theirs != ours:
        yield f"its {key.removeprefix('settings.')} is {json.dumps(theirs)}, here it is {json.dumps(ours)}"
