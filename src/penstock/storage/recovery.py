"""What a log does when it is opened, and what `verify` tells about it without changing anything.

Only the last segment can be unfinished, so only it is walked. Where the walk meets something that is not a
batch there are two cases, and `durable_bytes`, which every batch carries, tells them apart:

- a torn tail: the power went before these bytes were synced, so nobody was told of them. They are cut off.
- damage: a later batch knows that these bytes were durable. They are left as they are, and so is what is around them:
  the segment is sealed, and the log goes on in a new one.

What is kept is synced before it is served: until then it may be only in the memory of the operating system.

Sealed segments are not walked, so a file beside each one that is known to be damaged says so: `<base>.damaged`, with
what was found there in JSON. Like an index it is never trusted, and may be missing; readers find damage by themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from penstock.batch import NO_SEGMENT, OFFSET_MAX, VERSION
from penstock.errors import BadDirectory, LogDamaged, UnsupportedBatch
from penstock.storage.files import Files
from penstock.storage.index import Index
from penstock.storage.producers import Producers
from penstock.storage.segment import Damage, Found, OpenSegments, Reader, Segment, log_name

logger = logging.getLogger(__name__)

ASIDE_SUFFIX: Final = ".aside"  # a segment that is being rewritten; not yet part of the log
_REWRITE_BYTES: Final = 1 << 20
DAMAGED_SUFFIX: Final = ".damaged"
_NAME: Final = re.compile(r"([0-9]{20})\.(log|index|log\.aside|damaged)")
# Stands for the segments from the first to the second, and replaces them.
_MERGED_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.merged")


@dataclass(slots=True)
class Recovered:
    segments: list[Segment]
    end: int = 0
    append_time: int = 0
    # When the first message of the last segment was appended, if it has one.
    oldest_us: int | None = None
    log: int | None = None
    # Where the last control batch says that offsets are reserved up to, and whether it is the last of all.
    reserved: int = 0
    closed: bool = False
    producers: Producers = field(default_factory=Producers)
    # What is damaged in the last segment, and what was noted of the others.
    damage: list[LogDamaged] = field(default_factory=list)
    known_damage: list[LogDamaged] = field(default_factory=list)
    # Whether a reservation may have been where the damage is: then it is not known up to where offsets are reserved.
    is_reservation_lost: bool = False


def find_segments(
    files: Files, open_segments: OpenSegments, directory: Path, reader: Reader
) -> tuple[list[Segment], list[str]]:
    """The segments of a log by their offsets, and what in its directory is not right."""
    segments, _, _, problems = _look_around(files, open_segments, directory, reader)
    return segments, problems


def recover(
    files: Files, open_segments: OpenSegments, directory: Path, reader: Reader, *, strict: bool = False
) -> Recovered:
    """Find the end of a log, after whatever happened to it. No segments: it is a new one.

    If it is `strict` then damage in the last segment is raised, and nothing is changed.
    """
    segments, merged, others, problems = _look_around(files, open_segments, directory, reader)
    if merged:
        # It may have its name only in the memory of the operating system.
        files.sync_directory(directory)
        for first, last in merged:
            finish_merge(files, directory, first, last)
        segments, merged, others, problems = _look_around(files, open_segments, directory, reader)
    if problems:
        raise BadDirectory(problems[0])
    _clear_away(files, directory, segments, others)
    unborn: Segment | None = None
    while segments:
        recovered = _walk(segments, unborn, strict=strict)
        if recovered is not None:
            _finish_truncation(files, segments, recovered)
            noted = {int(name[:20]) for name in others if name.endswith(DAMAGED_SUFFIX)}
            for segment in segments[:-1]:
                if segment.base in noted:
                    recovered.known_damage += _noted_damage(files, segment)
            return recovered
        # The last segment was being created: the one before it is complete, and goes on.
        unborn = segments.pop()
        unborn.release()
        logger.warning("%s: was being created when the process ended, removed", unborn.path)
        files.remove(unborn.path)
        files.sync_directory(directory)
    return Recovered([])


def note_damage(files: Files, directory: Path, base: int, damage: Sequence[LogDamaged]) -> None:
    """Note durably what is damaged in a segment, in place of what was noted before."""
    document = [
        {"position": each.position, "first": each.first, "last": each.last, "reason": each.reason} for each in damage
    ]
    path = directory / damaged_name(base)
    file = files.create(path)
    try:
        file.write(json.dumps(document, indent=1).encode(), 0)
        file.sync()
    finally:
        file.close()
    files.sync_directory(directory)


def damaged_name(base: int) -> str:
    return f"{base:020d}{DAMAGED_SUFFIX}"


def _noted_damage(files: Files, segment: Segment) -> list[LogDamaged]:
    """What was noted of a segment, without what has been restored since; the note goes with the last of it."""
    path = segment.path.with_name(damaged_name(segment.base))
    try:
        file = files.open(path)
        try:
            noted = json.loads(file.read(file.size(), 0))
        finally:
            file.close()
        damage = [
            LogDamaged(segment.path, int(each["position"]), int(each["first"]), each["last"], str(each["reason"]))
            for each in noted
            if not segment.is_sound_at(int(each["position"]), int(each["first"]))
        ]
        if not damage:
            files.remove(path)
        return damage
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read, whoever reads damaged messages finds them again: %s", path, error)
        return []


def merged_name(first: int, last: int) -> str:
    """Return the name of a segment that replaces all from `first` to `last`."""
    return f"{first:020d}-{last:020d}.merged"


def finish_merge(files: Files, directory: Path, first: int, last: int) -> None:
    """Remove the segments that a merged one replaces, and give it the name of the first; what is done is left."""
    names = files.sizes(directory)
    replaced = [name for name in names if (match := _NAME.fullmatch(name)) and first < int(match[1]) <= last]
    index = log_name(first).replace(".log", ".index")
    for name in [*replaced, index]:
        if name in names:
            files.remove(directory / name)
    # Before it has its name: nothing would tell then that the others are to go.
    files.sync_directory(directory)
    merged = merged_name(first, last)
    if merged in names:
        files.rename(directory / merged, directory / log_name(first))
        files.sync_directory(directory)


def examine(segments: Sequence[Segment]) -> Iterator[tuple[Segment, Examined]]:
    """All that a log holds, and whatever is wrong with it where it is wrong; the rest comes all the same."""
    dropped = _dropped(segments)
    segments = [segment for segment in segments if segment not in dropped]
    end = 0
    for place, segment in enumerate(segments):
        previous = segments[place - 1] if place else None
        following = segments[place + 1] if place + 1 < len(segments) else None
        if previous is not None and (wrong := misplaced(previous, segment, end)):
            yield segment, wrong
        for found in _examine_segment(segment, previous, following, complete=following is not None):
            if isinstance(found, Found):
                end = found.batch.end
            elif isinstance(found, LogDamaged):
                end = max(end, found.last or 0)  # what is lost there is not lost once more
            yield segment, found


def verify(segments: Sequence[Segment], progress: Callable[[int], object] | None = None) -> Report:
    """Read every byte of a log, and tell what is there; `progress` is told of bytes that were read."""
    report = Report(segments=len(segments), bytes=sum(segment.size for segment in segments))
    for _, found in examine(segments):
        match found:
            case Found(batch=batch):
                report.batches += 1
                report.messages += batch.count
                report.end = batch.end
                if progress is not None:
                    progress(len(batch.data))
            case TornTail(size=size):
                report.torn_bytes = size
            case LogDamaged():
                report.damage.append(found)
            case UnsupportedBatch():
                report.unsupported.append(found)
    return report


class TornTail(NamedTuple):
    """Bytes that recovery cuts off: nobody was told that they are there."""

    path: Path
    size: int
    position: int
    first: int
    reason: str


Examined = Found | TornTail | LogDamaged | UnsupportedBatch


@dataclass(slots=True)
class Report:
    segments: int = 0
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    end: int = 0
    damage: list[LogDamaged] = field(default_factory=list)
    unsupported: list[UnsupportedBatch] = field(default_factory=list)
    torn_bytes: int = 0


def _look_around(
    files: Files, open_segments: OpenSegments, directory: Path, reader: Reader
) -> tuple[list[Segment], list[tuple[int, int]], list[str], list[str]]:
    """The segments by their offsets, from where to where some of them were merged, the names that are not of segments,
    and what is not right."""
    segments: list[Segment] = []
    merged: list[tuple[int, int]] = []
    others = []
    problems = []
    for name, size in sorted(files.sizes(directory).items()):
        if match := _MERGED_NAME.fullmatch(name):
            first, last = int(match[1]), int(match[2])
            merged.append((first, last))
            segments = [segment for segment in segments if segment.base != first]
            segments.append(Segment(files, open_segments, directory, first, size, reader, name))
            continue
        match = _NAME.fullmatch(name)
        base = int(match[1]) if match else 0
        if match is None or base > OFFSET_MAX:
            problems.append(f"{directory / name} is not a file of a log: move it elsewhere")
        elif match[2] == "log" and not any(first <= base <= last for first, last in merged):
            segments.append(Segment(files, open_segments, directory, base, size, reader))
        else:
            others.append(name)
    problems += [
        f"{segment.path} is empty, but is not the last segment: restore it from a copy"
        for segment in segments[:-1]
        if not segment.size
    ]
    return segments, merged, others, problems


def _clear_away(files: Files, directory: Path, segments: list[Segment], others: list[str]) -> None:
    """Remove what an interrupted compaction or retention left."""
    bases = {segment.base for segment in segments}
    for name in others:
        if name.endswith(ASIDE_SUFFIX) or int(name[:20]) not in bases:
            files.remove(directory / name)


def _walk(segments: list[Segment], unborn: Segment | None, *, strict: bool) -> Recovered | None:
    """Recover from the last segment, of which all was durable if the next one, `unborn`, was being created.

    None if not even its head was written.
    """
    active = segments[-1]
    active.sealed = False
    recovered = Recovered(segments, end=active.base)
    index = Index()
    # Every batch begins on a multiple of 8, also one behind damage at the end.
    size = (active.size + 7) // 8 * 8
    durable_bytes = 0
    is_empty = True
    previous = segments[-2] if len(segments) > 1 else None
    for found in _examine_segment(active, previous, unborn, complete=unborn is not None):
        if isinstance(found, TornTail):
            logger.warning(
                "%s: a torn tail of %d bytes, never acknowledged, is cut off at byte %d, offset %d (%s)", *found
            )
            size = found.position
            break
        if isinstance(found, LogDamaged):
            if strict:
                raise found
            if found.position == 0:
                if active.is_sound_at(0):
                    raise found  # it is of another log, or under another's name
                if previous is not None and active.log is None and (number := _log_number(previous)) is not None:
                    # Without its head it does not tell which log it is of.
                    active.log = number
                    return _walk(segments, unborn, strict=strict)
                recovered.producers = _producers_before(segments)
            recovered.damage.append(found)
            recovered.is_reservation_lost = True
            recovered.end = max(recovered.end, found.last or 0)
            index.interrupt()
            continue
        if not isinstance(found, Found):
            raise found
        _apply(found, recovered)
        index.add(found.batch, found.position)
        durable_bytes = max(durable_bytes, found.batch.durable_bytes)
        is_empty = False
    if is_empty:
        if recovered.damage:
            raise recovered.damage[0]
        if active.holds_batches() or (previous is None and active.base):
            raise LogDamaged(active.path, 0, active.base, None, "it does not begin with its head")
        return None
    _make_durable(active, durable_bytes, size)
    active.resume(index, size)
    recovered.end = max(recovered.end, recovered.reserved)
    return recovered


def _log_number(segment: Segment) -> int | None:
    with contextlib.suppress(LogDamaged, UnsupportedBatch):
        segment.head()
    return segment.log


def _producers_before(segments: Sequence[Segment]) -> Producers:
    """What is known of producers where the last segment begins, if its head does not tell."""
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
    """Cut the file off at `size`, or extend it, and sync what is behind `start`, written once more.

    If a sync failed before the process ended, the pages may be in memory, marked as clean, and not on the disk.
    """
    file = segment.file
    if size != segment.size:
        file.truncate(size)
    for position in range(start, size, _REWRITE_BYTES):
        file.write(file.read(min(_REWRITE_BYTES, size - position), position), position)
    file.sync()


def _finish_truncation(files: Files, segments: list[Segment], recovered: Recovered) -> None:
    for dropped in _dropped(segments):
        logger.warning("%s: was dropped by a truncation, removed", dropped.path)
        files.remove(dropped.path)
        files.sync_directory(dropped.path.parent)
        segments.remove(dropped)
    # A head that is damaged does not tell what it follows, and the walk has looked only for batches of this log.
    if len(segments) > 1 and not (recovered.damage and recovered.damage[0].position == 0):
        check_follows(segments[-2], segments[-1], segments[-1].base)


def _dropped(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that a truncation had dropped when it was interrupted."""
    try:
        head = segments[-1].head()
    except (IndexError, LogDamaged, UnsupportedBatch):
        return []
    if head.dropped == NO_SEGMENT:
        return []
    return [segment for segment in segments[:-1] if head.previous < segment.base <= head.dropped]


