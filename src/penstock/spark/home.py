"""The directory of a pipeline, in a data directory: who runs it, which pipeline it belongs to, and how far that is.

    <data>/pipelines/<name>/
           LOCK                  held by the process that runs it
           pipeline.json         which pipeline the checkpoint belongs to
           progress.json         how far it is
           checkpoint/           Spark's: offsets, commits, state

Only this directory tells how far a pipeline is: whoever removes it begins anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from penstock.errors import PenstockError
from penstock.spark.file import Pipeline
from penstock.spark.progress import KILLED, RUNNING, Progress

logger = logging.getLogger(__name__)

_LOCK_S: Final = 0.2


def status(name: str, data: str | Path = "data") -> Progress:
    """Of the last run, or of the one that is under way."""
    home = Home(Path(data), name)
    found = home.load()
    if found is None:
        there = [each.name for each in statuses(data)]
        raise PenstockError(
            f"no pipeline {name!r} has run with the data in {data}"
            + (f": there are {', '.join(there)}" if there else ", nor any other")
        )
    if found.state == RUNNING and not home.is_locked:
        return replace(found, state=KILLED)
    return found


def statuses(data: str | Path = "data") -> list[Progress]:
    """Of all that have run with this data directory, by name."""
    found = sorted(Path(data).glob("pipelines/*/progress.json"))
    return [status(path.parent.name, data) for path in found]


@dataclass(frozen=True, slots=True)
class Home:
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
        if not self._has_begun:
            _write_durably(path, json.dumps(ours, indent=2) + "\n")
            return
        try:
            theirs = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            raise PenstockError(
                f"{path} does not say which pipeline the checkpoint belongs to: remove {self.directory} to begin anew"
            ) from None
        if differing := list(_differences(theirs, ours, "")):
            raise PenstockError(
                f"the checkpoint in {self.directory} belongs to another pipeline: {'; '.join(differing)}. "
                "Give this one another name, or remove that directory to begin anew"
            )

    @property
    def _has_begun(self) -> bool:
        """Whether a batch was ever planned: a run that failed before that binds nobody."""
        return any(self.checkpoint.glob("*/offsets/[0-9]*"))

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
