"""`penstock registry`: tells brokers where they stand in their tree, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.address import hosts, join
from penstock.cli import logs
from penstock.errors import BadConfig

if TYPE_CHECKING:
    from penstock.registry.watched import Watched

app = typer.Typer(add_completion=False)


@app.command()
def registry(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The nodes: a .toml, .json, .yaml or .yml file.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP; 0: any free port.")] = 8080,
) -> None:
    """Tell the brokers of a tree their roles and parents, from a file that is watched. It stops cleanly on SIGTERM and
    Ctrl-C."""
    from penstock.clock import SystemClock
    from penstock.registry.watched import Watched

    logs.configure()
    try:
        watched = Watched(file, clock=SystemClock())
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None
    try:
        asyncio.run(_serve(watched, host, port))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


async def _serve(watched: Watched, host: str, port: int) -> None:
    from penstock.registry.server import serve

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(watched, host, port, stop, partial(_tell_ready, watched, host))


def _tell_ready(watched: Watched, host: str, port: int) -> None:
    from penstock.cli import version

    print(
        f"penstock {version()} registry ready: http on {' and '.join(join(each, port) for each in hosts(host))}, "
        f"{len(watched.served.tree.nodes)} nodes in {watched.path}, version {watched.served.version}",
        flush=True,
    )
