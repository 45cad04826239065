"""Where an archive is: a directory that the driver and the executors share, or an object store.

Names are relative to the archive, with slashes. Both places create a name at most once, which decides between writers.
A directory also has a lock, so that writers wait for each other instead of trying again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Protocol

import pyarrow

from penstock.errors import BadDirectory, DiskError
from penstock.object_store import ObjectStore
from penstock.spark.durable_files import sync_directory

_FILE_SCHEME: Final = "file://"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# An object in the manifest of an object store, so that an empty archive exists.
_MARK: Final = "archive.json"


class NewFile(Protocol):
    """A file that is being written to `stream`. It is in the archive's place, whole and durable, once it is stored."""

    stream: IO[bytes]

    def store(self) -> int:
        """Return the number of bytes."""
        ...

    def abandon(self) -> None: ...


class ArchivePlace(Protocol):
    def exists(self) -> bool:
        """Return whether this process can see the place."""
        ...

    def top_names(self) -> list[str]:
        """Return the names of the files and directories at the top."""
        ...

    def make(self, directory: str) -> None:
        """Make the place and a directory in it, if they are missing."""
        ...

    def locked(self, directory: str) -> AbstractContextManager[None]:
        """Keep other writers waiting, where the place can do that."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, relative to it. Raise FileNotFoundError if there is no such directory."""
        ...

    def read(self, name: str) -> bytes:
        """Raise FileNotFoundError if it is missing."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write a file durably. Raise FileExistsError if the name is taken."""
        ...

    def remove(self, names: Iterable[str]) -> None: ...

    def begin(self, name: str) -> NewFile: ...

    def sync(self, names: Sequence[str]) -> None:
        """Make the names of stored files durable."""
        ...

    def size(self, name: str) -> int:
        """Raise FileNotFoundError if it is missing."""
        ...

    def open(self, name: str, size: int) -> Any:
        """Open a file of this size for reading, as a binary file. Raise FileNotFoundError if it is missing."""
        ...

    def parquet_files(self, before: float) -> list[str]:
        """Return the names of all data files that were last changed before a time in seconds."""
        ...

    def location(self, name: str) -> str:
        """Return the path or URL by which other programs open a file."""
        ...


def open_place(place: str) -> ArchivePlace:
    """Return the directory at a path or file URL, or the object store at another URL."""
    if place.startswith(_FILE_SCHEME):
        return DirectoryPlace(Path(os.path.abspath(place.removeprefix(_FILE_SCHEME))))
    if "://" in place:
        return ObjectPlace(ObjectStore.open(place, BadDirectory))
    if _SCHEME.match(place):
        raise ValueError(f"invalid archive {place!r}: use a directory, or s3://BUCKET/PATH, gs://… or az://…")
    return DirectoryPlace(Path(os.path.abspath(place)))


