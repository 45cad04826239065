"""A backup consists of a manifest and the segments that it names.

    segments/<log number>/<base>-<bytes>-<version>-<sha256>.log
    backups/<time>-<random>.json

The name of a segment identifies its source (log number, base, bytes, and version of the file) and its content. So the
names alone show which segments the target already has, including those of interrupted backups. The content of a name
never changes, so several backups can share segments and run at the same time.

A manifest is written after all of its segments. A backup without a manifest does not exist.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from penstock.errors import BadBackup
from penstock.store.snapshot import ListedLog, ListedSegment

VERSION: Final = 1
SEGMENTS: Final = "segments/"
MANIFESTS: Final = "backups/"
# A damaged segment has another name, so that the next backup reads it again and reports it again.
SEGMENT_NAME: Final = re.compile(
    r"segments/([0-9a-f]{8}|refused)/([0-9]{20})-([0-9a-f]+)-([0-9a-f.]+)-([0-9a-f]{64})\.(log|damaged)"
)
MANIFEST_NAME: Final = re.compile(r"backups/([0-9]{8}T[0-9]{6}\.[0-9]{6}Z-[0-9a-f]{6})\.json")
MANIFEST_BYTES_MAX: Final = 1 << 30


class SegmentKey(NamedTuple):
    """Identify one version of a segment."""

    log: str
    base: int
    bytes: int
    version: str

    @classmethod
    def of(cls, log: ListedLog, segment: ListedSegment) -> SegmentKey:
        number = "refused" if log.number is None else f"{log.number:08x}"
        return cls(number, segment.base, segment.bytes, segment.version)

    def name(self, sha256: str, *, is_damaged: bool) -> str:
        kind = "damaged" if is_damaged else "log"
        return f"{SEGMENTS}{self.log}/{self.base:020d}-{self.bytes:x}-{self.version}-{sha256}.{kind}"


@dataclass(frozen=True, slots=True)
class BackedDamage:
    position: int
    first: int
    last: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class BackedSegment:
    base: int
    bytes: int
    name: str
    damage: list[BackedDamage] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        found = SEGMENT_NAME.fullmatch(self.name)
        assert found, "names are checked when the manifest is read"
        return found[5]


@dataclass(frozen=True, slots=True)
class BackedLog:
    topic_id: int
    topic: str | None
    partition: int
    number: int | None
    start: int
    # None: the log could not be opened, see `problem`.
    committed: int | None
    is_piped: bool
    problem: str | None
    segments: list[BackedSegment]

    @property
    def title(self) -> str:
        return f"{self.topic or 'state'}/{self.partition}"


@dataclass(frozen=True, slots=True)
class BackupManifest:
    id: str
    time_us: int
    penstock: str
    # The format of the data directory.
    data_format: int
    logs: list[BackedLog]

    @property
    def segments(self) -> list[BackedSegment]:
        return [segment for log in self.logs for segment in log.segments]

    @property
    def total_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    @property
    def problems(self) -> list[str]:
        """Return the damage of the source, one line each."""
        found = [f"{log.title}: {log.problem}" for log in self.logs if log.problem]
        for log in self.logs:
            for segment in log.segments:
                for each in segment.damage:
                    until = "the end" if each.last is None else str(each.last)
                    found.append(
                        f"{log.title}: segment {segment.base} is damaged at byte {each.position}, "
                        f"offsets {each.first} to {until}: {each.reason}"
                    )
        return found

    @property
    def name(self) -> str:
        return f"{MANIFESTS}{self.id}.json"

    def encode(self) -> bytes:
        document = asdict(self)
        return json.dumps({"version": VERSION, "sha256": _digest(document), "manifest": document}).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> BackupManifest:
        """Parse a manifest. Raise BadBackup, with its name, if it is damaged or of a newer version."""
        try:
            document = json.loads(data)
            if document["version"] != VERSION:
                raise BadBackup(f"{name} has version {document['version']}: this version of penstock reads {VERSION}")
            value = document["manifest"]
            if _digest(value) != document["sha256"]:
                raise ValueError("its checksum is wrong")
            return _read(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadBackup(f"{name} is damaged: {error}") from error


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _read(value: dict[str, Any]) -> BackupManifest:
    logs = [
        BackedLog(**{**log, "segments": [_read_segment(segment) for segment in log["segments"]]})
        for log in value["logs"]
    ]
    for log in logs:
        # These become paths.
        for number in (log.topic_id, log.partition, log.number or 0, *(segment.base for segment in log.segments)):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a number")
    return BackupManifest(**{**value, "logs": logs})


def _read_segment(value: dict[str, Any]) -> BackedSegment:
    segment = BackedSegment(**{**value, "damage": [BackedDamage(**damage) for damage in value["damage"]]})
    if not SEGMENT_NAME.fullmatch(segment.name):
        raise ValueError(f"{segment.name!r} is not the name of a segment")
    return segment
