"""The topics of a store, and their logs.

Changes of topics take these steps (see changes.py):

    create, alter   decide → commit to the state topic → open the new logs → install
    purge           commit the new starts to the state topic → let nobody read below them
    delete          commit a mark to the state topic → forget → remove the files → remove the mark

The state topic comes first, so the next start finishes an interrupted change.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Protocol

from penstock.errors import (
    AppendFailed,
    BadDirectory,
    DiskError,
    LogFailed,
    OffsetOutOfRange,
    PenstockError,
    TooManyTopics,
    UnknownTopic,
    UnsupportedBatch,
)
from penstock.health import Health
from penstock.log.files import Files, is_disk_full
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy, Topic
from penstock.log.witness import PartitionId
from penstock.store.changes import Changes, Idle, StateWrite, Steps, Work
from penstock.store.meta import Change
from penstock.store.rounds import Rounds
from penstock.store.space import DiskSpace
from penstock.store.state import STATE_TOPIC, StoreState
from penstock.store.witnesses import STATE_PARTITION

logger = logging.getLogger(__name__)

# What to do about a directory without a topic.
ORPHAN_REMEDY: Final = (
    "belongs to no known topic, so nobody can read it: stop the broker and run penstock log repair, with "
    "--adopt ID=NAME if it does not find the name, or move the directory elsewhere"
)


class OpenLog(Protocol):
    """Opens the log of a partition. For any thread."""

    def __call__(self, place: PartitionId, policy: Policy, *, piped: bool) -> Log: ...


class TopicCatalogue:
    def __init__(
        self,
        directory: Path,
        files: Files,
        state: StoreState,
        state_log: Log,
        rounds: Rounds,
        space: DiskSpace,
        open_segments: OpenSegments,
        health: Health,
        open_log: OpenLog,
        *,
        partitions_max: int,
        retain_bytes: int | None,
    ) -> None:
        """`directory` has a directory for each topic. `retain_bytes` limits all topics together."""
        self._directory = directory
        self._files = files
        self._state = state
        self._rounds = rounds
        self._space = space
        self._open_segments = open_segments
        self._health = health
        self._open_log = open_log
        self._partitions_max = partitions_max
        self._retain_bytes = retain_bytes
        self._topics: dict[int, Topic] = {}
        self.logs: dict[PartitionId, Log] = {STATE_PARTITION: state_log}
        # Why logs could not be opened. The others are served.
        self.refused: dict[PartitionId, PenstockError] = {}
        # Logs with damaged messages. The other messages are served.
        self.damage: dict[Log, None] = {log: None for log in self.logs.values() if log.damage}
        # Directories of topics that are not in the state topic. They are left alone.
        self.orphans: list[Path] = []

    @property
    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    @property
    def partitions(self) -> int:
        return sum(topic.partitions for topic in self._topics.values())

    def topic(self, topic_id: int) -> Topic:
        try:
            return self._topics[topic_id]
        except KeyError:
            raise UnknownTopic(f"unknown topic ID {topic_id}") from None

    def log(self, topic_id: int, partition: int) -> Log:
        """Return the log of a partition. Raises the reason if it could not be opened."""
        place = (topic_id, partition)
        if place in self.refused:
            raise self.refused[place]
        if place not in self.logs:
            raise UnknownTopic(f"unknown partition {partition} of topic ID {topic_id}")
        return self.logs[place]

    def note_damage(self, log: Log) -> None:
        """Note that the known damage of a log has changed. For any thread."""
        if log.damage:
            self.damage[log] = None
        else:
            self.damage.pop(log, None)

    def open_all(self, changes: Changes) -> None:
        """Open the topics in the state topic, and finish interrupted deletions."""
        known = {str(STATE_TOPIC)}
        for key, value in sorted(self._state.items("topic"), key=lambda item: int(item[0])):
            if value.get("deleted"):
                changes.now(self._remove(int(key), []))
            else:
                known.add(key)
                topic = Topic.from_json(int(key), value)
                opening = self._opening(topic)
                opening.run()
                self._note_fault(opening)
                self._install(topic, opening)
        self._find_orphans(known)

    def _find_orphans(self, known: set[str]) -> None:
        unknown = self._files.sizes(self._directory).keys() - known
        strays = [name for name in unknown if not (name.isdecimal() and str(int(name)) == name)]
        if strays:
            raise BadDirectory(f"{self._directory / min(strays)} does not belong there: move it elsewhere")
        self.orphans = [self._directory / name for name in sorted(unknown, key=int)]
        if self.orphans and self._state.get("store", "next_topic") is None:
            raise BadDirectory(
                f"{self.orphans[0]} belongs to no known topic, and no topic is known: restore "
                f"{self._directory / str(STATE_TOPIC)}, which names them, or run penstock log repair"
            )
        for path in self.orphans:
            logger.error("%s: %s", path, ORPHAN_REMEDY)

    # Changes.

    def identify(self) -> Steps[None]:
        """Draw the unique ID of this store, if it has none."""
        if self._state.get("store", "identity") is None:
            yield StateWrite([Change("store", "identity", secrets.token_hex(16))])

    def create(self, name: str, partitions: int, policy: Policy, origin: str | None) -> Steps[Topic]:
        # The record of the next ID may be lost, but no topic may get the files of another one.
        taken = [*self._topics, *(int(path.name) for path in self.orphans)]
        number = max(self._state.get("store", "next_topic") or 0, STATE_TOPIC + 1, *(each + 1 for each in taken))
        topic = Topic(number, name, partitions, policy, origin)
        self._check_partitions(topic, partitions)
        self._space.admit()
        yield StateWrite([_topic_change(topic), Change("store", "next_topic", number + 1)])
        opening = self._opening(topic)
        yield Work(opening.run)
        self._note_fault(opening)
        if opening.failure is not None:
            if is_disk_full(opening.failure):
                self._space.note_full()
            yield from self._take_back(topic, opening, opening.failure)
        self._install(topic, opening)
        return topic

    def _take_back(self, topic: Topic, opening: _TopicOpening, failure: DiskError) -> Steps[NoReturn]:
        """Remove a topic from the state topic again, because its files cannot be created."""
        try:
            yield StateWrite([_deletion(topic.id)])
        except PenstockError as error:
            self._install(topic, opening)
            raise AppendFailed(
                f"topic {topic.name} has refused partitions ({failure}), and cannot be removed again ({error}): "
                f"make room, then alter the topic or restart to open them, or delete it"
            ) from failure
        try:
            yield from self._remove(topic.id, list(opening.logs.values()))
        except BadDirectory as error:
            logger.error("%s", error)
        raise AppendFailed(
            f"topic {topic.name} is not created: {failure}: check the disk, then create it again"
        ) from failure

    def alter(self, topic: Topic) -> Steps[None]:
        before = self.topic(topic.id)
        if topic.partitions < before.partitions:
            raise ValueError(f"topic {topic.name} cannot have fewer partitions: it has {before.partitions}")
        if topic.origin != before.origin and (before.origin is not None or not self._is_empty(before)):
            raise ValueError(f"topic {topic.name} cannot be piped from {topic.origin}: it has messages of its own")
        self._check_partitions(topic, topic.partitions - before.partitions)
        yield StateWrite([_topic_change(topic)])
        opening = self._opening(topic)
        yield Work(opening.run)
        self._note_fault(opening)
        self._install(topic, opening)
        if opening.failure is not None:
            raise AppendFailed(
                f"topic {topic.name} is altered, but has refused partitions: {opening.failure}: "
                f"check the disk, then alter the topic again or restart to open them"
            ) from opening.failure

    def purge(self, topic_id: int, offsets: Mapping[int, int]) -> Steps[None]:
        logs = {partition: self.log(topic_id, partition) for partition in offsets}
        for partition, log in logs.items():
            if offsets[partition] > log.committed:
                raise OffsetOutOfRange(offsets[partition], log.start, log.committed)
        changes = [
            Change("start", f"{topic_id}/{partition}", offsets[partition])
            for partition, log in logs.items()
            if offsets[partition] > log.start
        ]
        if changes:
            yield StateWrite(changes)
        for partition, log in logs.items():
            log.upkeep.purge(offsets[partition])

    def delete(self, topic_id: int) -> Steps[None]:
        topic = self.topic(topic_id)
        yield StateWrite([_deletion(topic_id)])
        logs = self._uninstall(topic)
        yield Idle(logs)
        yield from self._remove(topic_id, logs)

    def _remove(self, topic_id: int, logs: list[Log]) -> Steps[None]:
        """Remove the files of a deleted topic, then its mark in the state topic."""
        yield Work(partial(self._remove_files, topic_id, logs))
        gone = [
            Change(kind, key, None)
            for kind in ("start", "schema")
            for key, _ in self._state.items(kind)
            if key.startswith(f"{topic_id}/")
        ]
        try:
            yield StateWrite([Change("topic", str(topic_id), None), *gone])
        except PenstockError as error:
            logger.warning("topic %d is deleted, and the next start removes its mark: %s", topic_id, error)

    def _check_partitions(self, topic: Topic, more: int) -> None:
        if more > 0 and self.partitions + more > self._partitions_max:
            raise TooManyTopics(
                f"topic {topic.name} cannot get {more} more partitions: there are {self.partitions} of at most "
                f"{self._partitions_max} (storage.partitions_max): delete topics, or raise the limit"
            )

    def _is_empty(self, topic: Topic) -> bool:
        logs = [self.logs.get((topic.id, partition)) for partition in range(topic.partitions)]
        return all(log is not None and log.is_empty for log in logs)

    def _opening(self, topic: Topic) -> _TopicOpening:
        places = [(topic.id, partition) for partition in range(topic.partitions)]
        return _TopicOpening(self._open_log, topic, [place for place in places if place not in self.logs])

    def _note_fault(self, opening: _TopicOpening) -> None:
        if opening.fault is not None:
            self._health.fault("open", str(opening.failure), opening.fault)

    def _install(self, topic: Topic, opening: _TopicOpening) -> None:
        self._topics[topic.id] = topic
        for place in opening.places:
            self.refused.pop(place, None)
        self.refused |= opening.refused
        self.logs |= opening.logs
        for (_, partition), error in opening.refused.items():
            logger.error("partition %d of topic %s is refused: %s", partition, topic.name, error)
        for partition in range(topic.partitions):
            log = self.logs.get((topic.id, partition))
            if log is not None:
                log.policy = topic.policy
                log.terms.store_limit = None if topic.is_internal else self._retain_bytes
                log.upkeep.purge(self._state.get("start", f"{topic.id}/{partition}") or 0)
                if topic.origin is not None and not log.terms.is_piped:
                    log.pipe()
                # Its pending batches may have woken the lane of the former policy.
                if self._rounds.is_dirty(log):
                    self._rounds.wake(log)

    def _uninstall(self, topic: Topic) -> list[Log]:
        """Forget a topic, and reject what is pending in its logs. A worker may still write to them."""
        del self._topics[topic.id]
        logs = []
        for partition in range(topic.partitions):
            self.refused.pop((topic.id, partition), None)
            log = self.logs.pop((topic.id, partition), None)
            if log is not None:
                self._rounds.forget(log)
                self.damage.pop(log, None)
                log.abandon()
                logs.append(log)
        return logs

    def _remove_files(self, topic_id: int, logs: list[Log]) -> None:
        """Remove the files of a topic whose logs are abandoned. For any thread."""
        directory = self._directory / str(topic_id)
        try:
            for log in logs:
                # Running upkeep gives up at its next batch, and no more begins.
                with log.upkeep.lock:
                    # An open file keeps its room on the disk.
                    for segment in log.segments:
                        self._open_segments.drop(segment)
            for partition in self._files.sizes(directory):
                for name in self._files.sizes(directory / partition):
                    self._files.remove(directory / partition / name)
                self._files.remove_directory(directory / partition)
            if directory.name in self._files.sizes(directory.parent):
                self._files.remove_directory(directory)
                self._files.sync_directory(directory.parent)
        except OSError as error:
            raise BadDirectory(
                f"{directory} belongs to a deleted topic and cannot be removed, the next start tries again: {error}"
            ) from error


class _TopicOpening:
    """Logs for a worker to open, and the result."""

    def __init__(self, open_log: OpenLog, topic: Topic, places: list[PartitionId]) -> None:
        self._open_log = open_log
        self._topic = topic
        self.places = places
        self.logs: dict[PartitionId, Log] = {}
        self.refused: dict[PartitionId, PenstockError] = {}
        # Set if the disk failed. Other logs are refused for their content.
        self.failure: DiskError | None = None
        # The unexpected exception that caused it, if it was one.
        self.fault: Exception | None = None

    def run(self) -> None:
        for place in self.places:
            try:
                self._open(place)
            except (AppendFailed, LogFailed) as error:
                self.failure = self.refused[place] = error
            except (DiskError, UnsupportedBatch) as error:
                self.refused[place] = error

    def _open(self, place: PartitionId) -> None:
        try:
            self.logs[place] = self._open_log(place, self._topic.policy, piped=self._topic.origin is not None)
        except OSError as error:
            raise AppendFailed(f"partition {place[1]} cannot be opened: {error}") from error
        except PenstockError:
            raise
        except Exception as fault:
            self.fault = fault
            raise AppendFailed(f"partition {place[1]} cannot be opened, unexpected error: {fault!r}") from fault


def _topic_change(topic: Topic) -> Change:
    return Change("topic", str(topic.id), topic.to_json())


def _deletion(topic_id: int) -> Change:
    """Return the mark of a topic whose files are being removed."""
    return Change("topic", str(topic_id), {"deleted": True})
