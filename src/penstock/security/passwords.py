"""Passwords: Argon2id, computed in few threads.

A hash takes 19 MiB and some 20 ms, which is the point of it. So at most two are computed at a time, a bounded number
waits, and a password that was right is remembered: as a keyed hash, for as long as the process and the user live. A
client that reconnects, and each HTTP request, would cost as much otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final

from penstock.errors import Overloaded

if TYPE_CHECKING:
    from argon2 import PasswordHasher

# OWASP's first choice for Argon2id.
TIME_COST: Final = 2
MEMORY_KIB: Final = 19 << 10
PARALLELISM: Final = 1
THREADS: Final = 2
WAITING_MAX: Final = 256
REMEMBERED_MAX: Final = 4096
PASSWORD_BYTES_MAX: Final = 1024
# A file may name more costly parameters, but not ones that exhaust the memory.
_MEMORY_KIB_MAX: Final = 256 << 10


@cache
def _hasher() -> PasswordHasher:
    from argon2 import PasswordHasher

    return PasswordHasher(time_cost=TIME_COST, memory_cost=MEMORY_KIB, parallelism=PARALLELISM)


@cache
def _nobody() -> str:
    """Return the hash of a password that nobody knows: a wrong user takes as long as a wrong password."""
    return _hasher().hash(secrets.token_hex(16))


def hash_password(password: str) -> str:
    if not _is_text(password) or not 0 < len(password.encode()) <= PASSWORD_BYTES_MAX:
        raise ValueError(f"a password has 1 to {PASSWORD_BYTES_MAX} bytes of UTF-8")
    return _hasher().hash(password)


def _is_text(password: str) -> bool:
    """Return whether it can be encoded: JSON may have half of a character."""
    return not any("\ud800" <= character <= "\udfff" for character in password)


def check_hash(text: str) -> None:
    """Raise ValueError unless this is the hash of a password."""
    from argon2 import Type, extract_parameters
    from argon2.exceptions import InvalidHashError

    try:
        found = extract_parameters(text)
    except InvalidHashError:
        raise ValueError("not an Argon2id hash: `penstock user passwd` makes one") from None
    if found.type is not Type.ID or found.memory_cost > _MEMORY_KIB_MAX:
        raise ValueError(
            f"not an Argon2id hash of at most {_MEMORY_KIB_MAX >> 10} MiB: `penstock user passwd` makes one"
        )


def _verify(password_hash: str | None, password: str) -> bool:
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        _hasher().verify(password_hash or _nobody(), password)
    except (Argon2Error, InvalidHashError):
        return False
    return password_hash is not None


class Passwords:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._threads = asyncio.Semaphore(THREADS)
        self._waiting = 0

    def is_remembered(self, password_hash: str | None, password: str) -> bool:
        """Return whether this password was right for this hash before."""
        if password_hash is None:
            return False
        digest = self._digest(password_hash, password)
        if digest in self._remembered:
            self._remembered.move_to_end(digest)
            return True
        return False

    async def verify(self, password_hash: str | None, password: str, check_allowed: Callable[[], None]) -> bool:
        """Return whether a password is right. `password_hash`: None for a user who is unknown.

        `check_allowed` raises an error if it must not be verified any more when its turn comes: others that came
        before may have failed meanwhile, so parallel guesses are as limited as single ones."""
        if not _is_text(password) or len(password.encode()) > PASSWORD_BYTES_MAX:
            return False
        if self._waiting >= WAITING_MAX:
            raise Overloaded(f"{self._waiting} logins wait for their password to be verified: try later")
        self._waiting += 1
        try:
            async with self._threads:
                check_allowed()
                # One of many connections that log in at once has verified it.
                if self.is_remembered(password_hash, password):
                    return True
                is_right = await asyncio.to_thread(_verify, password_hash, password)
        finally:
            self._waiting -= 1
        if is_right and password_hash is not None:
            self._remembered[self._digest(password_hash, password)] = None
            if len(self._remembered) > REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return is_right

    def _digest(self, password_hash: str, password: str) -> bytes:
        text = f"{password_hash}\0{password}".encode(errors="surrogatepass")
        return hmac.digest(self._key, text, hashlib.sha256)
