"""What a node asks of the one who runs it, and the answers.

    Append, StoreMark     create an object if there is none     →  Stored, Taken, Unknown
    Read                  records in order, then the trim mark  →  Reading
    Survey                what is beyond a missing record       →  Surveyed
    Restore               the content of a checkpoint           →  its record
    Delete                trimmed rounds                        →  done
    Commit, Lead, Deposed                                          need no answer

Each request gets one answer. A request that failed in a way that leaves open whether it was executed, or will be, is
Unknown. The node asks for the same again at once, so the one who runs it waits before it tells. Reads and deletes that
fail are repeated by the one who runs the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cluster.checkpoint import UNTRIMMED, Mark
from penstock.cluster.place import Place
from penstock.cluster.record import Record


@dataclass(frozen=True, slots=True)
class Append:
    """Create the record at `position` if there is none."""

    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read records from `position` on, in order: up to `limit`, or the first missing one. *Then* read the trim mark."""

    position: int
    limit: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Look for the last record beyond `position` that a list has. If there is one, read it, *then* look again whether
    the record at `position` is missing, and *then* read the trim mark."""

    position: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the local store hold everything in the checkpoint at this position; answer with the record."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A valid record is committed. Apply it; if the node leads, acknowledge it. Then the node is at `place`."""

    record: Record
    place: Place


@dataclass(frozen=True, slots=True)
class Lead:
    """The node leads: what is committed so far is all that any leader before it has acknowledged."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """The node leads no more. Nobody knows about its appends that are not committed: tell nobody that they are."""

    # Of the new leader.
    epoch: int


@dataclass(frozen=True, slots=True)
class StoreMark:
    """Create the trim mark if there is none of its number."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the records in ranges of positions. Missing ones are deleted already."""

    ranges: tuple[tuple[int, int], ...]


Action = Append | Read | Survey | Restore | Commit | Lead | Deposed | StoreMark | Delete


@dataclass(frozen=True, slots=True)
class Stored:
    """The object was created."""


@dataclass(frozen=True, slots=True)
class Taken:
    """There was an object: this. It is one's own if a request was repeated below, or answered too late."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have been created, or be created later."""

    # What failed, for people.
    reason: str = ""


Answer = Stored | Taken | Unknown


@dataclass(frozen=True, slots=True)
class Reading:
    """The records from `position` on, and the trim mark as it was after the last of them was read."""

    position: int
    records: tuple[bytes, ...]
    # Whether the record after these was missing.
    is_end: bool
    mark: Mark


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The last record beyond `position`, if `position` is missing and there is one."""

    position: int
    beyond: int = 0
    data: bytes | None = None
    mark: Mark = UNTRIMMED
