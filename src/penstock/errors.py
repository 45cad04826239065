"""Every error that Penstock raises, in one tree.

    PenstockError
    ├── BadConfig              invalid settings: the text names each
    ├── PeerError              the request is wrong: change it
    │   ├── CorruptBatch       bytes that are not a valid batch
    │   ├── UnsupportedBatch   a batch of a newer format version
    │   ├── BatchTooLarge      a batch or message above the size limit
    │   ├── OffsetOutOfRange   an offset outside the log
    │   ├── OutOfSequence      a gap in a producer's sequence, or an unknown producer
    │   ├── StaleEpoch         a newer instance of the producer has taken over
    │   ├── BadSubject         an invalid subject or pattern
    │   ├── BadHeader          an invalid header, or one that asks for something impossible
    │   ├── BadFrame           bytes that are not a frame of the protocol
    │   ├── BadRequest         an unknown or incomplete request
    │   ├── RequestTooLarge    a request body above the size limit
    │   ├── Unauthorized       missing or invalid credentials
    │   ├── TlsRequired        a connection without TLS to a port that requires it
    │   ├── Forbidden          a request that may come from a web page of another site
    │   ├── PermissionDenied   the user may not do this
    │   ├── QuotaExceeded      more than the quota of the user allows
    │   ├── TopicConflict      a topic with that name, or one above or below it, exists
    │   ├── StaleLayout        the topic has more partitions than the producer assumed
    │   ├── NoResponders       no subscription matches the subject of a request
    │   ├── UnknownGroup       no group with that name
    │   ├── GroupConflict      the group exists with other settings
    │   ├── ClaimConflict      another client holds the name
    │   ├── StaleCommit        the group was reset or rebalanced in the meantime
    │   ├── RefreshConflict    some members of the group do not support a refresh
    │   ├── BadSchema          an invalid schema, or one that cannot be used
    │   ├── UnknownSchema      the topic has no schema, or not that version
    │   ├── SchemaConflict     a schema that is not compatible with the version before
    │   ├── SchemaMismatch     a value that does not match the schema of its topic
    │   ├── StageLost          the staged messages of a transaction are gone
    │   ├── BadTopology        an invalid description of the tree of brokers
    │   ├── UnknownNode        the registry has no node with that ID
    │   ├── ReadOnlyTopic      the topic is piped from another broker: publish there
    │   ├── OriginConflict     the local topic is not a copy of the piped one
    │   └── PipeLoop           a broker that would be its own ancestor in the tree
    ├── BrokerError            the broker cannot do it now: retry later
    │   ├── Overloaded         too many bytes are waiting for the disk
    │   ├── Closed             closed, or closing
    │   ├── TooManyTopics      the limit of topics or partitions is reached
    │   ├── TooManyGroups      the limit of groups is reached
    │   ├── TooManySubscriptions   the limit of subscriptions is reached
    │   ├── TooManySchemas     the limit of schema versions is reached
    │   ├── TooManySources     a partition already tracks the maximum number of sources
    │   ├── UnknownTopic       no topic with that name
    │   └── RefreshAborted     a refresh was aborted: the previous state still holds
    ├── ClientError            a failure between a client and its broker
    │   ├── NoBroker           no broker answers at the address
    │   ├── ConnectionLost     no reply arrived: the request may or may not have been executed
    │   ├── TimedOut           the request timed out
    │   ├── DeliveryFailed     a producer could not store some messages: `failed` lists them
    │   ├── SparkLost          the Java process of Spark has ended
    │   ├── BadParent          the server at the address cannot be the parent of a pipe
    │   └── NotOutstanding     too late: the message is done, back with the group, or a dead letter
    └── DiskError              the data directory or disk has a problem: inspect it
        ├── DirectoryInUse     another process has the directory open
        ├── BadDirectory       unexpected files, or files that contradict each other
        ├── UnsupportedFormat  a newer version of Penstock wrote the directory
        ├── BadBackup          a damaged, incomplete or unsuitable backup
        ├── LogDamaged         durable bytes have changed on disk
        ├── CorruptRecord      a damaged record in the shared log of a cluster
        ├── ReadFailed         the disk failed to read
        ├── AppendFailed       a write failed and was rolled back: mostly, the disk is full
        └── LogFailed          an fsync failed: the log is read-only until a restart

Each leaf has one code, which identifies the error on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar


class PenstockError(Exception):
    code: ClassVar[str] = "ERROR"


class BadConfig(PenstockError):
    """Carry every invalid setting, one line each, in `problems`."""

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
        super().__init__(f"offset {offset} is out of range: the log holds {start} to {end}")
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


class TlsRequired(PeerError):
    code = "TLS_REQUIRED"


class Forbidden(PeerError):
    code = "FORBIDDEN"


class PermissionDenied(PeerError):
    code = "PERMISSION_DENIED"


class QuotaExceeded(PeerError):
    code = "QUOTA_EXCEEDED"


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


class BadSchema(PeerError):
    code = "BAD_SCHEMA"


class UnknownSchema(PeerError):
    code = "UNKNOWN_SCHEMA"


class SchemaConflict(PeerError):
    code = "SCHEMA_CONFLICT"


class SchemaMismatch(PeerError):
    code = "SCHEMA_MISMATCH"


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


class TooManySchemas(BrokerError):
    code = "TOO_MANY_SCHEMAS"


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


class SparkLost(ClientError):
    code = "SPARK_LOST"


class DeliveryFailed(ClientError):
    """List the messages in `failed`, each as subject, value and error."""

    code = "DELIVERY_FAILED"

    def __init__(self, failed: Sequence[tuple[str, bytes | None, PenstockError]]) -> None:
        count, (subject, _, error) = len(failed), failed[0]
        super().__init__(f"{count} messages were not stored; the first, to {subject}: {error}")
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
    """Report that offsets `first` up to but not including `last` cannot be read; all others can."""

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
        """Return the same error with advice appended to its text."""
        advised = LogDamaged(self.path, self.position, self.first, self.last, self.reason)
        advised.args = (f"{advised}: {remedy}",)
        return advised

    def covers(self, other: LogDamaged) -> bool:
        """Return whether all offsets of `other` are within this damage."""
        reaches_end = self.last is None or (other.last is not None and other.last <= self.last)
        return self.first <= other.first and reaches_end

    def holds(self, offset: int) -> bool:
        """Return whether `offset` is damaged and the next readable offset is known."""
        return self.last is not None and self.first <= offset < self.last


class CorruptRecord(DiskError):
    code = "CORRUPT_RECORD"


class ReadFailed(DiskError):
    code = "READ_FAILED"


class AppendFailed(DiskError):
    code = "APPEND_FAILED"


class LogFailed(DiskError):
    code = "LOG_FAILED"


def from_wire(code: str, text: str) -> PenstockError:
    """Return the error that the peer raised. An unknown code, from a newer peer, is kept in a PenstockError."""
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
