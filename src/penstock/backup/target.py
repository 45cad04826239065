"""Where backups are: a directory, a tar stream, or an object store. One seam for all of them.

    part = target.begin()       bytes go to a file of its own first: `part.path`
    part.write(data) …
    part.commit(name)           from here on the target has it, durably, whole and under this name

What is not committed leaves nothing that has a name of a backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from penstock.backup.manifest import MANIFEST_NAME, SEGMENT_NAME
from penstock.errors import BadBackup
from penstock.storage.files import FILE_MODE, OsFiles

CHUNK_BYTES: Final = 1 << 20
_PARTIAL: Final = "partial"


class Part(Protocol):
    path: Path

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Let what was written be read at `path`."""
        ...

    def commit(self, name: str) -> None: ...

    def close(self) -> None:
        """Let it go, committed or not."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    bytes: int
    # When it was stored, in seconds, by the clock of the target.
    time_s: float


class Target(Protocol):
    def begin(self) -> Part: ...

    def names(self, prefix: str) -> dict[str, Stored]:
        """All that is committed under names that begin with `prefix`, which ends with a slash."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Raises BadBackup if it is not there."""
        ...

    def fetch(self, name: str, path: Path) -> str:
        """Copy to a new file, durably, and return the SHA-256 of what was copied."""
        ...

    def remove(self, names: list[str]) -> None: ...


class DirectoryTarget:
    """Files are private, whatever the umask says."""

    def __init__(self, directory: Path, *, is_temporary: bool = False) -> None:
        """What is fetched from one that is temporary is moved, not copied."""
        self._directory = directory
        self._is_temporary = is_temporary
        self._files = OsFiles()

    def begin(self) -> Part:
        self._files.make_directory(self._directory / _PARTIAL)
        self._clear()
        return _FilePart(self._directory, self._files)

    def names(self, prefix: str) -> dict[str, Stored]:
        found = {}
        for directory, _, names in os.walk(self._directory / prefix):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found[str(path.relative_to(self._directory))] = Stored(status.st_size, status.st_mtime)
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
        """Remove what backups that were killed have left. Those that run have their files locked."""
        for path in (self._directory / _PARTIAL).iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


class _FilePart:
    def __init__(self, directory: Path, files: OsFiles) -> None:
        self._directory = directory
        self._files = files
        self.path = directory / _PARTIAL / secrets.token_hex(8)
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            self._file = os.fdopen(descriptor, "wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Another backup may have taken it for left over before it was locked.
            if self.path.exists():
                break
            self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def commit(self, name: str) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        path = self._directory / name
        self._files.make_directory(path.parent)
        self.path.rename(path)
        self._files.sync_directory(path.parent)

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class SpooledPart:
    """A temporary file, private as those are, that `store` copies to where it belongs."""

    def __init__(self, store: Callable[[str, Path], None]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="penstock-backup-")
        self.path = Path(path)
        self._file = os.fdopen(descriptor, "wb")
        self._store = store

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def commit(self, name: str) -> None:
        self._file.flush()
        self._store(name, self.path)

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class TarTarget:
    """A stream: it can be written once, and holds one backup."""

    def __init__(self, stream: BinaryIO) -> None:
        self._tar = tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `close`

    def begin(self) -> Part:
        return SpooledPart(self._store)

    def names(self, prefix: str) -> dict[str, Stored]:
        return {}

    def read(self, name: str) -> Iterator[bytes]:
        raise BadBackup("a tar stream that is being written cannot be read")

    def fetch(self, name: str, path: Path) -> str:
        raise BadBackup("a tar stream that is being written cannot be read")

    def remove(self, names: list[str]) -> None:
        pass  # it has nothing but this backup

    def close(self) -> None:
        self._tar.close()

    def _store(self, name: str, path: Path) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = path.stat().st_size, FILE_MODE, int(time.time())
        with path.open("rb") as file:
            self._tar.addfile(member, file)


def read_tar(stream: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    """The members of a tar stream that belong to a backup, in order. Raises BadBackup if it ends too early."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and (SEGMENT_NAME.fullmatch(member.name) or MANIFEST_NAME.fullmatch(member.name)):
                    yield member.name, file  # type: ignore[misc] # it reads bytes
    except (tarfile.TarError, EOFError) as error:
        raise BadBackup(f"the tar stream is damaged or cut short: {error}") from error


def unpack(stream: BinaryIO, directory: Path) -> DirectoryTarget:
    """Write the files of a tar stream to a directory, and return that."""
    files = OsFiles()
    for name, file in read_tar(stream):
        path = directory / name
        files.make_directory(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as copied:
            shutil.copyfileobj(file, copied, CHUNK_BYTES)
    return DirectoryTarget(directory, is_temporary=True)


def copy(data: Iterator[bytes], path: Path) -> str:
    """Write a new private file, sync it, and return the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        for chunk in data:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def digest_of(data: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in data:
        digest.update(chunk)
    return digest.hexdigest()


def open_target(place: str) -> Target:
    """Return the target at a path or, where there is a scheme, the URL of an object store."""
    if "://" not in place:
        return DirectoryTarget(Path(place))
    from penstock.backup.objects import ObjectTarget

    return ObjectTarget.open(place)
