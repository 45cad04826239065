"""An object store as a target: S3, Google Cloud Storage, Azure, or local files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.backup.target import BackupPart, SpooledPart, copy
from penstock.errors import BadBackup
from penstock.log.files import OsFiles
from penstock.object_store import ObjectStore, StoredFile


class ObjectTarget:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> ObjectTarget:
        if url.startswith("file://"):
            OsFiles().make_directory(Path(url.removeprefix("file://")))
        return cls(ObjectStore.open(url, BadBackup))

    def begin(self) -> BackupPart:
        return SpooledPart(self._store.put)

    def names(self, prefix: str) -> dict[str, StoredFile]:
        return self._store.names(prefix)

    def read(self, name: str) -> Iterator[bytes]:
        try:
            yield from self._store.read(name)
        except FileNotFoundError as error:
            raise BadBackup(f"{error.filename} is missing") from None

    def fetch(self, name: str, path: Path) -> str:
        return copy(self.read(name), path)

    def remove(self, names: list[str]) -> None:
        self._store.remove(names)