class DirectoryPlace:
    """A directory: local, or mounted by the driver and all executors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def top_names(self) -> list[str]:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"invalid archive {self.path}: it is a file, not a directory")
        return os.listdir(self.path) if self.path.is_dir() else []

    def make(self, directory: str) -> None:
        made = self.path / directory
        if not made.is_dir():
            made.mkdir(parents=True, exist_ok=True)
            for each in (made, self.path, self.path.parent):
                sync_directory(each)

    @contextmanager
    def locked(self, directory: str) -> Iterator[None]:
        try:
            descriptor = os.open(self.path / directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except FileNotFoundError as error:
            raise BadDirectory(f"{self} is not an archive: it has no {directory}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def names(self, directory: str) -> list[str]:
        return os.listdir(self.path / directory)

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        aside = path.with_name(f".{uuid.uuid4().hex}")
        try:
            with open(aside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise BadDirectory(f"{self.path}: an archive needs a file system with hard links") from error
            raise
        finally:
            aside.unlink(missing_ok=True)
        sync_directory(path.parent)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def begin(self, name: str) -> NewFile:
        return _DirectoryFile(self._path(name))

    def sync(self, names: Sequence[str]) -> None:
        # Another task may have created a parent directory and not synced it yet, so all of them are synced.
        directories = {parent for name in names for parent in PurePosixPath(name).parents}
        for directory in sorted(directories, reverse=True):
            sync_directory(self.path / directory)

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def open(self, name: str, size: int) -> Any:
        return pyarrow.OSFile(str(self._path(name)))

    def parquet_files(self, before: float) -> list[str]:
        return [
            path.relative_to(self.path).as_posix()
            for path in sorted((self.path / "data").rglob("*.parquet"))
            if path.stat().st_mtime <= before
        ]

    def location(self, name: str) -> str:
        return str(self._path(name))

    def _path(self, name: str) -> Path:
        return self.path.joinpath(*PurePosixPath(name).parts)


class _DirectoryFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stream: IO[bytes] = open(path, "xb")  # noqa: SIM115 - closed by store() or abandon()

    def store(self) -> int:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        size = self.stream.tell()
        self.stream.close()
        return size

    def abandon(self) -> None:
        self.stream.close()
        self._path.unlink(missing_ok=True)


class ObjectPlace:
    """A prefix in an object store that creates objects only if they do not exist."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return self._store.url

    def exists(self) -> bool:
        return True

    def top_names(self) -> list[str]:
        return self._store.top_names()

    def make(self, directory: str) -> None:
        """Create a mark, twice: a store that ignores the condition would let two writers commit the same entry."""
        mark = f"{directory}/{_MARK}"
        with contextlib.suppress(FileExistsError):
            self._store.create(mark, b"{}")
            self._store.create(mark, b"{}")
            raise BadDirectory(
                f"{self}: this object store replaces objects that exist, also if it is asked not to: use another one"
            )

    def locked(self, directory: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def names(self, directory: str) -> list[str]:
        found = [name.removeprefix(f"{directory}/") for name in self._store.names(f"{directory}/")]
        if not found:
            raise FileNotFoundError(errno.ENOENT, "missing", self._store.url_of(directory))
        return found

    def read(self, name: str) -> bytes:
        return b"".join(self._store.read(name))

    def create(self, name: str, data: bytes) -> None:
        self._store.create(name, data)

    def remove(self, names: Iterable[str]) -> None:
        self._store.remove(list(names))

    def begin(self, name: str) -> NewFile:
        return _SpooledFile(self._store, name)

    def sync(self, names: Sequence[str]) -> None:
        pass  # an object is durable when it is stored

    def size(self, name: str) -> int:
        return self._store.size(name)

    def open(self, name: str, size: int) -> Any:
        return _ObjectReader(self._store, name, size)

    def parquet_files(self, before: float) -> list[str]:
        found = self._store.names("data/").items()
        return sorted(name for name, file in found if name.endswith(".parquet") and file.time_s <= before)

    def location(self, name: str) -> str:
        return self._store.url_of(name)


class _SpooledFile:
    """A temporary file that is uploaded when it is complete, so that a failed task leaves no part of an object."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        descriptor, path = tempfile.mkstemp(prefix="penstock-archive-")
        self._path = Path(path)
        self._is_stored = False
        self.stream: IO[bytes] = os.fdopen(descriptor, "wb")

    def store(self) -> int:
        size = self.stream.tell()
        self.stream.close()
        self._store.put(self._name, self._path)
        self._is_stored = True
        self._path.unlink()
        return size

    def abandon(self) -> None:
        self.stream.close()
        self._path.unlink(missing_ok=True)
        if self._is_stored:
            # The failure that led here is reported; the file is in no manifest.
            with contextlib.suppress(DiskError):
                self._store.remove([self._name])


class _ObjectReader(io.RawIOBase):
    """An object as a file. Each read is a request: pyarrow reads a whole column of a row group at once."""

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = max(0, self._size - self._at)
        length = length if size < 0 else min(size, length)
        found = self._store.read_range(self._name, self._at, length) if length else b""
        self._at += len(found)
        return found
