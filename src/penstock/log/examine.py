"""Scans the segments of a log, and distinguishes batches, damage and a torn tail, without changing anything.

Where a walk meets bytes that are not a batch, `durable_bytes`, which every batch contains, distinguishes two cases:

- a torn tail: the power went before these bytes were synced, so they were never acknowledged.
- damage: a later batch knows that these bytes were durable.

A file can also be cut short, empty or missing, and look as if it had never been longer. So each log knows where it must
begin (its `.start` file), and witnesses know how far it once reached (`log/witness.py`). What is missing in between
is damage. A file can also be another segment, of this log or of another one: its head tells. Then no batch in it
counts, whatever its offset, and the file is damaged as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import LogDamaged, UnsupportedBatch
from penstock.log import scan
from penstock.log.scan import Damage, Found
from penstock.log.segment import Segment, SegmentOrigin, log_name
from penstock.log.witness import NOBODY, Witness
from penstock.model.batch import NO_SEGMENT, VERSION


class TornTail(NamedTuple):
    """Bytes that recovery cuts off: they were never acknowledged."""

    path: Path
    size: int
    position: int
    first: int
    reason: str


Examined = Found | TornTail | LogDamaged | UnsupportedBatch


@dataclass(slots=True)
class Report:
    """The content of a log."""

    segments: int = 0
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    end: int = 0
    damage: list[LogDamaged] = field(default_factory=list)
    unsupported: list[UnsupportedBatch] = field(default_factory=list)
    torn_bytes: int = 0


def verify(
    segments: Sequence[Segment],
    progress: Callable[[int], object] | None = None,
    *,
    start: int | None = None,
    witness: Witness = NOBODY,
) -> Report:
    """Read every byte of a log, and report on it. `progress` is called with the bytes that were read. The other
    arguments are those of `examine`."""
    report = Report(segments=len(segments), bytes=sum(segment.size for segment in segments))
    for _, found in examine(segments, start=start, witness=witness):
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


def examine(
    segments: Sequence[Segment], *, start: int | None = None, witness: Witness = NOBODY
) -> Iterator[tuple[Segment, Examined]]:
    """Yield everything a log holds, and what is wrong where it is wrong. The segments must be identified (`identify`).

    `start` and `witness` say where the log must begin and how far it once reached, if that is known.
    """
    dropped = dropped_by_truncation(segments)
    segments = [segment for segment in segments if segment not in dropped]
    end = reserved = 0
    if segments and (wrong := missing_start(segments, start, segments[0].path.parent)):
        yield segments[0], wrong
    for place, segment in enumerate(segments):
        previous = segments[place - 1] if place else None
        following = segments[place + 1] if place + 1 < len(segments) else None
        if previous is not None and (wrong := misplaced(previous, segment, end)):
            yield segment, wrong
        for found in examine_segment(segment, following, witness.durable, complete=following is not None):
            if isinstance(found, Found):
                end = found.batch.end
                if not found.batch.count:
                    reserved = found.batch.control().reserved
            elif isinstance(found, LogDamaged):
                end = max(end, found.last or 0)  # the same offsets are not reported twice
            yield segment, found
    witnessed = witness.end if witness.given > max(end, reserved) else witness.durable
    if segments and end < witnessed:
        yield segments[-1], cut_short(segments[-1], max(end, segments[-1].base), witnessed)


def examine_segment(
    segment: Segment, following: Segment | None, witnessed: int, *, complete: bool
) -> Iterator[Examined]:
    """Yield everything a segment holds. With `complete` all of it was durable, as when the next segment was begun;
    otherwise everything below `witnessed` was."""
    if complete and not segment.size:
        yield empty(segment, following)
    if segment.foreign():
        yield lost(segment, following, witnessed)
        return
    items = segment.scan(check=True)
    for found in items:
        if isinstance(found, Found):
            yield _supported(segment, found)
            continue
        rest: list[Found | Damage] = [found, *items]
        for item, was_durable in zip(rest, _were_durable(rest), strict=True):
            if isinstance(item, Found):
                yield _supported(segment, item)
            elif was_durable or complete or item.first < witnessed:
                last = witnessed if item.first < witnessed else None
                yield item.error(segment.path, following.base if following else last)
            else:
                yield TornTail(segment.path, segment.size - item.position, item.position, item.first, item.reason)
                return


def _were_durable(rest: list[Found | Damage]) -> list[bool]:
    """Return of each item whether a later one shows that the bytes there had been synced."""
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


# Which log the segments belong to.


def identify(segments: Sequence[Segment]) -> int | None:
    """Tell the segments the number of their log, and return it; None if no head can be read.

    If the first and the last segment agree, the number is theirs. Otherwise a file of another log was put there, and
    the number is that of most segments, or of the earlier ones in a tie.
    """
    number = next((origin.log for origin in _origins(segments)), None)
    last = next((origin.log for origin in _origins(segments[::-1])), None)
    if number != last:
        [(number, _)] = Counter(origin.log for origin in _origins(segments)).most_common(1)
    for segment in segments:
        segment.log = number
    return number


def _origins(segments: Sequence[Segment]) -> Iterator[SegmentOrigin]:
    """Yield what the heads say, except those of files under the name of another segment."""
    for segment in segments:
        if (origin := segment.origin) is not None and origin.offset == segment.base:
            yield origin


def dropped_by_truncation(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that a truncation had dropped when it was interrupted."""
    try:
        head = segments[-1].head()
    except (IndexError, LogDamaged, UnsupportedBatch):
        return []
    if head.dropped == NO_SEGMENT:
        return []
    return [segment for segment in segments[:-1] if head.previous < segment.base <= head.dropped]


