"""Bodies in JSON: of a CHECKPOINT record, of a member, and the trim mark.

A checkpoint says where the content of all rounds below a position is stored. So a node can begin there, and these
rounds may be deleted from the log.

    … ROUND  ROUND  ROUND  LEAD  ROUND  CHECKPOINT  ROUND …
      └─ in the checkpoint ──┘   ▲          └ says: begin at ▲
                                 └ `position`

The trim mark names a committed checkpoint. Below the mark's position rounds are missing, so nobody reads there: a node
that wants to begins at the checkpoint instead. Marks are numbered, and each is created under the next number, so the
newest is found by reading and no list of objects is trusted.
"""

from __future__ import annotations

from typing import Annotated, Final, Self, TypeVar

import msgspec

from penstock.cluster.record import POSITION_MAX, Kind, Record
from penstock.errors import CorruptRecord

_Position = Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]
_T = TypeVar("_T")
_U64 = Annotated[int, msgspec.Meta(ge=0)]

# Of a mark's object: its name is longer than its content.
MARK_BYTES_MAX: Final = 4096


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the cluster."""

    node: str
    # Where clients and other nodes find it.
    address: str = ""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, record: Record) -> Self:
        return _decoded(record, cls)


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything below `position`, and what a reader knows there: see `Place`."""

    position: _Position
    epoch: _U64
    incarnation: _U64
    number: _U64
    leader: str
    members: list[Member]
    # Ranges of positions: the rounds since the previous checkpoint. Once the mark is stored, they are deleted.
    rounds: list[tuple[_Position, _Position]]
    # The position of the previous checkpoint.
    previous: _Position | None
    # Says where the content of these rounds is stored: for whoever applies rounds.
    content: str

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, record: Record) -> Self:
        assert record.kind is Kind.CHECKPOINT, f"record {record.position} is {record.kind!r}"
        return _decoded(record, cls)


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trim mark. Each mark is at or above the one before it."""

    # 1, 2, 3, …; 0: nothing was ever trimmed.
    number: _U64 = 0
    # No position below this is read any more.
    position: _Position = 0
    # The position of a committed checkpoint, which holds everything below.
    checkpoint: _Position = 0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, number: int) -> Self:
        """Return the mark that was read under `number`. Raises CorruptRecord if it is not one."""
        try:
            mark = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CorruptRecord(f"trim mark {number} of the shared log is damaged: {error}") from None
        if mark.number != number:
            raise CorruptRecord(f"trim mark {number} of the shared log is damaged: it was written as {mark.number}")
        return mark


UNTRIMMED: Final = Mark()


def _decoded(record: Record, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(record.body, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"record {record.position} of the shared log has an invalid body: {error}") from None
