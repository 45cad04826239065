"""What a client must give, or gives: a user and a password, or a token."""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import Unauthorized

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Empty credentials require nothing."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.user is not None or self.token is not None

    def accepts(self, *, user: object = None, password: object = None, token: object = None) -> bool:
        if self.token is not None and _is_same(token, self.token):
            return True
        if self.user is None or self.password is None:
            return False
        # Both are compared, so that the time this takes reveals nothing.
        return _is_same(user, self.user) & _is_same(password, self.password)

    def accepts_header(self, authorization: str) -> bool:
        """Return whether an Authorization header has valid credentials."""
        scheme, _, value = authorization.partition(" ")
        match scheme.lower():
            case "bearer":
                return self.accepts(token=value.strip())
            case "basic":
                try:
                    user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
                except ValueError:
                    return False
                return self.accepts(user=user, password=password)
        return False

    async def require(self, request: Request, _action: str) -> None:
        """Raise Unauthorized unless a request has valid credentials, or none are required. Whoever has them may do
        everything."""
        if self and not self.accepts_header(request.headers.get("authorization", "")):
            raise Unauthorized("credentials required: a user and a password (Basic), or a token (Bearer)")

    @property
    def header(self) -> str | None:
        """Return the Authorization header with these credentials."""
        if self.token is not None:
            return f"Bearer {self.token}"
        if self.user is None:
            return None
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def _is_same(given: object, wanted: str) -> bool:
    # JSON can have half a surrogate pair, which cannot be encoded in UTF-8.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())
