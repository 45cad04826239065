"""Compaction: of each key the latest message stays, at its old offset; messages without a key all stay.

The latest message of a key may be a tombstone. It stays for a while, so that readers learn of it, and then goes
too. Each sealed segment is rewritten on its own: aside, synced, and put in place of the old one by a rename, so
that there is always one of the two. Batches of which everything stays are copied as they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from penstock.batch import Batch, encode
from penstock.errors import AppendFailed
from penstock.storage.files import Files
from penstock.storage.index import Index
from penstock.storage.policy import Policy
from penstock.storage.recovery import ASIDE_SUFFIX
from penstock.storage.segment import Damage, Found, Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")
Latest = dict[bytes | None, int]


def compact(
    segments: Sequence[Segment],
    policy: Policy,
    durable: int,
    now_us: int,
    files: Files,
    replace: Callable[[Segment, Segment], None],
) -> int:
    """Compact all but the last of `segments`; how many messages were dropped."""
    latest, sound = _latest(segments, durable)
    # What is damaged is not compacted, and may hold what a tombstone deletes: so the tombstones stay as well.
    horizon_us = now_us - policy.tombstone_ms * 1000 if sound else -1
    dropped = 0
    for segment in segments[:-1]:
        dropped += _compact_segment(segment, latest, horizon_us, files, replace)
    return dropped


def _latest(segments: Sequence[Segment], durable: int) -> tuple[Latest, bool]:
    """key -> the offset of its latest message: of those that are durable, or the key could be lost with the power.
    And whether all is sound.

    All keys of the log are in memory at once.
    """
    latest: Latest = {}
    sound = True
    for segment in segments:
        for found in segment.scan(check=True):
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
    horizon_us: int,
    files: Files,
    replace: Callable[[Segment, Segment], None],
) -> int:
    dropped = 0
    # Of the batches that lose messages: where each begins, and which it keeps.
    smaller: dict[int, list[int]] = {}
    for found in segment.scan(check=True):
        if isinstance(found, Damage):
            logger.error("%s; the segment is not compacted", found.error(segment.path))
            return 0
        batch = found.batch
        if batch.count:
            kept = _kept(batch, latest, horizon_us)
            if len(kept) < batch.count:
                dropped += batch.count - len(kept)
                smaller[found.position] = kept
    if dropped:
        rewrite(segment, _remaining(segment, smaller), files, replace)
    return dropped


def _remaining(segment: Segment, smaller: dict[int, list[int]]) -> Iterator[Batch]:
    for found in segment.scan():
        assert isinstance(found, Found)
        kept = smaller.get(found.position)
        if kept is None:
            yield found.batch
        elif kept:
            yield _without_others(found.batch, kept)


def _kept(batch: Batch, latest: Latest, horizon_us: int) -> list[int]:
    """The places in a batch of the messages that stay."""
    columns = batch.columns()
    keys = columns.keys()
    if keys is None:
        return list(range(batch.count))
    kept = [
        place
        for place, (key, offset) in enumerate(zip(keys, columns.offsets(), strict=True))
        if key is None or latest.get(key, -1) <= offset
    ]
    tombstones = columns.tombstones()
    if tombstones is not None and batch.append_time <= horizon_us:
        kept = [place for place in kept if keys[place] is None or not tombstones[place]]
    return kept


def _without_others(batch: Batch, kept: list[int]) -> Batch:
    """The batch with only the messages at these places, at the offsets that they have."""
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
    """Put a segment with only these batches in place of `segment`, of which readers may still hold parts."""
    aside = segment.path.with_name(segment.path.name + ASIDE_SUFFIX)
    index = Index()
    position = 0
    segment.pin()
    try:
        file = files.create(aside)
        for batch in batches:
            file.write(batch.data, position)
            index.add(batch, position)
            position += len(batch.data)
        file.sync()
        # The old index goes first: it must not meet the new log.
        with contextlib.suppress(FileNotFoundError):
            files.remove(segment.index_path)
        files.rename(aside, segment.path)
    except OSError as error:
        with contextlib.suppress(OSError):
            files.remove(aside)
        raise AppendFailed(f"{segment.path}: cannot be rewritten: {error.strerror}") from error
    replace(segment, segment.replaced(index, position))
    files.sync_directory(segment.path.parent)
