"""Compaction keeps the latest message of each key, at its old offset, and all messages without a key.

The latest message of a key may be a tombstone. It stays for a while, so that readers see it, and is then dropped too.
An expired message is dropped at once, with or without a key. Each sealed segment is rewritten on its own: written
aside, synced, and renamed over the old one, so one of the two always exists. Batches that keep all messages are copied
as they are. Small segments are then merged with their neighbours; otherwise a log in which few keys change often would
have ever more segments.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from penstock.errors import AppendFailed, Closed
from penstock.log import retention
from penstock.log.files import File, Files
from penstock.log.index import OffsetIndex
from penstock.log.log_files import ASIDE_SUFFIX, finish_merge, merged_name
from penstock.log.policy import Policy
from penstock.log.scan import Damage, Found
from penstock.log.segment import Segment
from penstock.model.batch import Batch, Columns, Control, encode, encode_control
from penstock.model.run import read_ttls

logger = logging.getLogger(__name__)

T = TypeVar("T")
Latest = dict[bytes | None, int]
# Returns whether to give up, because the log is deleted or the store stops. Called at every batch.
Stopped = Callable[[], bool]


class _Horizon(NamedTuple):
    """Drop tombstones appended until `tombstones_us`, and messages expired at `now_us`; -1: keep all."""

    tombstones_us: int
    now_us: int


# Fewer are not merged, or a segment would be rewritten for each small one that follows.
MERGED_MIN: Final = 4


def compact(
    segments: Sequence[Segment],
    policy: Policy,
    durable: int,
    now_us: int,
    files: Files,
    replace: Callable[[Segment, Segment], None],
    stopped: Stopped,
) -> int:
    """Compact all but the last of `segments`; return how many messages were dropped. Raises Closed if it is stopped."""
    latest, sound = _latest(segments, durable, stopped)
    # Damaged segments are not compacted, and may hold messages that a tombstone deletes. So tombstones stay too, and
    # expired messages, which delete as well.
    horizon = _Horizon(now_us - policy.tombstone_ms * 1000, now_us) if sound else _Horizon(-1, -1)
    dropped = 0
    for segment in segments[:-1]:
        dropped += _compact_segment(segment, latest, horizon, files, replace, stopped)
    return dropped


def _latest(segments: Sequence[Segment], durable: int, stopped: Stopped) -> tuple[Latest, bool]:
    """Return the offset of the latest durable message of each key, and whether nothing is damaged.

    A message that is not durable does not count: a power cut could lose it, and with it the key.

    All keys of the log are in memory at once.
    """
    latest: Latest = {}
    sound = True
    for segment in segments:
        for found in _scan(segment, stopped):
            if isinstance(found, Damage):
                sound = False
                continue
            if not found.batch.count or found.batch.end > durable:
                continue
            columns = found.batch.columns()
            keys = columns.keys()
            if keys is not None:
                latest.update(zip(keys, columns.offsets(), strict=True))
    latest.pop(None, None)
    return latest, sound


def _compact_segment(
    segment: Segment,
    latest: Latest,
    horizon: _Horizon,
    files: Files,
    replace: Callable[[Segment, Segment], None],
    stopped: Stopped,
) -> int:
    dropped = 0
    # The position of each batch that loses messages, and the places of those that it keeps.
    smaller: dict[int, list[int]] = {}
    for found in _scan(segment, stopped):
        if isinstance(found, Damage):
            logger.error("%s; the segment is not compacted", found.error(segment.path))
            return 0
        batch = found.batch
        if batch.count:
            kept = _kept(batch, latest, horizon)
            if len(kept) < batch.count:
                dropped += batch.count - len(kept)
                smaller[found.position] = kept
    if dropped:
        rewrite(segment, _remaining(segment, smaller, stopped), files, replace)
    return dropped


def _remaining(segment: Segment, smaller: dict[int, list[int]], stopped: Stopped) -> Iterator[Batch]:
    for found in _scan(segment, stopped):
        assert isinstance(found, Found)
        kept = smaller.get(found.position)
        if kept is None:
            yield found.batch
        elif kept:
            yield _without_others(found.batch, kept)


def _kept(batch: Batch, latest: Latest, horizon: _Horizon) -> list[int]:
    """Return the places in a batch of the messages that stay."""
    columns = batch.columns()
    expired = _expired(batch, columns, horizon.now_us) if batch.asks else ()
    return [place for place in _kept_of_keys(batch, columns, latest, horizon) if place not in expired]


def _expired(batch: Batch, columns: Columns, now_us: int) -> Collection[int]:
    """Return the places of expired messages."""
    blocks = {place: block for place, block in enumerate(columns.headers() or ()) if block is not None}
    return {place for place, ttl_us in read_ttls(blocks).items() if batch.append_time + ttl_us <= now_us}


def _kept_of_keys(batch: Batch, columns: Columns, latest: Latest, horizon: _Horizon) -> list[int]:
    """Return the places of messages that are the latest of their key, or have none."""
    keys = columns.keys()
    if keys is None:
        return list(range(batch.count))
    kept = [
        place
        for place, (key, offset) in enumerate(zip(keys, columns.offsets(), strict=True))
        if key is None or latest.get(key, -1) <= offset
    ]
    tombstones = columns.tombstones()
    if tombstones is not None and batch.append_time <= horizon.tombstones_us:
        kept = [place for place in kept if keys[place] is None or not tombstones[place]]
    return kept


def _without_others(batch: Batch, kept: list[int]) -> Batch:
    """Return the batch with only the messages at these places, at their offsets."""
    columns = batch.columns()
    smaller = encode(
        _pick(columns.values(), kept) or [],
        timestamp=batch.timestamp,
        keys=_pick(columns.keys(), kept),
        subjects=_pick(columns.subjects(), kept),
        replies=_pick(columns.replies(), kept),
        headers=_pick(columns.headers(), kept),
        timestamps=_pick(columns.timestamps(), kept) if columns.timestamps_at >= 0 else None,
        tombstones=_pick(columns.tombstones(), kept),
        deltas=[offset - batch.base_offset for offset in _pick(columns.offsets(), kept) or ()],
        span=batch.span,
        producer=batch.producer,
        sequence=batch.sequence,
        compression=batch.compression,
        asks=batch.asks,
    )
    smaller.stamp(
        batch.base_offset,
        append_time=batch.append_time,
        log=batch.log,
        durable_bytes=batch.durable_bytes,
        epoch=batch.epoch,
        source=batch.source,
        position=batch.position,
    )
    return smaller


def _pick(column: Sequence[T] | None, places: list[int]) -> list[T] | None:
    return None if column is None else [column[place] for place in places]


def rewrite(
    segment: Segment, batches: Iterator[Batch], files: Files, replace: Callable[[Segment, Segment], None]
) -> None:
    """Put a segment with only these batches in place of `segment`. Readers may still hold batches of the old one."""
    aside = segment.path.with_name(segment.path.name + ASIDE_SUFFIX)
    segment.pin()
    try:
        _, index, size = _write(aside, batches, files)
        # The old index is removed first: it must not be used with the new log.
        with contextlib.suppress(FileNotFoundError):
            files.remove(segment.index_path)
        files.rename(aside, segment.path)
    except (OSError, Closed) as error:
        with contextlib.suppress(OSError):
            files.remove(aside)
        segment.unpin()
        if isinstance(error, Closed):
            raise
        raise AppendFailed(f"{segment.path}: cannot be rewritten: {error.strerror}") from error
    rewritten = segment.replaced(index, size)
    rewritten.save_index()
    replace(segment, rewritten)
    files.sync_directory(segment.path.parent)


def small_neighbours(
    segments: Sequence[Segment], policy: Policy, store_limit: int | None = None
) -> list[Sequence[Segment]]:
    """Return the groups of sealed neighbours to merge: each at most half a segment, and at most the part of the
    retention that one segment may have, since retention will drop them together."""
    span_us = retention.segment_span_us(policy)
    bytes_max = min(policy.segment_bytes // 2, retention.segment_bytes(policy, store_limit))
    groups: list[list[Segment]] = [[]]
    size = 0
    begun = 0
    for place, segment in enumerate(segments[:-1]):
        group = groups[-1]
        is_long = span_us is not None and group and retention.begun_at(segments, place + 1) - begun > span_us
        if is_long or size + segment.size > bytes_max:
            groups.append([])
            size = 0
        if not groups[-1]:
            begun = retention.begun_at(segments, place)
        groups[-1].append(segment)
        size += segment.size
    return [group for group in groups if len(group) >= MERGED_MIN]


class Merge:
    """Merges neighbouring sealed segments into one with the name of the first.

    The new file is complete and synced before it is renamed to `<first>-<last>.merged`. From then on it replaces the
    segments from `first` to `last`, and recovery finishes an interrupted `settle`. `undo` cleans up after an earlier
    error. Both can be called again.
    """

    def __init__(self, group: Sequence[Segment], following: Segment, files: Files) -> None:
        self._group = group
        self._following = following
        self._files = files
        self._first = group[0]
        self._directory = self._first.path.parent
        self._aside = self._first.path.with_name(self._first.path.name + ASIDE_SUFFIX)
        self._path = self._directory / merged_name(self._first.base, group[-1].base)
        self._merged: Segment | None = None

    def write(self, stopped: Stopped) -> Segment:
        """Return the merged segment, once it replaces the others."""
        # Readers notice that the other files are removed. Only this name will have another file.
        self._first.pin()
        try:
            file, index, size = _write(self._aside, self._batches(stopped), self._files)
            self._files.rename(self._aside, self._path)
            self._files.sync_directory(self._directory)
        except OSError as error:
            raise AppendFailed(f"{self._path}: cannot be written: {error.strerror}") from error
        self._merged = self._first.replaced(index, size)
        # Pinned until it has its name.
        self._merged.pin(file)
        return self._merged

    def undo(self) -> None:
        names = self._files.sizes(self._directory)
        for path in (self._aside, self._path):
            if path.name in names:
                self._files.remove(path)
        self._files.sync_directory(self._directory)
        self._first.unpin()

    def settle(self) -> None:
        """Remove the files of the merged segments, and give the new one its name."""
        assert self._merged is not None
        finish_merge(self._files, self._directory, self._first.base, self._group[-1].base)
        self._merged.unpin()
        self._merged.save_index()

    def _batches(self, stopped: Stopped) -> Iterator[Batch]:
        reserved = append_time = 0
        for segment in self._group:
            for found in _scan(segment, stopped):
                if isinstance(found, Damage):
                    raise found.error(segment.path)
                batch = found.batch
                append_time = batch.append_time
                if not batch.count:
                    reserved = batch.control().reserved
                if batch.count or (segment is self._first and found.position == 0):
                    yield batch
        # With this foot it ends where the next segment begins, so nothing is missing between them.
        foot = encode_control(Control(reserved, self._first.base))
        foot.stamp(self._following.base, append_time=append_time, log=self._first.log or 0)
        yield foot


def _write(path: Path, batches: Iterator[Batch], files: Files) -> tuple[File, OffsetIndex, int]:
    """Write a new file, and sync it."""
    index = OffsetIndex()
    position = 0
    file = files.create(path)
    try:
        for batch in batches:
            file.write(batch.data, position)
            index.add(batch, position)
            position += len(batch.data)
        file.sync()
    except BaseException:
        file.close()
        raise
    return file, index, position


def _scan(segment: Segment, stopped: Stopped) -> Iterator[Found | Damage]:
    for found in segment.scan(check=True):
        if stopped():
            raise Closed(f"{segment.path}: the log is closed, compaction stopped")
        yield found