def _examine_segment(
    segment: Segment, previous: Segment | None, following: Segment | None, *, complete: bool
) -> Iterator[Examined]:
    """`complete`: all of it was durable, as when the next segment was begun."""
    if complete and not segment.size:
        last = following.base if following else None
        yield LogDamaged(segment.path, 0, segment.base, last, "the file is empty")
    scan = segment.scan(check=True)
    for found in scan:
        if isinstance(found, Found):
            yield _supported(segment, found)
            continue
        rest: list[Found | Damage] = [found, *scan]
        for item, was_durable in zip(rest, _were_durable(rest), strict=True):
            if isinstance(item, Found):
                yield _supported(segment, item)
            elif was_durable or complete:
                yield item.error(segment.path, following.base if following else None)
            else:
                yield TornTail(segment.path, segment.size - item.position, item.position, item.first, item.reason)
                return


def _were_durable(rest: list[Found | Damage]) -> list[bool]:
    """Of each damage: whether what comes after it shows that the bytes there had been synced."""
    proofs = []
    durable_bytes = 0
    for item in reversed(rest):
        if isinstance(item, Found):
            # The head is synced before anything else is written.
            durable_bytes = max(durable_bytes, item.batch.durable_bytes, 1)
        proofs.append(durable_bytes > item.position)
    return proofs[::-1]


