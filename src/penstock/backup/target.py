"""Targets of backups: a directory, a tar stream or an object store, behind one interface.

    part = target.begin()       bytes go to a temporary file first: `part.path`
    part.write(data) …
    part.commit(name)           from here on the target has the file, durable and complete, under this name

A part that is not committed leaves no file with the name of a backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Final, Protocol, cast

from penstock.backup.manifest import MANIFEST_NAME, SEGMENT_NAME
from penstock.errors import BadBackup, BadDirectory
from penstock.log.files import FILE_MODE, OsFiles
from penstock.object_store import CHUNK_BYTES, StoredFile
from penstock.store.format import FORMAT_NAME, RESTORING_NAME

_PARTIAL: Final = "partial"
_FILE_SCHEME: Final = "file://"


class BackupPart(Protocol):
    path: Path

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Make the written bytes readable at `path`."""
        ...

    def commit(self, name: str) -> None: ...

    def close(self) -> None:
        """Release the part, committed or not."""
        ...


class Target(Protocol):
    def begin(self) -> BackupPart: ...

    def names(self, prefix: str) -> dict[str, StoredFile]:
        """Return the committed files whose names begin with `prefix`, which ends with a slash."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raise BadBackup if it is missing."""
        ...

    def fetch(self, name: str, path: Path) -> str:
        """Copy to a new durable file, and return the SHA-256 of its bytes."""
        ...

    def remove(self, names: list[str]) -> None: ...


class DirectoryTarget:
    """A directory. Files are private, whatever the umask is."""

    def __init__(self, directory: Path, *, is_temporary: bool = False) -> None:
        """`is_temporary`: `fetch` moves files instead of copying them."""
        self._directory = directory
        self._is_temporary = is_temporary
        self._files = OsFiles()

    def begin(self) -> BackupPart:
        self._files.make_directory(self._directory / _PARTIAL)
        self._clear()
        return _DirectoryPart(self._directory, self._files)

    def names(self, prefix: str) -> dict[str, StoredFile]:
        found = {}
        for directory, _, names in os.walk(self._directory / prefix):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found[str(path.relative_to(self._directory))] = StoredFile(status.st_size, status.st_mtime)
        return found

    def read(self, name: str) -> Iterator[bytes]:
        try:
            file = (self._directory / name).open("rb")
        except FileNotFoundError:
            raise BadBackup(f"{self._directory / name} is missing") from None
        with file:
            while data := file.read(CHUNK_BYTES):
                yield data

    def fetch(self, name: str, path: Path) -> str:
        if not self._is_temporary:
            return copy(self.read(name), path)
        digest = digest_of(self.read(name))
        (self._directory / name).rename(path)
        return digest

    def remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()

    def _clear(self) -> None:
        """Remove the temporary files of killed backups. Running backups have theirs locked."""
        for path in (self._directory / _PARTIAL).iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


