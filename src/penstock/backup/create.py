"""Copy a snapshot to a target: first the segments that the target lacks, then the manifest.

The broker lists and serves the bytes; the client that makes the backup writes them. So the broker needs no
credentials for the target, and the client limits the rate.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from penstock.backup.manifest import (
    SEGMENT_NAME,
    SEGMENTS,
    BackedDamage,
    BackedLog,
    BackedSegment,
    BackupManifest,
    SegmentKey,
)
from penstock.backup.target import BackupPart, Target
from penstock.errors import ReadFailed
from penstock.log.files import OsFiles
from penstock.log.open_segments import OpenSegments
from penstock.log.scan import Damage
from penstock.log.segment import Segment
from penstock.store.format import FORMAT
from penstock.store.snapshot import ListedLog, ListedSegment, SnapshotListing

# Bytes to request at once, and bytes to skip at once where the disk of the source cannot be read.
_READ_BYTES: Final = 4 << 20
_SECTOR_BYTES: Final = 4096
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STEP_BYTES_MIN: Final = 64 << 10


class BackupSource(Protocol):
    """A snapshot of a broker, or of a store in this process."""

    @property
    def listing(self) -> tuple[int, int]: ...

    def read(self, file: int, position: int, length: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Done:
    manifest: BackupManifest
    copied_segments: int
    copied_bytes: int


class Throttle:
    """Limit the bytes per second."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()
        # Bytes to read at once: about one second's worth.
        self.step_bytes = _READ_BYTES if bytes_per_s is None else max(_STEP_BYTES_MIN, min(bytes_per_s, _READ_BYTES))

    def pass_(self, count: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self._rate
        if self._free_at > now:
            time.sleep(self._free_at - now)


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of the source, and the names of those that the target already has."""

    listing: SnapshotListing
    known: Mapping[SegmentKey, str]

    @property
    def bytes(self) -> int:
        """Return the number of bytes to copy."""
        return sum(
            segment.bytes
            for log in self.listing.logs
            for segment in log.segments
            if SegmentKey.of(log, segment) not in self.known
        )


def plan(source: BackupSource, target: Target) -> Plan:
    file, size = source.listing
    data = b"".join(
        source.read(file, position, min(_READ_BYTES, size - position)) for position in range(0, size, _READ_BYTES)
    )
    return Plan(SnapshotListing.decode(data), dict(_known(target)))


def create(
    source: BackupSource,
    target: Target,
    planned: Plan,
    *,
    penstock: str,
    throttle: Throttle,
    progress: Callable[[int], object] = lambda count: None,
) -> Done:
    """Copy the segments that the target lacks, then write the manifest; call `progress` with the bytes copied."""
    copied = _Copied(source, target, throttle, progress)
    logs, file = [], 0
    for log in planned.listing.logs:
        segments = []
        for segment in log.segments:
            key = SegmentKey.of(log, segment)
            name = planned.known.get(key)
            if name is None:
                segments.append(copied.copy(file, log, segment, key))
            else:
                segments.append(BackedSegment(segment.base, segment.bytes, name))
            file += 1
        logs.append(
            BackedLog(
                log.topic_id,
                log.topic,
                log.partition,
                log.number,
                log.start,
                log.committed,
                log.is_piped,
                log.problem,
                segments,
            )
        )
    time_us = planned.listing.time_us
    manifest = BackupManifest(new_id(time_us), time_us, penstock, FORMAT, logs)
    put(target, manifest.name, manifest.encode())
    return Done(manifest, copied.segments, copied.bytes)


def new_id(time_us: int) -> str:
    """Return a new backup ID; IDs sort by time."""
    return f"{(_EPOCH + timedelta(microseconds=time_us)):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(3)}"


def put(target: Target, name: str, data: bytes) -> None:
    part = target.begin()
    try:
        part.write(data)
        part.commit(name)
    finally:
        part.close()


class _Copied:
    def __init__(
        self, source: BackupSource, target: Target, throttle: Throttle, progress: Callable[[int], object]
    ) -> None:
        self._source = source
        self._target = target
        self._throttle = throttle
        self._progress = progress
        self.segments = self.bytes = 0

    def copy(self, file: int, log: ListedLog, segment: ListedSegment, key: SegmentKey) -> BackedSegment:
        part = self._target.begin()
        try:
            digest = hashlib.sha256()
            for data in self._read(file, segment.bytes):
                digest.update(data)
                part.write(data)
            damage = _damage(part, log, segment)
            name = key.name(digest.hexdigest(), is_damaged=bool(damage))
            part.commit(name)
        finally:
            part.close()
        self.segments += 1
        self.bytes += segment.bytes
        return BackedSegment(segment.base, segment.bytes, name, damage)

    def _read(self, file: int, size: int) -> Iterator[bytes]:
        step = self._throttle.step_bytes
        for position in range(0, size, step):
            length = min(step, size - position)
            try:
                data = self._source.read(file, position, length)
            except ReadFailed:
                data = b"".join(self._read_sectors(file, position, length))
            # Zeros replace bytes that the source has lost: they are not a batch, so the damage is detected.
            yield data.ljust(length, b"\0")
            self._throttle.pass_(length)
            self._progress(length)

    def _read_sectors(self, file: int, position: int, length: int) -> Iterator[bytes]:
        """Read in sectors, and replace those that cannot be read."""
        for at in range(position, position + length, _SECTOR_BYTES):
            wanted = min(_SECTOR_BYTES, position + length - at)
            try:
                yield self._source.read(file, at, wanted).ljust(wanted, b"\0")
            except ReadFailed:
                yield bytes(wanted)


def _known(target: Target) -> Iterator[tuple[SegmentKey, str]]:
    for name, stored in target.names(SEGMENTS).items():
        found = SEGMENT_NAME.fullmatch(name)
        if found is not None and found[6] == "log" and stored.bytes == int(found[3], 16):
            yield SegmentKey(found[1], int(found[2]), int(found[3], 16), found[4]), name


def _damage(part: BackupPart, log: ListedLog, segment: ListedSegment) -> list[BackedDamage]:
    """Return the damage of a copied segment."""
    # Written bytes stay in the buffer of the part until it is flushed.
    part.flush()
    path = part.path
    copied = Segment(
        OsFiles(read_only=True), OpenSegments(), path.parent, segment.base, segment.bytes, "pread", path.name
    )
    copied.log = log.number
    return [
        BackedDamage(found.position, found.first, found.last, found.reason)
        for found in copied.scan(check=True)
        if isinstance(found, Damage)
    ]
