"""The topics of a store, and their logs.

Topics are changed in the same steps, whoever waits for the disk (see changes.py):

    create, alter   decide → commit to the state topic → open the new logs → install
    purge           commit the new starts to the state topic → let nobody read below
    delete          commit a mark to the state topic → forget → remove the files → commit that the mark is gone

The state topic comes first, so the next start finishes what was interrupted.
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
from penstock.storage.changes import Changes, Commit, Idle, Steps, Work
from penstock.storage.files import Files
from penstock.storage.log import Log
from penstock.storage.meta import Change
from penstock.storage.policy import Policy, Topic
from penstock.storage.rounds import Rounds
from penstock.storage.segment import OpenSegments
from penstock.storage.space import DiskSpace, is_disk_full
from penstock.storage.state import STATE_TOPIC, State
from penstock.storage.witness import STATE_PLACE, Place

logger = logging.getLogger(__name__)

# What to do about a directory of no known topic.
ORPHAN_REMEDY: Final = (
    "of no known topic, nobody can read it: stop the broker and run penstock log repair, with --adopt ID=NAME if it "
    "does not find the name by itself, or move the directory elsewhere"
)


class OpenLog(Protocol):
    """Opens the log of a partition. For any thread."""

    def __call__(self, place: Place, policy: Policy, *, piped: bool) -> Log: ...


class Catalogue:
    def __init__(
        self,
        directory: Path,
        files: Files,
        state: State,
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
        self.logs: dict[Place, Log] = {STATE_PLACE: state_log}
        # Logs that cannot be opened. The others are served all the same.
        self.refused: dict[Place, PenstockError] = {}
        # Logs of which some messages cannot be read. They are served around them.
        self.damage: dict[Log, None] = {log: None for log in self.logs.values() if log.damage}
        # Directories of topics that the state topic does not know. They are left alone.
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
            raise UnknownTopic(f"there is no topic with id {topic_id}") from None

    def log(self, topic_id: int, partition: int) -> Log:
        """Return the log of a partition; raise why it was refused, if it could not be opened."""
        place = (topic_id, partition)
        if place in self.refused:
            raise self.refused[place]
        if place not in self.logs:
            raise UnknownTopic(f"there is no partition {partition} of a topic with id {topic_id}")
        return self.logs[place]

    def note_damage(self, log: Log) -> None:
        """What is known to be damaged in a log has changed. For any thread."""
        if log.damage:
            self.damage[log] = None
        else:
            self.damage.pop(log, None)

    def open_all(self, changes: Changes) -> None:
        """Open the topics that the state topic knows, and finish the deletions that were interrupted."""
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
                f"{self.orphans[0]} is of no known topic, and no topic is known: restore "
                f"{self._directory / str(STATE_TOPIC)}, which names them, or run penstock log repair"
            )
        for path in self.orphans:
            logger.error("%s: %s", path, ORPHAN_REMEDY)

    # Changes.

    def identify(self) -> Steps[None]:
        """Draw what tells this store from all others, if nobody has."""
        if self._state.get("store", "identity") is None:
            yield Commit([Change("store", "identity", secrets.token_hex(16))])

    def create(self, name: str, partitions: int, policy: Policy, origin: str | None) -> Steps[Topic]:
        # The record of the next number may be lost, but no topic is to get the files of another.
        taken = [*self._topics, *(int(path.name) for path in self.orphans)]
        number = max(self._state.get("store", "next_topic") or 0, STATE_TOPIC + 1, *(each + 1 for each in taken))
        topic = Topic(number, name, partitions, policy, origin)
        self._check_partitions(topic, partitions)
        self._space.admit()
        yield Commit([_topic_change(topic), Change("store", "next_topic", number + 1)])
        opening = self._opening(topic)
        yield Work(opening.run)
        self._note_fault(opening)
        if opening.failure is not None:
            if is_disk_full(opening.failure):
                self._space.note_full()
            yield from self._take_back(topic, opening, opening.failure)
        self._install(topic, opening)
        return topic

    def _take_back(self, topic: Topic, opening: _Opening, failure: DiskError) -> Steps[NoReturn]:
        """A topic that is in the state topic, and cannot have its files."""
        try:
            yield Commit([_deletion(topic.id)])
        except PenstockError as error:
            self._install(topic, opening)
            raise AppendFailed(
                f"topic {topic.name} has partitions that are refused ({failure}), and is not taken back ({error}): "
                f"make room, then alter the topic or restart to open them, or delete it"
            ) from failure
        try:
            yield from self._remove(topic.id, list(opening.logs.values()))
        except BadDirectory as error:
            logger.error("%s", error)
        raise AppendFailed(
            f"topic {topic.name} is not created: {failure}: look at the disk, then create it again"
        ) from failure

    def alter(self, topic: Topic) -> Steps[None]:
        before = self.topic(topic.id)
        if topic.partitions < before.partitions:
            raise ValueError(f"topic {topic.name} cannot have fewer partitions than before")
        if topic.origin != before.origin and (before.origin is not None or not self._is_empty(before)):
            raise ValueError(f"topic {topic.name} cannot be that of {topic.origin}: it has messages of its own")
        self._check_partitions(topic, topic.partitions - before.partitions)
        yield Commit([_topic_change(topic)])
        opening = self._opening(topic)
        yield Work(opening.run)
        self._note_fault(opening)
        self._install(topic, opening)
        if opening.failure is not None:
            raise AppendFailed(
                f"topic {topic.name} is altered, but has partitions that are refused: {opening.failure}: "
                f"look at the disk, then alter the topic once more or restart to open them"
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
            yield Commit(changes)
        for partition, log in logs.items():
            log.purge(offsets[partition])

    def delete(self, topic_id: int) -> Steps[None]:
        topic = self.topic(topic_id)
        yield Commit([_deletion(topic_id)])
        logs = self._uninstall(topic)
        yield Idle(logs)
        yield from self._remove(topic_id, logs)

    def _remove(self, topic_id: int, logs: list[Log]) -> Steps[None]:
        """Remove the files of a topic that is marked as deleted, then the mark."""
        yield Work(partial(self._remove_files, topic_id, logs))
        starts = [key for key, _ in self._state.items("start") if key.startswith(f"{topic_id}/")]
        try:
            yield Commit([Change("topic", str(topic_id), None), *(Change("start", key, None) for key in starts)])
        except PenstockError as error:
            logger.warning("topic %d is deleted, the next start removes the mark of it: %s", topic_id, error)

    def _check_partitions(self, topic: Topic, more: int) -> None:
        if more > 0 and self.partitions + more > self._partitions_max:
            raise TooManyTopics(
                f"topic {topic.name} cannot get {more} partitions: there are {self.partitions}, and "
                f"{self._partitions_max} are the most (storage.partitions_max): delete topics, or raise it"
            )

    def _is_empty(self, topic: Topic) -> bool:
        logs = [self.logs.get((topic.id, partition)) for partition in range(topic.partitions)]
        return all(log is not None and log.is_empty for log in logs)

    def _opening(self, topic: Topic) -> _Opening:
        places = [(topic.id, partition) for partition in range(topic.partitions)]
        return _Opening(self._open_log, topic, [place for place in places if place not in self.logs])

    def _note_fault(self, opening: _Opening) -> None:
        if opening.fault is not None:
            self._health.fault("open", str(opening.failure), opening.fault)

    def _install(self, topic: Topic, opening: _Opening) -> None:
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
                log.store_limit = None if topic.is_internal else self._retain_bytes
                log.purge(self._state.get("start", f"{topic.id}/{partition}") or 0)
                if topic.origin is not None and not log.is_piped:
                    log.pipe()
                # What it has waiting may have woken the lane that its policy asked for until now.
                if self._rounds.is_dirty(log):
                    self._rounds.wake(log)

    def _uninstall(self, topic: Topic) -> list[Log]:
        """Forget a topic. Who waits for its logs is told; a worker may still have something of them."""
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
        """For any thread, when the logs were abandoned."""
        directory = self._directory / str(topic_id)
        try:
            for log in logs:
                # Upkeep that runs gives up at its next batch, and none begins.
                with log.upkeep_lock:
                    # A file that is open keeps its room on the disk.
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
                f"{directory} is of a deleted topic and cannot be removed, the next start tries again: {error}"
            ) from error


class _Opening:
    """Logs to be opened, for a worker, and how that went."""

    def __init__(self, open_log: OpenLog, topic: Topic, places: list[Place]) -> None:
        self._open_log = open_log
        self._topic = topic
        self.places = places
        self.logs: dict[Place, Log] = {}
        self.refused: dict[Place, PenstockError] = {}
        # Set if the disk did not do what it was asked. Other logs are refused for what is in them.
        self.failure: DiskError | None = None
        # The unexpected exception behind it, if it was one.
        self.fault: Exception | None = None

    def run(self) -> None:
        for place in self.places:
            try:
                self._open(place)
            except (AppendFailed, LogFailed) as error:
                self.failure = self.refused[place] = error
            except (DiskError, UnsupportedBatch) as error:
                self.refused[place] = error

    def _open(self, place: Place) -> None:
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
    """The mark of a topic whose files are being removed."""
    return Change("topic", str(topic_id), {"deleted": True})
