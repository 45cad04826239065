"""`penstock client`: the Python broker's command line, over its own protocol."""

from __future__ import annotations

import json as json_text
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.address import bare, join
from penstock.cli.options import JsonLines
from penstock.cli.text import Document, iso, put, safe, shown
from penstock.errors import BadConfig, BadRequest, NoBroker, Unauthorized

if TYPE_CHECKING:
    from penstock.client.qb import BrokerClient, BrokerMessage
    from penstock.server.config import ClientConfig

app = typer.Typer(no_args_is_help=True, add_completion=False)

User = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER")]
Password = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD")]
Token = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_TOKEN", help="Instead of these two.")]

_TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Its name.")]
_SubscriptionName = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the subscription.")]
_Count = Annotated[int | None, typer.Option(min=1, help="End after so many.")]


@dataclass(frozen=True, slots=True)
class _Broker:
    """Where it is, and who asks it."""

    host: str
    port: int
    client_id: str | None
    user: str | None
    password: str | None
    token: str | None
    config: Path | None

    @contextmanager
    def client(self) -> Iterator[BrokerClient]:
        from penstock.client import qb

        # What it would log is told as an error.
        logging.getLogger(qb.__name__).addHandler(logging.NullHandler())
        try:
            settings = self._settings()
            with qb.BrokerClient(
                self.host,
                self.port,
                self.client_id,
                request_timeout=settings.request_timeout_s,
                heartbeat_interval=settings.heartbeat_s,
                user=self.user,
                password=self.password,
                token=self.token,
            ) as client:
                yield client
        except NoBroker:
            raise NoBroker(
                f"no broker at {join(bare(self.host), self.port)}: start one with `penstock serve --quiet-port "
                f"{self.port}`, or name another with --host and --port"
            ) from None
        except Unauthorized as error:
            raise Unauthorized(f"{error}: give --user and --password, or --token") from None

    def _settings(self) -> ClientConfig:
        """What the file and the environment say of clients. What they say of servers is not looked at."""
        from penstock.server.config import load_client

        try:
            return load_client(path=self.config, environ=os.environ)
        except BadConfig as error:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
            raise typer.Exit(1) from None


@app.callback()
def options(
    context: typer.Context,
    host: Annotated[str, typer.Option(envvar="QB_SERVER_HOST", help="Where the broker is.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="QB_SERVER_PORT", min=1, max=65535, help="Its port for clients that speak first.")
    ] = 9999,
    client_id: Annotated[str | None, typer.Option(help="Who asks.  [default: one of its own]")] = None,
    user: User = None,
    password: Password = None,
    token: Token = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whose client.… is used: TOML, JSON or YAML.")
    ] = None,
) -> None:
    """Talk to a server as the Python broker's command line does."""
    context.obj = _Broker(host, port, client_id, user, password, token, config)


@app.command("create-topic")
def create_topic(
    context: typer.Context,
    topic: _TopicName,
    partitions: Annotated[int, typer.Option(min=1, help="Logs that share its messages.")] = 1,
    retention: Annotated[
        int | None,
        typer.Option(min=1, metavar="HOURS", help="Drop what is older.  [default: as the server's settings say]"),
    ] = None,
    json: JsonLines = False,
) -> None:
    """Make a topic."""
    with context.obj.client() as client:
        _check(client, client.create_topic(topic, partitions, retention))
    document = {"topic": topic, "partitions": partitions, "retention_hours": retention}
    _tell(f"Created topic '{safe(topic)}' with {partitions} partitions", document, as_json=json)


@app.command("create-subscription")
def create_subscription(
    context: typer.Context,
    name: _SubscriptionName,
    topic: _TopicName,
    offset: Annotated[int, typer.Option(min=0, help="Where it begins.")] = 0,
    json: JsonLines = False,
) -> None:
    """Make a subscription of a topic: its messages go to its subscribers in turn."""
    with context.obj.client() as client:
        _check(client, client.create_subscription(name, topic, offset))
    text = f"Created subscription '{safe(name)}' for topic '{safe(topic)}' starting at offset {offset}"
    _tell(text, {"subscription": name, "topic": topic, "start_offset": offset}, as_json=json)


@app.command("delete-subscription")
def delete_subscription(context: typer.Context, name: _SubscriptionName, json: JsonLines = False) -> None:
    """Delete a subscription and its place in the topic. The messages stay."""
    with context.obj.client() as client:
        _check(client, client.delete_subscription(name))
    _tell(f"Deleted subscription '{safe(name)}'", {"subscription": name}, as_json=json)


