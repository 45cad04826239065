"""Security of a server: who may log in, and who has.

Credentials come from the settings (one administrator) and from the file of users. A login is decided at once if it can
be; a password that must be verified, and a failure, which is held back, take a while.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.clock import Clock
from penstock.errors import BadConfig, PenstockError, Unauthorized
from penstock.health import Usage
from penstock.model.subject import clean
from penstock.security import users_file
from penstock.security.audit import Audit
from penstock.security.identity import Identity
from penstock.security.nkeys import is_signed, read_public_key
from penstock.security.passwords import Passwords
from penstock.security.quotas import Meter
from penstock.security.throttle import Throttle
from penstock.security.users import ADMINISTRATOR, TOKEN_PREFIX, Grant, User, Users, is_expired
from penstock.security.users_edit import UsersEditor
from penstock.web.credentials import Credentials

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0
JWT_REFUSED: Final = "JWT accounts are not supported: use a user and a password, a token or an NKEY"
_KEY_CHARACTERS: Final = 128
_SALT: Final = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    fixed: Credentials = field(default_factory=Credentials)
    users: Path | None = None
    failures_max: int = 10
    lockout_s: int = 300
    # None: if there is a file of users.
    audit: bool | None = None
    # Dead letters of a subject are at this and the subject: who may not read one may not read the other.
    dead_letter_prefix: bytes = b"DLQ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What a client shows. Values come from the wire, and may have any type."""

    user: object = None
    password: object = field(default=None, repr=False)
    token: object = field(default=None, repr=False)
    nkey: object = None
    signature: object = field(default=None, repr=False)
    # That the server gave this connection.
    nonce: str = ""
    jwt: object = field(default=None, repr=False)
    # The names in its verified certificate.
    certificate: Sequence[str] = ()

    @classmethod
    def from_nats(cls, options: Mapping[str, Any], nonce: str = "", certificate: Sequence[str] = ()) -> Login:
        """Read the options of CONNECT."""
        names = {"user": "user", "password": "pass", "token": "auth_token", "nkey": "nkey", "signature": "sig"}
        given = {name: options.get(other) for name, other in names.items()}
        return cls(**given, jwt=options.get("jwt"), nonce=nonce, certificate=certificate)

    @classmethod
    def from_header(cls, authorization: str, certificate: Sequence[str] = ()) -> Login:
        """Read an Authorization header."""
        scheme, _, value = authorization.partition(" ")
        match scheme.lower():
            case "bearer":
                return cls(token=value.strip(), certificate=certificate)
            case "basic":
                try:
                    user, colon, password = base64.b64decode(value, validate=True).decode().partition(":")
                except ValueError:
                    user, colon, password = "", ":", ""
                return cls(user=user, password=password if colon else "", certificate=certificate)
        return cls(certificate=certificate)

    @property
    def is_empty(self) -> bool:
        return all(each is None for each in (self.user, self.password, self.token, self.nkey, self.jwt))

    @property
    def key(self) -> str:
        """Return the name under which failures are counted and shown: never a secret."""
        match self:
            case Login(user=str(user)) if user:
                return clean(user, _KEY_CHARACTERS)
            case Login(nkey=str(key)) if key:
                return clean(key, _KEY_CHARACTERS)
            case Login(token=str(token)) if token.startswith(f"{TOKEN_PREFIX}_"):
                return clean(f"token {token.split('_')[1][:16]}")
            case Login(token=str(token)):
                # Those who give a wrong one must not lock out those who give the right one. What is shown tells
                # nothing about it.
                return f"token #{hmac.digest(_SALT, token.encode(errors='surrogatepass'), hashlib.sha256).hex()[:8]}"
            case Login(certificate=[first, *_]):
                return clean(first, _KEY_CHARACTERS)
        return ""


