"""What a log does when it is opened, and what `verify` tells about it without changing anything.

Only the last segment can be unfinished, so only it is walked. Where the walk meets something that is not a
batch there are two cases, and `durable_bytes`, which every batch carries, tells them apart:

- a torn tail: the power went before these bytes were synced, so nobody was told of them. They are cut off.
- damage: a later batch knows that these bytes were durable. They are left as they are, and so is what is around them:
  the segment is sealed, and the log goes on in a new one.

What is kept is synced before it is served: until then it may be only in the memory of the operating system.

A file can also be cut short, empty or gone, and look as if it had never been longer. So each log knows where it must
begin, and is told where it must end:

- the mark, an empty file `<offset>.start`, is renamed before segments are dropped: whatever is missing from there to
  the first segment is damage. A log of an earlier version has none; it gets one at its first segment.
- witnesses are outside the log (`storage/witness.py`). If the walk ends below what they say, what is between is damage.

Both become the same: a segment that ends before the next one begins. A missing first segment gets a file with a head
and nothing else, and behind a last segment that was cut short the log goes on in a new one, which begins where the
witness says. Readers, `verify` and repair then find a segment that is cut short, as they do in the middle of a log.

A file can also be another segment, of this log or of another one: its head tells. No batch in it counts, whatever its
offset, so it is damaged as a whole: it is left as it is, and if it is the last one the log goes on in a new segment.

Sealed segments are not walked, so a file beside each one that is known to be damaged says so: `<base>.damaged`, with
what was found there in JSON. Like an index it is never trusted, and may be missing; readers find damage by themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from penstock.batch import NO_SEGMENT, OFFSET_MAX, VERSION
from penstock.errors import BadDirectory, LogDamaged, UnsupportedBatch
from penstock.storage.files import Files
from penstock.storage.index import Index
from penstock.storage.producers import Producers
from penstock.storage.segment import Damage, Found, OpenSegments, Origin, Reader, Segment, log_name
from penstock.storage.witness import NOBODY, Witness

logger = logging.getLogger(__name__)

ASIDE_SUFFIX: Final = ".aside"  # a segment that is being rewritten; not yet part of the log
_REWRITE_BYTES: Final = 1 << 20
DAMAGED_SUFFIX: Final = ".damaged"
START_SUFFIX: Final = ".start"
_NAME: Final = re.compile(r"([0-9]{20})\.(log|index|log\.aside|damaged|start)")
# Stands for the segments from the first to the second, and replaces them.
_MERGED_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.merged")


@dataclass(slots=True)
class Recovered:
    segments: list[Segment]
    end: int = 0
    # Where the last sound batch ends: `end` may be further, where offsets are reserved.
    reached: int = 0
    # Up to where it once reached, as far as anyone knows: what is between the two is lost.
    witnessed: int = 0
    # Where the log begins, as its mark says; None: it has no mark yet.
    start: int | None = None
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


@dataclass(slots=True)
class Listing:
    """The directory of a log: its segments by their offsets, from where to where some of them were merged, the mark of
    its start, the names of other files, and what is not right."""

    segments: list[Segment] = field(default_factory=list)
    merged: list[tuple[int, int]] = field(default_factory=list)
    start: int | None = None
    others: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def recover(
    files: Files,
    open_segments: OpenSegments,
    directory: Path,
    reader: Reader,
    *,
    witness: Witness = NOBODY,
    piped: bool = False,
    strict: bool = False,
) -> Recovered:
    """Find the end of a log, after whatever happened to it. No segments: it is a new one, or all of it is gone.

    What a piped log has lost at its end is fetched once more, at the offsets that it had: it has no witness. If it
    is `strict` then what is lost at its begin or its end is raised, and nothing is changed.
    """
    listing = look_around(files, open_segments, directory, reader)
    if listing.merged:
        # It may have its name only in the memory of the operating system.
        files.sync_directory(directory)
        for first, last in listing.merged:
            finish_merge(files, directory, first, last)
        listing = look_around(files, open_segments, directory, reader)
    if listing.problems:
        raise BadDirectory(listing.problems[0])
    if strict and (wrong := _missing_start(listing.segments, listing.start, directory)):
        raise wrong
    _clear_away(files, directory, listing)
    if listing.start and not listing.segments:
        # Retention leaves the last segment.
        witness = Witness(max(witness.durable, listing.start + 1), witness.given)
    witness = NOBODY if piped else witness
    number = identify(listing.segments)
    recovered = _recover_end(files, listing.segments, witness, directory, piped=piped, strict=strict)
    recovered.start = listing.start
    recovered.log = recovered.log if number is None else number
    noted = {int(name[:20]) for name in listing.others if name.endswith(DAMAGED_SUFFIX)}
    sealed = recovered.segments[:-1]
    for segment, following in zip(sealed, recovered.segments[1:], strict=True):
        if not segment.size:
            recovered.known_damage.append(_is_empty(segment, following))
        elif segment.base in noted:
            recovered.known_damage += _noted_damage(files, segment)
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
        # The last segment was being created: the one before it is complete, and goes on.
        unborn = segments.pop()
        unborn.release()
        logger.warning("%s: was being created when the process ended, removed", unborn.path)
        files.remove(unborn.path)
        files.sync_directory(directory)
    if strict and witness.end:
        raise LogDamaged(directory / log_name(0), 0, 0, witness.end, "all segments are missing")
    return Recovered([], witnessed=witness.end)


def cut_short(segment: Segment, end: int, witnessed: int) -> LogDamaged:
    reason = f"the file is cut short, or a later one is missing: offsets below {witnessed} were given out"
    return LogDamaged(segment.path, segment.size, end, witnessed, reason)


def mark_start(files: Files, directory: Path, before: int | None, start: int) -> None:
    """Mark where a log begins; the directory is not synced. A rename needs no room on the disk."""
    if before is not None and start_name(before) in files.sizes(directory):
        files.rename(directory / start_name(before), directory / start_name(start))
    else:
        files.create(directory / start_name(start)).close()


def start_name(start: int) -> str:
    return f"{start:020d}{START_SUFFIX}"


def identify(segments: Sequence[Segment]) -> int | None:
    """Tell the segments of which log they are, and return its number; None if no head can be read.

    If the first and the last one agree then it is theirs. Else somebody put a file of another log there, and the number
    is that of most segments, or of the earliest of two.
    """
    number = next((origin.log for origin in _origins(segments)), None)
    last = next((origin.log for origin in _origins(segments[::-1])), None)
    if number != last:
        [(number, _)] = Counter(origin.log for origin in _origins(segments)).most_common(1)
    for segment in segments:
        segment.log = number
    return number


def _origins(segments: Sequence[Segment]) -> Iterator[Origin]:
    """What the heads tell; a file under the name of another segment has none that counts."""
    for segment in segments:
        if (origin := segment.origin) is not None and origin.offset == segment.base:
            yield origin


def _missing_start(segments: Sequence[Segment], start: int | None, directory: Path) -> LogDamaged | None:
    """What is missing between the mark and the first segment."""
    if start is None or not segments or segments[0].base <= start:
        return None
    first = segments[0]
    reason = f"all segments before {first.path.name} are missing, and retention did not drop them"
    return LogDamaged(directory / log_name(start), 0, start, first.base, reason)


def _is_empty(segment: Segment, following: Segment | None) -> LogDamaged:
    return LogDamaged(segment.path, 0, segment.base, following.base if following else None, "the file is empty")


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


def examine(
    segments: Sequence[Segment], *, start: int | None = None, witness: Witness = NOBODY
) -> Iterator[tuple[Segment, Examined]]:
    """All that a log holds, and whatever is wrong with it where it is wrong; the rest comes all the same. The segments
    know of which log they are (`identify`).

    `start` and `witness`: where it must begin and how far it once reached, if that is known.
    """
    dropped = _dropped(segments)
    segments = [segment for segment in segments if segment not in dropped]
    end = reserved = 0
    if segments and (wrong := _missing_start(segments, start, segments[0].path.parent)):
        yield segments[0], wrong
    for place, segment in enumerate(segments):
        previous = segments[place - 1] if place else None
        following = segments[place + 1] if place + 1 < len(segments) else None
        if previous is not None and (wrong := misplaced(previous, segment, end)):
            yield segment, wrong
        for found in _examine_segment(segment, following, witness.durable, complete=following is not None):
            if isinstance(found, Found):
                end = found.batch.end
                if not found.batch.count:
                    reserved = found.batch.control().reserved
            elif isinstance(found, LogDamaged):
                end = max(end, found.last or 0)  # what is lost there is not lost once more
            yield segment, found
    witnessed = witness.end if witness.given > max(end, reserved) else witness.durable
    if segments and end < witnessed:
        yield segments[-1], cut_short(segments[-1], max(end, segments[-1].base), witnessed)


def verify(
    segments: Sequence[Segment],
    progress: Callable[[int], object] | None = None,
    *,
    start: int | None = None,
    witness: Witness = NOBODY,
) -> Report:
    """Read every byte of a log, and tell what is there; `progress` is told of bytes that were read. As in `examine`."""
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


def look_around(files: Files, open_segments: OpenSegments, directory: Path, reader: Reader) -> Listing:
    found = Listing()
    for name, size in sorted(files.sizes(directory).items()):
        if match := _MERGED_NAME.fullmatch(name):
            first, last = int(match[1]), int(match[2])
            found.merged.append((first, last))
            found.segments = [segment for segment in found.segments if segment.base != first]
            found.segments.append(Segment(files, open_segments, directory, first, size, reader, name))
            continue
        match = _NAME.fullmatch(name)
        base = int(match[1]) if match else 0
        if match is None or base > OFFSET_MAX:
            found.problems.append(f"{directory / name} is not a file of a log: move it elsewhere")
        elif match[2] == "start":
            # The later one, if somebody put an old one back.
            found.start = max(base, found.start or 0)
            found.others.append(name)
        elif match[2] == "log" and not any(first <= base <= last for first, last in found.merged):
            found.segments.append(Segment(files, open_segments, directory, base, size, reader))
        else:
            found.others.append(name)
    return found


def _clear_away(files: Files, directory: Path, listing: Listing) -> None:
    """Remove what an interrupted compaction or retention left."""
    start = listing.start or 0
    segments = listing.segments
    while len(segments) > 1 and segments[1].base <= start:
        files.remove(segments.pop(0).path)
        files.sync_directory(directory)
    bases = {segment.base for segment in segments}
    for name in listing.others:
        if name.endswith(START_SUFFIX):
            is_left = name != start_name(start)
        else:
            is_left = name.endswith(ASIDE_SUFFIX) or int(name[:20]) not in bases
        if is_left:
            files.remove(directory / name)


def _walk(segments: list[Segment], unborn: Segment | None, witness: Witness, *, strict: bool) -> Recovered | None:
    """Recover from the last segment, of which all was durable if the next one, `unborn`, was being created.

    None if there is no batch of it that can be read.
    """
    active = segments[-1]
    if active.foreign():
        return None
    active.unseal()
    recovered = Recovered(segments, end=active.base, reached=active.base, witnessed=witness.durable)
    index = Index()
    # Every batch begins on a multiple of 8, also one behind damage at the end.
    size = (active.size + 7) // 8 * 8
    durable_bytes = 0
    torn: TornTail | None = None
    is_empty = True
    for found in _examine_segment(active, unborn, witness.durable, complete=unborn is not None):
        if isinstance(found, TornTail):
            torn = found
            size = found.position
            break
        if isinstance(found, LogDamaged):
            if strict:
                raise found
            if found.position == 0:
                recovered.producers = _producers_before(segments)
            recovered.damage.append(found)
            recovered.is_reservation_lost = True
            recovered.end = max(recovered.end, found.last or 0)
            recovered.witnessed = max(recovered.witnessed, found.last or 0)
            index.interrupt()
            continue
        if not isinstance(found, Found):
            raise found
        _apply(found, recovered)
        index.add(found.batch, found.position)
        durable_bytes = max(durable_bytes, found.batch.durable_bytes)
        is_empty = False
    if is_empty:
        return None
    recovered.end = max(recovered.end, recovered.reserved)
    if witness.given > max(recovered.end, witness.durable):
        # What was given out is neither there nor reserved: so it was on the disk.
        return _walk(segments, unborn, Witness(witness.given), strict=strict)
    if strict and recovered.reached < recovered.witnessed:
        raise cut_short(active, recovered.reached, recovered.witnessed)
    if torn is not None:
        logger.warning("%s: a torn tail of %d bytes, never acknowledged, is cut off at byte %d, offset %d (%s)", *torn)
    _make_durable(active, durable_bytes, size)
    active.resume(index, size)
    return recovered


def _without_batches(
    segments: list[Segment], unborn: Segment | None, witnessed: int, *, piped: bool, strict: bool
) -> Recovered | None:
    """The last segment has no batch that can be read: everything in it is lost, or it was being created (None)."""
    active = segments[-1]
    is_lost = unborn is not None or witnessed > active.base or (len(segments) == 1 and active.base > 0)
    if not active.holds_batches() and (piped or not is_lost):
        return None
    damage = _nothing_in(active, None, max(witnessed, unborn.base if unborn else 0))
    if strict or piped:
        raise damage  # where a piped log goes on is the origin's to say
    # Whatever is in there is left for those who know better.
    active.resume(Index(), active.size)
    return Recovered(
        segments,
        end=active.base,
        reached=active.base,
        witnessed=damage.last or 0,
        append_time=_last_append_time(segments[:-1]),
        producers=_producers_before(segments),
        damage=[damage],
    )


def _nothing_in(segment: Segment, following: Segment | None, witnessed: int) -> LogDamaged:
    """All that a segment stands for is lost: it is foreign, or nothing in it can be read."""
    foreign = segment.foreign()
    last = following.base if following else max(segment.base + 1, witnessed, segment.end_of_log())
    reason = foreign.reason if foreign else "nothing in it can be read"
    return LogDamaged(segment.path, 0, segment.base, last, reason)


def _last_append_time(segments: Sequence[Segment]) -> int:
    for segment in reversed(segments):
        times = [found.batch.append_time for found in segment.scan() if isinstance(found, Found)]
        if times:
            return times[-1]
    return 0


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


def _finish_truncation(files: Files, segments: list[Segment], recovered: Recovered, *, strict: bool) -> None:
    for dropped in _dropped(segments):
        logger.warning("%s: was dropped by a truncation, removed", dropped.path)
        files.remove(dropped.path)
        files.sync_directory(dropped.path.parent)
        segments.remove(dropped)
    # A head that is damaged does not tell what it follows, and the walk has looked only for batches of this log.
    if len(segments) > 1 and not (recovered.damage and recovered.damage[0].position == 0):
        try:
            check_follows(segments[-2], segments[-1], segments[-1].base)
        except LogDamaged as damage:
            if strict or damage.path == segments[-1].path:
                raise
            # What is missing before it is lost; who reads there is told.
            end = segments[-2].end()
            recovered.known_damage.append(LogDamaged(damage.path, damage.position, end, damage.last, damage.reason))


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
    segment: Segment, following: Segment | None, witnessed: int, *, complete: bool
) -> Iterator[Examined]:
    """`complete`: all of it was durable, as when the next segment was begun. Else all below `witnessed` was."""
    if complete and not segment.size:
        yield _is_empty(segment, following)
    if segment.foreign():
        yield _nothing_in(segment, following, witnessed)
        return
    scan = segment.scan(check=True)
    for found in scan:
        if isinstance(found, Found):
            yield _supported(segment, found)
            continue
        rest: list[Found | Damage] = [found, *scan]
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
    # What a truncation cut off is not missing.
    if end < segment.base and head.dropped == NO_SEGMENT and previous.end() < segment.base:
        raise LogDamaged(previous.path, previous.size, end, segment.base, "the file is cut short")


def overlap(previous: Segment, segment: Segment, end: int) -> LogDamaged:
    reason = f"it overlaps {previous.path.name}, which ends at offset {end}"
    return LogDamaged(segment.path, 0, segment.base, end, reason)