class _DirectoryPart:
    def __init__(self, directory: Path, files: OsFiles) -> None:
        self._directory = directory
        self._files = files
        self.path = directory / _PARTIAL / secrets.token_hex(8)
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            self._file = os.fdopen(descriptor, "wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Another backup may have removed the file before it was locked.
            if self.path.exists():
                break
            self._file.close()

    def write(self, data: bytes) -> None:
        with writing(self._directory):
            self._file.write(data)

    def flush(self) -> None:
        with writing(self._directory):
            self._file.flush()

    def commit(self, name: str) -> None:
        path = self._directory / name
        with writing(self._directory):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._files.make_directory(path.parent)
            self.path.rename(path)
            self._files.sync_directory(path.parent)

    def close(self) -> None:
        _discard(self._file, self.path)


class SpooledPart:
    """A private temporary file that `store` copies to its final place."""

    def __init__(self, store: Callable[[str, Path], None]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="penstock-backup-")
        self.path = Path(path)
        self._file = os.fdopen(descriptor, "wb")
        self._store = store

    def write(self, data: bytes) -> None:
        with writing(self.path):
            self._file.write(data)

    def flush(self) -> None:
        with writing(self.path):
            self._file.flush()

    def commit(self, name: str) -> None:
        self.flush()
        self._store(name, self.path)

    def close(self) -> None:
        _discard(self._file, self.path)


class TarTarget:
    """A tar stream: it is written once, and holds one backup."""

    def __init__(self, stream: BinaryIO) -> None:
        self._output = _TarStream(stream)
        output = cast("BinaryIO", self._output)
        self._tar = tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `close`

    def begin(self) -> BackupPart:
        return SpooledPart(self._store)

    def names(self, prefix: str) -> dict[str, StoredFile]:
        return {}

    def read(self, name: str) -> Iterator[bytes]:
        raise BadBackup("a tar stream that is being written cannot be read")

    def fetch(self, name: str, path: Path) -> str:
        raise BadBackup("a tar stream that is being written cannot be read")

    def remove(self, names: list[str]) -> None:
        pass  # a stream has only this backup

    def close(self) -> None:
        self._output.check_open()
        self._tar.close()
        self._output.flush()

    def _store(self, name: str, path: Path) -> None:
        self._output.check_open()
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = path.stat().st_size, FILE_MODE, int(time.time())
        with path.open("rb") as file:
            self._tar.addfile(member, file)


class _TarStream:
    """The stream that a tar is written to, until it fails. An unclosed tar would write its end when it is garbage
    collected, where an error could not be reported."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._has_failed = False

    def write(self, data: bytes) -> int:
        # A stream that its owner has closed is written to only when the tar is garbage collected: see `check_open`.
        if not (self._has_failed or self._stream.closed):
            with self._translated_errors():
                self._stream.write(data)
        return len(data)

    def check_open(self) -> None:
        if self._stream.closed:
            raise BadBackup("the tar stream is closed: the backup is incomplete")

    def flush(self) -> None:
        with self._translated_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._has_failed = True
            raise BadBackup(f"cannot write the tar stream: {error.strerror}: the backup is incomplete") from error


def read_tar(stream: BinaryIO) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the members of a tar stream that belong to a backup, in order, each to be read before the next. Raise
    BadBackup if the stream is damaged or truncated, unless a checksum of the backup can report it better."""
    has_manifest = False
    with _translated_damage():
        tar = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115 - the stream is the caller's
    while True:
        with _translated_damage():
            member = tar.next()
            file = tar.extractfile(member) if member is not None and member.isfile() else None
        if member is None:
            break
        if file is not None and (SEGMENT_NAME.fullmatch(member.name) or MANIFEST_NAME.fullmatch(member.name)):
            has_manifest |= MANIFEST_NAME.fullmatch(member.name) is not None
            yield member.name, _read_member(file)
    # tarfile takes a damaged or truncated header for the end. The manifest is written last.
    if not has_manifest:
        raise BadBackup("the tar stream is damaged or truncated: it has no manifest")


def _read_member(file: IO[bytes]) -> Iterator[bytes]:
    while True:
        with _translated_damage():
            data = file.read(CHUNK_BYTES)
        if not data:
            return
        yield data


@contextlib.contextmanager
def _translated_damage() -> Iterator[None]:
    try:
        yield
    # Numbers and names in extended headers have no checksum, and tarfile does not validate them.
    except (tarfile.TarError, EOFError, ValueError, OverflowError, LookupError) as error:
        raise BadBackup(f"the tar stream is damaged or truncated: {error}") from error


def unpack(stream: BinaryIO, directory: Path) -> DirectoryTarget:
    """Write the files of a tar stream to a directory, and return it as a target."""
    files = OsFiles()
    for name, data in read_tar(stream):
        path = directory / name
        files.make_directory(path.parent)
        path.unlink(missing_ok=True)
        copy(data, path)
    return DirectoryTarget(directory, is_temporary=True)


def copy(data: Iterator[bytes], path: Path) -> str:
    """Write a new private file, sync it, and return the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    # Unbuffered: nothing is left to write when it is closed after an error.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb", 0) as file:
        for chunk in data:
            digest.update(chunk)
            with writing(path):
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]
        with writing(path):
            os.fsync(file.fileno())
    return digest.hexdigest()


def digest_of(data: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in data:
        digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path to errors: those of an open file have none."""
    try:
        yield
    except OSError as error:
        raise BadDirectory(f"cannot write {error.filename or path}: {error.strerror}") from error


def _discard(file: BinaryIO, path: Path) -> None:
    # Closing retries a failed write, which was already reported.
    with contextlib.suppress(OSError):
        file.close()
    path.unlink(missing_ok=True)


def open_target(place: str, *, is_new: bool = False) -> Target:
    """Return the target at a path or, with a scheme, the URL of an object store. `is_new`: the directory may
    not exist, and is created by the first write."""
    if not place:
        raise BadDirectory("the target is empty: give a directory or the URL of an object store")
    if "://" not in place or place.startswith(_FILE_SCHEME):
        _check_directory(Path(place.removeprefix(_FILE_SCHEME)), is_new=is_new)
    if "://" not in place:
        return DirectoryTarget(Path(place))
    from penstock.backup.objects import ObjectTarget

    return ObjectTarget.open(place)


def _check_directory(path: Path, *, is_new: bool) -> None:
    whole = path.resolve()
    for each in (whole, *whole.parents):
        if _is_data_directory(each):
            where = f"{path} is" if each == whole else f"{path} is inside {each},"
            raise BadDirectory(f"{where} the data directory of a broker: choose another directory")
    if path.exists() and not path.is_dir():
        raise BadDirectory(f"{path} is not a directory: to read a tar file, use - and stdin")
    if not is_new and not path.exists():
        raise BadDirectory(f"{path} does not exist")


def _is_data_directory(path: Path) -> bool:
    has_format, is_restoring, has_lock, has_topics = (
        (path / name).exists() for name in (FORMAT_NAME, RESTORING_NAME, "LOCK", "topics")
    )
    return has_format or is_restoring or (has_lock and has_topics)
