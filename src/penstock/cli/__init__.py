"""The `penstock` command. Each module here is a command or a group of them.

A command imports its dependencies when it runs, so that `--help` and completion stay fast.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. Commands that run until they are interrupted
(`subscribe`, `top`, `fetch --follow`) exit with 0 on Ctrl-C.
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

_SERVER: Final = "Run a server and manage its data"
_CLIENT: Final = "Use a server"
# Modules that define commands, by name: their panel in the help, and their description.
MODULES: Final = {
    "log": (_SERVER, "Verify, repair and dump the logs of a data directory."),
    "backup": (_SERVER, "Back up a running broker to a directory, a tar stream or an object store."),
    "restore": (_SERVER, "Restore a backup into a new data directory, optionally to an earlier time or offset."),
    "user": (_SERVER, "Add, list, change and remove users in a file of users."),
    "registry": (_SERVER, "Serve the roles and parents of a tree of brokers from a file."),
    "cert": (_SERVER, "Create a CA and certificates for a trial of TLS."),
    "context": (_CLIENT, "Save broker addresses and credentials under a name."),
    "topic": (_CLIENT, "Create, list, change, copy and delete topics."),
    "publish": (_CLIENT, "Publish messages from arguments, stdin or a file."),
    "subscribe": (_CLIENT, "Print messages as they arrive, alone or as a member of a group."),
    "group": (_CLIENT, "Create, list, reset and delete groups, and show their lag."),
    "fetch": (_CLIENT, "Read stored messages as lines, JSON, CSV or Parquet."),
    "dlq": (_CLIENT, "List, inspect, redrive and purge dead letters."),
    "delayed": (_CLIENT, "List and cancel delayed messages."),
    "audit": (_CLIENT, "Show the audit trail: logins, refusals and changes."),
    "client": (_CLIENT, "Run the commands of the Python broker's command line."),
    "shell": (_CLIENT, "Run Cursus commands, with history and completion."),
    "top": (_CLIENT, "Show the rates of topics and the lag of groups, live."),
    "topology": (_CLIENT, "Show the tree of brokers with roles, health and lag."),
    "replica": (_CLIENT, "Keep a local copy of a topic and serve queries over HTTP."),
    "pipeline": (_CLIENT, "Process topics with Spark: transform, aggregate, archive, replay and more."),
    "pipelines": (_CLIENT, "Run a directory of pipelines as a service, and show the pipelines of a broker."),
    "archive": (_CLIENT, "Show what an archive of topics holds, and compact its files."),
    "bench": (_CLIENT, "Measure the throughput and latency of a broker."),
}


class _Commands(TyperGroup):
    """Load a module when one of its commands runs: building all commands would make `--help` half as slow again."""

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
    # Escape characters that the terminal cannot show instead of failing.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        _fail(str(error))
    except OSError as error:
        from penstock.store.inspect import explain

        _fail(explain(error))


def _fail(reason: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # The disk is full, or the reader is gone. Python would retry at exit and print a traceback.
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
    # Cursus' many flags are in a table of their own: see serve.cursus_flags.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def run_serve(
    context: typer.Context,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Listen on this address or host name; repeatable. \\[default: 127.0.0.1]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port for NATS clients; 0: any free port. \\[default: 4222]")] = None,
    quiet_port: Annotated[int | None, typer.Option(help="Port for clients that speak first. \\[default: 9092]")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port for health and metrics. \\[default: 8222]")] = None,
    data: Annotated[str | None, typer.Option(help="Data directory. \\[default: ./data]")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept clients of other machines without credentials or TLS.")
    ] = False,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS with this certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The private key of the certificate.")] = None,
    create_admin: Annotated[
        bool,
        typer.Option(
            "--create-admin",
            help="Without configured credentials: at the first start, create an administrator, and print its password.",
        ),
    ] = False,
    path: Annotated[
        Path | None,
        typer.Option("--config", "-config", metavar="FILE", help="Configuration file: .toml, .json, .yaml or .yml."),
    ] = None,
) -> None:
    """Start the server.

    SIGTERM and Ctrl-C stop it cleanly; SIGUSR2 stops it gradually (lame duck mode); SIGHUP loads the TLS
    certificate again.
    Cursus' flags, such as --log-dir, also work.
    """
    from penstock.cli import serve

    flags = {
        "server.host": host or None,
        "server.port": port,
        "server.quiet_port": quiet_port,
        "server.http_port": http_port,
        "storage.data_dir": data,
        "server.insecure": insecure or None,
        "tls.cert": tls_cert,
        "tls.key": tls_key,
        **serve.cursus_flags(context),
    }
    if not serve.run(path, flags, creates_admin=create_admin):
        raise typer.Exit(1)


@app.command("config", rich_help_panel=_SERVER)
def run_config(
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration file: .toml, .json, .yaml or .yml.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show each setting, its value and its source. Exit code 1 if the configuration is invalid."""
    from penstock.cli import config

    if not config.run(path, as_json=json):
        raise typer.Exit(1)


@app.command("demo", rich_help_panel=_SERVER)
def run_demo(
    orders: Annotated[int, typer.Option(min=1000, help="Number of orders to publish.")] = 20_000,
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep all data in this directory. \\[default: a new temporary directory]"),
    ] = None,
) -> None:
    """Run a demo: two clients publish orders, three Spark pipelines process them. Takes a minute."""
    from penstock.cli import demo

    if not demo.run(orders, directory):
        raise typer.Exit(1)


@app.command("worker", rich_help_panel=_CLIENT)
def run_worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app to run, such as shop.billing:app.")],
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,…]", envvar="PENSTOCK_SERVERS", help="Use this broker instead of the app's own."
        ),
    ] = None,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS, and trust these CAs.")] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS with this client certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The key of the certificate.")] = None,
) -> None:
    """Run the consumers of an app until SIGTERM or Ctrl-C."""
    from penstock.cli import worker
    from penstock.cli.options import read_tls

    if not worker.run(target, servers, read_tls(tls_ca, tls_cert, tls_key)):
        raise typer.Exit(1)
