"""The file of users and roles, in TOML. Only its owner may read it.

    [roles.reader]
    subscribe = ["orders", "orders.>"]
    groups.join = ["billing*"]

    [users.ann]
    password = "$argon2id$v=19$..."          `penstock user passwd` makes it
    roles = ["reader"]
    publish = { allow = ["orders.>"], deny = ["orders.secret.>"] }
    quotas = { connections = 10, bytes_in_s = "1MiB" }

A user who has no permissions may do nothing. What can be written is in `_PERMISSIONS` and `_USER`; every problem is
reported with its line, and a file with problems is not used at all.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import Any, Final

from penstock import table_file
from penstock.errors import BadConfig
from penstock.model.subject import is_pattern
from penstock.schema import shown
from penstock.security.nkeys import read_public_key
from penstock.security.passwords import check_hash
from penstock.security.permissions import NAMED, SWITCHES, Action, Permissions, Responses, Rule
from penstock.security.quotas import NAMES, NO_QUOTAS, Quotas
from penstock.security.users import Token, User, Users
from penstock.table_file import TableFile

Tables = dict[str, Any]
_Path = tuple[str | int, ...]

NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
# Stands for a value that may be a secret.
_HIDDEN: Final = "not that"
_SIZE: Final = re.compile(r"(\d{1,15}) ?(kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB|B)?")
_FACTORS: Final = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", start=1)
}
# What a user or a role may have, and what a user may have besides.
_PATTERNS: Final = {action.value: action for action in Action if action not in SWITCHES and action != Action.CONNECT}
_TABLES: Final = ("groups", "topics")
_PERMISSIONS: Final = (
    *dict.fromkeys(name.partition(".")[0] for name in _PATTERNS),
    "allow_responses",
    *sorted(SWITCHES),
    "quotas",
)
_USER: Final = ("password", "roles", "tokens", "nkeys", "certificates", "enabled", "expires")


def read_bytes(path: Path) -> bytes:
    """Return the content of the file. Raise BadConfig, also if others may read it."""
    try:
        # Without waiting for the writer of a FIFO.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(found):
                raise BadConfig([f"{path} is not a regular file"])
            mode = stat.S_IMODE(found)
            if mode & 0o077:
                raise BadConfig([f"{path} has the mode {mode:04o}: others can read it, run chmod 600 {path}"])
            return file.read()
    except FileNotFoundError:
        raise BadConfig([f"{path} does not exist: create it with penstock user add NAME --file {path}"]) from None
    except OSError as error:
        raise BadConfig([f"{path}: {error.strerror}"]) from None


def parse(path: Path, data: bytes, dead_letter_prefix: bytes = b"DLQ") -> Users:
    """Read the users. Raise BadConfig with all problems."""
    return _Reader(table_file.parse(path, data), dead_letter_prefix).read()


class _Reader:
    """It gathers all problems before it raises."""

    def __init__(self, file: TableFile, dead_letter_prefix: bytes) -> None:
        self._file = file
        self._dead_letter_prefix = dead_letter_prefix
        self._problems: list[str] = [
            f"{file.path}:{line}: {shown(key)} is repeated: keep one of them" for key, line in file.repeated
        ]

    def read(self) -> Users:
        tables = self._file.tables
        self._check_names((), tables, ("users", "roles"))
        roles = {}
        for name, table in self._tables(tables, "roles"):
            self._check_names(("roles", name), table, _PERMISSIONS)
            roles[name] = self._permissions(("roles", name), table), self._quotas(("roles", name), table)
        users = [self._user(name, table, roles) for name, table in self._tables(tables, "users")]
        self._check_unique(users)
        if self._problems:
            raise BadConfig(self._problems)
        return Users(users, roles)

    def _user(self, name: str, table: Tables, roles: Mapping[str, tuple[Permissions, Quotas]]) -> User:
        at: _Path = ("users", name)
        self._check_names(at, table, (*_USER, *_PERMISSIONS))
        if not NAME.fullmatch(name):
            self._wrong(at, name, "a name of up to 128 letters, digits and _ . @ -", what="the name of a user")
        known = self._texts((*at, "roles"), table.get("roles", []))
        for role in known:
            if role not in roles:
                self._wrong((*at, "roles"), role, f"a role: there are {', '.join(roles) or 'none'}")
        given = [roles[role] for role in known if role in roles]
        permissions = reduce(or_, (each for each, _ in given), self._permissions(at, table))
        role_quotas = reduce(and_, (each for _, each in given), NO_QUOTAS)
        return User(
            name=name,
            permissions=permissions,
            quotas=self._quotas(at, table) | role_quotas,
            roles=tuple(known),
            password_hash=self._checked((*at, "password"), table.get("password"), check_hash),
            tokens=tuple(self._tokens((*at, "tokens"), table.get("tokens", []))),
            nkeys=tuple(
                key
                for key in self._texts((*at, "nkeys"), table.get("nkeys", []), is_secret=True)
                if self._checked((*at, "nkeys"), key, read_public_key) is not None
            ),
            certificates=tuple(self._texts((*at, "certificates"), table.get("certificates", []))),
            is_enabled=self._flag((*at, "enabled"), table.get("enabled", True)),
            expires_us=self._time((*at, "expires"), table.get("expires")),
        )

    def _check_unique(self, users: list[User]) -> None:
        """One credential belongs to one user."""
        seen: dict[str, str] = {}
        for user in users:
            for kind, names in (
                ("nkeys", user.nkeys),
                ("certificates", user.certificates),
                ("tokens", [token.id for token in user.tokens]),
            ):
                for name in names:
                    other = seen.setdefault(f"{kind} {name}", user.name)
                    if other != user.name:
                        self._wrong(("users", user.name, kind), name, f"of one user, and {other} has it too")

    # Permissions.

    def _permissions(self, at: _Path, table: Tables) -> Permissions:
        rules: dict[Action, Rule] = {}
        for name, action in _PATTERNS.items():
            first, _, second = name.partition(".")
            value = table.get(first)
            if second:
                value = value.get(second) if isinstance(value, dict) else None
            if value is not None:
                rules[action] = self._rule((*at, *name.split(".")), value, action)
        for name in _TABLES:
            allowed = [each.partition(".")[2] for each in _PATTERNS if each.startswith(f"{name}.")]
            if isinstance(value := table.get(name), dict):
                self._check_names((*at, name), value, allowed)
            elif value is not None:
                self._wrong((*at, name), value, f"a table of {', '.join(allowed)}")
        switches = frozenset(each for each in SWITCHES if self._flag((*at, each.value), table.get(each.value, False)))
        return Permissions(rules, switches, self._responses((*at, "allow_responses"), table.get("allow_responses")))

    def _rule(self, at: _Path, value: Any, action: Action) -> Rule:
        if isinstance(value, list):
            value = {"allow": value}
        if not isinstance(value, dict):
            self._wrong(at, value, "a list of patterns, or a table of allow and deny")
            return Rule()
        self._check_names(at, value, ("allow", "deny"))
        allow, deny = (tuple(self._patterns((*at, key), value.get(key, []), action)) for key in ("allow", "deny"))
        if action is Action.SUBSCRIBE:
            # Its dead letters have the same values.
            deny += tuple(self._dead_letter_prefix + b"." + each for each in deny)
        return Rule(allow, deny)

    def _patterns(self, at: _Path, value: Any, action: Action) -> Iterator[bytes]:
        for number, text in enumerate(self._texts(at, value)):
            if action in NAMED or is_pattern(text.encode()):
                yield text.encode()
            else:
                self._wrong((*at, number), text, "a pattern of subjects, such as orders.*, orders.> or >")

    def _responses(self, at: _Path, value: Any) -> Responses | None:
        if isinstance(value, dict):
            self._check_names(at, value, ("count", "ttl_s"))
            given = {name: self._count((*at, name), each) for name, each in value.items() if name in ("count", "ttl_s")}
            return Responses(**{name: each for name, each in given.items() if each is not None})
        return Responses() if value is not None and self._flag(at, value) else None

    def _quotas(self, at: _Path, table: Tables) -> Quotas:
        value, at = table.get("quotas", {}), (*at, "quotas")
        if not isinstance(value, dict):
            self._wrong(at, value, f"a table of {', '.join(NAMES)}")
            return NO_QUOTAS
        self._check_names(at, value, NAMES)
        return Quotas(**{name: self._count((*at, name), each) for name, each in value.items() if name in NAMES})

    # Credentials.

    def _tokens(self, at: _Path, value: Any) -> Iterator[Token]:
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self._wrong(at, _HIDDEN, "a list of tables with id and hash: `penstock user token` makes one")
            return
        for number, table in enumerate(value):
            place = (*at, number)
            self._check_names(place, table, ("id", "hash", "about", "expires"))
            texts = [table.get(name, "") for name in ("id", "hash", "about")]
            if not all(isinstance(each, str) for each in texts) or not re.fullmatch(r"[0-9a-f]{64}", texts[1]):
                where = f"{self._file.where(place)}: {_dotted(place)}"
                self._problems.append(f"{where} has no valid id and hash: `penstock user token` makes them")
            else:
                yield Token(texts[0], texts[1], texts[2], self._time((*place, "expires"), table.get("expires")))

    # Values.

    def _tables(self, tables: Tables, name: str) -> Iterator[tuple[str, Tables]]:
        found = tables.get(name, {})
        # There may be passwords in it.
        is_secret = name == "users"
        if not isinstance(found, dict):
            self._wrong((name,), _HIDDEN if is_secret else found, "a table")
            return
        for key, table in found.items():
            if isinstance(table, dict):
                yield str(key), table
            else:
                self._wrong((name, key), _HIDDEN if is_secret else table, "a table")

    def _texts(self, at: _Path, value: Any, *, is_secret: bool = False) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            self._wrong(at, _HIDDEN if is_secret else value, "a list of texts")
            return []
        return value

    def _flag(self, at: _Path, value: Any) -> bool:
        if not isinstance(value, bool):
            self._wrong(at, value, "true or false")
        return value is True

    def _count(self, at: _Path, value: Any) -> int | None:
        if isinstance(value, str) and "bytes" in str(at[-1]) and (found := _SIZE.fullmatch(value)):
            value = int(found[1]) * _FACTORS[found[2] or "B"]
        if type(value) is not int or not 0 < value < 1 << 62:
            self._wrong(at, value, "a positive integer")
            return None
        return value

    def _time(self, at: _Path, value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, datetime) or value.tzinfo is None:
            self._wrong(at, value, "a time with its zone, such as 2030-01-31T12:00:00Z")
            return None
        return round(value.timestamp() * 1_000_000)

    def _checked(self, at: _Path, value: Any, check: Callable[[str], object]) -> str | None:
        """Return a credential. It is not shown if it is wrong: it may be the secret itself."""
        if value is None:
            return None
        try:
            if not isinstance(value, str):
                raise ValueError("not text")
            check(value)
        except ValueError as error:
            self._problems.append(f"{self._file.where(at)}: {_dotted(at)}: its value is {error}")
            return None
        return value

    def _check_names(self, at: _Path, table: Tables, allowed: tuple[str, ...] | list[str]) -> None:
        for name in table:
            if name not in allowed:
                place = f"{self._file.where((*at, name))}: {_dotted((*at, name))}"
                self._problems.append(f"{place} is unknown: there are {', '.join(allowed)}")

    def _wrong(self, at: _Path, value: Any, allowed: str, what: str | None = None) -> None:
        text = value if value is _HIDDEN else shown(value)
        self._problems.append(f"{self._file.where(at)}: {what or _dotted(at)} is {text}: it must be {allowed}")


def _dotted(at: _Path) -> str:
    return ".".join(map(str, at))
