"""The `penstock` command. Each module here is a command or a group of them.

What a command needs is imported when it runs, so that `--help` and completion do not wait for it.

Exit codes: 0 it is done, 1 it failed, 2 it was asked the wrong way, 130 it was interrupted. Commands that only an
interruption ends (`subscribe`, `top`, `fetch --follow`) are done when it comes.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.errors import PenstockError

_SERVER: Final = "A server, and its data"
_CLIENT: Final = "Talk to a server"
# Modules with commands of their own, by name: where they are listed, and what for.
MODULES: Final = {
    "log": (_SERVER, "Look into the logs of a data directory, verify and repair them."),
    "backup": (_SERVER, "Back up a running broker: to a directory, a tar stream or an object store."),
    "restore": (_SERVER, "Make a data directory of a backup, also as of an earlier time or offset."),
    "registry": (_SERVER, "Tell the brokers of a tree their roles and parents, from a file that is watched."),
    "context": (_CLIENT, "Give brokers names: add, list, use and remove contexts."),
    "topic": (_CLIENT, "Make, list, change and delete topics."),
    "publish": (_CLIENT, "Publish messages: from arguments, lines of stdin, or a file."),
    "subscribe": (_CLIENT, "Print messages as they come, alone or as a member of a group."),
    "group": (_CLIENT, "Make, list, reset and delete groups; see how far they are behind."),
    "fetch": (_CLIENT, "Read what is stored: as lines, JSON, CSV or Parquet."),
    "dlq": (_CLIENT, "List dead letters, look at them, send them again, and purge them."),
    "delayed": (_CLIENT, "List and cancel messages that were published with a delay."),
    "client": (_CLIENT, "Talk to a server as the Python broker's command line does."),
    "shell": (_CLIENT, "Type Cursus' commands, with history and completion."),
    "top": (_CLIENT, "Watch the rates of topics and the lag of groups."),
    "topology": (_CLIENT, "Draw the tree of brokers: roles, health, lag."),
    "replica": (_CLIENT, "Keep a copy of a topic on this machine, and answer queries of it over HTTP."),
    "pipeline": (_CLIENT, "Run topics through Spark: transform, aggregate, archive, replay and more."),
    "bench": (_CLIENT, "Measure a broker: throughput and latency."),
}


class _Commands(TyperGroup):
    """Modules are loaded when one of their commands is to run: to build all commands takes half as long again as the
    rest of `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (panel, text) in MODULES.items():
            self.add_command(TyperCommand(name=name, help=text, rich_help_panel=panel))

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        name, command, rest = super().resolve_command(context, arguments)
        if name in MODULES:
            command = typer.main.get_command(import_module(f"penstock.cli.{name}").app)
            command.help = command.help or MODULES[name][1]
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    help="A durable message broker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    # What a terminal cannot show is escaped rather than refused.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        _fail(str(error))
    except OSError as error:
        from penstock.storage.inspect import explain

        _fail(explain(error))


def _fail(reason: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # It is full, or its reader is gone. Python would try again at exit, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"error: {reason}", file=sys.stderr)
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


@app.command(
    "serve",
    rich_help_panel=_SERVER,
    # Cursus' flags are many, and a table has them.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def run_serve(
    context: typer.Context,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address of all ports, or a name; may be repeated.  [default: 127.0.0.1]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Text door; 0: any free port.  [default: 4222]")] = None,
    quiet_port: Annotated[int | None, typer.Option(help="For clients that speak first.  [default: 9092]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Health and statistics.  [default: 8222]")] = None,
    data: Annotated[str | None, typer.Option(help="Directory of all data.  [default: ./data]")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without credentials.")] = False,
    path: Annotated[
        Path | None,
        typer.Option("--config", "-config", metavar="FILE", help="A .toml, .json, .yaml or .yml file of settings."),
    ] = None,
) -> None:
    """Start the server. It stops cleanly on SIGTERM and Ctrl-C, and gradually on SIGUSR2 (lame duck mode).

    Cursus' flags, such as --log-dir, are understood too."""
    from penstock.cli import serve

    flags = {
        "server.host": host or None,
        "server.port": port,
        "server.quiet_port": quiet_port,
        "server.http_port": http_port,
        "storage.data_dir": data,
        "server.insecure": insecure or None,
        **serve.cursus_flags(context),
    }
    if not serve.run(path, flags):
        raise typer.Exit(1)


@app.command("config", rich_help_panel=_SERVER)
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


@app.command("demo", rich_help_panel=_SERVER)
def run_demo(
    orders: Annotated[int, typer.Option(min=1000, help="How many orders come in.")] = 20_000,
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where everything stays.  [default: a new temporary directory]"),
    ] = None,
) -> None:
    """See all of it at work: orders from two clients, three pipelines on Spark, tables and a plot. Takes a minute."""
    from penstock.cli import demo

    if not demo.run(orders, directory):
        raise typer.Exit(1)


@app.command("worker", rich_help_panel=_CLIENT)
def run_worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where its consumers are: shop.billing:app.")],
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,…]", envvar="PENSTOCK_SERVERS", help="Another broker than the one that it names."
        ),
    ] = None,
) -> None:
    """Run the consumers of an app, until SIGTERM or Ctrl-C."""
    from penstock.cli import worker

    if not worker.run(target, servers):
        raise typer.Exit(1)
