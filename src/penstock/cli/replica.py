"""`penstock replica`: keep a copy of a topic and answer queries until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli import logs
from penstock.cli.options import Declared, TlsCa, TlsCert, TlsKey, options, read_tls
from penstock.replica.config import FIELDS

if TYPE_CHECKING:
    from penstock.replica.replica import Replica
    from penstock.tls.options import TlsOptions

E = TypeVar("E", bound=Exception)

app = typer.Typer(add_completion=False)


@app.command()
@options
def replica(
    *,
    flags: Annotated[dict[str, Any], Declared(FIELDS, reads=False)],
    user: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", help="User name for the broker.")] = None,
    password: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD", help="Password for the broker.")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_TOKEN", help="Token for the broker.")] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Keep a local copy of a topic and serve queries over HTTP, also while the broker is down.

    The environment variables in brackets set the same options; flags take precedence. SIGTERM and Ctrl-C stop it
    cleanly.
    """
    if not _run(flags, user, password, token, read_tls(tls_ca, tls_cert, tls_key)):
        raise typer.Exit(1)


def _run(
    flags: dict[str, Any], user: str | None, password: str | None, token: str | None, tls: TlsOptions | None
) -> bool:
    """Run the replica until it stops; return whether it succeeded. All but the flags are for the broker."""
    import uvloop

    from penstock.app.retry import Retry
    from penstock.cli import version
    from penstock.errors import BadConfig, PenstockError
    from penstock.replica.config import load
    from penstock.replica.replica import Replica
    from penstock.store.inspect import explain
    from penstock.web.credentials import Credentials

    logs.configure()
    problems: list[str] = []
    try:
        credentials = Credentials(user=user, password=password, token=token)
        config = load(environ=os.environ, flags=flags, credentials=credentials)
        replica = Replica(
            config, version=version(), delay_s=Retry.exponential().delay_s, credentials=credentials, tls=tls
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(replica))
    except* BadConfig as errors:
        problems += [problem for error in _each(errors) for problem in str(error).splitlines()]
    except* (PenstockError, OSError) as errors:
        problems += [explain(error) for error in _each(errors)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return not problems


def _each(errors: BaseExceptionGroup[E]) -> Iterator[E]:
    """Yield the errors without the groups around them."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _each(error)
        else:
            yield error


async def _serve(replica: Replica) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await replica.run(stop, _tell_ready)


def _tell_ready(replica: Replica) -> None:
    from penstock.address import join

    config = replica.config
    print(
        f"penstock {replica.version} replica {config.type} ready: http on {join(config.host, replica.port)}, "
        f"{config.topic} of {config.broker} as {config.group}, data in {config.data_dir}",
        flush=True,
    )