class Security:
    def __init__(self, clock: Clock, settings: SecuritySettings | None = None) -> None:
        """Raise BadConfig if the file of users is invalid."""
        settings = settings or SecuritySettings()
        self._clock = clock
        self._fixed = settings.fixed
        self._path = settings.users
        self._dead_letter_prefix = settings.dead_letter_prefix
        self.is_required = bool(settings.fixed) or settings.users is not None
        self.users = Users()
        # Why the file of users is not used as it is now.
        self.problems: tuple[str, ...] = ()
        self._seen = self._taken = b""
        if settings.users is not None:
            self._taken = self._seen = users_file.read_bytes(settings.users)
            self.users = users_file.parse(settings.users, self._taken, settings.dead_letter_prefix)
            if not len(self.users) and not settings.fixed:
                logger.warning("%s has no users: nobody can log in, add one with penstock user add", settings.users)
        self.throttle = Throttle(settings.failures_max, settings.lockout_s)
        self.passwords = Passwords()
        self.audit = Audit(clock, is_on=self.has_users if settings.audit is None else settings.audit)
        self._meters: dict[str, Meter] = {}
        # Those that are connected: called when their user has changed, and when they are no longer valid.
        self._connected: dict[Identity, tuple[Callable[[], None], Callable[[str], None]]] = {}

    @property
    def has_users(self) -> bool:
        return self._path is not None

    def editor(self) -> UsersEditor | None:
        return None if self._path is None else UsersEditor(self._path)

    def usage(self) -> dict[str, Usage]:
        return {**self.throttle.usage(), **self.audit.usage()}

    # Logins.

    def login(self, given: Login, *, address: str, door: str) -> Identity | Coroutine[Any, Any, Identity]:
        """Return who a client is; a coroutine if that takes a while. Raise Unauthorized, here or there.

        `address` is without the port."""
        key = given.key
        self._check_locked(given, address, door)
        if self._fixed.accepts(user=given.user, password=given.password, token=given.token):
            name = self._fixed.user or "administrator"
            return self._admit(Grant(User(name=name, permissions=ADMINISTRATOR), ""), key, address, door)
        if (
            self.has_users
            and isinstance(given.user, str)
            and isinstance(given.password, str)
            and given.token is None
            and given.nkey is None
        ):
            user = self.users.get(given.user)
            password_hash = None if user is None or not user.is_valid(self._clock.now_us()) else user.password_hash
            if user is not None and self.passwords.is_remembered(password_hash, given.password):
                return self._admit(Grant(user, password_hash or ""), key, address, door)
            return self._verify(given, given.password, password_hash, address, door)
        grant = self._grant(given)
        if grant is None or not grant.user.is_valid(self._clock.now_us()) or is_expired(grant, self._clock.now_us()):
            return self._fail(given, address, door)
        return self._admit(grant, key, address, door)

    def inside(self) -> Identity:
        """Return the identity of a client in this process."""
        grant = Grant(User(name="embedded", permissions=ADMINISTRATOR), "")
        return Identity(grant, self.meter(grant.user), self.audit, self._clock, address="", door="embedded")

    def _grant(self, given: Login) -> Grant | None:
        if isinstance(given.token, str):
            return self.users.by_token(given.token)
        if isinstance(given.nkey, str):
            try:
                public_key = read_public_key(given.nkey)
            except ValueError:
                return None
            found = self.users.by_nkey(given.nkey)
            is_right = bool(given.nonce) and is_signed(public_key, given.nonce, given.signature)
            return found if is_right else None
        return self.users.by_certificate(given.certificate) if given.is_empty else None

    async def _verify(
        self, given: Login, password: str, password_hash: str | None, address: str, door: str
    ) -> Identity:
        check = partial(self._check_locked, given, address, door)
        is_right = await self.passwords.verify(password_hash, password, check)
        # The user may have changed meanwhile.
        user = self.users.get(str(given.user))
        if not is_right or user is None or user.password_hash != password_hash or password_hash is None:
            await self._fail(given, address, door)
        assert user is not None, "or it would have failed"
        if not user.is_valid(self._clock.now_us()):
            await self._fail(given, address, door)
        return self._admit(Grant(user, password_hash or ""), given.key, address, door)

    def _check_locked(self, given: Login, address: str, door: str) -> None:
        locked_s = self.throttle.locked_s(given.key, address, self._clock.monotonic_us())
        if locked_s:
            self._record(given, address, door, "failed", "locked out")
            raise Unauthorized(f"too many failed logins: try again in {locked_s:.0f} s")

    async def _fail(self, given: Login, address: str, door: str) -> Identity:
        why = "JWT" if given.jwt is not None and given.token is None and given.user is None else ""
        delay_s = self.throttle.failed(given.key, address, self._clock.monotonic_us())
        self._record(given, address, door, "failed", why)
        await asyncio.sleep(delay_s)
        raise Unauthorized(JWT_REFUSED if why else "the broker does not know this user or token")

    def _admit(self, grant: Grant, key: str, address: str, door: str) -> Identity:
        self.throttle.succeeded(key, address)
        identity = Identity(grant, self.meter(grant.user), self.audit, self._clock, address=address, door=door)
        if door != "http":
            # A browser logs in with each request.
            identity.record("login")
        return identity

    def _record(self, given: Login, address: str, door: str, result: str, why: str) -> None:
        self.audit.record("login", user=given.key, address=address, door=door, result=result, why=why)

    def meter(self, user: User) -> Meter:
        found = self._meters.get(user.name)
        if found is None:
            found = self._meters[user.name] = Meter(user.name, user.quotas, self._clock.monotonic_us())
        return found

    def usage_of(self, user: User) -> dict[str, int]:
        """Return what a user uses of what may have a quota."""
        meter = self._meters.get(user.name)
        return {} if meter is None else meter.usage(self._clock.monotonic_us())

    # Those that are connected.

    def connect(self, identity: Identity, changed: Callable[[], None], revoked: Callable[[str], None]) -> None:
        """`changed` is called when the user has other permissions, `revoked` with the reason when its login is no
        longer valid. Raise QuotaExceeded if the user has too many connections."""
        identity.meter.begin("connections")
        self._connected[identity] = changed, revoked

    def disconnect(self, identity: Identity) -> None:
        if self._connected.pop(identity, None) is not None:
            identity.meter.end("connections")

    def sweep(self) -> None:
        """End the connections whose user or token has expired."""
        now_us = self._clock.now_us()
        for identity, (_, revoked) in list(self._connected.items()):
            if is_expired(identity.grant, now_us):
                revoked("User Authentication Expired")

    # The file.

    async def watch(self) -> None:
        """Take a changed file when two reads gave the same content: an editor may write in place."""
        while self._path is not None:
            await asyncio.sleep(WATCH_S)
            before, self._seen = self._seen, await asyncio.to_thread(_read, self._path)
            if self._seen == before and self._seen != self._taken:
                self._take(self._path, self._seen)

    def reload(self) -> None:
        """Take the file as it is now. If it is invalid, the users stay as they were."""
        if self._path is not None:
            self._seen = _read(self._path)
            self._take(self._path, self._seen)

    def _take(self, path: Path, data: bytes) -> None:
        self._taken = data
        try:
            # Also for its problems: it may be missing, or others may read it.
            users = users_file.parse(path, users_file.read_bytes(path), self._dead_letter_prefix)
            if len(self.users) and not len(users):
                raise BadConfig([f"{path} has no users: nobody could log in, not even to add one"])
        except BadConfig as error:
            self.problems = tuple(error.problems)
            for problem in error.problems:
                logger.error("%s", problem)
            logger.error("%s is invalid: the %d users stay as they were", path, len(self.users))
            self.audit.record("users", user="", address="", result="failed", why="; ".join(error.problems))
            return
        self.problems = ()
        self.users = users
        logger.info("%s: %d users, %d roles", path, len(users), len(users.roles))
        self.audit.record("users", user="", address="", resource=str(path))
        self._renew()

    def _renew(self) -> None:
        now_us, monotonic_us = self._clock.now_us(), self._clock.monotonic_us()
        for name, meter in list(self._meters.items()):
            if (user := self.users.get(name)) is not None:
                meter.change(user.quotas, monotonic_us)
        for identity, (changed, revoked) in list(self._connected.items()):
            if not identity.grant.credential:
                continue  # the administrator of the settings, or this process
            grant = self.users.renewed(identity.grant, now_us)
            if grant is None:
                revoked("User Authentication Revoked")
            elif grant.user != identity.user:
                identity.change(grant)
                changed()
        connected = {identity.name for identity in self._connected}
        self._meters = {
            name: meter for name, meter in self._meters.items() if name in connected or self.users.get(name) is not None
        }


def _read(path: Path) -> bytes:
    """Return the content of the file; if it cannot be read, the reason."""
    try:
        return users_file.read_bytes(path)
    except (PenstockError, OSError) as error:
        return str(error).encode()
