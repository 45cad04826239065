"""The manifest of an archive: which files are in it, of which batch each is, and which offsets they hold.

    <root>/_manifest/lock                                   held while a batch is committed
                     00000000000000000107.json              an entry: one committed batch and its files
                     00000000000000000099.checkpoint.json   what the entries up to this one come to, without the files
                     00000000000000000099.files.json        a piece: the files of the entries that were folded here

A data file that no entry names is not in the archive. An entry is written aside, synced and linked to its number, which
can be done once for each number: so a batch is in the archive whole or not at all. Every hundred entries are folded, so
that a commit reads a hundred small files at the most, however old the archive is; they are removed one fold later.

Of each topic partition an archive holds one range of offsets, which grows at its end. Within it an offset may have no
row: compaction and filters leave such holes. One query leaves no others, so its batches may begin beyond the end;
another writer that begins there would leave out what lies between, and must say that this is meant.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.errors import BadDirectory
from penstock.spark.durable_files import sync_directory

VERSION: Final = 1
FOLD_EVERY: Final = 100
DIRECTORY: Final = "_manifest"
# A writer that nobody can name again needs not be remembered when its entry is folded.
ONCE: Final = "once:"
# A reader that lists the directory while entries are folded finds some of them gone, and looks again.
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
    """A batch: number `batch` of `writer`, whose batches have ascending numbers."""

    writer: str
    batch: int
    columns: tuple[str, ...]
    files: tuple[ArchivedFile, ...]

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Of each topic partition the first offset and the end."""
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for file in self.files:
            first, end = found.get((file.topic, file.partition), (file.first, file.last + 1))
            found[file.topic, file.partition] = min(first, file.first), max(end, file.last + 1)
        return found


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """The offsets of a topic partition, the end not included, and who wrote last."""

    first: int
    end: int
    writer: str


@dataclass(slots=True)
class State:
    """What the entries up to `number` come to. `recent`: the files that are in no piece yet."""

    number: int = -1
    checkpoint: int = -1
    columns: tuple[str, ...] = ()
    ranges: dict[tuple[str, int], ArchivedRange] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    pieces: list[int] = field(default_factory=list)
    recent: list[ArchivedFile] = field(default_factory=list)

    def holds(self, entry: Entry) -> bool:
        return entry.batch <= self.writers.get(entry.writer, -1)

    def apply(self, entry: Entry) -> None:
        self.number += 1
        self.columns = entry.columns
        self.writers[entry.writer] = entry.batch
        self.recent.extend(entry.files)
        for place, (first, end) in entry.spans().items():
            known = self.ranges.get(place)
            self.ranges[place] = ArchivedRange(first if known is None else known.first, end, entry.writer)


