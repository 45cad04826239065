"""The settings of a replica: from the environment, and from flags, which win. All problems are reported at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final

from penstock.address import bare, is_loopback, join
from penstock.errors import BadConfig
from penstock.log.policy import SegmentBytes
from penstock.model.subject import is_pattern
from penstock.schema import Field, Form, Invalid, Port, Text, about, declared, make
from penstock.web.credentials import Credentials


class OnError(StrEnum):
    """What to do when a message cannot be stored. A message is acknowledged only if it is stored, or counted as
    skipped."""

    EXPONENTIAL_THEN_FIXED = "EXPONENTIAL_THEN_FIXED"  # retry it forever
    SKIP_ON_ERROR = "SKIP_ON_ERROR"  # continue with the next message; this one is counted and logged
    PAUSE_ON_ERROR = "PAUSE_ON_ERROR"  # stop until somebody resumes the replica


def _name(text: str) -> str:
    return _checked(text, bool(text) and text.isprintable() and " " not in text)


def _pattern(text: str) -> str:
    return _checked(text, is_pattern(text.encode()))


def _host(text: str) -> str:
    return bare(_checked(text, bool(text) and not re.search(r"[\s/,]", text)))


def _path(text: str) -> str:
    return _checked(text, bool(text) and "\0" not in text)


def _checked(text: str, is_allowed: bool) -> str:
    if not is_allowed:
        raise ValueError(text)
    return text


Name = Annotated[str, Form(read=_name, allowed="a name without blanks")]
Pattern = Annotated[str, Form(read=_pattern, allowed="a topic, or a pattern such as prices.>")]
Host = Annotated[str, Form(read=_host, allowed="a name or an address, without a port")]
Directory = Annotated[str, Form(read=_path, allowed="a directory")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    topic: Annotated[Pattern, Form(variable="CONSUMER_TOPIC"), about("the topic to copy, or a pattern")]
    group: Annotated[Name, Form(variable="CONSUMER_GROUP"), about("the group to read as; no other client may use it")]
    type: Annotated[Name, Form(variable="CONSUMER_TYPE"), about("the type that /api/query/stats shows")] = "replica"
    host: Annotated[Host, Form(variable="CONSUMER_HOST"), about("address of the HTTP port")] = "127.0.0.1"
    port: Annotated[Port, Form(variable="CONSUMER_PORT"), about("HTTP port; 0: any free port")] = 8082
    broker_host: Annotated[Host, Form(variable="BROKER_HOST"), about("address of the broker")] = "127.0.0.1"
    broker_port: Annotated[Port, Form(variable="BROKER_PORT"), about("port of the broker, 9092 or 4222")] = 9092
    data_dir: Annotated[Directory, Form(variable="STORAGE_DATA_DIR", option="data"), about("directory of the copy")] = (
        "./consumer-data"
    )
    segment_bytes_max: Annotated[
        SegmentBytes, Form(variable="STORAGE_SEGMENT_SIZE", option="segment_size"), about("size of a segment")
    ] = 64 << 20
    on_error: Annotated[
        OnError,
        Form(variable="CONSUMER_RETRY_POLICY", option="retry_policy"),
        about(f"what to do when a message cannot be stored: {', '.join(OnError)}"),
    ] = OnError.EXPONENTIAL_THEN_FIXED
    http_user: Annotated[
        Text | None, Form(variable="CONSUMER_HTTP_USER"), about("user of queries; none: the credentials for the broker")
    ] = None
    http_password: Annotated[Text | None, Form(variable="CONSUMER_HTTP_PASSWORD"), about("password of that user")] = (
        field(default=None, repr=False)
    )
    http_token: Annotated[Text | None, Form(variable="CONSUMER_HTTP_TOKEN"), about("token instead of both")] = field(
        default=None, repr=False
    )
    http_hosts: Annotated[
        Text | None, Form(variable="CONSUMER_HTTP_HOSTS"), about("other names of this machine in queries; *: any")
    ] = None
    http_tls_cert: Annotated[
        Text | None, Form(variable="CONSUMER_HTTP_TLS_CERT"), about("file with the certificate of the HTTP port: https")
    ] = None
    http_tls_key: Annotated[
        Text | None, Form(variable="CONSUMER_HTTP_TLS_KEY"), about("its private key; none: it is in the same file")
    ] = None
    insecure: Annotated[
        bool, Form(variable="CONSUMER_INSECURE"), about("answer other machines without credentials, or without TLS")
    ] = False

    def credentials(self, broker: Credentials) -> Credentials:
        """Return what queries must give: the replica's own credentials, or those for the broker, whose data it has."""
        own = Credentials(user=self.http_user, password=self.http_password, token=self.http_token)
        return own or broker

    @property
    def broker(self) -> str:
        return join(self.broker_host, self.broker_port)


FIELDS: Final = declared(ReplicaConfig)


def load(
    *, environ: Mapping[str, str], flags: Mapping[str, Any], credentials: Credentials | None = None
) -> ReplicaConfig:
    """`flags` have the names of the fields; None, and an empty variable: not given. `credentials` are those for the
    broker."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, each in FIELDS.items():
        flag, variable = _flag(each), each.form.variable
        if flags.get(name) is not None:
            origin, value = flag, flags[name]
        elif environ.get(variable):
            origin, value = variable, environ[variable]
        else:
            if each.is_required:
                problems.append(f"{variable} (or {flag}) is not set: it must be {each.allowed}")
            continue
        try:
            values[name] = each.parse(value)
        except Invalid as problem:
            problems.append(problem.of(origin))
    if not problems:
        config = make(ReplicaConfig, values)
        problems += _conflicts(config, credentials or Credentials())
    if problems:
        raise BadConfig(problems)
    return config


def _flag(each: Field) -> str:
    return f"--{(each.form.option or each.name).replace('_', '-')}"


def _conflicts(config: ReplicaConfig, broker: Credentials) -> Iterator[str]:
    if (config.http_user is None) != (config.http_password is None):
        yield "CONSUMER_HTTP_USER and CONSUMER_HTTP_PASSWORD go together: set both, or neither"
    if config.http_tls_key is not None and config.http_tls_cert is None:
        yield "CONSUMER_HTTP_TLS_KEY needs CONSUMER_HTTP_TLS_CERT: set both, or neither"
    is_open = not (is_loopback(config.host) or config.insecure)
    if is_open and config.credentials(broker) and config.http_tls_cert is None:
        yield (
            f"CONSUMER_HOST (or --host) is {config.host!r}, which other machines can reach, and credentials would "
            "cross the network unencrypted: set CONSUMER_HTTP_TLS_CERT and CONSUMER_HTTP_TLS_KEY; in a private "
            "network, or behind a proxy with TLS, set CONSUMER_INSECURE=true (--insecure)"
        )
    if is_open and not config.credentials(broker):
        yield (
            f"CONSUMER_HOST (or --host) is {config.host!r}, which other machines can reach, and no credentials are "
            "required: set CONSUMER_HTTP_TOKEN, or CONSUMER_HTTP_USER and CONSUMER_HTTP_PASSWORD; to answer anyone, "
            "set CONSUMER_INSECURE=true (--insecure)"
        )
