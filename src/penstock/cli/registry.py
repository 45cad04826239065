"""`penstock registry`: serve brokers their place in the tree until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.address import hosts, join
from penstock.cli import logs
from penstock.errors import BadConfig

if TYPE_CHECKING:
    from penstock.tls.port import ServerTls

app = typer.Typer(add_completion=False)


@app.command()
def registry(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="File of nodes: .toml, .json, .yaml or .yml.")
    ] = None,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: any free port.")] = 8080,
    mock_cloud: Annotated[
        bool,
        typer.Option("--mock-cloud", help="Serve a test parent with five messages for any node, instead of FILE."),
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Serve https with this certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The private key of the certificate.")] = None,
) -> None:
    """Serve the roles and parents of a tree of brokers from a file, and watch the file for changes.

    SIGTERM and Ctrl-C stop it cleanly.
    """
    logs.configure()
    if (file is None) is not mock_cloud:
        raise typer.BadParameter("give either FILE or --mock-cloud", param_hint="'FILE'")
    try:
        tls = open_port(tls_cert, tls_key)
        serve = _mock_cloud() if file is None else _watched(file, tls)
        asyncio.run(_until_stopped(serve, host, port))
    except (BadConfig, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


# Serve on a host and a port until the event is set; print the port when ready.
_Serve = Callable[[str, int, asyncio.Event], Coroutine[None, None, None]]


def open_port(cert: Path | None, key: Path | None) -> ServerTls | None:
    """Return TLS for an HTTP port; None without a certificate. Raise BadConfig if the files are invalid."""
    if cert is None:
        return None
    from penstock.tls.certificate import CertificateFiles, ServerCertificate
    from penstock.tls.port import ServerTls

    files = CertificateFiles(cert=str(cert), key=None if key is None else str(key))
    return ServerTls(ServerCertificate(files))


def _watched(file: Path, tls: ServerTls | None) -> _Serve:
    from penstock.clock import SystemClock
    from penstock.registry import server
    from penstock.registry.watched_file import WatchedFile

    try:
        watched = WatchedFile(file, clock=SystemClock())
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None

    async def serve(host: str, port: int, stop: asyncio.Event) -> None:
        served = watched.served
        what = f"{len(served.tree.nodes)} nodes in {watched.path}, version {served.version}"
        ready = partial(_tell_ready, "registry", host, what)
        await server.serve(server.app(watched), host, port, stop, ready, watched, tls)

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
