"""Users as they are served: each with the permissions and quotas of its roles, found by any of its credentials."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.security.permissions import NO_PERMISSIONS, Action, Permissions
from penstock.security.quotas import NO_QUOTAS, Quotas
from penstock.times import iso_or_none

TOKEN_PREFIX: Final = "pst"
ADMINISTRATOR: Final = Permissions(switches=frozenset({Action.ADMIN}))


@dataclass(frozen=True, slots=True)
class Token:
    """A token is `pst_<id>_<secret>`. It is random, so a plain hash of it is enough."""

    id: str
    # SHA-256 of the whole token, in hexadecimal.
    hash: str = field(repr=False)
    about: str = ""
    expires_us: int | None = None

    @property
    def expires(self) -> str | None:
        return None if self.expires_us is None else iso_or_none(self.expires_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    name: str
    permissions: Permissions = NO_PERMISSIONS
    quotas: Quotas = NO_QUOTAS
    roles: tuple[str, ...] = ()
    password_hash: str | None = field(default=None, repr=False)
    tokens: tuple[Token, ...] = ()
    nkeys: tuple[str, ...] = ()
    # Names in client certificates: subjects such as "CN=ann", DNS names, e-mail addresses.
    certificates: tuple[str, ...] = ()
    is_enabled: bool = True
    expires_us: int | None = None

    @property
    def expires(self) -> str | None:
        return None if self.expires_us is None else iso_or_none(self.expires_us)

    def is_valid(self, now_us: int) -> bool:
        return self.is_enabled and (self.expires_us is None or now_us < self.expires_us)


@dataclass(frozen=True, slots=True)
class Grant:
    """A successful login: the user, and the credential that it was given for."""

    user: User
    # The hash of the password or token, the key, or the name in the certificate.
    credential: str = field(repr=False)
    expires_us: int | None = None


class Users:
    def __init__(self, users: Iterable[User] = (), roles: Mapping[str, object] | None = None) -> None:
        self._named = {user.name: user for user in users}
        self.roles = tuple(roles or ())
        self._by_token = {token.id: (user, token) for user in self._named.values() for token in user.tokens}
        self._by_nkey = {key: user for user in self._named.values() for key in user.nkeys}
        self._by_certificate = {name: user for user in self._named.values() for name in user.certificates}

    @property
    def has_nkeys(self) -> bool:
        return bool(self._by_nkey)

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[User]:
        return iter(self._named.values())

    def get(self, name: str) -> User | None:
        return self._named.get(name)

    def by_token(self, text: str) -> Grant | None:
        """Return the user of a token, whether or not it has expired."""
        prefix, _, rest = text.partition("_")
        user, token = self._by_token.get(rest.partition("_")[0], (None, None))
        digest = token_hash(text)
        is_same = hmac.compare_digest(digest, digest if token is None else token.hash)
        if user is None or token is None or prefix != TOKEN_PREFIX or not is_same:
            return None
        return Grant(user, token.hash, token.expires_us)

    def by_nkey(self, key: str) -> Grant | None:
        user = self._by_nkey.get(key)
        return None if user is None else Grant(user, key)

    def by_certificate(self, names: Iterable[str]) -> Grant | None:
        found = next(((self._by_certificate[name], name) for name in names if name in self._by_certificate), None)
        return None if found is None else Grant(*found)

    def renewed(self, grant: Grant, now_us: int) -> Grant | None:
        """Return the same grant with the user as it is now; None if it is no longer given."""
        user = self._named.get(grant.user.name)
        if user is None or not user.is_valid(now_us) or is_expired(grant, now_us):
            return None
        credentials = {user.password_hash, *user.nkeys, *user.certificates, *(token.hash for token in user.tokens)}
        return Grant(user, grant.credential, grant.expires_us) if grant.credential in credentials else None


def is_expired(grant: Grant, now_us: int) -> bool:
    ends = [each for each in (grant.expires_us, grant.user.expires_us) if each is not None]
    return bool(ends) and min(ends) <= now_us


def new_token() -> tuple[str, str]:
    """Return a new token, which nobody can be told a second time, and its ID."""
    number = secrets.token_hex(4)
    return f"{TOKEN_PREFIX}_{number}_{secrets.token_urlsafe(32)}", number


def token_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
