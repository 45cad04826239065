"""The options that commands share, each defined once.

A command may take a dataclass, or the fields of a declaration, as one parameter: `options` makes each field an option.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import typer

from penstock import times
from penstock.cli import contexts
from penstock.clock import SystemClock
from penstock.errors import BadHeader, NoBroker, PenstockError, Unauthorized
from penstock.model import headers
from penstock.tls.options import VARIABLES, TlsOptions

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.schema import Field

# Completion of names gives up after this long.
COMPLETION_S: Final = 0.5

# The part of a help page with the options of a connection.
BROKER_PANEL: Final = "Broker"
_SERVERS: Final = "127.0.0.1:4222"
_SERVERS_VARIABLE: Final = "PENSTOCK_SERVERS"
_CONTEXT_VARIABLE: Final = "PENSTOCK_CONTEXT"


User = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", help="User name.", rich_help_panel=BROKER_PANEL)]
Password = Annotated[
    str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD", help="Password.", rich_help_panel=BROKER_PANEL)
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PENSTOCK_AUTH_TOKEN", help="Token, instead of a user and a password.", rich_help_panel=BROKER_PANEL
    ),
]


def _tls_file(name: str, about: str) -> Any:
    return typer.Option(metavar="FILE", envvar=VARIABLES[name], help=about, rich_help_panel=BROKER_PANEL)


TlsCa = Annotated[str | None, _tls_file("ca", "Use TLS, and trust these CAs. \\[default: those of the system]")]
TlsCert = Annotated[str | None, _tls_file("cert", "Use TLS with this client certificate.")]
TlsKey = Annotated[str | None, _tls_file("key", "The key of the certificate.")]


def read_tls(ca: str | None, cert: str | None, key: str | None) -> TlsOptions | None:
    """Return the options of TLS; None if none is given."""
    try:
        return TlsOptions(ca=ca, cert=cert, key=key) or None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--tls-key'") from None


@dataclass(frozen=True, slots=True)
class Declared:
    """Options for the fields of a declaration. A duration loses the unit in its name: `retain_ms` is --retain. The
    command gets the given ones as a dict, parsed as in a configuration file unless `reads` is false."""

    fields: Mapping[str, Field]
    reads: bool = True

    def parameters(self) -> list[inspect.Parameter]:
        return [
            inspect.Parameter(
                _option(field), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field)
            )
            for field in self.fields.values()
        ]

    def gather(self, given: dict[str, Any]) -> dict[str, Any]:
        found = {name: given.pop(_option(field)) for name, field in self.fields.items()}
        if not self.reads:
            return found
        return {
            name: parse(self.fields[name], value, f"--{_option(self.fields[name]).replace('_', '-')}")
            for name, value in found.items()
            if value is not None
        }


def _option(field: Field) -> str:
    return field.form.option or field.name.removesuffix("_ms")


def _annotation(field: Field) -> Any:
    about = f"{field.about[0].upper()}{field.about[1:]}."
    if field.form.variable:
        default = "" if field.default is None or field.is_required else f" \\[default: {field.written_default}]"
        about = f"{about}{default}  [{field.form.variable}]"
        if field.choices != (True, False):
            return Annotated[str | None, typer.Option(help=about)]
    if field.choices == (True, False):
        return Annotated[bool | None, typer.Option(help=about)]
    if field.choices:
        return Annotated[Literal[field.choices] | None, typer.Option(help=about)]
    metavar = f"{field.metavar}|none" if field.is_optional else field.metavar
    return Annotated[str | None, typer.Option(metavar=metavar, help=about)]


def options(command: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    gathered: dict[str, Callable[[dict[str, Any]], Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        declared = next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Declared)), None)
        if declared is not None:
            gathered[name] = declared.gather
            parameters += declared.parameters()
        elif is_dataclass(kind):
            gathered[name] = functools.partial(_gather, kind)
            parameters += _parameters(kind)
        else:
            # Keyword-only, like those of the fields, so that they may be in any order.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, gather in gathered.items():
            given[name] = gather(given)
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _gather(kind: Any, given: dict[str, Any]) -> Any:
    return kind(**{field.name: given.pop(field.name) for field in fields(kind)})


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(kind)
    ]


def complete_context(incomplete: str) -> list[str]:
    try:
        return [name for name in contexts.load().by_name if name.startswith(incomplete)]
    except (PenstockError, OSError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The address of the broker and the credentials for it. A server reads its credentials from the same variables.

    An explicit address takes precedence over a named context, and that over the current context. The command line
    takes precedence over the environment. Credentials of a context are sent only to its own servers.
    """

    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar=_CONTEXT_VARIABLE,
            autocompletion=complete_context,
            help="Use the broker of this context (see `penstock context`).",
            rich_help_panel=BROKER_PANEL,
        ),
    ] = None
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,…]",
            envvar=_SERVERS_VARIABLE,
            help="Broker addresses, also as nats://… or tls://…; tried in turn. \\[default: 127.0.0.1:4222]",
            rich_help_panel=BROKER_PANEL,
        ),
    ] = None
    user: User = None
    password: Password = None
    token: Token = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    @contextmanager
    def client(self, *, timeout: float = 30.0) -> Iterator[Client]:
        from penstock.client.sync import Client

        servers, credentials, tls = self._resolve()
        try:
            made = Client(servers.split(","), name="penstock", timeout=timeout, tls=tls, **credentials)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--servers'") from None
        try:
            with made as client:
                yield client
        except NoBroker as error:
            raise NoBroker(str(error).replace("servers=", "--servers")) from None
        except Unauthorized as error:
            raise Unauthorized(f"{error}: give --user and --password, or --token") from None

    def _resolve(self) -> tuple[str, dict[str, str | None], TlsOptions | None]:
        """Return the servers, and the credentials and TLS options for them."""
        tls = read_tls(self.tls_ca, self.tls_cert, self.tls_key)
        credentials = {"user": self.user, "password": self.password, "token": self.token}
        name = self.context
        if name is not None and self.servers is not None:
            # A value that differs from the environment is from the command line.
            is_typed = name != os.environ.get(_CONTEXT_VARIABLE)
            if is_typed == (self.servers != os.environ.get(_SERVERS_VARIABLE)):
                raise typer.BadParameter("give --context or --servers, not both", param_hint="'--context'")
            name = name if is_typed else None
        elif self.servers is None and name is None:
            name = contexts.load().current
        if name is None:
            return _SERVERS if self.servers is None else self.servers, credentials, tls
        chosen = contexts.load().get(name)
        if not any(credentials.values()):
            credentials = {"user": chosen.user, "password": chosen.password, "token": chosen.token}
        return chosen.servers, credentials, tls or read_tls(chosen.tls_ca, chosen.tls_cert, chosen.tls_key)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation at a terminal; without one, proceed."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


