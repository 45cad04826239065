"""The settings of a replica: from the environment, and from flags, which win. All that is wrong is refused at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from penstock.address import bare, is_loopback, join
from penstock.errors import BadConfig
from penstock.storage.policy import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN
from penstock.subject import is_pattern
from penstock.web import Credentials


class OnError(StrEnum):
    """What follows when a message cannot be stored here. None is ever acknowledged that neither is stored nor told of
    as skipped."""

    EXPONENTIAL_THEN_FIXED = "EXPONENTIAL_THEN_FIXED"  # it is tried again, for ever
    SKIP_ON_ERROR = "SKIP_ON_ERROR"  # the next message; this one is counted, and logged
    PAUSE_ON_ERROR = "PAUSE_ON_ERROR"  # nothing, until somebody who has looked resumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """How a value is read, and what is said of one that cannot be."""

    read: Callable[[str], Any]
    text: str


# Spelled exactly: Mb are not bytes.
_SIZES: Final = {"": 1, "B": 1, "kB": 1000} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_SEGMENT_BYTES: Final = (SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)


def _name(text: str) -> str:
    return _checked(text, bool(text) and text.isprintable() and " " not in text)


def _pattern(text: str) -> str:
    return _checked(text, is_pattern(text.encode()))


def _host(text: str) -> str:
    return bare(_checked(text, bool(text) and not re.search(r"[\s/,]", text)))


def _port(text: str) -> int:
    return int(_checked(text, text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535))


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15}) ?([A-Za-z]*)", text)
    unit = _SIZES.get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(text)
    size = int(found[1]) * unit
    low, high = _SEGMENT_BYTES
    return size if low <= size <= high else int(_checked(text, False))


def _policy(text: str) -> OnError:
    return OnError(text.upper())


def _path(text: str) -> str:
    return _checked(text, bool(text) and "\0" not in text)


def _secret(text: str) -> str:
    return _checked(text, bool(text))


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[_checked(text, text in ("true", "false"))]


def _checked(text: str, is_allowed: bool) -> str:
    if not is_allowed:
        raise ValueError(text)
    return text


NAME: Final = Allowed(read=_name, text="a name without blanks")
PATTERN: Final = Allowed(read=_pattern, text="a topic, or a pattern such as prices.>")
HOST: Final = Allowed(read=_host, text="a name or an address, without a port")
PORT: Final = Allowed(read=_port, text="a port, 0 to 65535")
SIZE: Final = Allowed(read=_size, text='bytes, as a number or like "64MiB", 4KiB to 2GiB')
POLICY: Final = Allowed(read=_policy, text=", ".join(OnError))
PATH: Final = Allowed(read=_path, text="a directory")
SECRET: Final = Allowed(read=_secret, text="text that is not empty")
FLAG: Final = Allowed(read=_flag, text="true or false")


def _by(variable: str, flag: str, allowed: Allowed) -> dict[str, Any]:
    return {"variable": variable, "flag": flag, "allowed": allowed}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """`penstock replica --help` tells what each is for."""

    topic: str = field(metadata=_by("CONSUMER_TOPIC", "--topic", PATTERN))
    group: str = field(metadata=_by("CONSUMER_GROUP", "--group", NAME))
    type: str = field(default="replica", metadata=_by("CONSUMER_TYPE", "--type", NAME))
    host: str = field(default="127.0.0.1", metadata=_by("CONSUMER_HOST", "--host", HOST))
    port: int = field(default=8082, metadata=_by("CONSUMER_PORT", "--port", PORT))
    broker_host: str = field(default="127.0.0.1", metadata=_by("BROKER_HOST", "--broker-host", HOST))
    broker_port: int = field(default=9092, metadata=_by("BROKER_PORT", "--broker-port", PORT))
    data_dir: str = field(default="./consumer-data", metadata=_by("STORAGE_DATA_DIR", "--data", PATH))
    segment_bytes_max: int = field(default=64 << 20, metadata=_by("STORAGE_SEGMENT_SIZE", "--segment-size", SIZE))
    on_error: OnError = field(
        default=OnError.EXPONENTIAL_THEN_FIXED, metadata=_by("CONSUMER_RETRY_POLICY", "--retry-policy", POLICY)
    )

    http_user: str | None = field(default=None, metadata=_by("CONSUMER_HTTP_USER", "--http-user", SECRET))
    http_password: str | None = field(
        default=None, repr=False, metadata=_by("CONSUMER_HTTP_PASSWORD", "--http-password", SECRET)
    )
    http_token: str | None = field(
        default=None, repr=False, metadata=_by("CONSUMER_HTTP_TOKEN", "--http-token", SECRET)
    )
    http_hosts: str | None = field(default=None, metadata=_by("CONSUMER_HTTP_HOSTS", "--http-hosts", SECRET))
    insecure: bool = field(default=False, metadata=_by("CONSUMER_INSECURE", "--insecure", FLAG))

    def credentials(self, broker: Credentials) -> Credentials:
        """What queries must give: those of the replica, or else those that it gives the broker, whose data it has."""
        own = Credentials(user=self.http_user, password=self.http_password, token=self.http_token)
        return own or broker

    @property
    def broker(self) -> str:
        return join(self.broker_host, self.broker_port)


def load(
    *, environ: Mapping[str, str], flags: Mapping[str, str | None], credentials: Credentials | None = None
) -> ReplicaConfig:
    """`flags` are by the names of the fields; None, and a variable that is empty: not given. `credentials` are those
    for the broker."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for each in fields(ReplicaConfig):
        try:
            given = _given(each, environ, flags)
        except _Missing as error:
            problems.append(str(error))
            continue
        if given is None:
            continue
        origin, text = given
        allowed: Allowed = each.metadata["allowed"]
        try:
            values[each.name] = allowed.read(text)
        except ValueError:
            shown = repr(text) if each.repr else "***"
            problems.append(f"{origin} is {shown}: it must be {allowed.text}")
    if problems:
        raise BadConfig(problems)
    config = ReplicaConfig(**values)
    problems += _conflicts(config, credentials or Credentials())
    if problems:
        raise BadConfig(problems)
    return config


def _conflicts(config: ReplicaConfig, broker: Credentials) -> Iterator[str]:
    if (config.http_user is None) != (config.http_password is None):
        yield "CONSUMER_HTTP_USER and CONSUMER_HTTP_PASSWORD go together: set both, or neither"
    if not (is_loopback(config.host) or config.credentials(broker) or config.insecure):
        yield (
            f"CONSUMER_HOST (or --host) is {config.host!r}, which other machines can reach, and no credentials are "
            "required: set CONSUMER_HTTP_TOKEN, or CONSUMER_HTTP_USER and CONSUMER_HTTP_PASSWORD; to answer anyone, "
            "set CONSUMER_INSECURE=true (--insecure)"
        )


class _Missing(Exception):
    """What must be given was not: the text says what."""


def _given(each: Field[Any], environ: Mapping[str, str], flags: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Who says it, and what; None: nobody, and there is a default."""
    variable, flag = each.metadata["variable"], each.metadata["flag"]
    text = flags.get(each.name)
    if text is not None:
        return flag, text
    if environ.get(variable):
        return variable, environ[variable]
    if each.default is MISSING:
        allowed: Allowed = each.metadata["allowed"]
        raise _Missing(f"{variable} (or {flag}) is not set: it must be {allowed.text}")
    return None
