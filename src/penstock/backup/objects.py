"""An object store as the place of backups: S3, Google Cloud Storage, Azure, or local files, by obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backup.target import CHUNK_BYTES, Part, SpooledPart, Stored, copy
from penstock.errors import BadBackup, BadConfig
from penstock.storage.files import OsFiles

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class ObjectTarget:
    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url.rstrip("/")

    @classmethod
    def open(cls, url: str) -> ObjectTarget:
        """Credentials are where the tools of the store look for them: in the environment, or with the machine."""
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
            raise BadConfig([f"{url}: {_brief(error)}: it must be like s3://BUCKET/PATH, gs://… or az://…"]) from error

    def begin(self) -> Part:
        return SpooledPart(self._put)

    def names(self, prefix: str) -> dict[str, Stored]:
        import obstore

        with self._told(prefix):
            return {
                meta["path"]: Stored(meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._store, prefix)
                for meta in page
            }

    def read(self, name: str) -> Iterator[bytes]:
        import obstore

        with self._told(name):
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def fetch(self, name: str, path: Path) -> str:
        return copy(self.read(name), path)

    def remove(self, names: list[str]) -> None:
        import obstore

        for name in names:
            with self._told(name), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    def _put(self, name: str, path: Path) -> None:
        import obstore

        with self._told(name):
            obstore.put(self._store, name, path)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Raise what the store says as an error of ours, with the name."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise BadBackup(f"{self._url}/{name} is missing") from None
        except (BaseError, OSError) as error:
            raise BadBackup(f"{self._url}/{name}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Without the dump of the request that obstore adds."""
    return str(error).split("\n", 1)[0]
