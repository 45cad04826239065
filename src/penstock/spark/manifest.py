"""The manifest of an archive: its files, the batch of each, and the offsets that they hold.

    <archive>/_manifest/lock                                   in a directory: held while a batch is committed
                        archive.json                           in an object store: says that there is an archive
                        00000000000000000107.json              an entry: one committed batch and its files
                        00000000000000000099.checkpoint.json   the sum of the entries up to this one, without the files
                        00000000000000000099.files.json        a piece: the files of the entries folded here

A data file that no entry names is not in the archive. An entry is created under the next number, which succeeds only
once per number, so a batch is added atomically. A writer whose number is taken looks again, and tries the next one.
Every hundred entries are folded, so that a commit reads at most a hundred small files, however old the archive is.
Folded entries are removed one fold later.

An archive holds one range of offsets per topic partition, which grows at its end. Offsets within it may have no row:
compaction and filters leave such holes. A single query leaves no other holes, so its batches may begin beyond the end.
Another writer that begins there would skip messages, and must set an option to confirm that.

Compaction adds an entry that names a new file and the small files that it replaces, so readers see one or the other.
The replaced files stay for readers that have planned with them; the checkpoint remembers when they were replaced. Such
entries have version 2: an older Penstock would read the rows twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeVar

from penstock.errors import BadDirectory, DiskError
from penstock.spark.archive_place import ArchivePlace

VERSION: Final = 1
REPLACING_VERSION: Final = 2
FOLD_EVERY: Final = 100
DIRECTORY: Final = "_manifest"
# The prefix of writers that are used once. They are forgotten when their entry is folded.
ONCE: Final = "once:"
# How long the manifest remembers a replaced file.
REPLACED_S: Final = 7 * 24 * 3600
# How often a reader tries again when entries disappear because they are being folded.
_LOOKS_MAX: Final = 10

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """Rows of one topic partition, ascending by offset. `path` is relative to the archive; timestamps are µs."""

    path: str
    topic: str
    partition: int
    rows: int
    bytes: int
    first: int
    last: int
    first_timestamp: int
    last_timestamp: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch with its number, which ascends for each writer; or, with `replaced`, a compaction."""

    writer: str
    batch: int
    columns: tuple[str, ...]
    files: tuple[ArchivedFile, ...]
    # The paths that the files replace, and when, in seconds.
    replaced: tuple[str, ...] = ()
    time_s: int = 0

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the first offset and the end of each topic partition."""
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for file in self.files:
            first, end = found.get((file.topic, file.partition), (file.first, file.last + 1))
            found[file.topic, file.partition] = min(first, file.first), max(end, file.last + 1)
        return found


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """The offsets of a topic partition, excluding the end, and its last writer."""

    first: int
    end: int
    writer: str


@dataclass(slots=True)
class ManifestState:
    """The sum of the entries up to `number`. `recent` are the files that are in no piece yet.

    `replaced` are files that pieces and `recent` may still list, and when they were replaced.
    """

    number: int = -1
    checkpoint: int = -1
    columns: tuple[str, ...] = ()
    ranges: dict[tuple[str, int], ArchivedRange] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    pieces: list[int] = field(default_factory=list)
    recent: list[ArchivedFile] = field(default_factory=list)
    replaced: dict[str, int] = field(default_factory=dict)
    # Whether files were replaced after the checkpoint.
    is_rewritten: bool = False

    def holds(self, entry: Entry) -> bool:
        return entry.batch <= self.writers.get(entry.writer, -1)

    def apply(self, entry: Entry) -> None:
        self.number += 1
        self.columns = entry.columns
        self.writers[entry.writer] = entry.batch
        self.recent.extend(entry.files)
        if entry.replaced:
            self.replaced |= dict.fromkeys(entry.replaced, entry.time_s)
            self.is_rewritten = True
            return
        for place, (first, end) in entry.spans().items():
            known = self.ranges.get(place)
            self.ranges[place] = ArchivedRange(first if known is None else known.first, end, entry.writer)


class ArchiveManifest:
    """The manifest of the archive at a place. Any number may read and commit at the same time."""

    def __init__(self, place: ArchivePlace, *, fold_every: int = FOLD_EVERY) -> None:
        self._place = place
        self._fold_every = fold_every
        self._state = ManifestState()
        self._pieces: dict[int, list[ArchivedFile]] = {}

    def create(self) -> None:
        """Create an empty manifest if there is none."""
        self._place.make(DIRECTORY)

    def state(self) -> ManifestState:
        """Return the current state."""
        return self._retrying(self._refresh)

    def ranges(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the first offset and the end of each topic partition."""
        return {place: (known.first, known.end) for place, known in self.state().ranges.items()}

    def files(self) -> list[ArchivedFile]:
        """Return every file in the archive, in the order of commits and compactions."""
        return self._retrying(self._all_files)

    def commit(self, entry: Entry, *, gaps: bool = False) -> bool:
        """Add a batch; return False if it was added before. Raise ValueError if it does not continue the archive."""
        with self._place.locked(DIRECTORY):
            while True:
                state = self.state()
                if state.holds(entry):
                    check_replay(self._place, entry, state.ranges)
                    # The writer that created it may have been killed before the sync.
                    self._place.sync([_name(state.number, "json")])
                    return False
                check(self._place, entry, state, gaps=gaps)
                if self._append(entry, state.number + 1):
                    return True

    def replace(self, entry: Entry) -> bool:
        """Add a compaction; return False if another one has replaced some of its files."""
        with self._place.locked(DIRECTORY):
            while True:
                number = self.state().number + 1
                if not self.unnamed(file.path for file in entry.files):
                    return True  # added before: an object store repeats a request whose reply was lost
                if self.unnamed(entry.replaced):
                    return False
                if self._append(entry, number):
                    return True

    def unnamed(self, paths: Iterable[str]) -> list[str]:
        """Return those of the files that no entry names."""
        named = {file.path for file in self.files()}
        return [path for path in paths if path not in named]

    def unneeded(self, paths: Iterable[str], before: float) -> list[str]:
        """Return those of the files that no entry names, and that were not replaced after `before`, in seconds."""
        unnamed = self.unnamed(paths)
        replaced = self.state().replaced
        return [path for path in unnamed if replaced.get(path, 0) <= before]

    def _append(self, entry: Entry, number: int) -> bool:
        """Add an entry under a number; return False if another writer took it."""
        try:
            self._put(_name(number, "json"), _entry_json(number, entry))
        except FileExistsError as error:
            if self.state().number < number:
                raise BadDirectory(f"{error.filename} exists, but is not listed: start the query again") from error
            return False
        state = self.state()
        # Others may have folded while this writer was paused. If they removed the entry that had this number, creating
        # it once more succeeded, but nobody reads it.
        if not state.holds(entry) and self.unnamed(file.path for file in entry.files):
            return False
        if state.number - state.checkpoint >= self._fold_every:
            self._fold(state)
        return True

    def _retrying(self, look: Callable[[], _Found]) -> _Found:
        for _ in range(_LOOKS_MAX):
            try:
                return look()
            except FileNotFoundError as error:
                missing = error
                self._state = ManifestState()
        if DIRECTORY not in self._place.top_names():
            raise BadDirectory(f"{self._place} is not an archive: it has no {DIRECTORY}") from missing
        raise BadDirectory(
            f"{missing.filename} of the archive is missing: restore it, or start a new archive elsewhere"
        )

    def _refresh(self) -> ManifestState:
        entries, checkpoints = _numbers(self._place.names(DIRECTORY))
        checkpoint, last = max(checkpoints, default=-1), max(entries | checkpoints, default=-1)
        if checkpoint > self._state.checkpoint:
            self._state = _checkpoint_state(checkpoint, self._read(_name(checkpoint, "checkpoint.json")))
        for number in range(self._state.number + 1, last + 1):
            self._state.apply(_entry(self._read(_name(number, "json"))))
        return self._state

    def _all_files(self) -> list[ArchivedFile]:
        state = self._refresh()
        found = [file for piece in state.pieces for file in self._piece(piece)] + state.recent
        return [file for file in found if file.path not in state.replaced]

    def _piece(self, number: int) -> list[ArchivedFile]:
        if number not in self._pieces:
            self._pieces[number] = [_file(file) for file in self._read(_name(number, "files.json"))["files"]]
        return self._pieces[number]

    def _fold(self, state: ManifestState) -> None:
        """Fold the entries. A failure is only logged: the batch is committed, and a later fold does it."""
        previous, number = state.checkpoint, state.number
        try:
            # Pieces that list replaced files become part of the new one.
            changed = [piece for piece in state.pieces if state.is_rewritten and self._lists_replaced(piece, state)]
            files = [file for piece in changed for file in self._piece(piece)] + state.recent
            pieces = [*(piece for piece in state.pieces if piece not in changed), number]
            kept = [asdict(file) for file in files if file.path not in state.replaced]
            self._put(_name(number, "files.json"), {"files": kept})
            self._put(_name(number, "checkpoint.json"), _checkpoint_json(state, pieces))
            self._remove_folded(previous, number, pieces)
        except (OSError, DiskError) as error:
            _log.warning("%s: the manifest could not be folded: %s", self._place, error)

    def _lists_replaced(self, piece: int, state: ManifestState) -> bool:
        return any(file.path in state.replaced for file in self._piece(piece))

    def _remove_folded(self, previous: int, number: int, pieces: Sequence[int]) -> None:
        """Remove the entries of the last fold. Those of this one stay for readers that are about to open them."""
        for name in self._place.names(DIRECTORY):
            stem, _, kind = name.partition(".")
            if not stem.isdecimal():
                gone = name.startswith(".")  # left by a killed writer: in a directory we hold the lock
            elif kind == "files.json":
                gone = int(stem) < number and int(stem) not in pieces  # of an interrupted fold
            else:
                gone = int(stem) < previous or (kind == "json" and int(stem) == previous)
            if gone:
                self._place.remove([f"{DIRECTORY}/{name}"])

    def _put(self, name: str, content: dict[str, Any]) -> None:
        """Write a file durably under a new name."""
        version = REPLACING_VERSION if content.get("replaced") else VERSION
        self._place.create(name, json.dumps({"version": version} | content, separators=(",", ":")).encode())

    def _read(self, name: str) -> dict[str, Any]:
        content = self._place.read(name)
        try:
            read: dict[str, Any] = json.loads(content)
            version = read["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise BadDirectory(
                f"{self._place.location(name)} is damaged: restore it, or start a new archive elsewhere"
            ) from error
        if version not in (VERSION, REPLACING_VERSION):
            raise BadDirectory(
                f"{self._place.location(name)} has unknown version {version}, this Penstock reads up to"
                f" {REPLACING_VERSION}: install a newer one"
            )
        return read


