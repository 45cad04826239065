"""An object store: S3, Google Cloud Storage, Azure, or local files, through obstore.

Backups and archives open stores here. Errors of the store are raised as the error that the caller names, with the URL
of the object; a missing object is a FileNotFoundError.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import BadConfig, DiskError

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Store

CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    bytes: int
    # The time of the last change in seconds, by the clock of the store.
    time_s: float


class ObjectStore:
    def __init__(self, store: Store, url: str, failure: type[DiskError]) -> None:
        self._store = store
        self.url = url.rstrip("/")
        self._failure = failure

    @classmethod
    def open(cls, url: str, failure: type[DiskError]) -> ObjectStore:
        """Open an object store. Credentials come from the environment or from the machine."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise BadConfig([f"{url}: object stores need obstore: pip install 'penstock[backup]'"]) from error
        try:
            return cls(from_url(url), url, failure)
        except (BaseError, ValueError) as error:
            raise BadConfig([f"{url}: {_brief(error)}: use s3://BUCKET/PATH, gs://… or az://…"]) from error

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self, prefix: str) -> dict[str, StoredFile]:
        """Return the objects whose names begin with `prefix`, which ends with a slash."""
        import obstore

        with self._translated_errors(prefix):
            return {
                meta["path"]: StoredFile(meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._store, prefix)
                for meta in page
            }

    def top_names(self) -> list[str]:
        """Return the names before the first slash."""
        import obstore

        with self._translated_errors(""):
            found = obstore.list_with_delimiter(self._store)
        names = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        return [name.strip("/") for name in names]

    def size(self, name: str) -> int:
        import obstore

        with self._translated_errors(name):
            return obstore.head(self._store, name)["size"]

    def last_name(self, prefix: str, after: str) -> str | None:
        """Return the last name in the order of bytes that begins with `prefix` and comes after `after`."""
        import obstore

        with self._translated_errors(prefix):
            return max(
                (meta["path"] for page in obstore.list(self._store, prefix, offset=after) for meta in page),
                default=None,
            )

    def read_whole(self, name: str, bytes_max: int) -> bytes:
        """Return an object in one request. Raises the error of the store, and reads nothing, if it is larger."""
        import obstore

        with self._translated_errors(name):
            found = obstore.get(self._store, name)
            size = found.meta["size"]
            if size > bytes_max:
                raise self._failure(f"{self.url_of(name)}: {size} bytes, at most {bytes_max} are expected")
            return bytes(found.bytes())

    def read(self, name: str) -> Iterator[bytes]:
        import obstore

        with self._translated_errors(name):
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        import obstore

        with self._translated_errors(name):
            return bytes(obstore.get_range(self._store, name, start=start, length=length))

    def put(self, name: str, source: Path) -> None:
        """Store a file, and replace an object of this name."""
        import obstore

        with self._translated_errors(name):
            obstore.put(self._store, name, source)

    def create(self, name: str, data: bytes) -> None:
        """Store an object. Raise FileExistsError if there is one of this name: of several writers one succeeds.

        obstore repeats a request whose reply was lost, and then finds its own object. So the caller must look at it.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._translated_errors(name):
            try:
                obstore.put(self._store, name, data, mode="create")
            except AlreadyExistsError:
                raise FileExistsError(errno.EEXIST, "taken", self.url_of(name)) from None

    def remove(self, names: list[str]) -> None:
        import obstore

        for name in names:
            with self._translated_errors(name), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "missing", self.url_of(name)) from None
        except FileExistsError:
            raise
        except (BaseError, OSError) as error:
            raise self._failure(f"{self.url_of(name)}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Return the text of an error without the request that obstore appends."""
    return str(error).split("\n", 1)[0]
