"""An object store as a target: S3, Google Cloud Storage, Azure, or local files, through obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backup.target import CHUNK_BYTES, BackupPart, SpooledPart, StoredFile, copy
from penstock.errors import BadBackup, BadConfig
from penstock.log.files import OsFiles

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class ObjectTarget:
    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url.rstrip("/")

    @classmethod
    def open(cls, url: str) -> ObjectTarget:
        """Open an object store. Credentials come from the environment or from the machine."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise BadConfig([f"{url}: object stores need obstore: pip install 'penstock[backup]'"]) from error
        try:
            if url.startswith("file://"):
                OsFiles().make_directory(Path(url.removeprefix("file://")))
            return cls(from_url(url), url)
        except (BaseError, ValueError) as error:
            raise BadConfig([f"{url}: {_brief(error)}: use s3://BUCKET/PATH, gs://… or az://…"]) from error

    def begin(self) -> BackupPart:
        return SpooledPart(self._put)

    def names(self, prefix: str) -> dict[str, StoredFile]:
        import obstore

        with self._translated_errors(prefix):
            return {
                meta["path"]: StoredFile(meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._store, prefix)
                for meta in page
            }

    def read(self, name: str) -> Iterator[bytes]:
        import obstore

        with self._translated_errors(name):
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def fetch(self, name: str, path: Path) -> str:
        return copy(self.read(name), path)

    def remove(self, names: list[str]) -> None:
        import obstore

        for name in names:
            with self._translated_errors(name), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    def _put(self, name: str, path: Path) -> None:
        import obstore

        with self._translated_errors(name):
            obstore.put(self._store, name, path)

    @contextlib.contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        """Raise errors of the store as errors of Penstock, with the name."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise BadBackup(f"{self._url}/{name} is missing") from None
        except (BaseError, OSError) as error:
            raise BadBackup(f"{self._url}/{name}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Return the text of an error without the request that obstore appends."""
    return str(error).split("\n", 1)[0]