def _supported(segment: Segment, found: Found) -> Found | UnsupportedBatch:
    if found.batch.version == VERSION:
        return found
    try:
        found.batch.check()
    except UnsupportedBatch as error:
        return UnsupportedBatch(f"{segment.path}: at byte {found.position}: {error}")
    return found


def _apply(found: Found, recovered: Recovered) -> None:
    batch = found.batch
    recovered.end = batch.end
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


def misplaced(previous: Segment, segment: Segment, end: int) -> LogDamaged | None:
    """What is wrong between the two, of which the first ends at `end`."""
    if end > segment.base:
        return overlap(previous, segment, end)
    try:
        check_follows(previous, segment, end)
    except LogDamaged as damage:
        if damage.path != segment.path:
            return damage
        # The head is damaged, which costs no message. Whether something is missing before it, the foot tells.
        if end < segment.base and previous.end() < segment.base:
            reason = f"{segment.path.name} comes next, and does not begin with its head"
            return LogDamaged(previous.path, previous.size, end, segment.base, reason)
    except UnsupportedBatch:
        pass
    return None


def check_follows(previous: Segment, segment: Segment, end: int) -> None:
    """LogDamaged if there once was anything between the two, of which the first ends at `end`."""
    head = segment.head()
    if head.previous > segment.base:
        reason = f"{segment.path.name} comes next, and is the first segment of a log"
        raise LogDamaged(previous.path, previous.size, end, segment.base, reason)
    # What was merged has the name of its first segment, and ends with a foot where the next one begins.
    if head.previous != previous.base and not (previous.base < head.previous and previous.end() == segment.base):
        missing = segment.path.with_name(log_name(head.previous))
        reason = f"the segment before {segment.path.name}, {missing.name}, is missing"
        raise LogDamaged(missing, 0, end, segment.base, reason)
    with contextlib.suppress(LogDamaged):
        previous.head()
    if previous.log not in (None, segment.log):
        raise LogDamaged(segment.path, 0, segment.base, None, f"it is of another log than {previous.path.name}")
    # What a truncation cut off is not missing.
    if end < segment.base and head.dropped == NO_SEGMENT and previous.end() < segment.base:
        raise LogDamaged(previous.path, previous.size, end, segment.base, "the file is cut short")


def overlap(previous: Segment, segment: Segment, end: int) -> LogDamaged:
    reason = f"it overlaps {previous.path.name}, which ends at offset {end}"
    return LogDamaged(segment.path, 0, segment.base, end, reason)
