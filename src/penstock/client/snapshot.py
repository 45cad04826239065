"""A snapshot of everything that a broker stores, read over a connection. It ends with the connection."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.wire.binary import Read, Type, json_frame, read_frame

if TYPE_CHECKING:
    from penstock.client.sync import Client

# A read is split into requests of this size, which are sent at once: a distant broker costs one round trip.
_READ_BYTES: Final = 1 << 20


class RemoteSnapshot:
    def __init__(self, client: Client) -> None:
        """Begin a snapshot. The broker first finishes a running compaction, which may take minutes."""
        self._client = client
        self._number, self._file, self._bytes = client._loop.run(self._begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self._client._loop.run(lambda: self._ask({"end": self._number}, "end a snapshot"))

    @property
    def listing(self) -> tuple[int, int]:
        """The number of the file with the listing, and its bytes."""
        return self._file, self._bytes

    def read(self, file: int, position: int, length: int) -> bytes:
        """Return `length` bytes of a file, fewer only at its end."""
        return self._client._loop.run(lambda: self._read(file, position, length))

    async def _begin(self) -> tuple[int, int, int]:
        found = await self._ask({}, "begin a snapshot")
        return found["snapshot"], found["file"], found["bytes"]

    async def _ask(self, fields: dict[str, Any], what: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._client._async._link.ask(
            lambda number: json_frame(Type.SNAPSHOT, number, fields), what, timeout_s=math.inf
        )
        return found

    async def _read(self, file: int, position: int, length: int) -> bytes:
        link = self._client._async._link

        async def ask(read: Read) -> bytes:
            found: bytes = await link.ask(lambda number: read_frame(number, read), f"read file {file} of a snapshot")
            return found

        reads = [
            Read(self._number, file, at, min(_READ_BYTES, position + length - at))
            for at in range(position, position + length, _READ_BYTES)
        ]
        return b"".join(await asyncio.gather(*map(ask, reads)))
