"""Restore a backup into a new data directory.

Everything is prepared in `<data>/restoring/data`, which is itself a data directory. A broker refuses `<data>` while
`<data>/restoring` exists. So an interrupted restore leaves nothing that looks like a complete store, and can be run
again.

The broker may have stored messages after the backup, and consumers may have read them. So no offset and no topic ID
that it may have used is used again: every log continues far above the backup. `meta.db` and the indexes are not part
of a backup: they are rebuilt from the logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from penstock.backup import cut
from penstock.backup.cut import CutLog, PartitionName, ToOffsets, ToTime
from penstock.backup.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    MANIFESTS,
    BackedLog,
    BackedSegment,
    BackupManifest,
)
from penstock.backup.target import Target, digest_of, read_tar, unpack, writing
from penstock.errors import BadBackup, BadDirectory, LogDamaged
from penstock.log import log_files
from penstock.log.files import FILE_MODE, OsFiles
from penstock.log.open_segments import OpenSegments
from penstock.log.scan import Found
from penstock.log.segment import Segment, log_name
from penstock.model.batch import NO_SEGMENT, Control, encode_control
from penstock.object_store import CHUNK_BYTES
from penstock.outcome import Outcome
from penstock.store.format import FORMAT, FORMAT_NAME, RESTORING_NAME
from penstock.store.meta import Change
from penstock.store.state import Addition
from penstock.store.store import Store, StoreSettings

# A log continues this many offsets above its backup: half a day at 100,000 messages per second. Sequences of the text
# protocol have 40 bits for an offset, so 255 restores in a row fit.
OFFSETS_AHEAD: Final = 1 << 32
TOPIC_IDS_AHEAD: Final = 256

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Restored:
    manifest: BackupManifest
    cuts: list[CutLog]


def manifests(target: Target) -> list[BackupManifest]:
    """Return the backups of a target, oldest first. Raise BadBackup if a manifest is damaged."""
    names = sorted(name for name in target.names(MANIFESTS) if MANIFEST_NAME.fullmatch(name))
    return [_read_manifest(target, name) for name in names]


def choose(found: list[BackupManifest], backup: str | None, to: ToTime | ToOffsets | None) -> BackupManifest:
    """Return the backup with this ID, or the newest, or the first one after a time."""
    if backup is not None:
        found = [manifest for manifest in found if manifest.id == backup]
    if not found:
        raise BadBackup("the target has no backup" if backup is None else f"unknown backup {backup}: see --list")
    if isinstance(to, ToTime):
        found = [manifest for manifest in found if manifest.time_us >= to.time_us][:1]
        if not found:
            raise BadBackup("all backups are older than --time: omit it to restore the newest")
    manifest = found[-1]
    if manifest.data_format > FORMAT:
        raise BadBackup(
            f"backup {manifest.id} has data of format {manifest.data_format}, and this version of penstock reads "
            f"formats up to {FORMAT}: install penstock {manifest.penstock} or later"
        )
    return manifest


def check(target: Target, manifest: BackupManifest, progress: Progress = lambda count: None) -> list[str]:
    """Read every segment of a backup; return the damaged and missing ones."""
    problems = []
    for segment in manifest.segments:
        try:
            digest = digest_of(_counted(target.read(segment.name), progress))
        except BadBackup as error:
            problems.append(str(error))
            continue
        if digest != segment.sha256:
            problems.append(f"{segment.name} is damaged: its checksum is wrong")
    return problems


def check_tar(stream: BinaryIO) -> tuple[BackupManifest, list[str]]:
    """Check the backup in a tar stream, like `check`."""
    digests: dict[str, str] = {}
    manifest: BackupManifest | None = None
    for name, data in read_tar(stream):
        if MANIFEST_NAME.fullmatch(name):
            manifest = BackupManifest.decode(name, b"".join(islice(data, MANIFEST_BYTES_MAX // CHUNK_BYTES)))
        else:
            digests[name] = digest_of(data)
    assert manifest is not None, "`read_tar` raises without a manifest"
    wrong = [segment.name for segment in manifest.segments if digests.get(segment.name) != segment.sha256]
    return manifest, [f"{name} is {'damaged' if name in digests else 'missing'}" for name in wrong]


class Restore:
    """A restore into a directory, which is locked from `__enter__` to `__exit__`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._restoring = directory / RESTORING_NAME
        self._data = self._restoring / "data"
        self._files = OsFiles()

    def __enter__(self) -> Restore:
        self._files.make_directory(self._directory)
        names = set(os.listdir(self._directory))
        if names and RESTORING_NAME not in names:
            raise BadDirectory(f"{self._directory} is not empty: restore into a new directory")
        self._files.make_directory(self._restoring)
        self._lock = self._files.lock(self._restoring / "LOCK")
        # Existing files are of an interrupted restore: a broker does not open such a directory.
        for name in names - {RESTORING_NAME}:
            _remove(self._directory / name)
        for name in set(os.listdir(self._restoring)) - {"LOCK"}:
            _remove(self._restoring / name)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def unpack(self, stream: BinaryIO) -> Target:
        """Unpack the backup in a tar stream into the directory, until it is restored."""
        return unpack(stream, self._restoring / "unpacked")

    def run(
        self,
        target: Target,
        manifest: BackupManifest,
        to: ToTime | ToOffsets | None = None,
        progress: Progress = lambda count: None,
        *,
        offsets_ahead: int = OFFSETS_AHEAD,
    ) -> Restored:
        """Restore the backup. Raise BadBackup, with its name, at the first damaged or missing file."""
        self._check_room(manifest)
        self._files.make_directory(self._data)
        for log in manifest.logs:
            self._copy_log(target, log, progress)
            if log.committed is not None:
                self._end_log(log, log.committed, offsets_ahead)
        (self._data / FORMAT_NAME).touch(FILE_MODE)
        (self._data / FORMAT_NAME).write_text(f"{manifest.data_format}\n")
        cuts = self._adjust(manifest, to)
        self._finish()
        return Restored(manifest, cuts)

    def _check_room(self, manifest: BackupManifest) -> None:
        free, _ = self._files.space(self._directory)
        if manifest.total_bytes > free:
            raise BadDirectory(
                f"backup {manifest.id} needs {manifest.total_bytes} bytes, but {self._directory} has only {free} free"
            )

    def _copy_log(self, target: Target, log: BackedLog, progress: Progress) -> None:
        directory = self._log_directory(log)
        self._files.make_directory(directory)
        for segment in log.segments:
            self._copy_segment(target, segment, directory)
            progress(segment.bytes)
        self._files.sync_directory(directory)

    def _copy_segment(self, target: Target, segment: BackedSegment, directory: Path) -> None:
        path = directory / log_name(segment.base)
        if target.fetch(segment.name, path) != segment.sha256:
            raise BadBackup(f"{segment.name} is damaged: its checksum is wrong; restore another backup (--list)")
        if segment.damage:
            damage = [LogDamaged(path, each.position, each.first, each.last, each.reason) for each in segment.damage]
            log_files.note_damage(self._files, directory, segment.base, damage)

    def _end_log(self, log: BackedLog, committed: int, offsets_ahead: int) -> None:
        """Record at the end of a log that all of it was durable, so that damage there is not taken for a torn tail, and
        its next offset. Internal topics need no new offsets, because consumers do not see them, nor do piped ones."""
        *others, last = log.segments
        path = self._log_directory(log) / log_name(last.base)
        segment = Segment(self._files, OpenSegments(), path.parent, last.base, last.bytes, "pread")
        segment.log = log.number
        times = [found.batch.append_time for found in segment.scan() if isinstance(found, Found)]
        is_seen = log.topic is not None and not (log.topic.startswith("$") or log.is_piped)
        reserved = committed + offsets_ahead if is_seen else committed
        note = encode_control(Control(reserved, others[-1].base if others else NO_SEGMENT))
        size = (last.bytes + 7) // 8 * 8
        note.stamp(
            committed, append_time=max(times, default=0), log=log.number or 0, durable_bytes=min(size, (1 << 32) - 1)
        )
        file = self._files.open(path)
        try:
            with writing(path):
                file.truncate(size)
                file.write(note.data, size)
                file.sync()
        finally:
            file.close()

    def _log_directory(self, log: BackedLog) -> Path:
        return self._data / "topics" / str(log.topic_id) / str(log.partition)

    def _adjust(self, manifest: BackupManifest, to: ToTime | ToOffsets | None) -> list[CutLog]:
        """Open and cut the logs, and adjust groups and topic IDs to the skipped offsets and IDs."""
        settings = StoreSettings(partitions_max=1 << 31)
        with Store(self._data, settings=settings) as store:
            held = {PartitionName(log.topic or "", log.partition): log.committed or 0 for log in manifest.logs}
            cuts = cut.cut(store, {} if to is None else cut.find_cuts(store, to, held))
            ends = {(log.topic_id, log.partition): log.committed for log in manifest.logs}
            ids = {topic.name: topic.id for topic in store.topics}
            ends |= {(ids[each.place.topic], each.place.partition): each.offset for each in cuts}
            changes = [
                *(cut.undecided(store.state, to.time_us) if isinstance(to, ToTime) else ()),
                Change("store", "next_topic", (store.state.get("store", "next_topic") or 1) + TOPIC_IDS_AHEAD),
                *_move_groups(store, ends),
            ]
            _write(store, changes)
        return cuts

    def _finish(self) -> None:
        """Move the store into place: after the first rename, the directory has the complete store."""
        self._files.sync_directory(self._data / "topics")
        for name in ("topics", FORMAT_NAME):
            (self._data / name).rename(self._directory / name)
        self._files.sync_directory(self._directory)
        _remove(self._data)
        _remove(self._restoring)
        self._files.sync_directory(self._directory)


