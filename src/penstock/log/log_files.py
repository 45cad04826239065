"""The files in the directory of a log, by their names:

<base>.log                  a segment that begins at offset `base`
<base>.log.aside            a segment that is being rewritten, not part of the log yet
<first>-<last>.merged       replaces the segments from `first` to `last`
<base>.index                rebuildable, never trusted
<base>.damaged              what is known to be damaged in the segment, in JSON; may be missing, never trusted
<offset>.start              empty: the log begins at this offset
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.errors import LogDamaged
from penstock.log import scan
from penstock.log.files import Files
from penstock.log.open_segments import OpenSegments
from penstock.log.segment import ReadMode, Segment, log_name
from penstock.model.batch import OFFSET_MAX

logger = logging.getLogger(__name__)

ASIDE_SUFFIX: Final = ".aside"
DAMAGED_SUFFIX: Final = ".damaged"
START_SUFFIX: Final = ".start"
_NAME: Final = re.compile(r"([0-9]{20})\.(log|index|log\.aside|damaged|start)")
_MERGED_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.merged")


@dataclass(slots=True)
class LogListing:
    # By ascending offset.
    segments: list[Segment] = field(default_factory=list)
    # The first and the last segment that each merged one replaces.
    merged: list[tuple[int, int]] = field(default_factory=list)
    # The offset of the `.start` file.
    start: int | None = None
    # The names of all other files.
    others: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_log(files: Files, open_segments: OpenSegments, directory: Path, read_mode: ReadMode) -> LogListing:
    found = LogListing()
    for name, size in sorted(files.sizes(directory).items()):
        if match := _MERGED_NAME.fullmatch(name):
            first, last = int(match[1]), int(match[2])
            found.merged.append((first, last))
            found.segments = [segment for segment in found.segments if segment.base != first]
            found.segments.append(Segment(files, open_segments, directory, first, size, read_mode, name))
            continue
        match = _NAME.fullmatch(name)
        base = int(match[1]) if match else 0
        if match is None or base > OFFSET_MAX:
            found.problems.append(f"{directory / name} is not a file of a log: move it elsewhere")
        elif match[2] == "start":
            # The later one, if an old one was put back.
            found.start = max(base, found.start or 0)
            found.others.append(name)
        elif match[2] == "log" and not any(first <= base <= last for first, last in found.merged):
            found.segments.append(Segment(files, open_segments, directory, base, size, read_mode))
        else:
            found.others.append(name)
    return found


def clear_away(files: Files, directory: Path, listing: LogListing) -> None:
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


# The start of the log.


def start_name(start: int) -> str:
    return f"{start:020d}{START_SUFFIX}"


def mark_start(files: Files, directory: Path, before: int | None, start: int) -> None:
    """Mark where a log begins; the directory is not synced. A rename needs no room on the disk."""
    if before is not None and start_name(before) in files.sizes(directory):
        files.rename(directory / start_name(before), directory / start_name(start))
    else:
        files.create(directory / start_name(start)).close()


# Merged segments.


def merged_name(first: int, last: int) -> str:
    return f"{first:020d}-{last:020d}.merged"


def finish_merge(files: Files, directory: Path, first: int, last: int) -> None:
    """Remove the segments that a merged one replaces, and give it the name of the first. Finished steps are skipped."""
    names = files.sizes(directory)
    replaced = [name for name in names if (match := _NAME.fullmatch(name)) and first < int(match[1]) <= last]
    index = log_name(first).replace(".log", ".index")
    for name in [*replaced, index]:
        if name in names:
            files.remove(directory / name)
    # Before it has its name: afterwards nothing would tell that the others must go.
    files.sync_directory(directory)
    merged = merged_name(first, last)
    if merged in names:
        files.rename(directory / merged, directory / log_name(first))
        files.sync_directory(directory)


# Damaged segments.


def damaged_name(base: int) -> str:
    return f"{base:020d}{DAMAGED_SUFFIX}"


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


def noted_damage(files: Files, segment: Segment) -> list[LogDamaged]:
    """Return what was noted of a segment and was not restored since. A note without any is removed."""
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
            if not scan.is_sound_at(segment, int(each["position"]), int(each["first"]))
        ]
        if not damage:
            files.remove(path)
        return damage
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s: cannot be read, readers will find the damage again: %s", path, error)
        return []