class Manifest:
    """The manifest of the archive at `root`. Many may read while one commits; commits wait for each other."""

    def __init__(self, root: Path, *, fold_every: int = FOLD_EVERY) -> None:
        self.root = root
        self.directory = root / DIRECTORY
        self._fold_every = fold_every
        self._state = State()
        self._pieces: dict[int, list[ArchivedFile]] = {}

    def create(self) -> None:
        """Make an empty one where there is none."""
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            for parent in (self.directory, self.root, self.root.parent):
                sync_directory(parent)

    def state(self) -> State:
        """As of now."""
        return self._looking(self._refresh)

    def ranges(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Of each topic partition the first offset and the end."""
        return {place: (known.first, known.end) for place, known in self.state().ranges.items()}

    def files(self) -> list[ArchivedFile]:
        """Every file that is in the archive, in the order of the commits."""
        return self._looking(self._all_files)

    def commit(self, entry: Entry, *, gaps: bool = False) -> bool:
        """Add a batch; False if it is there already. ValueError if it does not go on where the archive ends."""
        with self._locked():
            state = self.state()
            if state.holds(entry):
                check_replay(self.root, entry, state.ranges)
                # Whoever linked it may have been stopped before this.
                sync_directory(self.directory)
                return False
            check(self.root, entry, state, gaps=gaps)
            self._put(f"{state.number + 1:020d}.json", _entry_json(state.number + 1, entry))
            state = self.state()
            if state.number - state.checkpoint >= self._fold_every:
                self._fold(state)
        return True

    def unnamed(self, paths: Iterable[str]) -> list[str]:
        """Those of the files that no entry names, as of now."""
        named = {file.path for file in self.files()}
        return [path for path in paths if path not in named]

    def _looking(self, look: Callable[[], _Found]) -> _Found:
        for _ in range(_LOOKS_MAX):
            try:
                return look()
            except FileNotFoundError as error:
                missing = error
                self._state = State()
        if not self.directory.is_dir():
            raise BadDirectory(f"{self.root} is no archive: it has no {DIRECTORY}") from missing
        raise BadDirectory(f"{missing.filename} of the archive is missing; restore it, or archive anew elsewhere")

    def _refresh(self) -> State:
        entries, checkpoints = _numbers(os.listdir(self.directory))
        checkpoint, last = max(checkpoints, default=-1), max(entries | checkpoints, default=-1)
        if checkpoint > self._state.checkpoint:
            self._state = _checkpoint_state(checkpoint, self._read(f"{checkpoint:020d}.checkpoint.json"))
        for number in range(self._state.number + 1, last + 1):
            self._state.apply(_entry(self._read(f"{number:020d}.json")))
        return self._state

    def _all_files(self) -> list[ArchivedFile]:
        state = self._refresh()
        found: list[ArchivedFile] = []
        for piece in state.pieces:
            if piece not in self._pieces:
                self._pieces[piece] = [_file(file) for file in self._read(f"{piece:020d}.files.json")["files"]]
            found += self._pieces[piece]
        return found + state.recent

    def _fold(self, state: State) -> None:
        """The batch is committed already: what fails here is done by a later fold."""
        previous, number = state.checkpoint, state.number
        pieces = [*state.pieces, number]
        try:
            self._put(f"{number:020d}.files.json", {"files": [asdict(file) for file in state.recent]})
            self._put(f"{number:020d}.checkpoint.json", _checkpoint_json(state, pieces))
            self._remove_folded(previous, number, pieces)
        except OSError as error:
            _log.warning("%s: the manifest could not be folded: %s", self.root, error)

    def _remove_folded(self, previous: int, number: int, pieces: Sequence[int]) -> None:
        """Entries stay until the fold after theirs, for readers that are about to open them."""
        for name in os.listdir(self.directory):
            stem, _, kind = name.partition(".")
            if not stem.isdecimal():
                gone = name.startswith(".")  # written aside by someone who was stopped: we hold the lock
            elif kind == "files.json":
                gone = int(stem) < number and int(stem) not in pieces  # of a fold that was interrupted
            else:
                gone = int(stem) < previous or (kind == "json" and int(stem) == previous)
            if gone:
                os.unlink(self.directory / name)

    def _put(self, name: str, content: dict[str, Any]) -> None:
        """Durably, under a name that nobody has taken."""
        aside, path = self.directory / f".{uuid.uuid4().hex}", self.directory / name
        try:
            with open(aside, "xb") as file:
                file.write(json.dumps({"version": VERSION} | content, separators=(",", ":")).encode())
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)
        except FileExistsError as error:
            raise BadDirectory(f"{path}: another writer took this number; start the query again") from error
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise BadDirectory(f"{self.root}: an archive needs a file system with hard links") from error
            raise
        finally:
            aside.unlink(missing_ok=True)
        sync_directory(self.directory)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        content = path.read_bytes()
        try:
            read: dict[str, Any] = json.loads(content)
            version = read["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise BadDirectory(f"{path} is damaged; restore it, or archive anew elsewhere") from error
        if version != VERSION:
            raise BadDirectory(f"{path} has version {version}, and this Penstock knows {VERSION}: install a newer one")
        return read

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except FileNotFoundError as error:
            raise BadDirectory(f"{self.root} is no archive: it has no {DIRECTORY}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def check(root: Path, entry: Entry, state: State, *, gaps: bool) -> None:
    """That a batch goes on where the archive ends, with the same columns."""
    if state.columns and entry.columns != state.columns:
        raise ValueError(
            f"the archive {root} has the columns {', '.join(state.columns)}, and this write {', '.join(entry.columns)}:"
            " write the same, or to another directory"
        )
    ends = {place: known.end for place, known in state.ranges.items()}
    for (topic, partition), (first, _) in entry.spans().items():
        known = state.ranges.get((topic, partition))
        if known is None:
            continue
        refuse_overlap(root, (topic, partition), first, ends)
        if known.writer != entry.writer and not gaps:
            refuse_gap(root, (topic, partition), first, ends)


def check_replay(root: Path, entry: Entry, ranges: Mapping[tuple[str, int], ArchivedRange]) -> None:
    """That a batch which was archived before still has the rows of then: other rows would be lost without a word."""
    for (topic, partition), (first, end) in entry.spans().items():
        known = ranges.get((topic, partition))
        if known is None or first < known.first or end > known.end:
            raise ValueError(
                f"batch {entry.batch} of {entry.writer} was archived in {root} before, and now has other rows"
                f" ({topic} partition {partition}, offsets {first} to {end - 1}): has its checkpoint been changed?"
                " Start with a new checkpoint where the archive ends, or with a new txnId"
            )


def refuse_overlap(root: Path, place: tuple[str, int], first: int, ends: Mapping[tuple[str, int], int]) -> None:
    if first < ends[place]:
        raise ValueError(
            f"the archive {root} holds {place[0]} partition {place[1]} up to offset {ends[place] - 1}, and this write"
            f" begins at {first}: go on with startingOffsets {starting_offsets(ends)}, or write to another directory"
        )


def refuse_gap(root: Path, place: tuple[str, int], first: int, ends: Mapping[tuple[str, int], int]) -> None:
    if first > ends[place]:
        raise ValueError(
            f"the archive {root} holds {place[0]} partition {place[1]} up to offset {ends[place] - 1}, and this write"
            f" begins at {first}: go on with startingOffsets {starting_offsets(ends)}, or, if there is nothing between"
            " or it shall be left out, give the option archiveGaps=true"
        )


def starting_offsets(ends: Mapping[tuple[str, int], int]) -> str:
    """Where each partition ends, as the source takes it."""
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), end in sorted(ends.items()):
        topics.setdefault(topic, {})[str(partition)] = end
    return json.dumps(topics, separators=(",", ":"))


def _numbers(names: Iterable[str]) -> tuple[set[int], set[int]]:
    """Of the entries and of the checkpoints."""
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
    }


def _entry(read: dict[str, Any]) -> Entry:
    return Entry(read["writer"], read["batch"], tuple(read["columns"]), tuple(_file(file) for file in read["files"]))


def _checkpoint_json(state: State, pieces: Sequence[int]) -> dict[str, Any]:
    return {
        "number": state.number,
        "columns": state.columns,
        "ranges": _ranges_json((place, known.first, known.end, known.writer) for place, known in state.ranges.items()),
        "writers": {writer: batch for writer, batch in state.writers.items() if not writer.startswith(ONCE)},
        "pieces": list(pieces),
    }


def _checkpoint_state(number: int, read: dict[str, Any]) -> State:
    ranges = {(r["topic"], r["partition"]): ArchivedRange(r["first"], r["end"], r["writer"]) for r in read["ranges"]}
    return State(number, number, tuple(read["columns"]), ranges, dict(read["writers"]), list(read["pieces"]))


def _ranges_json(ranges: Iterable[tuple[tuple[str, int], int, int, str]]) -> list[dict[str, Any]]:
    return [
        {"topic": topic, "partition": partition, "first": first, "end": end, "writer": writer}
        for (topic, partition), first, end, writer in sorted(ranges)
    ]


_FILE_FIELDS: Final = [f.name for f in fields(ArchivedFile)]


def _file(read: dict[str, Any]) -> ArchivedFile:
    return ArchivedFile(*(read[name] for name in _FILE_FIELDS))
