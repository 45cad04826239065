"""`penstock cert`: a CA and certificates for a trial of TLS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.tls.authority import Issued

app = typer.Typer(no_args_is_help=True, add_completion=False)

_CA: Final = "ca"

Directory = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory of the files; created if missing.")]
Days = Annotated[int, typer.Option(min=1, max=36_500, help="Days until the certificate expires.")]


@app.command("ca")
def make_ca(
    directory: Directory = Path("tls"),
    name: Annotated[str, typer.Option(help="Name of the CA.")] = "Penstock trial CA",
    days: Days = 3650,
) -> None:
    """Create a CA: ca.pem, which servers and clients need, and ca-key.pem, which stays here."""
    from penstock.tls import authority

    _check_name(name, "'--name'")
    _save(directory, _CA, authority.make_ca(name, days))


@app.command("server")
def make_server(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST]...", help="Names and addresses that clients connect to. \\[default: localhost]"),
    ] = None,
    directory: Directory = Path("tls"),
    name: Annotated[str, typer.Option(help="Name of the files.")] = "server",
    days: Days = 365,
) -> None:
    """Create the certificate of a server, signed by the CA: server.pem and server-key.pem."""
    from penstock.tls import authority

    named = hosts or ["localhost", "127.0.0.1", "::1"]
    for host in named:
        _check_name(host, "'HOST'")
        if any(each.isspace() or each in ",/@" for each in host):
            raise typer.BadParameter(f"invalid host {host!r}: use a name or an address", param_hint="'HOST'")
    _check_file_name(name, "'--name'")
    try:
        issued = authority.issue_server(_load_ca(directory), named, days)
    except ValueError as error:
        raise typer.BadParameter(f"invalid host ({error})", param_hint="'HOST'") from None
    _save(directory, name, issued)


@app.command("client")
def make_client(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Common name of the client, and name of the files.")],
    directory: Directory = Path("tls"),
    email: Annotated[list[str] | None, typer.Option(help="Alternative name: an e-mail address; repeatable.")] = None,
    days: Days = 365,
) -> None:
    """Create the certificate of a client, signed by the CA: NAME.pem and NAME-key.pem."""
    from penstock.tls import authority

    _check_name(name, "'NAME'")
    _check_file_name(name, "'NAME'")
    try:
        issued = authority.issue_client(_load_ca(directory), name, email or [], days)
    except ValueError as error:
        raise typer.BadParameter(f"invalid address ({error})", param_hint="'--email'") from None
    _save(directory, name, issued)


def _check_name(name: str, option: str) -> None:
    # X.509 has no longer common names.
    if not 1 <= len(name) <= 64 or not name.isprintable():
        raise typer.BadParameter(f"invalid name {name!r}: use 1 to 64 printable characters", param_hint=option)


def _check_file_name(name: str, option: str) -> None:
    if "/" in name or name.startswith(".") or name == _CA:
        raise typer.BadParameter(
            f"invalid name {name!r}: it is also the name of a file, other than {_CA!r}", param_hint=option
        )


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}-key.pem"


def _load_ca(directory: Path) -> Issued:
    from penstock.tls.authority import Issued

    cert, key = _paths(directory, _CA)
    try:
        return Issued(cert.read_bytes(), key.read_bytes())
    except FileNotFoundError as error:
        raise PenstockError(
            f"there is no CA in {directory} ({error.filename} is missing): make one with `penstock cert ca --dir "
            f"{directory}`"
        ) from None


def _save(directory: Path, name: str, issued: Issued) -> None:
    """Write two files that only the user can read. Neither may exist."""
    paths = _paths(directory, name)
    for path in paths:
        if path.exists():
            raise PenstockError(f"{path} exists: choose another --dir or name, or remove it")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, data in zip(paths, (issued.cert, issued.key), strict=True):
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
    print(f"created {paths[0]} and {paths[1]}")
