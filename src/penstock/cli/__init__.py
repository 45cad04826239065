"""The `penstock` command. Each module here is a command or a group of them.

What a command needs is imported when it runs, so that `--help` and completion do not wait for it.
"""

from __future__ import annotations

import sys
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
