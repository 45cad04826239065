"""Files that note what is asked of them, and let a test step in before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.log.files import File, Files
from penstock.model.batch import Buffer


class Call(NamedTuple):
    name: str
    path: Path
    length: int = 0
    position: int = 0


class WatchedFiles:
    """Any other files. `before` is called in the thread that asks: it may wait there, raise, or do something else."""

    def __init__(self, files: Files, before: Callable[[Call], None] | None = None) -> None:
        self.calls: list[Call] = []
        self.before = before
        self._files = files

    def count(self, name: str, suffix: str = "") -> int:
        return sum(call.name == name and str(call.path).endswith(suffix) for call in self.calls)

    def note(self, call: Call) -> None:
        self.calls.append(call)
        if self.before is not None:
            self.before(call)

    def open(self, path: Path) -> WatchedFile:
        self.note(Call("open", path))
        return WatchedFile(self, self._files.open(path), path)

    def create(self, path: Path) -> WatchedFile:
        self.note(Call("create", path))
        return WatchedFile(self, self._files.create(path), path)

    def sizes(self, directory: Path) -> dict[str, int]:
        self.note(Call("sizes", directory))
        return self._files.sizes(directory)

    def make_directory(self, path: Path) -> None:
        self.note(Call("make_directory", path))
        self._files.make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self.note(Call("remove_directory", path))
        self._files.remove_directory(path)

    def rename(self, path: Path, to: Path) -> None:
        self.note(Call("rename", to))
        self._files.rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self.note(Call("link", to))
        self._files.link(path, to)

    def version(self, path: Path) -> str:
        return self._files.version(path)

    def remove(self, path: Path) -> None:
        self.note(Call("remove", path))
        self._files.remove(path)

    def sync_directory(self, path: Path) -> None:
        self.note(Call("sync_directory", path))
        self._files.sync_directory(path)

    def sync(self, files: Sequence[File]) -> list[OSError | None]:
        watched = [file for file in files if isinstance(file, WatchedFile)]
        assert len(watched) == len(files)
        for file in watched:
            self.note(Call("sync", file.path))
        return self._files.sync([file.inner for file in watched])

    def space(self, path: Path) -> tuple[int, int]:
        return self._files.space(path)

    def lock(self, path: Path) -> File:
        self.note(Call("lock", path))
        return self._files.lock(path)


class WatchedFile:
    def __init__(self, files: WatchedFiles, inner: File, path: Path) -> None:
        self.inner = inner
        self.path = path
        self._note = files.note

    def read(self, length: int, position: int) -> bytes:
        self._note(Call("read", self.path, length, position))
        return self.inner.read(length, position)

    def view(self) -> memoryview:
        self._note(Call("view", self.path))
        return self.inner.view()

    def write(self, data: Buffer, position: int) -> None:
        self._note(Call("write", self.path, len(data), position))
        self.inner.write(data, position)

    def write_all(self, parts: Sequence[Buffer], position: int) -> None:
        self._note(Call("write", self.path, sum(map(len, parts)), position))
        self.inner.write_all(parts, position)

    def truncate(self, length: int) -> None:
        self._note(Call("truncate", self.path, length))
        self.inner.truncate(length)

    def allocate(self, length: int) -> None:
        self._note(Call("allocate", self.path, length))
        self.inner.allocate(length)

    def size(self) -> int:
        return self.inner.size()

    def sync(self) -> None:
        self._note(Call("sync", self.path))
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()