def _name(number: int, kind: str) -> str:
    return f"{DIRECTORY}/{number:020d}.{kind}"


def check(root: object, entry: Entry, state: ManifestState, *, gaps: bool) -> None:
    """Raise ValueError if a batch does not continue the archive, or has other columns."""
    if state.columns and entry.columns != state.columns:
        raise ValueError(
            f"the archive {root} has the columns {', '.join(state.columns)}, but this write has"
            f" {', '.join(entry.columns)}: write the same, or to another directory"
        )
    ends = {place: known.end for place, known in state.ranges.items()}
    for (topic, partition), (first, _) in entry.spans().items():
        known = state.ranges.get((topic, partition))
        if known is None:
            continue
        refuse_overlap(root, (topic, partition), first, ends)
        if known.writer != entry.writer and not gaps:
            refuse_gap(root, (topic, partition), first, ends)


def check_replay(root: object, entry: Entry, ranges: Mapping[tuple[str, int], ArchivedRange]) -> None:
    """Raise ValueError if a batch that was archived before has other rows now: they would be dropped silently."""
    for (topic, partition), (first, end) in entry.spans().items():
        known = ranges.get((topic, partition))
        if known is None or first < known.first or end > known.end:
            raise ValueError(
                f"batch {entry.batch} of {entry.writer} was archived in {root} before, but now has other rows"
                f" ({topic} partition {partition}, offsets {first} to {end - 1}): has its checkpoint been changed?"
                " Start over with a new checkpoint where the archive ends, or with a new txnId"
            )


