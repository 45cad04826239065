"""Brokers by name: `contexts.json` in the user's configuration directory, readable only by the user."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock import address
from penstock.errors import PenstockError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PORT: Final = 4222


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The address of a broker and the credentials for it."""

    servers: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    # Paths of files.
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def addresses(self) -> str:
        """Return the addresses of the broker, without credentials."""
        return ",".join(address.join(*address.split(each, _PORT)) for each in self.servers.split(","))

    @property
    def login(self) -> str:
        """Return the kind of login, without secrets."""
        found = {"user": self.user, "token": self.token}
        for each in reversed(self.servers.split(",")) if not (self.user or self.token) else ():
            found |= address.login(each)
        return f"user {found['user']}" if found["user"] else "token" if found["token"] else "-"


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts, and the current one."""

    by_name: dict[str, Context]
    current: str | None = None

    def get(self, name: str) -> Context:
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise PenstockError(f"unknown context {name!r} (known: {known}): add it with `penstock context add`")
        return self.by_name[name]


def path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "penstock" / "contexts.json"


def load() -> Contexts:
    try:
        found = json.loads(path().read_bytes())
        contexts = {str(name): Context(**fields) for name, fields in found["contexts"].items()}
        current = found["current"]
    except FileNotFoundError:
        return Contexts({})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PenstockError(f"{path()} is not a valid file of contexts ({error!r}): correct or delete it") from None
    return Contexts(contexts, current if current in contexts else None)


def save(contexts: Contexts) -> None:
    """Replace the file atomically; only the user can read it."""
    target = path()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "current": contexts.current,
        "contexts": {
            name: {key: value for key, value in asdict(context).items() if value is not None}
            for name, context in contexts.by_name.items()
        },
    }
    temporary = target.with_name(f".contexts.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
    temporary.replace(target)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise PenstockError(
            f"invalid name {name!r}: use at most 64 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
