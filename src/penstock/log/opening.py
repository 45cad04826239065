"""Opens the directory of a log: recovers it, or begins a new one, and leaves damage at its ends behind.

A damaged or shortened last segment is sealed as it is, and the log continues in a new one. A missing first segment is
replaced by one with only a head. So missing messages always look like a segment that ends before the next one begins.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.clock import Clock
from penstock.errors import AppendFailed, LogDamaged
from penstock.log import examine, log_files, recovery, retention
from penstock.log.append_clock import AppendClock
from penstock.log.damage import KnownDamage
from penstock.log.files import Files
from penstock.log.marks import Marks
from penstock.log.open_segments import OpenSegments
from penstock.log.producers import Producers
from penstock.log.segment import ReadMode
from penstock.log.segment_writer import SegmentWriter
from penstock.log.segments import Segments
from penstock.log.witness import Witness
from penstock.model.batch import NO_SEGMENT, Control

# If a reservation may be among the damage, the log continues this far after everything that is known. That is beyond
# any reservation: a reservation is ahead of what waits for the disk, and never so many messages do.
RESERVATION_LOST_AHEAD: Final = 1 << 27


@dataclass(slots=True)
class OpenedLog:
    segments: Segments
    producers: Producers
    append_clock: AppendClock
    # Where the last batch on the disk ends. The log's end may be further, where offsets are reserved.
    reached: int
    # When the oldest message of the active segment was appended; None: it has no message.
    oldest_us: int | None
    # Whether the log was closed, and nothing was written since.
    is_closed_cleanly: bool
    damage: list[LogDamaged]


def open_log(
    directory: Path,
    marks: Marks,
    damage: KnownDamage,
    *,
    files: Files,
    clock: Clock,
    open_segments: OpenSegments,
    read_mode: ReadMode,
    piped: bool,
    witness: Witness,
    strict: bool,
) -> OpenedLog:
    """Open a log and set its marks. See `Log` for the arguments."""
    files.make_directory(directory)
    found = recovery.recover(files, open_segments, directory, read_mode, witness=witness, piped=piped, strict=strict)
    marks.restart(found.end)
    marks.reserve(found.reserved)
    segments = Segments(
        directory,
        files,
        open_segments,
        read_mode,
        number=secrets.randbits(32) if found.log is None else found.log,
        found=found.segments,
        marked=found.start,
        marks=marks,
        damage=damage,
    )
    opened = OpenedLog(
        segments,
        # The origin of a piped log recognises the duplicates of producers.
        Producers() if piped else found.producers,
        AppendClock(clock, found.append_time),
        found.reached,
        found.oldest_us,
        found.closed,
        [],
    )
    _begin(opened, marks)
    if found.damage or opened.reached < found.witnessed:
        _leave_behind(opened, marks, found, files, piped=piped)
    if segments.marked is not None and segments.marked < segments.all[0].base:
        _restore_first(opened, segments.marked, files)
    opened.damage += found.known_damage
    return opened


def _begin(opened: OpenedLog, marks: Marks) -> None:
    """Create the first segment and the `.start` file, if they do not exist."""
    segments = opened.segments
    if segments.marked is None:
        # The directory is synced when a segment is created. Before that, the log may once more have no mark.
        segments.mark_start(segments.all[0].base if segments.all else 0)
    if segments.all:
        return
    assert segments.marked is not None
    start = opened.reached = segments.marked
    segments.prepend(segments.create(start, Control(start, NO_SEGMENT), opened.append_clock.next()))
    marks.restart(start)


def _leave_behind(opened: OpenedLog, marks: Marks, found: recovery.Recovered, files: Files, *, piped: bool) -> None:
    """Seal the last segment, which is damaged or cut short, as it is, and continue in a new one."""
    segments = opened.segments
    damaged = segments.active
    witnessed, damage = found.witnessed, found.damage
    # Without a foot, the segment stays one that is cut short, up to where the next one begins.
    is_cut = opened.reached < witnessed
    if is_cut and not any(each.last == witnessed for each in damage):
        damage = [*damage, examine.cut_short(damaged, opened.reached, witnessed)]
    base = max(marks.end, witnessed)
    if base == damaged.base:
        if piped:
            raise damage[0]  # only the origin knows the next offset
        base += 1  # two segments cannot have the same name
    is_unknown = found.is_reservation_lost or is_cut
    end = base + RESERVATION_LOST_AHEAD if is_unknown and not piped else base
    if not is_cut:
        base = end
    append_time = opened.append_clock.last  # of the last message: retention takes it for the segment's age
    try:
        log_files.note_damage(files, segments.directory, damaged.base, damage)
        if not is_cut:
            SegmentWriter(damaged).write_control(Control(base, segments.previous_base), base, append_time)
    except OSError as error:
        raise AppendFailed(f"{damaged.path}: cannot be sealed: {error.strerror}") from error
    control = Control(end, damaged.base, snapshot=opened.producers.snapshot(end))
    active = segments.create(base, control, append_time)
    damaged.size = damaged.written
    segments.append([active])
    marks.restart(end)
    marks.reserve(end)
    opened.damage += damage
    opened.reached = base
    opened.is_closed_cleanly = False
    opened.oldest_us = None


def _restore_first(opened: OpenedLog, start: int, files: Files) -> None:
    """Put a segment with only a head where the first ones are missing, so that readers there get an error."""
    segments = opened.segments
    following = segments.all[0]
    first = segments.create(start, Control(start, NO_SEGMENT), retention.begun_at(segments.all, 0))
    first.sealed = True
    segments.prepend(first)
    reason = f"all segments before {following.path.name} are missing, and retention did not drop them"
    lost = LogDamaged(first.path, first.size, start, following.base, reason)
    log_files.note_damage(files, segments.directory, first.base, [lost])
    opened.damage.append(lost)