def refuse_overlap(root: object, place: tuple[str, int], first: int, ends: Mapping[tuple[str, int], int]) -> None:
    if first < ends[place]:
        raise ValueError(
            f"the archive {root} holds {place[0]} partition {place[1]} up to offset {ends[place] - 1}, but this write"
            f" begins at {first}: continue with startingOffsets {starting_offsets(ends)}, or write to another directory"
        )


def refuse_gap(root: object, place: tuple[str, int], first: int, ends: Mapping[tuple[str, int], int]) -> None:
    if first > ends[place]:
        raise ValueError(
            f"the archive {root} holds {place[0]} partition {place[1]} up to offset {ends[place] - 1}, but this write"
            f" begins at {first}: continue with startingOffsets {starting_offsets(ends)}, or, to skip the messages in"
            " between, set archiveGaps=true"
        )


def starting_offsets(ends: Mapping[tuple[str, int], int]) -> str:
    """Return the end of each partition as the option startingOffsets of the source."""
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), end in sorted(ends.items()):
        topics.setdefault(topic, {})[str(partition)] = end
    return json.dumps(topics, separators=(",", ":"))


def _numbers(names: Iterable[str]) -> tuple[set[int], set[int]]:
    """Return the numbers of the entries and of the checkpoints."""
    entries, checkpoints = set(), set()
    for name in names:
        stem, _, kind = name.partition(".")
        if kind == "json" and stem.isdecimal():
            entries.add(int(stem))
        elif kind == "checkpoint.json" and stem.isdecimal():
            checkpoints.add(int(stem))
    return entries, checkpoints