def _move_groups(store: Store, ends: Mapping[tuple[int, int], int | None]) -> Iterator[Addition]:
    """Move groups that had read all of a log to its new next offset, so that they have no lag."""
    for key, whole in store.state.items("position"):
        # `<group>/<topic id>/<partition>`; the name of a group may contain slashes.
        _, topic_id, partition = key.rsplit("/", 2)
        place = int(topic_id), int(partition)
        end = ends.get(place)
        if end is None or place in store.catalogue.refused:
            continue
        going_on = store.log(*place).committed
        last: dict[str, Any] = [whole, *store.state.additions("position", key)][-1]
        if end <= last["next"] < going_on:
            floor = going_on if last["floor"] == last["next"] else last["floor"]
            yield Addition("position", key, {"floor": floor, "next": going_on, "lots": [], "done": []})


def _write(store: Store, changes: list[Change | Addition]) -> None:
    outcome = Outcome()
    store.state.write(changes, outcome)
    store.flush()
    outcome.check()


def _read_manifest(target: Target, name: str) -> BackupManifest:
    return BackupManifest.decode(name, b"".join(target.read(name)))


def _counted(data: Iterator[bytes], progress: Progress) -> Iterator[bytes]:
    for chunk in data:
        progress(len(chunk))
        yield chunk


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
