"""`penstock user`: the file of users. A server that runs reads it again when it changes."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import BadConfig, PenstockError

if TYPE_CHECKING:
    from penstock.security.users import User
    from penstock.security.users_edit import UsersEditor

app = typer.Typer(no_args_is_help=True, add_completion=False)

File = Annotated[
    Path, typer.Option("--file", envvar="PENSTOCK_AUTH_USERS", help="The file of users, as in the setting auth.users.")
]
Name = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]
Generate = Annotated[bool, typer.Option("--generate", help="Generate a password and print it once.")]
Patterns = list[str] | None


@app.command("add")
def add(
    name: Name,
    *,
    role: Annotated[Patterns, typer.Option(help="A role of the file; repeatable.")] = None,
    publish: Annotated[Patterns, typer.Option(metavar="PATTERN", help="Subjects to publish to; repeatable.")] = None,
    subscribe: Annotated[Patterns, typer.Option(metavar="PATTERN", help="Subjects to read; repeatable.")] = None,
    group: Annotated[Patterns, typer.Option(metavar="NAME", help="Groups to join; * is any text; repeatable.")] = None,
    nkey: Annotated[Patterns, typer.Option(metavar="U…", help="Public NKEY of a NATS client; repeatable.")] = None,
    certificate: Annotated[
        Patterns, typer.Option(metavar="NAME", help="Name in a client certificate; repeatable.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The user may do everything.")] = False,
    password: Annotated[bool, typer.Option(help="Set a password: ask for it, or read a line from stdin.")] = True,
    generate: Generate = False,
    file: File,
) -> None:
    """Add a user. Without options it may log in with its password, and do nothing."""
    fields: dict[str, Any] = {
        "roles": role,
        "publish": publish,
        "subscribe": subscribe,
        "groups": None if group is None else {"join": group},
        "nkeys": nkey,
        "certificates": certificate,
        "admin": admin or None,
    }
    text = _password(name, generate=generate) if password or generate else None
    with _editor(file) as editor:
        editor.add(name, text, {field: value for field, value in fields.items() if value})
    _tell(f"added {name}", text if generate else None)


@app.command("passwd")
def passwd(name: Name, *, generate: Generate = False, file: File) -> None:
    """Set the password of a user: ask for it, or read a line from stdin."""
    text = _password(name, generate=generate)
    with _editor(file) as editor:
        editor.set_password(name, text)
    _tell(f"changed the password of {name}", text if generate else None)


@app.command("list")
def list_users(
    *, json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False, file: File
) -> None:
    """List the users, without their secrets."""
    from penstock.cli import output
    from penstock.security import users_file

    with _editor(file):
        users = sorted(users_file.parse(file, users_file.read_bytes(file)), key=lambda user: user.name)
    if json:
        output.print_json([_row(user) for user in users])
        return
    rows = [tuple(_shown(value) for value in _row(user).values()) for user in users]
    names = ("user", "state", "roles", "credentials", "expires", "may")
    output.console().print(output.table(names, rows))


@app.command("disable")
def disable(name: Name, *, file: File) -> None:
    """Keep a user, and let it log in no more. Its connections are closed."""
    with _editor(file) as editor:
        editor.enable(name, is_enabled=False)
    _tell(f"disabled {name}")


@app.command("enable")
def enable(name: Name, *, file: File) -> None:
    """Let a disabled user log in again."""
    with _editor(file) as editor:
        editor.enable(name, is_enabled=True)
    _tell(f"enabled {name}")


@app.command("remove")
def remove(name: Name, *, file: File) -> None:
    """Remove a user. Its connections are closed."""
    with _editor(file) as editor:
        editor.remove(name)
    _tell(f"removed {name}")


@app.command("token")
def token(
    name: Name,
    *,
    about: Annotated[str, typer.Option(help="What the token is for.")] = "",
    ttl: Annotated[str | None, typer.Option(metavar="DURATION", help="How long it is valid, such as 90d.")] = None,
    file: File,
) -> None:
    """Give a user a new token, and print it. Only its hash is stored."""
    from penstock.times import read_duration

    try:
        ttl_s = None if ttl is None else read_duration(ttl) / 1e6
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with _editor(file) as editor:
        text, number = editor.add_token(name, about=about, ttl_s=ttl_s)
    print(text)
    print(f"token {number} of {name}: it is not shown again", file=sys.stderr)


@app.command("revoke")
def revoke(
    name: Name,
    number: Annotated[str | None, typer.Argument(metavar="[TOKEN]", help="ID of the token; all, if missing.")] = None,
    *,
    file: File,
) -> None:
    """Revoke a token of a user, or all. Connections that used it are closed."""
    with _editor(file) as editor:
        count = editor.revoke_tokens(name, number)
    _tell(f"revoked {count} of the tokens of {name}")


@contextmanager
def _editor(file: Path) -> Iterator[UsersEditor]:
    from penstock.security.users_edit import UsersEditor

    try:
        yield UsersEditor(file)
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _password(name: str, *, generate: bool) -> str:
    """Return a password. It is never an argument: other users of the machine can list those."""
    if generate:
        return secrets.token_urlsafe(18)
    if os.isatty(sys.stdin.fileno()):
        text: str = typer.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True)
    else:
        text = sys.stdin.readline().rstrip("\n")
    if not text:
        raise typer.BadParameter("the password is empty: type one, or write it to stdin")
    return text


def _row(user: User) -> dict[str, Any]:
    kinds = {
        "password": user.password_hash is not None,
        **{f"token {token.id}": True for token in user.tokens},
        "nkey": bool(user.nkeys),
        "certificate": bool(user.certificates),
    }
    may = [str(action) for action in (*user.permissions.rules, *sorted(user.permissions.switches))]
    return {
        "name": user.name,
        "state": "enabled" if user.is_enabled else "disabled",
        "roles": list(user.roles),
        "credentials": [kind for kind, is_there in kinds.items() if is_there],
        "expires": user.expires,
        "may": may,
    }


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)


def _tell(what: str, password: str | None = None) -> None:
    print(what)
    if password is not None:
        print(f"password: {password}")
