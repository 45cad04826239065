"""The state that a pipeline keeps from one run to the next.

It is in the directory `data` beside the pipeline file, so that a file finds its state from any working directory, or in
the data directory that the user names.

    <data>/pipelines/<name>/
           LOCK                  held by the process that runs the pipeline
           pipeline.json         the identity of the pipeline that owns the checkpoint
           progress.json         the progress of the last run
           checkpoint/           Spark's own: offsets, commits, state

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
from penstock.pipelines.progress import KILLED, RUNNING, PipelineProgress
from penstock.spark.durable_files import write_durably
from penstock.spark.offsets import Offsets
from penstock.spark.options import TopicPartition

logger = logging.getLogger(__name__)

# The default data directory, beside the pipeline file. Earlier versions used the one in the working directory.
DATA: Final = "data"

_LOCK_S: Final = 0.2


def state_of(pipeline: Pipeline, data: str | Path | None = None) -> StateDirectory:
    """Return the state directory of a pipeline: below `data`, or beside its file."""
    return StateDirectory(pipeline.directory / DATA if data is None else Path(data), pipeline.name)


def status(name: str, data: str | Path = DATA) -> PipelineProgress:
    """Return the progress of the current run, or of the last one."""
    home = StateDirectory(Path(data), name)
    found = home.load()
    if found is None:
        there = [each.name for each in statuses(data)]
        raise PenstockError(
            f"no pipeline {name!r} has run with the data directory {data}"
            + (f": there are {', '.join(there)}" if there else ", nor has any other")
            + ". Give its file instead of its name, or its data directory with --data"
        )
    if found.state == RUNNING and not home.is_locked:
        return replace(found, state=KILLED)
    return found


def statuses(data: str | Path = DATA) -> list[PipelineProgress]:
    """Return the progress of every pipeline in a data directory, sorted by name."""
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
        """Hold the lock. Only one process may run a pipeline: two would process the same batches."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "a+") as lock:
            if not _try_lock(lock):
                lock.seek(0)
                owner = lock.read().strip()
                raise PenstockError(f"pipeline {self.name} is already running, in process {owner}: stop that one first")
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            # Closing the file releases the lock.
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

    # Ownership.

    def identify(self, pipeline: Pipeline) -> None:
        """Raise PenstockError if the checkpoint belongs to another pipeline. Claim it if it is empty."""
        path = self.directory / "pipeline.json"
        ours = json.loads(json.dumps(pipeline.identity))
        if not self.has_begun:
            # A checkpoint without a known owner is useless.
            write_durably(path, json.dumps(ours, indent=2) + "\n")
            return
        try:
            theirs = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            raise PenstockError(
                f"{path} is missing or damaged, so the owner of the checkpoint is unknown: use --restart to start over"
            ) from None
        if differing := list(_differences(theirs, ours, "")):
            raise PenstockError(
                f"the checkpoint in {self.directory} belongs to another pipeline: {'; '.join(differing)}. "
                "Give this one another name, or use --restart to start over"
            )

    def refuse_namesake(self, pipeline: Pipeline) -> None:
        """Refuse a second file with the same name and another sink: it would continue with the state of the first.

        A file that was renamed, moved or deployed again is the same pipeline.
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

    def refuse_moved_state(self, pipeline: Pipeline) -> None:
        """Refuse to start from scratch beside the file if its state is in the working directory."""
        old = StateDirectory(Path(DATA), self.name)
        if self.has_begun or not old.has_begun or old.directory.resolve() == self.directory.resolve():
            return
        before = old.before()
        other = None if before is None else _loaded(before.file)
        if other is None or other.name != self.name or other.path.samefile(pipeline.path):
            raise PenstockError(
                f"pipeline {self.name} has its state in {old.directory.resolve()}, but the state is now kept beside "
                f"the file: move that directory to {self.directory}, or use --data {old.data.resolve()}"
            )

    @property
    def has_begun(self) -> bool:
        """Whether a batch was ever planned. A run that failed before that leaves nothing to protect."""
        return any(self.checkpoint.glob("*/offsets/[0-9]*"))

    # The checkpoint.

    def planned(self) -> dict[TopicPartition, int]:
        """Return the end offset of the last planned batch of rows in each partition."""
        batch = self.batch("rows")
        if batch is None:
            return {}
        found: dict[TopicPartition, int] = {}
        for end in read_ends(self.checkpoint / "rows" / "offsets" / str(batch)):
            for place, offset in Offsets.from_json(end).ends.items():
                found[place] = max(offset, found.get(place, 0))
        return found

    def batch(self, query: str) -> int | None:
        """Return the number of a query's last planned batch."""
        return max((int(path.name) for path in self._offsets(query) if path.name.isdecimal()), default=None)

    def queries(self) -> list[tuple[str, int]]:
        """Return the ID of each query and the number of its last planned batch, or -1."""
        found = []
        for metadata in sorted(self.checkpoint.glob("*/metadata")):
            batch = self.batch(metadata.parent.name)
            found.append((str(json.loads(metadata.read_text())["id"]), -1 if batch is None else batch))
        return found

    def _offsets(self, query: str) -> Iterator[Path]:
        return self.checkpoint.glob(f"{query}/offsets/[0-9]*")

    def discard(self) -> None:
        """Remove the state. The checkpoint goes in one rename: half of one is worse than none."""
        aside = self.directory / "discarded"
        shutil.rmtree(aside, ignore_errors=True)
        if self.checkpoint.exists():
            self.checkpoint.replace(aside)
        for name in ("pipeline.json", "progress.json"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)

    # Progress.

    def save(self, progress: PipelineProgress) -> None:
        """Write the progress atomically, but not durably: it may be lost in a power cut."""
        aside = self._progress.with_suffix(".new")
        aside.write_text(json.dumps(asdict(progress)) + "\n")
        aside.replace(self._progress)

    def load(self) -> PipelineProgress | None:
        """Return the progress of the last run; None if there was none."""
        try:
            return PipelineProgress(**json.loads(self._progress.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise PenstockError(f"{self._progress} cannot be read: the next run replaces it") from error

    def before(self) -> PipelineProgress | None:
        """Return the progress of the last run. One that cannot be read does not prevent a run."""
        try:
            return self.load()
        except PenstockError as error:
            logger.warning("%s", error)
            return None

    @property
    def _progress(self) -> Path:
        return self.directory / "progress.json"


def read_ends(path: Path) -> list[dict[str, Any]]:
    """Return the end offsets of a batch from Spark's offset log, one document for each source."""
    # A line with the version, one with Spark's metadata, then one for each source.
    ends = [json.loads(line) for line in path.read_text().splitlines()[2:] if line.startswith("{")]
    # A directory of files has none.
    return [end for end in ends if "topics" in end]


def _loaded(file: str) -> Pipeline | None:
    """Load a pipeline file; None if it is gone or invalid."""
    try:
        return load(file)
    except BadConfig:
        return None


def _target(pipeline: Pipeline) -> tuple[str | None, ...]:
    sink = pipeline.sink
    return () if sink is None else (sink.servers, sink.topic, sink.parquet, sink.archive, sink.delta)


def _try_lock(lock: IO[str]) -> bool:
    """Take the lock; wait a moment, because `is_locked` in another process holds it briefly."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_LOCK_S / 10)


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}):
            yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else name)
    elif theirs != ours:
        yield f"its {key.removeprefix('settings.')} is {json.dumps(theirs)}, this one's is {json.dumps(ours)}"
