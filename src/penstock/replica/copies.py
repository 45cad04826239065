"""The copies in a data directory: one that is read and, during a refresh, one that is being built.

    <data>/…               a store (see store/store.py), in which each copy is a topic
    <data>/index-<id>.db   the index of the copy with that topic ID

A value in the store's state topic names the current copies. It changes atomically, so a crash at any moment leaves
readers with the old copy or with the new one. Copies that it does not name are removed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.clock import Clock
from penstock.errors import BadDirectory, PenstockError
from penstock.log.files import Files
from penstock.log.policy import Policy
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.replica.copy import Copy
from penstock.replica.index import remove_index
from penstock.store.meta import Change, Meta
from penstock.store.store import Store, StoreSettings

logger = logging.getLogger(__name__)

_NAME: Final = "$copy"
_STATE: Final = ("replica", "copies")


class OriginTopic(NamedTuple):
    """The topic at the broker. One that is deleted and created again has another ID."""

    name: str
    id: int


@dataclass(frozen=True, slots=True)
class _CurrentCopies:
    """The current copies, by the ID of their topic in the store, and the topic each is a copy of, once known."""

    pattern: str
    serving: int
    building: int | None = None
    serving_topic: OriginTopic | None = None
    building_topic: OriginTopic | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> _CurrentCopies:
        topics = {name: OriginTopic(*value[name]) for name in ("serving_topic", "building_topic") if value[name]}
        return cls(value["pattern"], value["serving"], value["building"], **topics)


class Copies:
    """One thread at a time may change the copies; any thread may read."""

    def __init__(
        self,
        directory: Path,
        pattern: str,
        *,
        segment_bytes_max: int,
        files: Files | None = None,
        clock: Clock | None = None,
        meta: Meta | None = None,
        index_directory: Path | None = None,
    ) -> None:
        """`pattern` is what is copied. A directory with a copy of something else is refused. Indexes are in the same
        directory unless `index_directory` says otherwise."""
        if (directory / "CURRENT").exists():
            raise BadDirectory(
                f"{directory} has a copy in the format of an earlier version: remove the directory, and the replica "
                "copies the topic again"
            )
        self._directory = directory
        self._index_directory = index_directory or directory
        self._policy = Policy(segment_bytes=segment_bytes_max)
        self._readers: Counter[Copy] = Counter()
        self._changed = threading.Condition()
        # Queries read from the disk, so batches need not be kept in memory.
        self._store = Store(directory, settings=StoreSettings(tail_bytes_max=0), files=files, clock=clock, meta=meta)
        self._serving: Copy | None = None
        self._building: Copy | None = None
        try:
            self._named = self._open(pattern)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for copy in (self._serving, self._building):
            if copy is not None:
                copy.close()
        self._store.close()

    @property
    def is_building(self) -> bool:
        return self._building is not None

    @contextmanager
    def read(self) -> Iterator[Copy]:
        """Yield the copy that is served. It is not removed while a reader uses it."""
        with self._changed:
            copy = self._serving
            assert copy is not None, "the copies are open"
            self._readers[copy] += 1
        try:
            yield copy
        finally:
            with self._changed:
                self._readers[copy] -= 1
                if not self._readers[copy]:
                    del self._readers[copy]
                self._changed.notify_all()

    # New messages go to the copy that is being built, if there is one.

    @property
    def topic(self) -> OriginTopic | None:
        """The topic whose messages the copy has; None if the copy is empty."""
        return self._named.building_topic if self.is_building else self._named.serving_topic

    @property
    def topic_name(self) -> str | None:
        """The name of that topic, or of the one that readers see."""
        topic = self.topic or self._named.serving_topic
        return None if topic is None else topic.name

    def next_offset(self, partition: int) -> int:
        return self._filled.next_offset(partition)

    def append(self, topic: OriginTopic, runs: Mapping[int, Run]) -> int:
        """Store messages; see `Copy.append`."""
        if topic != self.topic:
            if self.is_building:
                self._name(replace(self._named, building_topic=topic))
            else:
                self._name(replace(self._named, serving_topic=topic))
        return self._filled.append(topic.name, runs)

    # Refresh.

    def begin(self) -> None:
        """Start a new copy beside the one that is read. Abandon a copy that is being built."""
        building = self._copy(self._create(self._named.pattern))
        try:
            self._name(replace(self._named, building=building.id, building_topic=None))
        except BaseException:
            self._remove(building)
            raise
        abandoned, self._building = self._building, building
        if abandoned is not None:
            self._remove(abandoned)

    def complete(self) -> bool:
        """Serve the copy that was built, and remove the old one; return False if none was built."""
        building, old = self._building, self._serving
        if building is None or old is None:
            return False
        self._name(_CurrentCopies(self._named.pattern, building.id, serving_topic=self._named.building_topic))
        with self._changed:
            self._serving, self._building = building, None
            self._changed.wait_for(lambda: not self._readers[old])
        self._remove(old)
        return True

    def abandon(self) -> None:
        """Abandon the copy that is being built. New messages go to the one that is read again."""
        if self._building is None:
            return
        self._name(replace(self._named, building=None, building_topic=None))
        abandoned, self._building = self._building, None
        self._remove(abandoned)

    @property
    def _filled(self) -> Copy:
        copy = self._building or self._serving
        assert copy is not None, "the copies are open"
        return copy

    def _open(self, pattern: str) -> _CurrentCopies:
        value = self._store.state.get(*_STATE)
        if value is None:
            if any(not topic.is_internal for topic in self._store.topics):
                raise BadDirectory(f"{self._directory} is the data directory of a broker: choose another directory")
            named = _CurrentCopies(pattern, self._create(pattern))
            self._name(named)
        else:
            named = _CurrentCopies.from_json(value)
        if named.pattern != pattern:
            raise BadDirectory(
                f"{self._directory} has a copy of {named.pattern}, not of {pattern}: choose another directory"
            )
        for topic in self._store.topics:
            if topic.id not in (named.serving, named.building):
                self._store.delete_topic(topic.id)
                remove_index(self._index_path(topic.id))
        self._serving = self._copy(named.serving)
        if named.building is not None:
            self._building = self._copy(named.building)
        return named

    def _create(self, pattern: str) -> int:
        return self._store.create_topic(_NAME, policy=self._policy, origin=pattern).id

    def _name(self, named: _CurrentCopies) -> None:
        outcome = Outcome()
        self._store.state.write([Change(*_STATE, asdict(named))], outcome)
        self._store.flush()
        outcome.check()
        self._named = named

    def _copy(self, topic_id: int) -> Copy:
        [topic] = [each for each in self._store.topics if each.id == topic_id]
        if topic.policy != self._policy:
            topic = replace(topic, policy=self._policy)
            self._store.alter_topic(topic)
        return Copy(self._store, topic, self._index_path(topic_id))

    def _index_path(self, topic_id: int) -> Path:
        return self._index_directory / f"index-{topic_id}.db"

    def _remove(self, copy: Copy) -> None:
        """Remove a copy that is no longer current. If this fails, it is removed when the directory is opened again."""
        try:
            copy.remove_index()
            self._store.delete_topic(copy.id)
        except (OSError, PenstockError) as error:
            logger.warning("copy %d of %s is left over: %s", copy.id, self._directory, error)
