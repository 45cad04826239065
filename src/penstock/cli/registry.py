"""`penstock registry`: tells brokers where they stand in their tree, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.address import hosts, join
from penstock.cli import logs
from penstock.errors import BadConfig

app = typer.Typer(add_completion=False)


@app.command()
def registry(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The nodes: a .toml, .json, .yaml or .yml file.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP; 0: any free port.")] = 8080,
    mock_cloud: Annotated[
        bool,
        typer.Option(
            "--mock-cloud", help="Instead of a file: a parent for trials, with five messages, that any node follows."
        ),
    ] = False,
) -> None:
    """Tell the brokers of a tree their roles and parents, from a file that is watched. It stops cleanly on SIGTERM and
    Ctrl-C."""
    logs.configure()
    if (file is None) is not mock_cloud:
        raise typer.BadParameter("give a FILE or --mock-cloud, and not both", param_hint="'FILE'")
    serve = _mock_cloud() if file is None else _watched(file)
    try:
        asyncio.run(_until_stopped(serve, host, port))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


# Serves at a host and a port until it is to stop, and tells the port when it is ready.
_Serve = Callable[[str, int, asyncio.Event], Coroutine[None, None, None]]


def _watched(file: Path) -> _Serve:
    from penstock.clock import SystemClock
    from penstock.registry import server
    from penstock.registry.watched import Watched

    try:
        watched = Watched(file, clock=SystemClock())
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None

    async def serve(host: str, port: int, stop: asyncio.Event) -> None:
        served = watched.served
        what = f"{len(served.tree.nodes)} nodes in {watched.path}, version {served.version}"
        ready = partial(_tell_ready, "registry", host, what)
        await server.serve(server.app(watched), host, port, stop, ready, watched)

    return serve


def _mock_cloud() -> _Serve:
    from penstock.clock import SystemClock
    from penstock.registry import mock, server

    async def serve(host: str, port: int, stop: asyncio.Event) -> None:
        what = f"{len(mock.PRICES)} messages of {mock.TOPIC}"
        await server.serve(mock.app(SystemClock()), host, port, stop, partial(_tell_ready, "mock cloud", host, what))

    return serve


async def _until_stopped(serve: _Serve, host: str, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(host, port, stop)


def _tell_ready(kind: str, host: str, what: str, port: int) -> None:
    from penstock.cli import version

    where = " and ".join(join(each, port) for each in hosts(host))
    print(f"penstock {version()} {kind} ready: http on {where}, {what}", flush=True)