@app.command("publish")
def publish(
    context: typer.Context,
    topic: _TopicName,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Its body.")],
    partition: Annotated[int | None, typer.Option(min=0, help="Where it goes.  [default: the broker chooses]")] = None,
    properties: Annotated[
        str | None, typer.Option(metavar="JSON", help="""An object, like '{"colour": "red"}'.""")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Publish a message. It returns when it is as durable as its topic promises."""
    given = _read_properties(properties)
    with context.obj.client() as client:
        _check(client, client.publish(topic, os.fsencode(message), partition, **given))
    _tell(f"Published message to topic '{safe(topic)}'", {"topic": topic, "properties": given}, as_json=json)


@app.command("join-subscription")
def join_subscription(
    context: typer.Context, name: _SubscriptionName, count: _Count = None, json: JsonLines = False
) -> None:
    """Join a subscription and print its messages as they come.

    Each is acknowledged when it is printed. Ctrl-C ends it, with exit code 0.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with context.obj.client() as client, suppress(KeyboardInterrupt):
        printer = _Printer(client, count, as_json=json)
        _check(client, client.subscribe_to_subscription(name, printer.take))
        printer.wait()


@app.command("subscribe")
def subscribe(
    context: typer.Context,
    topic: _TopicName,
    offset: Annotated[int, typer.Option(min=0, help="Where to begin.")] = 0,
    partition: Annotated[int, typer.Option(min=0, help="Of which partition.")] = 0,
    count: _Count = None,
    json: JsonLines = False,
) -> None:
    """Print the messages of a topic from an offset on, as they come.

    It is a subscription of its own, which is deleted at the end. Ctrl-C ends it, with exit code 0.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with context.obj.client() as client, suppress(KeyboardInterrupt):
        printer = _Printer(client, count, as_json=json)
        _check(client, client.subscribe(topic, partition, offset, handler=printer.take))
        printer.wait()


class _Printer:
    """Prints messages, in the client's thread, until there are enough or nobody reads them."""

    def __init__(self, client: BrokerClient, count: int | None, *, as_json: bool) -> None:
        self._client = client
        self._left = count
        self._form = _json_line if as_json else _lines
        self._failure: Exception | None = None

    def take(self, message: BrokerMessage) -> None:
        try:
            print(self._form(message), flush=True)
        except Exception as error:
            # It is not acknowledged, and raised again where it ends the command.
            self._failure = error
            self._client.disconnect()
            raise
        if self._left is not None:
            self._left -= 1
            if not self._left:
                # Before another one is handed over, which somebody else may be waiting for.
                self._client.disconnect()

    def wait(self) -> None:
        """Until that is so, or whoever waits is interrupted."""
        self._client.wait()
        if self._failure is not None:
            raise self._failure
        if self._left != 0:
            self._client.check()


def _check(client: BrokerClient, is_done: bool) -> None:
    if not is_done:
        raise BadRequest(client.last_error)


def _tell(text: str, document: Document, *, as_json: bool) -> None:
    print(json_text.dumps(document) if as_json else text)


def _read_properties(text: str | None) -> dict[str, str]:
    from penstock.client.qb import RESERVED

    try:
        given = json_text.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise _bad_properties(f"{text!r} is not JSON: {error}") from None
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        raise _bad_properties("it must be an object of strings, numbers and booleans")
    # `data` is what `publish` calls the body.
    taken = sorted({*RESERVED, "data"} & given.keys())
    if taken:
        raise _bad_properties(f"{', '.join(taken)} cannot be the name of a property")
    return {name: value if isinstance(value, str) else json_text.dumps(value) for name, value in given.items()}


def _bad_properties(reason: str) -> typer.BadParameter:
    return typer.BadParameter(reason, param_hint="'--properties'")


def _lines(message: BrokerMessage) -> str:
    head = f"[{safe(message.topic)}@{message.offset}] (sub: {safe(message.subscription)})"
    line = f"{head} {shown(message.body, alone=True)}"
    custom = _custom(message)
    return f"{line}\n  Properties: {custom}" if custom else line


def _json_line(message: BrokerMessage) -> str:
    document: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": iso(round(message.timestamp * 1_000_000)),
        "subscription": message.subscription,
        "properties": _custom(message),
    }
    put(document, "body", message.body)
    return json_text.dumps(document)


def _custom(message: BrokerMessage) -> dict[str, str]:
    """What its publisher said of it."""
    from penstock.client.qb import RESERVED

    return {name: value for name, value in message.properties.items() if name not in RESERVED}
