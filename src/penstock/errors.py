"""Every error that Penstock raises, in one tree.

    PenstockError
    ├── BadConfig              a setting is wrong: the text says which
    ├── PeerError              what was sent or asked is wrong: change it
    │   ├── CorruptBatch       bytes that are not a batch
    │   ├── UnsupportedBatch   a batch of a newer version
    │   ├── BatchTooLarge      larger than a batch may be
    │   ├── OffsetOutOfRange   an offset that the log does not hold
    │   ├── OutOfSequence      a producer left a gap, or is not known
    │   ├── StaleEpoch         a newer instance of the producer has taken over
    │   ├── BadSubject         no subject that can be stored, or no pattern
    │   ├── BadHeader          a header that asks for what cannot be done
    │   ├── BadFrame           bytes that are no frame of the protocol
    │   ├── BadRequest         a request that is not known, or lacks something
    │   ├── RequestTooLarge    a request with a larger body than is read
    │   ├── Unauthorized       the broker wants a user or a token, and these are not they
    │   ├── Forbidden          a request that a web page of another site may have sent
    │   ├── TopicConflict      a topic of that name, or above or below it, exists
    │   ├── StaleLayout        the topic has more partitions than the producer knew
    │   ├── NoResponders       nobody is subscribed to the subject of a request
    │   ├── UnknownGroup       no group has that name
    │   ├── GroupConflict      the group exists, and is another one
    │   ├── ClaimConflict      another client has the name
    │   ├── StaleCommit        the group has been reset or shared out anew since
    │   ├── RefreshConflict    a member of the group does not understand a refresh
    │   ├── StageLost          what a transaction staged is not there any more
    │   ├── BadTopology        a place in the tree of brokers that cannot be taken
    │   ├── UnknownNode        the registry has no node of that id
    │   ├── ReadOnlyTopic      the topic is piped from another broker: publish it there
    │   ├── OriginConflict     the topic here is not the one that is piped
    │   └── PipeLoop           a broker that would be its own ancestor
    ├── BrokerError            this process cannot do it now: try again
    │   ├── Overloaded         too many bytes wait for the disk
    │   ├── Closed             stopped, or stopping
    │   ├── TooManyTopics      more topics or partitions than are allowed
    │   ├── TooManyGroups      no more groups can be created
    │   ├── TooManySubscriptions   no more subscriptions can be opened
    │   ├── TooManySources     a partition stores messages of as many sources as it can remember
    │   ├── UnknownTopic       no such topic
    │   └── RefreshAborted     a refresh was given up: what was there before it still counts
    ├── ClientError            between a client and its broker
    │   ├── NoBroker           nobody answers at the address
    │   ├── ConnectionLost     the answer did not come: it may or may not have been done
    │   ├── TimedOut           it took too long
    │   ├── DeliveryFailed     messages of a producer are not stored: it tells which
    │   ├── BadParent          what answers there is no parent of a pipe
    │   └── NotOutstanding     too late for a message: done already, back with the group, or a dead letter
    └── DiskError              the data directory is in the way: look at it
        ├── DirectoryInUse     another process has it open
        ├── BadDirectory       files that do not belong there, or do not fit together
        ├── UnsupportedFormat  a newer version of penstock wrote it
        ├── BadBackup          a backup that is damaged, incomplete, or not what was asked for
        ├── LogDamaged         bytes that were durable are not what was written
        ├── ReadFailed         the disk does not give back what is there
        ├── AppendFailed       a write failed and was taken back; there may be room again later
        └── LogFailed          an fsync failed: the log takes nothing more until a restart

Each leaf has one code, which is what a peer sees on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar


class PenstockError(Exception):
    code: ClassVar[str] = "ERROR"


class BadConfig(PenstockError):
    """All that is wrong, one line each."""

    code = "BAD_CONFIG"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class PeerError(PenstockError):
    code = "PEER"


class CorruptBatch(PeerError):
    code = "CORRUPT_BATCH"


class UnsupportedBatch(PeerError):
    code = "UNSUPPORTED_BATCH"


class BatchTooLarge(PeerError):
    code = "BATCH_TOO_LARGE"


class OffsetOutOfRange(PeerError):
    code = "OFFSET_OUT_OF_RANGE"

    def __init__(self, offset: int, start: int, end: int) -> None:
        super().__init__(f"offset {offset} is not in the log, which holds {start} to {end}")
        self.offset = offset
        self.start = start
        self.end = end


class OutOfSequence(PeerError):
    code = "OUT_OF_SEQUENCE"


class StaleEpoch(PeerError):
    code = "STALE_EPOCH"


class BadSubject(PeerError):
    code = "BAD_SUBJECT"


class BadHeader(PeerError):
    code = "BAD_HEADER"


class BadFrame(PeerError):
    code = "BAD_FRAME"


class BadRequest(PeerError):
    code = "BAD_REQUEST"


class RequestTooLarge(PeerError):
    code = "REQUEST_TOO_LARGE"


class Unauthorized(PeerError):
    code = "UNAUTHORIZED"


class Forbidden(PeerError):
    code = "FORBIDDEN"


class StaleLayout(PeerError):
    code = "STALE_LAYOUT"


class TopicConflict(PeerError):
    code = "TOPIC_CONFLICT"


class NoResponders(PeerError):
    code = "NO_RESPONDERS"


class UnknownGroup(PeerError):
    code = "UNKNOWN_GROUP"


class GroupConflict(PeerError):
    code = "GROUP_CONFLICT"


class ClaimConflict(PeerError):
    code = "CLAIM_CONFLICT"


class StaleCommit(PeerError):
    code = "STALE_COMMIT"


class RefreshConflict(PeerError):
    code = "REFRESH_CONFLICT"


class StageLost(PeerError):
    code = "STAGE_LOST"


class BadTopology(PeerError):
    code = "BAD_TOPOLOGY"


class UnknownNode(PeerError):
    code = "UNKNOWN_NODE"


class ReadOnlyTopic(PeerError):
    code = "READ_ONLY_TOPIC"


class OriginConflict(PeerError):
    code = "ORIGIN_CONFLICT"


class PipeLoop(PeerError):
    code = "PIPE_LOOP"


class BrokerError(PenstockError):
    code = "BROKER"


class Overloaded(BrokerError):
    code = "OVERLOADED"


class Closed(BrokerError):
    code = "CLOSED"


class TooManyTopics(BrokerError):
    code = "TOO_MANY_TOPICS"


class TooManyGroups(BrokerError):
    code = "TOO_MANY_GROUPS"


class TooManySubscriptions(BrokerError):
    code = "TOO_MANY_SUBSCRIPTIONS"


class TooManySources(BrokerError):
    code = "TOO_MANY_SOURCES"


class UnknownTopic(BrokerError):
    code = "UNKNOWN_TOPIC"


class RefreshAborted(BrokerError):
    code = "REFRESH_ABORTED"


class ClientError(PenstockError):
    code = "CLIENT"


class NoBroker(ClientError):
    code = "NO_BROKER"


class ConnectionLost(ClientError):
    code = "CONNECTION_LOST"


class TimedOut(ClientError):
    code = "TIMED_OUT"


class DeliveryFailed(ClientError):
    """`failed`: the messages, each with its subject, its value and why it is not stored."""

    code = "DELIVERY_FAILED"

    def __init__(self, failed: Sequence[tuple[str, bytes | None, PenstockError]]) -> None:
        count, (subject, _, error) = len(failed), failed[0]
        super().__init__(f"{count} messages are not stored; the first, to {subject}: {error}")
        self.failed = list(failed)


class BadParent(ClientError):
    code = "BAD_PARENT"


class NotOutstanding(ClientError):
    code = "NOT_OUTSTANDING"


class DiskError(PenstockError):
    code = "DISK"


class DirectoryInUse(DiskError):
    code = "DIRECTORY_IN_USE"


class BadDirectory(DiskError):
    code = "BAD_DIRECTORY"


class UnsupportedFormat(DiskError):
    code = "UNSUPPORTED_FORMAT"


class BadBackup(DiskError):
    code = "BAD_BACKUP"


class LogDamaged(DiskError):
    """Offsets `first` to `last` (the latter not included) cannot be read; all others can."""

    code = "LOG_DAMAGED"

    def __init__(self, path: Path, position: int, first: int, last: int | None, reason: str) -> None:
        until = "the end" if last is None else str(last)
        super().__init__(f"{path}: damaged at byte {position}, offsets {first} to {until}: {reason}")
        self.path = path
        self.position = position
        self.first = first
        self.last = last
        self.reason = reason

    def with_remedy(self, remedy: str) -> LogDamaged:
        """Return the same for whoever can do something about it."""
        told = LogDamaged(self.path, self.position, self.first, self.last, self.reason)
        told.args = (f"{told}: {remedy}",)
        return told

    def covers(self, other: LogDamaged) -> bool:
        """Whether all that another one names is among this."""
        is_as_far = self.last is None or (other.last is not None and other.last <= self.last)
        return self.first <= other.first and is_as_far

    def holds(self, offset: int) -> bool:
        """Whether `offset` is among what cannot be read, and it is known what comes next."""
        return self.last is not None and self.first <= offset < self.last


class ReadFailed(DiskError):
    code = "READ_FAILED"


class AppendFailed(DiskError):
    code = "APPEND_FAILED"


class LogFailed(DiskError):
    code = "LOG_FAILED"


def from_wire(code: str, text: str) -> PenstockError:
    """The error that a peer tells of, as the one that was raised there; one of a newer peer keeps its code."""
    kind = _leaves(PenstockError).get(code)
    if kind is None:
        newer = PenstockError(f"{code}: {text}")
        newer.code = code  # type: ignore[misc]
        return newer
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


def _leaves(kind: type[PenstockError]) -> dict[str, type[PenstockError]]:
    children = [child for child in kind.__subclasses__() if child.__module__ == __name__]
    found = {} if children else {kind.code: kind}
    for child in children:
        found |= _leaves(child)
    return found
