"""The options that commands share, each written once.

A command may take a dataclass as one parameter; `options` makes each of its fields an option of the command.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from penstock import headers, times
from penstock.cli import contexts
from penstock.clock import SystemClock
from penstock.errors import BadHeader, NoBroker, PenstockError, Unauthorized

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.server.config import Setting

# Who presses Tab waits no longer for names.
COMPLETION_S: Final = 0.5

_PANEL: Final = "Broker"
_SERVERS: Final = "127.0.0.1:4222"
_SERVERS_VARIABLE: Final = "PENSTOCK_SERVERS"
_CONTEXT_VARIABLE: Final = "PENSTOCK_CONTEXT"


def options(command: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    gathered: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if is_dataclass(parameter.annotation):
            gathered[name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            # As those of the fields are, for then they may stand in any order.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in gathered.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


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
class Address:
    """Where the broker is, and who asks it. A server knows user, password and token by the same variables.

    An address that is given goes before a context that is named, and that before the context in use. What the command
    line says goes before the environment. Credentials of a context go only to its own servers.
    """

    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar=_CONTEXT_VARIABLE,
            autocompletion=complete_context,
            help="A broker that `penstock context add` named.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,…]",
            envvar=_SERVERS_VARIABLE,
            help="Where it is, also as nats://…; several are tried in turn.  [default: 127.0.0.1:4222]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    user: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", rich_help_panel=_PANEL)] = None
    password: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD", rich_help_panel=_PANEL)] = None
    token: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_AUTH_TOKEN", help="Instead of these two.", rich_help_panel=_PANEL)
    ] = None

    @contextmanager
    def client(self, *, timeout: float = 30.0) -> Iterator[Client]:
        from penstock.client.sync import Client

        servers, who = self._resolve()
        try:
            made = Client(servers.split(","), name="penstock", timeout=timeout, **who)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--servers'") from None
        try:
            with made as client:
                yield client
        except NoBroker as error:
            raise NoBroker(str(error).replace("servers=", "--servers")) from None
        except Unauthorized as error:
            raise Unauthorized(f"{error}: give --user and --password, or --token") from None

    def _resolve(self) -> tuple[str, dict[str, str | None]]:
        """Return the servers, and the credentials for them."""
        who = {"user": self.user, "password": self.password, "token": self.token}
        name = self.context
        if name is not None and self.servers is not None:
            # What is not as in the environment is from the command line.
            is_typed = name != os.environ.get(_CONTEXT_VARIABLE)
            if is_typed == (self.servers != os.environ.get(_SERVERS_VARIABLE)):
                raise typer.BadParameter("give a context or servers, not both", param_hint="'--context'")
            name = name if is_typed else None
        elif self.servers is None and name is None:
            name = contexts.load().current
        if name is None:
            return _SERVERS if self.servers is None else self.servers, who
        chosen = contexts.load().get(name)
        if not any(who.values()):
            who = {"user": chosen.user, "password": chosen.password, "token": chosen.token}
        return chosen.servers, who


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, one document in each line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]


def confirm(question: str, *, yes: bool) -> None:
    """Ask whoever sits at the terminal; a program has decided already."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


def check_selection(pattern: str | None, topic: str | None) -> None:
    if (pattern is None) == (topic is None):
        raise typer.BadParameter("name either a pattern of subjects or a --topic", param_hint="'PATTERN'")


def convert(setting: Setting, text: str, option: str) -> Any:
    """What is given on the command line is read as in a file of settings."""
    try:
        return setting.convert(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: it must be {setting.allowed}", param_hint=f"'{option}'") from None


PLACE: Final = "earliest|latest|OFFSET|TIME"


def read_place(text: str) -> times.Place:
    try:
        return times.read_place(text, SystemClock().now_us())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_delay(text: str) -> float | datetime:
    """How long a message is kept back: seconds, unless there is a unit; or until when."""
    try:
        delay = times.read_delay(text)
        return seconds_of(delay) if isinstance(delay, float) else delay
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_ttl(text: str) -> str:
    """How long a message is delivered, as the broker reads it."""
    try:
        headers.read_ttl(text)
    except BadHeader as error:
        raise typer.BadParameter(str(error)) from None
    return text


def seconds_of(number: float) -> float:
    """Of a delay, which has a bound."""
    if not 0 <= number <= headers.DELAY_US_MAX / 1e6:
        raise ValueError(f"a delay of {number} seconds is below zero, or more than a year")
    return number


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    return _complete(context, incomplete, lambda client: [topic.name for topic in client.topics()])


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    return _complete(context, incomplete, lambda client: [group.name for group in client.groups()])


def _complete(context: typer.Context, incomplete: str, names: Callable[[Client], list[str]]) -> list[str]:
    """Without a broker there is nothing to propose, and nothing to say."""
    given = {field.name: context.params.get(field.name, field.default) for field in fields(Address)}
    try:
        with Address(**given).client(timeout=COMPLETION_S) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except (PenstockError, OSError, typer.BadParameter):
        return []


TopicName = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="Its name.")]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=complete_group, help="Its name.")]
