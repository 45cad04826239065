"""Changes of the file of users. Each reads the file, changes it, checks the result as a whole, and replaces the file
durably. Comments are not kept."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from penstock import table_file
from penstock.errors import BadConfig, BadRequest
from penstock.security import users_file
from penstock.security.passwords import hash_password
from penstock.security.users import new_token, token_hash

Tables = dict[str, Any]

TOKEN_TTL_MAX_S: Final = 100 * 365 * 86_400

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class UsersEditor:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, password: str | None, fields: Mapping[str, Any]) -> None:
        """Add a user. `fields` as in the file: roles, publish, quotas, and so on."""
        with self._changed(creates=True) as tables:
            users = tables.setdefault("users", {})
            if name in users:
                raise BadRequest(f"there is a user {name} already")
            users[name] = dict(fields) | ({} if password is None else {"password": _hashed(password)})

    def change(self, name: str, fields: Mapping[str, Any]) -> None:
        """Set fields of a user; None removes one."""
        with self._changed() as tables:
            user = _user(tables, name)
            for field, value in fields.items():
                if value is None:
                    user.pop(field, None)
                else:
                    user[field] = value

    def set_password(self, name: str, password: str) -> None:
        self.change(name, {"password": _hashed(password)})

    def enable(self, name: str, *, is_enabled: bool) -> None:
        self.change(name, {"enabled": None if is_enabled else False})

    def remove(self, name: str) -> None:
        with self._changed() as tables:
            _user(tables, name)
            if len(tables["users"]) == 1:
                # A broker does not take a file without users.
                raise BadRequest(f"{name} is the last user: disable it, or add another one first")
            del tables["users"][name]

    def add_token(self, name: str, *, about: str = "", ttl_s: float | None = None) -> tuple[str, str]:
        """Give a user a new token. Return it and its ID; only its hash is stored."""
        text, number = new_token()
        if ttl_s is not None and ttl_s > TOKEN_TTL_MAX_S:
            raise BadRequest(f"ttl_s is {ttl_s:.0f}: it must be at most {TOKEN_TTL_MAX_S}, 100 years")
        row: Tables = {"id": number, "hash": token_hash(text)}
        if about:
            row["about"] = about
        if ttl_s is not None:
            row["expires"] = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=ttl_s)
        with self._changed() as tables:
            _user(tables, name).setdefault("tokens", []).append(row)
        return text, number

    def revoke_tokens(self, name: str, number: str | None = None) -> int:
        """Remove a token of a user, or all. Return how many those are."""
        with self._changed() as tables:
            user = _user(tables, name)
            tokens = user.get("tokens", [])
            left = [row for row in tokens if number not in (None, row.get("id"))]
            if number is not None and len(left) == len(tokens):
                raise BadRequest(f"the user {name} has no token {number}")
            user["tokens"] = left
            return len(tokens) - len(left)

    @contextmanager
    def _changed(self, *, creates: bool = False) -> Iterator[Tables]:
        # A link stays one, and all editors of its file have the same lock.
        target = Path(os.path.realpath(self.path))
        # Also before the lock, which is a file: a wrong path must not leave one.
        self._read(target, creates=creates)
        with self._locked(target):
            tables = self._read(target, creates=creates)
            yield tables
            data = written(tables).encode()
            # What would be refused is not written.
            users_file.parse(self.path, data)
            _replace(target, data)

    def _read(self, target: Path, *, creates: bool) -> Tables:
        if not creates or os.path.lexists(target):
            return table_file.parse(self.path, users_file.read_bytes(self.path)).tables
        if not target.parent.is_dir():
            raise BadConfig([f"{target.parent} is not a directory: create it for {target.name}"])
        return {}

    @contextmanager
    def _locked(self, target: Path) -> Iterator[None]:
        """Let one editor change the file at a time."""
        path = target.with_name(f".{target.name}.lock")
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadConfig([f"{path}: {error.strerror}"]) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _hashed(password: str) -> str:
    try:
        return hash_password(password)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _user(tables: Tables, name: str) -> Tables:
    user = tables.get("users", {}).get(name)
    if not isinstance(user, dict):
        raise BadRequest(f"there is no user {name}")
    return user


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if path.exists():
            found = path.stat()
            # Whoever edits it, the broker's account must still be able to read it.
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file, found.st_uid, found.st_gid)
        while data:
            data = data[os.write(file, data) :]
        os.fsync(file)
    finally:
        os.close(file)
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# TOML.


def written(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML."""
    return "\n".join(_table(tables, ())).strip("\n") + "\n"


def _table(table: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not _is_section(value, at)}
    if at and (plain or not table):
        yield f"\n[{'.'.join(map(_key, at))}]"
    for name, value in plain.items():
        yield f"{_key(name)} = {_value(value)}"
    for name, value in table.items():
        if name not in plain:
            yield from _table(value, (*at, name))


def _is_section(value: Any, at: tuple[str, ...]) -> bool:
    """Return whether a value is a section of its own: the tables of users and roles, and no others."""
    return isinstance(value, Mapping) and len(at) < 2


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case Mapping():
            return "{ " + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items()) + " }"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise BadRequest(f"{type(value).__name__} cannot be written to the file of users")


def _text(text: str) -> str:
    # JSON's strings are TOML's, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
