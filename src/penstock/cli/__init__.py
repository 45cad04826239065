"""The `penstock` command. Each module here is a command or a group of them.

What a command needs is imported when it runs, so that `--help` and completion do not wait for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import log
from penstock.errors import PenstockError

app = typer.Typer(
    help="A durable message broker.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(log.app, name="log")


def main() -> None:
    # What a terminal cannot show is escaped rather than refused.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="penstock")
    except (PenstockError, OSError) as error:
        from penstock.storage.inspect import explain

        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {version()}")
        raise typer.Exit


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("demo")
def run_demo(
    messages: Annotated[int, typer.Option(min=1, help="How many messages to append and read back.")] = 200_000,
) -> None:
    """See the log at work: append, read, kill -9, recover, verify. In a temporary directory."""
    from penstock.cli import demo

    if not demo.run(messages):
        raise typer.Exit(1)


@app.command("config")
def run_config(
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A .toml, .json, .yaml or .yml file of settings.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show every setting, its value, and where that came from. Exit code 1 if anything is wrong."""
    from penstock.cli import config

    if not config.run(path, as_json=json):
        raise typer.Exit(1)


@app.command("serve")
def run_serve(
    host: Annotated[str | None, typer.Option(help="Address of all doors.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Text door; 0: any free port.  [default: 4222]")] = None,
    quiet_port: Annotated[int | None, typer.Option(help="For clients that speak first.  [default: 9092]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Health and statistics.  [default: 8222]")] = None,
    data: Annotated[str | None, typer.Option(help="Directory of all data.  [default: ./data]")] = None,
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A .toml, .json, .yaml or .yml file of settings.")
    ] = None,
) -> None:
    """Start the server. It stops cleanly on SIGTERM and Ctrl-C."""
    from penstock.cli import serve

    flags = {
        "server.host": host,
        "server.port": port,
        "server.quiet_port": quiet_port,
        "server.http_port": http_port,
        "storage.data_dir": data,
    }
    if not serve.run(path, flags):
        raise typer.Exit(1)
