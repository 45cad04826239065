"""`penstock replica`: a copy of a topic that answers queries, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli import logs

if TYPE_CHECKING:
    from penstock.replica.replica import Replica

E = TypeVar("E", bound=Exception)

app = typer.Typer(add_completion=False)


@app.command()
def replica(
    topic: Annotated[str | None, typer.Option(help="What is copied: a topic.  [CONSUMER_TOPIC]")] = None,
    group: Annotated[str | None, typer.Option(help="The group it reads as, its own.  [CONSUMER_GROUP]")] = None,
    type: Annotated[str | None, typer.Option(help="What it calls itself.  [CONSUMER_TYPE]")] = None,
    host: Annotated[str | None, typer.Option(help="Address of its HTTP port: 127.0.0.1.  [CONSUMER_HOST]")] = None,
    port: Annotated[str | None, typer.Option(help="HTTP port: 8082; 0: any free one.  [CONSUMER_PORT]")] = None,
    broker_host: Annotated[str | None, typer.Option(help="The broker: 127.0.0.1.  [BROKER_HOST]")] = None,
    broker_port: Annotated[str | None, typer.Option(help="Its port: 9092, or 4222.  [BROKER_PORT]")] = None,
    data: Annotated[
        str | None, typer.Option(help="Directory of the copy: ./consumer-data.  [STORAGE_DATA_DIR]")
    ] = None,
    segment_size: Annotated[
        str | None, typer.Option(help="A segment grows to it: 64MiB.  [STORAGE_SEGMENT_SIZE]")
    ] = None,
    retry_policy: Annotated[
        str | None,
        typer.Option(
            help="When a message cannot be stored: EXPONENTIAL_THEN_FIXED, SKIP_ON_ERROR or PAUSE_ON_ERROR.  "
            "[CONSUMER_RETRY_POLICY]"
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", help="For the broker.")] = None,
    password: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD")] = None,
    token: Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_TOKEN", help="Instead of these two.")] = None,
    http_user: Annotated[
        str | None, typer.Option(help="Queries must give it; without it, those for the broker.  [CONSUMER_HTTP_USER]")
    ] = None,
    http_password: Annotated[str | None, typer.Option(help="[CONSUMER_HTTP_PASSWORD]")] = None,
    http_token: Annotated[str | None, typer.Option(help="Instead of these two.  [CONSUMER_HTTP_TOKEN]")] = None,
    http_hosts: Annotated[
        str | None, typer.Option(help="More names of this machine that queries use; *: any.  [CONSUMER_HTTP_HOSTS]")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Answer other machines without credentials.  [CONSUMER_INSECURE]")
    ] = False,
) -> None:
    """Keep a copy of a topic on this machine, and answer queries of it over HTTP, also while the broker is away.

    All of it can be set in the environment, by the names in brackets; a flag wins. It stops cleanly on SIGTERM and
    Ctrl-C.
    """
    flags = {
        "topic": topic,
        "group": group,
        "type": type,
        "host": host,
        "port": port,
        "broker_host": broker_host,
        "broker_port": broker_port,
        "data_dir": data,
        "segment_bytes_max": segment_size,
        "on_error": retry_policy,
        "http_user": http_user,
        "http_password": http_password,
        "http_token": http_token,
        "http_hosts": http_hosts,
        "insecure": "true" if insecure else None,
    }
    if not _run(flags, user, password, token):
        raise typer.Exit(1)


def _run(flags: dict[str, str | None], user: str | None, password: str | None, token: str | None) -> bool:
    """Whether all went well; it returns when it has ended. The credentials are those for the broker."""
    import uvloop

    from penstock.app.retry import Retry
    from penstock.cli import version
    from penstock.errors import BadConfig, PenstockError
    from penstock.replica.config import load
    from penstock.replica.replica import Replica
    from penstock.storage.inspect import explain
    from penstock.web import Credentials

    logs.configure()
    problems: list[str] = []
    try:
        credentials = Credentials(user=user, password=password, token=token)
        config = load(environ=os.environ, flags=flags, credentials=credentials)
        replica = Replica(config, version=version(), delay_s=Retry.exponential().delay_s, credentials=credentials)
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
    """Without the tasks around them."""
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
