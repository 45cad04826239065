"""Finds the end of a log when it is opened.

Only the last segment can be unfinished, so only it is walked (`examine.py`). A torn tail is cut off. Damage is left as
it is, and so are its surroundings: `opening.py` seals the segment, and the log continues in a new one. What is kept is
synced before it is served: until then it may be only in the memory of the operating system.

Sealed segments are not walked. What was found damaged in them before is noted beside them (`log_files.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.errors import BadDirectory, LogDamaged, UnsupportedBatch
from penstock.log import examine, scan
from penstock.log.examine import TornTail
from penstock.log.files import Files
from penstock.log.index import OffsetIndex
from penstock.log.log_files import DAMAGED_SUFFIX, clear_away, finish_merge, list_log, noted_damage
from penstock.log.open_segments import OpenSegments
from penstock.log.producers import Producers
from penstock.log.scan import Found
from penstock.log.segment import ReadMode, Segment, log_name
from penstock.log.witness import NOBODY, Witness

logger = logging.getLogger(__name__)

_REWRITE_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Recovered:
    segments: list[Segment]
    end: int = 0
    # Where the last sound batch ends. `end` may be further, where offsets are reserved.
    reached: int = 0
    # How far the log once reached, as far as anyone knows. Everything in between is lost.
    witnessed: int = 0
    # Where the log begins, as its `.start` file says; None: it has none yet.
    start: int | None = None
    append_time: int = 0
    # When the first message of the last segment was appended; None: it has no message.
    oldest_us: int | None = None
    log: int | None = None
    # Up to where the last control batch reserves offsets, and whether that batch notes a clean stop.
    reserved: int = 0
    closed: bool = False
    producers: Producers = field(default_factory=Producers)
    # What is damaged in the last segment, and what was noted of the others.
    damage: list[LogDamaged] = field(default_factory=list)
    known_damage: list[LogDamaged] = field(default_factory=list)
    # Whether a reservation may be among the damage: then nobody knows up to where offsets are reserved.
    is_reservation_lost: bool = False


def recover(
    files: Files,
    open_segments: OpenSegments,
    directory: Path,
    read_mode: ReadMode,
    *,
    witness: Witness = NOBODY,
    piped: bool = False,
    strict: bool = False,
) -> Recovered:
    """Find the end of a log. Without segments, the log is new, or all of it is missing.

    A piped log has no witness: what it lost at its end is fetched again, at the same offsets. With `strict`, losses at
    the start or the end are raised, and nothing is changed.
    """
    listing = list_log(files, open_segments, directory, read_mode)
    if listing.merged:
        # A merged file may have its name only in the memory of the operating system.
        files.sync_directory(directory)
        for first, last in listing.merged:
            finish_merge(files, directory, first, last)
        listing = list_log(files, open_segments, directory, read_mode)
    if listing.problems:
        raise BadDirectory(listing.problems[0])
    if strict and (wrong := examine.missing_start(listing.segments, listing.start, directory)):
        raise wrong
    clear_away(files, directory, listing)
    if listing.start and not listing.segments:
        # Retention never drops the last segment.
        witness = Witness(max(witness.durable, listing.start + 1), witness.given)
    witness = NOBODY if piped else witness
    number = examine.identify(listing.segments)
    recovered = _recover_end(files, listing.segments, witness, directory, piped=piped, strict=strict)
    recovered.start = listing.start
    recovered.log = recovered.log if number is None else number
    noted = {int(name[:20]) for name in listing.others if name.endswith(DAMAGED_SUFFIX)}
    sealed = recovered.segments[:-1]
    for segment, following in zip(sealed, recovered.segments[1:], strict=True):
        if not segment.size:
            recovered.known_damage.append(examine.empty(segment, following))
        elif segment.base in noted:
            recovered.known_damage += noted_damage(files, segment)
    return recovered


def _recover_end(
    files: Files, segments: list[Segment], witness: Witness, directory: Path, *, piped: bool, strict: bool
) -> Recovered:
    unborn: Segment | None = None
    while segments:
        recovered = _walk(segments, unborn, witness, strict=strict)
        if recovered is None:
            recovered = _without_batches(segments, unborn, witness.end, piped=piped, strict=strict)
        if recovered is not None:
            _finish_truncation(files, segments, recovered, strict=strict)
            return recovered
        # The last segment was being created: the one before it is complete, and becomes active again.
        unborn = segments.pop()
        unborn.release()
        logger.warning("%s: was being created when the process ended, removed", unborn.path)
        files.remove(unborn.path)
        files.sync_directory(directory)
    if strict and witness.end:
        raise LogDamaged(directory / log_name(0), 0, 0, witness.end, "all segments are missing")
    return Recovered([], witnessed=witness.end)


def _walk(segments: list[Segment], unborn: Segment | None, witness: Witness, *, strict: bool) -> Recovered | None:
    """Recover from the last segment; None if no batch of it can be read.

    If the next segment, `unborn`, was being created, all of the last one was durable.
    """
    active = segments[-1]
    if active.foreign():
        return None
    active.unseal()
    walk = _Walk(Recovered(segments, end=active.base, reached=active.base, witnessed=witness.durable), active)
    for found in examine.examine_segment(active, unborn, witness.durable, complete=unborn is not None):
        if isinstance(found, TornTail):
            walk.torn = found
            walk.size = found.position
            break
        if isinstance(found, LogDamaged):
            if strict:
                raise found
            walk.pass_over(found)
        elif isinstance(found, Found):
            walk.take(found)
        else:
            raise found
    if walk.is_empty:
        return None
    recovered = walk.recovered
    recovered.end = max(recovered.end, recovered.reserved)
    if witness.given > max(recovered.end, witness.durable):
        # Offsets that were given out are neither stored nor reserved, so they were on the disk.
        return _walk(segments, unborn, Witness(witness.given), strict=strict)
    if strict and recovered.reached < recovered.witnessed:
        raise examine.cut_short(active, recovered.reached, recovered.witnessed)
    if walk.torn is not None:
        logger.warning(
            "%s: a torn tail of %d bytes, never acknowledged, is cut off at byte %d, offset %d (%s)", *walk.torn
        )
    _make_durable(active, walk.durable_bytes, walk.size)
    active.resume(walk.index, walk.size)
    return recovered


class _Walk:
    """The result of a scan of the last segment so far."""

    def __init__(self, recovered: Recovered, active: Segment) -> None:
        self.recovered = recovered
        self.index = OffsetIndex()
        # Every batch begins on a multiple of 8, also one behind damage at the end.
        self.size = (active.size + 7) // 8 * 8
        self.durable_bytes = 0
        self.torn: TornTail | None = None
        self.is_empty = True

    def pass_over(self, damage: LogDamaged) -> None:
        recovered = self.recovered
        if damage.position == 0:
            recovered.producers = _producers_before(recovered.segments)
        recovered.damage.append(damage)
        recovered.is_reservation_lost = True
        recovered.end = max(recovered.end, damage.last or 0)
        recovered.witnessed = max(recovered.witnessed, damage.last or 0)
        self.index.interrupt()

    def take(self, found: Found) -> None:
        recovered, batch = self.recovered, found.batch
        self.is_empty = False
        self.index.add(batch, found.position)
        self.durable_bytes = max(self.durable_bytes, batch.durable_bytes)
        recovered.end = recovered.reached = batch.end
        recovered.log = batch.log
        recovered.append_time = batch.append_time
        recovered.closed = False
        if batch.count:
            if recovered.oldest_us is None:
                recovered.oldest_us = batch.append_time
            recovered.producers.note(batch)
            recovered.producers.settle(batch)
            return
        control = batch.control()
        if found.position == 0:
            recovered.producers = Producers.restore(control.snapshot)
        recovered.reserved = control.reserved
        recovered.is_reservation_lost = False
        recovered.closed = found.position > 0 and control.reserved == batch.base_offset


def _without_batches(
    segments: list[Segment], unborn: Segment | None, witnessed: int, *, piped: bool, strict: bool
) -> Recovered | None:
    """Recover a log whose last segment has no batch that can be read: it is lost, or was being created (None)."""
    active = segments[-1]
    is_lost = unborn is not None or witnessed > active.base or (len(segments) == 1 and active.base > 0)
    if not scan.holds_batches(active) and (piped or not is_lost):
        return None
    damage = examine.lost(active, None, max(witnessed, unborn.base if unborn else 0))
    if strict or piped:
        raise damage  # only the origin of a piped log knows the next offset
    # The bytes are left as they are, for repair.
    active.resume(OffsetIndex(), active.size)
    return Recovered(
        segments,
        end=active.base,
        reached=active.base,
        witnessed=damage.last or 0,
        append_time=_last_append_time(segments[:-1]),
        producers=_producers_before(segments),
        damage=[damage],
    )


def _last_append_time(segments: Sequence[Segment]) -> int:
    for segment in reversed(segments):
        times = [found.batch.append_time for found in segment.scan() if isinstance(found, Found)]
        if times:
            return times[-1]
    return 0


def _producers_before(segments: Sequence[Segment]) -> Producers:
    """Return the producers as of the beginning of the last segment, whose head is damaged."""
    producers = Producers()
    begin = 0
    for place, segment in reversed(list(enumerate(segments[:-1]))):
        with contextlib.suppress(LogDamaged, UnsupportedBatch):
            producers, begin = Producers.restore(segment.head().snapshot), place
            break
    for segment in segments[begin:-1]:
        for found in segment.scan(check=True):
            if isinstance(found, Found) and found.batch.count:
                producers.note(found.batch)
                producers.settle(found.batch)
    return producers


def _make_durable(segment: Segment, start: int, size: int) -> None:
    """Cut the file off at `size`, or extend it, and write everything behind `start` again and sync it.

    If a sync failed before the process ended, the pages may be in memory, marked as clean, and not on the disk.
    """
    file = segment.file
    if size != segment.size:
        file.truncate(size)
    for position in range(start, size, _REWRITE_BYTES):
        file.write(file.read(min(_REWRITE_BYTES, size - position), position), position)
    file.sync()


def _finish_truncation(files: Files, segments: list[Segment], recovered: Recovered, *, strict: bool) -> None:
    for dropped in examine.dropped_by_truncation(segments):
        logger.warning("%s: was dropped by a truncation, removed", dropped.path)
        files.remove(dropped.path)
        files.sync_directory(dropped.path.parent)
        segments.remove(dropped)
    # A damaged head does not tell what it follows, and the walk has looked only for batches of this log.
    if len(segments) > 1 and not (recovered.damage and recovered.damage[0].position == 0):
        try:
            examine.check_follows(segments[-2], segments[-1], segments[-1].base)
        except LogDamaged as damage:
            if strict or damage.path == segments[-1].path:
                raise
            # Missing messages before it are lost; reading there raises.
            end = segments[-2].end()
            recovered.known_damage.append(LogDamaged(damage.path, damage.position, end, damage.last, damage.reason))
