"""`penstock context`: brokers by name, so that commands need no address and no credentials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import contexts
from penstock.cli.options import Json, complete_context
from penstock.cli.text import safe

app = typer.Typer(no_args_is_help=True, add_completion=False)

_Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_context, help="Name of the context.")]


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")],
    servers: Annotated[
        str,
        typer.Argument(
            metavar="URL[,…]", help="Address of the broker: tls://host:4222, nats://host:4222 or host:port."
        ),
    ],
    user: Annotated[str | None, typer.Option(help="User name.")] = None,
    password: Annotated[str | None, typer.Option(help="Password; - prompts for it.")] = None,
    token: Annotated[
        str | None, typer.Option(help="Token, instead of a user and a password; - prompts for it.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use TLS, and trust these CAs. \\[default: those of the system]")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Use TLS with this client certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of the certificate.")] = None,
    json: Json = False,
) -> None:
    """Add or replace a context. The first one becomes the current context."""
    contexts.check_name(name)
    made = contexts.Context(
        servers=servers,
        user=user,
        password=_secret("password", password),
        token=_secret("token", token),
        tls_ca=_absolute(tls_ca),
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
    )
    try:
        where = made.addresses
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'URL'") from None
    known = contexts.load()
    saved = contexts.Contexts({**known.by_name, name: made}, known.current or name)
    contexts.save(saved)
    _tell(f"added {name}: {where}" + (", current" if saved.current == name else ""), saved, as_json=json)


@app.command("list")
def list_contexts(json: Json = False) -> None:
    """List all contexts, without secrets. A star marks the current one."""
    from penstock.cli import output

    known = contexts.load()
    if json:
        _tell("", known, as_json=True)
        return
    rows = [
        ("*" if name == known.current else "", name, each.addresses, each.login)
        for name, each in sorted(known.by_name.items())
    ]
    output.console().print(output.table(("", "context", "servers", "login"), rows))


@app.command("use")
def use(name: _Name, json: Json = False) -> None:
    """Make a context the current one, which commands use by default."""
    known = contexts.load()
    known.get(name)
    saved = replace(known, current=name)
    contexts.save(saved)
    _tell(f"current context: {name}", saved, as_json=json)


@app.command("remove")
def remove(name: _Name, json: Json = False) -> None:
    """Remove a context. If it is the current one, no context is current afterwards."""
    known = contexts.load()
    known.get(name)
    left = {key: value for key, value in known.by_name.items() if key != name}
    saved = contexts.Contexts(left, None if known.current == name else known.current)
    contexts.save(saved)
    _tell(f"removed {name}", saved, as_json=json)


def _absolute(path: Path | None) -> str | None:
    """Return the path for commands in other directories."""
    return None if path is None else str(path.absolute())


def _secret(what: str, given: str | None) -> str | None:
    return str(typer.prompt(what, hide_input=True, err=True)) if given == "-" else given


def _tell(text: str, known: contexts.Contexts, *, as_json: bool) -> None:
    from penstock.cli import output

    if not as_json:
        print(safe(text))
        return
    rows = [{"name": name, "servers": each.addresses, "login": each.login} for name, each in known.by_name.items()]
    output.print_json({"current": known.current, "contexts": rows})
