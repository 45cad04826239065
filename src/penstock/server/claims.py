"""Names that one client has at a time, as long as it is connected: whoever says HELLO with a claim has it, or is
refused.

A client that reconnects is the same owner: it takes the claim over from its old connection, of which the server may not
know yet that it is dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadRequest, ClaimConflict

if TYPE_CHECKING:
    from penstock.server.connection import Connection

TEXT_BYTES_MAX: Final = 256


class Claims:
    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, Connection]] = {}
        # A connection has one at the most.
        self._names: dict[Connection, str] = {}

    def take(self, connection: Connection, name: Any, owner: Any) -> None:
        for text in (name, owner):
            if not isinstance(text, str) or not 0 < len(text.encode(errors="replace")) <= TEXT_BYTES_MAX:
                raise BadRequest(f"a claim and its owner are text of 1 to {TEXT_BYTES_MAX} bytes")
        self.release(connection)
        other_owner, other = self._owners.get(name, (owner, None))
        if other is not None:
            if other_owner != owner:
                raise ClaimConflict(
                    f"{name} is in use by another client ({other.name or 'without a name'}, {other.address}): "
                    f"close that one, or use another name"
                )
            self.release(other)
            other.abort()
        self._owners[name] = owner, connection
        self._names[connection] = name

    def release(self, connection: Connection) -> None:
        name = self._names.pop(connection, None)
        if name is not None:
            del self._owners[name]
