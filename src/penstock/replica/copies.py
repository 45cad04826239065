"""The copies in a data directory: one that is read, and perhaps one that is being built to follow it.

    <data>/LOCK           who has this directory open
    <data>/CURRENT        which copies count: {"topic": …, "serving": 1, "building": 2}
    <data>/copy-<n>/      a copy

CURRENT is replaced as a whole. So a crash at any moment leaves readers with the old copy or with the new one, and
whatever is not named there is removed.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.clock import Clock, SystemClock
from penstock.errors import BadDirectory
from penstock.replica.copy import Copy
from penstock.replica.disk import Disk, Lock, OsDisk
from penstock.replica.index import Topic
from penstock.replica.record import Record

logger = logging.getLogger(__name__)

_CURRENT: Final = "CURRENT"
_COPY: Final = re.compile(r"copy-(\d+)")


class Copies:
    """One thread at a time changes them; any may read."""

    def __init__(
        self,
        directory: Path,
        pattern: str,
        *,
        segment_bytes_max: int,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`pattern`: what the copy is of; a directory that has a copy of something else is refused."""
        self._directory = directory
        self._pattern = pattern
        self._segment_bytes_max = segment_bytes_max
        self._disk = disk or OsDisk()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._readers: Counter[Copy] = Counter()
        self._retired: set[Copy] = set()
        self._disk.make_directory(directory)
        self._held = Lock(directory)
        self._serving: Copy | None = None
        self._building: Copy | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for copy in (self._serving, self._building, *self._retired):
            if copy is not None:
                copy.close()
        self._held.close()

    @property
    def is_building(self) -> bool:
        return self._building is not None

    @contextmanager
    def read(self) -> Iterator[Copy]:
        """The copy that readers see. It stays until they have left, whatever follows it meanwhile."""
        with self._lock:
            copy = self._serving
            assert copy is not None, "it is open"
            self._readers[copy] += 1
        try:
            yield copy
        finally:
            with self._lock:
                self._readers[copy] -= 1
                is_last = not self._readers[copy]
                if is_last:
                    del self._readers[copy]
                is_left = is_last and copy in self._retired
                self._retired -= {copy} if is_left else set()
            if is_left:
                self._remove(copy)

    # What comes in goes to the one that is being built, if there is one.

    @property
    def topic(self) -> Topic | None:
        return self._filled.topic

    @property
    def topic_name(self) -> str | None:
        """Of the one that is read, if nothing has come since."""
        topic = self.topic or (self._serving.topic if self._serving is not None else None)
        return None if topic is None else topic.name

    def next_offset(self, partition: int) -> int:
        return self._filled.next_offset(partition)

    def append(self, topic: Topic, records: Mapping[int, Sequence[Record]]) -> int:
        """As `Copy.append`."""
        return self._filled.append(topic, records)

    # One after the other.

    def begin(self) -> None:
        """A new copy, beside the one that is read. One that is being built is given up."""
        number = 1 + max(self._numbers(), default=0)
        building = self._copy(number)
        try:
            self._name(self._number(self._serving), number)
        except BaseException:
            building.close()
            raise
        given_up, self._building = self._building, building
        if given_up is not None:
            self._remove(given_up)

    def complete(self) -> bool:
        """Readers see the one that was built, and the old one goes; False if none was."""
        building, old = self._building, self._serving
        if building is None or old is None:
            return False
        self._name(self._number(building), None)
        with self._lock:
            self._serving, self._building = building, None
            is_read = bool(self._readers[old])
            if is_read:
                self._retired.add(old)
        if not is_read:
            self._remove(old)
        return True

    def abandon(self) -> None:
        """What is being built is not wanted: what comes goes into the one that is read again."""
        if self._building is None:
            return
        self._name(self._number(self._serving), None)
        given_up, self._building = self._building, None
        self._remove(given_up)

    @property
    def _filled(self) -> Copy:
        copy = self._building or self._serving
        assert copy is not None, "it is open"
        return copy

    def _open(self) -> None:
        current = self._read_current()
        if current is None:
            # Without the word of CURRENT nothing was stored that anybody was told of; but there may be more to it.
            if self._numbers() and any(self._directory.glob("copy-*/*/segment-*.log")):
                raise BadDirectory(f"{self._directory} has copies and no {_CURRENT}: put it back, or move them away")
            self._name(1, None)
            current = {"topic": self._pattern, "serving": 1, "building": None}
        if current["topic"] != self._pattern:
            raise BadDirectory(
                f"{self._directory} has a copy of {current['topic']}, not of {self._pattern}: choose another directory"
            )
        named = {current["serving"], current["building"]}
        for number in self._numbers():
            if number not in named:
                self._disk.remove(self._path(number))
        self._serving = self._copy(current["serving"])
        if current["building"] is not None:
            self._building = self._copy(current["building"])

    def _read_current(self) -> dict[str, Any] | None:
        path = self._directory / _CURRENT
        try:
            current: dict[str, Any] = json.loads(path.read_bytes())
            _ = (current["topic"], int(current["serving"]), current["building"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise BadDirectory(f"{path} does not say which copy counts: put it back, or move the directory") from None
        return current

    def _name(self, serving: int, building: int | None) -> None:
        current = {"topic": self._pattern, "serving": serving, "building": building}
        self._disk.replace(self._directory / _CURRENT, f"{json.dumps(current)}\n".encode())

    def _numbers(self) -> list[int]:
        names = (_COPY.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(found[1]) for found in names if found)

    def _number(self, copy: Copy | None) -> int:
        assert copy is not None, "it is open"
        found = _COPY.fullmatch(copy.directory.name)
        assert found, "it is named by us"
        return int(found[1])

    def _path(self, number: int) -> Path:
        return self._directory / f"copy-{number}"

    def _copy(self, number: int) -> Copy:
        return Copy(self._path(number), disk=self._disk, clock=self._clock, segment_bytes_max=self._segment_bytes_max)

    def _remove(self, copy: Copy) -> None:
        """Not named any more: if this fails, it is done when the directory is opened again."""
        copy.close()
        try:
            self._disk.remove(copy.directory)
        except OSError as error:
            logger.warning("%s is left over: %s", copy.directory, error)
