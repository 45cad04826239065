"""Answers in JSON that may have thousands of rows: made in slices, so that nobody waits for them, and limited in bytes.

A list in a document may be an iterator: each of its items is made when it is written. Where such a list is cut because
the answer is full, the document's `total` tells how many there are, and `offset` asks for the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import Overloaded
from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.doors.peer import Peer

ANSWER_BYTES_MAX: Final = 8 << 20
SMALL_BYTES: Final = 64 << 10
UNSENT_BYTES_MAX: Final = 64 << 20
# Answers that are made at the same time.
_TURNS: Final = 4
# Pieces, and characters, that are written before others may use the loop: about a millisecond.
_SLICE: Final = 100
_SLICE_CHARACTERS: Final = 256 << 10


class Answers:
    """What a server answers with many rows: few answers are made at a time, and few bytes wait for slow clients."""

    def __init__(self, unsent: Callable[[], int]) -> None:
        """`unsent` is how many bytes of the HTTP port's answers were not sent yet."""
        self._unsent = unsent
        self._turns = asyncio.Semaphore(_TURNS)

    async def make(self, making: Awaitable[bytes]) -> bytes:
        """Make an answer of the HTTP port. Overloaded if clients do not read those that they have asked for."""
        async with self._turns:
            data = await making
        waiting = self._unsent()
        if len(data) > SMALL_BYTES and waiting + len(data) > UNSENT_BYTES_MAX:
            raise Overloaded(
                f"{waiting} bytes of answers wait for clients to read them, {UNSENT_BYTES_MAX} may: try later"
            )
        return data

    async def make_for(self, peer: Peer, document: dict[str, Any]) -> bytes:
        """Make an answer for a connection when it has read what it has asked for before."""
        while True:
            await peer.read_answers()
            async with self._turns:
                if peer.is_closing or not peer.has_unread:
                    return await encode(document)

    def usage(self) -> dict[str, Usage]:
        return {"http_unsent_bytes": Usage(self._unsent(), UNSENT_BYTES_MAX)}


class Rows:
    """Rows of a list that may be cut."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows


async def encode(document: object, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
    """Return a document as JSON. Its `Rows` end when the answer has `bytes_max`, but never before the first."""
    text = StringIO()
    pieces = begin = 0
    for piece in _pieces(document, lambda: text.tell() < bytes_max):
        text.write(piece)
        pieces += 1
        if pieces == _SLICE or text.tell() - begin >= _SLICE_CHARACTERS:
            pieces, begin = 0, text.tell()
            await asyncio.sleep(0)
    return text.getvalue().encode()


def _pieces(value: Any, has_room: Callable[[], bool]) -> Iterator[str]:
    """Parts of the JSON, each of them short unless it is a single text."""
    match value:
        case dict() if any(isinstance(each, dict | list | Rows | Iterator) for each in value.values()):
            mark = "{"
            for name, each in value.items():
                yield f"{mark}{json.dumps(name)}:"
                yield from _pieces(each, has_room)
                mark = ","
            yield "}"
        case Rows():
            yield from _items(value.rows, has_room, is_cut=True)
        case list() if not any(isinstance(each, dict | list) for each in value) and len(value) <= _SLICE:
            yield json.dumps(value, separators=(",", ":"))
        case list() | Iterator():
            yield from _items(value, has_room, is_cut=False)
        case _:
            yield json.dumps(value, separators=(",", ":"))


def _items(items: Iterable[Any], has_room: Callable[[], bool], *, is_cut: bool) -> Iterator[str]:
    mark = "["
    for item in items:
        if is_cut and mark == "," and not has_room():
            break
        yield mark
        yield from _pieces(item, has_room)
        mark = ","
    yield "[]" if mark == "[" else "]"
