"""Calls to the broker by name: JSON fields out, a JSON object back."""

from __future__ import annotations

from typing import Any

from penstock.client.link import Link
from penstock.client.partitioner import Layout
from penstock.wire.binary import Type, json_frame


class Calls:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(self, call: str, /, **fields: Any) -> dict[str, Any]:
        """Make a call that is sent again after a reconnect, because repeating it does no harm."""
        return await self._ask(call, fields, is_repeatable=True)

    async def change(self, call: str, /, **fields: Any) -> dict[str, Any]:
        """Make a call that is sent once. Raise ConnectionLost if the connection breaks before the answer."""
        return await self._ask(call, fields, is_repeatable=False)

    async def read_rows(self, call: str) -> list[dict[str, Any]]:
        """Return all rows of a list. The broker answers a long list in parts."""
        rows: dict[str, dict[str, Any]] = {}
        offset, total = 0, 1
        while offset < total:
            found = await self.read(call, offset=offset or None)
            rows |= {row["name"]: row for row in found[call]}
            offset, total = offset + len(found[call]), found["total"]
            if not found[call]:
                break  # rows were deleted in the meantime
        return list(rows.values())

    async def layout(self, subject: str) -> Layout:
        """Return the topic that stores a subject. The broker creates it if it does not exist."""
        return Layout.from_json(await self.read("resolve", subject=subject))

    async def _ask(self, call: str, fields: dict[str, Any], *, is_repeatable: bool) -> dict[str, Any]:
        """Send the fields that are not None."""
        asked = {"call": call} | {name: value for name, value in fields.items() if value is not None}
        found: dict[str, Any] = await self._link.ask(
            lambda number: json_frame(Type.CALL, number, asked), call, is_repeatable=is_repeatable
        )
        return found
