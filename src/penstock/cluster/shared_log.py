"""The shared log in an object store, or in a directory for trials.

    <url>/FORMAT                        "penstock cluster 1"
    <url>/log/<position, 20 digits>     a record, created if there is none
    <url>/trim/<number, 20 digits>      a trim mark, created if there is none
    <url>/probe/…                       objects of a start, which removes them

Everything rests on two promises of the store: of several who create an object, one succeeds, and who reads it then
finds it. The first start tries both, and refuses a store that breaks one. Lists are only hints: they may lag.

Calls block, and are for any thread. They use obstore's blocking functions: with its coroutines, some processes abort
when they end (obstore 0.12), in a thread that calls into an interpreter that is gone.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from penstock.cluster.actions import Answer, Reading, Stored, Surveyed, Taken, Unknown
from penstock.cluster.checkpoint import MARK_BYTES_MAX, UNTRIMMED, Mark
from penstock.cluster.record import RECORD_BYTES_MAX
from penstock.errors import BadConfig, BadDirectory, CorruptRecord, ReadFailed, UnsupportedFormat
from penstock.object_store import ObjectStore

FORMAT: Final = b"penstock cluster 1\n"

# After so many bytes a reading ends.
READ_BYTES: Final = 8 << 20

_OURS: Final = {"FORMAT", "log", "trim", "probe"}
# So many create one object at once to try the store, and so many requests of one call are under way.
_WRITERS: Final = 8


class SharedLog:
    def __init__(self, store: ObjectStore) -> None:
        """Use `open` for a store that was not tried yet."""
        self._store = store
        # The newest trim mark that was seen.
        self._mark = UNTRIMMED

    @classmethod
    def open(cls, url: str) -> SharedLog:
        """Open the log, or begin one.

        Raises BadConfig, BadDirectory or UnsupportedFormat if the store cannot be used.
        """
        return cls.begin(ObjectStore.open(url, ReadFailed))

    @classmethod
    def begin(cls, store: ObjectStore) -> SharedLog:
        foreign = sorted(set(store.top_names()) - _OURS)
        if foreign:
            raise BadDirectory(f"{store.url}: has {foreign[0]!r}, so it is not a cluster's: use an empty path")
        found = _read(store, "FORMAT", len(FORMAT) * 2)
        if found is None:
            _probe(store)
            created = _create(store, "FORMAT", FORMAT)
            found = FORMAT if isinstance(created, Stored) else _read(store, "FORMAT", len(FORMAT) * 2)
        if found != FORMAT:
            raise UnsupportedFormat(
                f"{store.url}/FORMAT is {found!r}, this Penstock reads {FORMAT!r}: upgrade it, or use another path"
            )
        return cls(store)

    # Records.

    def append(self, position: int, data: bytes) -> Answer:
        """Create a record if there is none at its position."""
        return _create(self._store, _record(position), data)

    def read(self, position: int, limit: int) -> Reading:
        """Read up to `limit` records from a position on, in order, until one is missing; then the trim mark.

        Records of more than READ_BYTES together are returned in several readings.
        """
        records: list[bytes] = []
        size = 0
        is_end = False
        while len(records) < limit and size < READ_BYTES and not is_end:
            data = _read(self._store, _record(position + len(records)), RECORD_BYTES_MAX)
            if data is None:
                is_end = True
            else:
                records.append(data)
                size += len(data)
        return Reading(position, tuple(records), is_end, self.mark())

    def survey(self, position: int) -> Surveyed:
        """Return the last record that a list has beyond `position`, if the one there is missing."""
        beyond = self.last(position + 1)
        if beyond is None:
            return Surveyed(position)
        data = _read(self._store, _record(beyond), RECORD_BYTES_MAX)
        if _read(self._store, _record(position), RECORD_BYTES_MAX) is not None:
            return Surveyed(position)
        return Surveyed(position, beyond, data, self.mark())

    def record(self, position: int) -> bytes:
        """Return a record that is never deleted. Raises CorruptRecord if it is missing."""
        data = _read(self._store, _record(position), RECORD_BYTES_MAX)
        if data is None:
            raise CorruptRecord(f"{self._store.url_of(_record(position))} is missing: restore it")
        return data

    def last(self, above: int = 0) -> int | None:
        """Return the highest position, at or above `above`, in a list of the store, which may lag."""
        name = self._store.last_name("log/", _record(above - 1) if above else "log/")
        return None if name is None else int(name.rpartition("/")[2])

    def delete(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """Delete records. Only `Trim` knows which."""
        names = [_record(position) for first, end in ranges for position in range(first, end)]
        with ThreadPoolExecutor(_WRITERS) as workers:
            for _ in workers.map(lambda name: self._store.remove([name]), names):
                pass

    # Trim marks.

    def store_mark(self, mark: Mark) -> Answer:
        """Create a trim mark if there is none of its number."""
        return _create(self._store, _trim(mark.number), mark.encode())

    def mark(self) -> Mark:
        """Return the newest trim mark: the last one of an unbroken sequence, whatever a list says."""
        mark = self._mark
        if not mark.number:
            hint = self._store.last_name("trim/", "trim/")
            mark = mark if hint is None else self._read_mark(int(hint.rpartition("/")[2])) or mark
        while (following := self._read_mark(mark.number + 1)) is not None:
            mark = following
        self._mark = mark
        return mark

    def _read_mark(self, number: int) -> Mark | None:
        data = _read(self._store, _trim(number), MARK_BYTES_MAX)
        return None if data is None else Mark.decode(data, number)


def _record(position: int) -> str:
    return f"log/{position:020}"


def _trim(number: int) -> str:
    return f"trim/{number:020}"


def _read(store: ObjectStore, name: str, bytes_max: int) -> bytes | None:
    try:
        return store.read_whole(name, bytes_max)
    except FileNotFoundError:
        return None


def _create(store: ObjectStore, name: str, data: bytes) -> Answer:
    try:
        store.create(name, data)
        return Stored()
    except FileExistsError:
        return _taken(store, name)
    except ReadFailed as error:
        return Unknown(str(error))


def _taken(store: ObjectStore, name: str) -> Answer:
    try:
        there = _read(store, name, RECORD_BYTES_MAX)
    except ReadFailed as error:
        return Unknown(str(error))
    return Unknown(f"{store.url_of(name)}: there was one, and now it is missing") if there is None else Taken(there)


def _probe(store: ObjectStore) -> None:
    """Raise BadConfig unless the store creates an object only if there is none, and lets everyone read it then."""
    name = f"probe/{secrets.token_hex(8)}"
    bodies = [b"%d" % number for number in range(_WRITERS)]
    try:
        first = [_create(store, f"{name}-twice", body) for body in bodies[:2]]
        _expect(store, first[0] == Stored() and first[1] == Taken(bodies[0]), "replaces objects that exist")
        with ThreadPoolExecutor(_WRITERS) as workers:
            raced = [*workers.map(lambda body: _create(store, f"{name}-race", body), bodies)]
        there = _read(store, f"{name}-race", 8)
        # A winner whose answer was lost finds its own object, and one that gave up does not know.
        is_consistent = all(_agrees(answer, body, there) for answer, body in zip(raced, bodies, strict=True))
        _expect(store, there is not None and is_consistent, "lets several writers create one object")
    finally:
        store.remove([f"{name}-twice", f"{name}-race"])


def _agrees(answer: Answer, body: bytes, there: bytes | None) -> bool:
    match answer:
        case Stored():
            return there == body
        case Taken(data):
            return there == data
        case Unknown():
            return True


def _expect(store: ObjectStore, holds: bool, what: str) -> None:
    if not holds:
        raise BadConfig([f"{store.url}: this object store {what}: use one with conditional writes (If-None-Match)"])