# Whether one segment follows another.


def misplaced(previous: Segment, segment: Segment, end: int) -> LogDamaged | None:
    """Return what is wrong between two segments, the first of which ends at `end`."""
    if end > segment.base:
        return overlap(previous, segment, end)
    try:
        check_follows(previous, segment, end)
    except LogDamaged as damage:
        if damage.path != segment.path:
            return damage
        # The head is damaged, which costs no message. The foot tells whether anything is missing before it.
        if end < segment.base and previous.end() < segment.base:
            reason = f"{segment.path.name} comes next, and does not begin with its head"
            return LogDamaged(previous.path, previous.size, end, segment.base, reason)
    except UnsupportedBatch:
        pass
    return None


def check_follows(previous: Segment, segment: Segment, end: int) -> None:
    """Raise LogDamaged if anything is missing between two segments, the first of which ends at `end`."""
    head = segment.head()
    if head.previous > segment.base:
        reason = f"{segment.path.name} comes next, and is the first segment of a log"
        raise LogDamaged(previous.path, previous.size, end, segment.base, reason)
    # A merged segment has the name of the first one that it replaces, and a foot where the next one begins.
    if head.previous != previous.base and not (previous.base < head.previous and previous.end() == segment.base):
        missing = segment.path.with_name(log_name(head.previous))
        reason = f"the segment before {segment.path.name}, {missing.name}, is missing"
        raise LogDamaged(missing, 0, end, segment.base, reason)
    # Messages that a truncation cut off are not missing.
    if end < segment.base and head.dropped == NO_SEGMENT and previous.end() < segment.base:
        raise LogDamaged(previous.path, previous.size, end, segment.base, "the file is cut short")


# Kinds of damage.


def overlap(previous: Segment, segment: Segment, end: int) -> LogDamaged:
    reason = f"it overlaps {previous.path.name}, which ends at offset {end}"
    return LogDamaged(segment.path, 0, segment.base, end, reason)


def cut_short(segment: Segment, end: int, witnessed: int) -> LogDamaged:
    reason = f"the file is cut short, or a later one is missing: offsets below {witnessed} were given out"
    return LogDamaged(segment.path, segment.size, end, witnessed, reason)


def empty(segment: Segment, following: Segment | None) -> LogDamaged:
    return LogDamaged(segment.path, 0, segment.base, following.base if following else None, "the file is empty")


def lost(segment: Segment, following: Segment | None, witnessed: int) -> LogDamaged:
    """Return the damage of a segment that is foreign, or in which nothing can be read."""
    foreign = segment.foreign()
    last = following.base if following else max(segment.base + 1, witnessed, scan.end_of_log(segment))
    reason = foreign.reason if foreign else "nothing in it can be read"
    return LogDamaged(segment.path, 0, segment.base, last, reason)


def missing_start(segments: Sequence[Segment], start: int | None, directory: Path) -> LogDamaged | None:
    """Return what is missing between the `.start` file and the first segment."""
    if start is None or not segments or segments[0].base <= start:
        return None
    first = segments[0]
    reason = f"all segments before {first.path.name} are missing, and retention did not drop them"
    return LogDamaged(directory / log_name(start), 0, start, first.base, reason)