def _entry_json(number: int, entry: Entry) -> dict[str, Any]:
    return {
        "number": number,
        "writer": entry.writer,
        "batch": entry.batch,
        "columns": entry.columns,
        "ranges": _ranges_json((place, first, end, entry.writer) for place, (first, end) in entry.spans().items()),
        "files": [asdict(file) for file in entry.files],
    } | ({"replaced": entry.replaced, "time_s": entry.time_s} if entry.replaced else {})


def _entry(read: dict[str, Any]) -> Entry:
    files = tuple(_file(file) for file in read["files"])
    replaced = tuple(read.get("replaced", ()))
    return Entry(read["writer"], read["batch"], tuple(read["columns"]), files, replaced, read.get("time_s", 0))


def _checkpoint_json(state: ManifestState, pieces: Sequence[int]) -> dict[str, Any]:
    newest = max(state.replaced.values(), default=0)
    replaced = {path: time_s for path, time_s in state.replaced.items() if time_s > newest - REPLACED_S}
    return {
        "number": state.number,
        "columns": state.columns,
        "ranges": _ranges_json((place, known.first, known.end, known.writer) for place, known in state.ranges.items()),
        "writers": {writer: batch for writer, batch in state.writers.items() if not writer.startswith(ONCE)},
        "pieces": list(pieces),
    } | ({"replaced": replaced} if replaced else {})


def _checkpoint_state(number: int, read: dict[str, Any]) -> ManifestState:
    ranges = {(r["topic"], r["partition"]): ArchivedRange(r["first"], r["end"], r["writer"]) for r in read["ranges"]}
    return ManifestState(
        number=number,
        checkpoint=number,
        columns=tuple(read["columns"]),
        ranges=ranges,
        writers=dict(read["writers"]),
        pieces=list(read["pieces"]),
        replaced=dict(read.get("replaced", {})),
    )


def _ranges_json(ranges: Iterable[tuple[tuple[str, int], int, int, str]]) -> list[dict[str, Any]]:
    return [
        {"topic": topic, "partition": partition, "first": first, "end": end, "writer": writer}
        for (topic, partition), first, end, writer in sorted(ranges)
    ]


_FILE_FIELDS: Final = [f.name for f in fields(ArchivedFile)]


def _file(read: dict[str, Any]) -> ArchivedFile:
    return ArchivedFile(*(read[name] for name in _FILE_FIELDS))
