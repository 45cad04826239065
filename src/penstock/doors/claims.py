"""Claims: names that one client has at a time, for as long as it is connected. HELLO takes a claim, or is refused.

A client that reconnects is the same owner. It takes the claim over from its old connection, because the server may not
know yet that this one is dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadRequest, ClaimConflict

if TYPE_CHECKING:
    from penstock.doors.session import Session

TEXT_BYTES_MAX: Final = 256


class Claims:
    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, Session]] = {}
        # A connection has at most one.
        self._names: dict[Session, str] = {}

    def take(self, session: Session, name: Any, owner: Any) -> None:
        """Give a claim to a connection. Raise ClaimConflict if a client with another owner has it."""
        for text in (name, owner):
            if not isinstance(text, str) or not 0 < len(text.encode(errors="replace")) <= TEXT_BYTES_MAX:
                raise BadRequest(f"a claim and its owner are text of 1 to {TEXT_BYTES_MAX} bytes")
        self.release(session)
        other_owner, other = self._owners.get(name, (owner, None))
        if other is not None:
            if other_owner != owner:
                raise ClaimConflict(
                    f"{name} is in use by another client ({other.name or 'without a name'}, {other.address}): "
                    f"close that one, or use another name"
                )
            self.release(other)
            other.abort()
        self._owners[name] = owner, session
        self._names[session] = name

    def release(self, session: Session) -> None:
        name = self._names.pop(session, None)
        if name is not None:
            del self._owners[name]