def check_selection(pattern: str | None, topic: str | None) -> None:
    if (pattern is None) == (topic is None):
        raise typer.BadParameter("give either a PATTERN of subjects or --topic", param_hint="'PATTERN'")


def parse(field: Field, text: str, option: str) -> Any:
    """Parse an option like the setting in a configuration file."""
    try:
        return field.parse(text)
    except ValueError:
        raise typer.BadParameter(
            f"invalid value {text!r}: it must be {field.allowed}", param_hint=f"'{option}'"
        ) from None


PLACE: Final = "earliest|latest|OFFSET|TIME"


def read_place(text: str) -> times.Place:
    try:
        return times.read_place(text, SystemClock().now_us())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_delay(text: str) -> float | datetime:
    """Parse a delay: a duration, in seconds if it has no unit, or a time."""
    try:
        delay = times.read_delay(text)
        return seconds_of(delay) if isinstance(delay, float) else delay
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_ttl(text: str) -> str:
    """Check a TTL; the broker parses it again."""
    try:
        headers.read_ttl(text)
    except BadHeader as error:
        raise typer.BadParameter(str(error)) from None
    return text


def seconds_of(number: float) -> float:
    """Return a delay in seconds if it is within its limits."""
    if not 0 <= number <= headers.DELAY_US_MAX / 1e6:
        raise ValueError(f"invalid delay of {number} seconds: it must be from 0 to a year")
    return number


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    return _complete(context, incomplete, lambda client: [topic.name for topic in client.topics()])


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    return _complete(context, incomplete, lambda client: [group.name for group in client.groups()])


def _complete(context: typer.Context, incomplete: str, names: Callable[[Client], list[str]]) -> list[str]:
    """Propose names from the broker; none, and no error, if there is no broker."""
    given = {field.name: context.params.get(field.name, field.default) for field in fields(ConnectionOptions)}
    try:
        with ConnectionOptions(**given).client(timeout=COMPLETION_S) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except (PenstockError, OSError, typer.BadParameter):
        return []


TopicName = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="Name of the topic.")]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=complete_group, help="Name of the group.")]
