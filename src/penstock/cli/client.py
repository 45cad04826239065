"""`penstock client`: the Python broker's command line, over that broker's protocol."""

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
from penstock.cli.options import JsonLines, TlsCa, TlsCert, TlsKey, read_tls
from penstock.cli.text import Document, iso, put, safe, shown
from penstock.errors import BadConfig, BadRequest, NoBroker, Unauthorized
from penstock.tls.options import TlsOptions

if TYPE_CHECKING:
    from penstock.client.qb import BrokerClient, BrokerMessage
    from penstock.server.settings import ClientConfig

app = typer.Typer(no_args_is_help=True, add_completion=False)

User = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", help="User name.")]
Password = Annotated[str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD", help="Password.")]
Token = Annotated[
    str | None, typer.Option(envvar="PENSTOCK_AUTH_TOKEN", help="Token, instead of a user and a password.")
]

_TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
_SubscriptionName = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the subscription.")]
_Count = Annotated[int | None, typer.Option(min=1, help="Exit after this many messages.")]


@dataclass(frozen=True, slots=True)
class _BrokerAddress:
    """The address of a broker, and the credentials and settings of its client."""

    host: str
    port: int
    client_id: str | None
    user: str | None
    password: str | None
    token: str | None
    config: Path | None
    tls: TlsOptions | None

    @contextmanager
    def client(self) -> Iterator[BrokerClient]:
        from penstock.client import qb

        # The command prints the client's failures as errors.
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
                tls=self.tls,
            ) as client:
                yield client
        except NoBroker as error:
            if not str(error).startswith("no broker"):
                raise
            raise NoBroker(
                f"no broker at {join(bare(self.host), self.port)}: start one with `penstock serve --quiet-port "
                f"{self.port}`, or name another with --host and --port"
            ) from None
        except Unauthorized as error:
            raise Unauthorized(f"{error}: give --user and --password, or --token") from None

    def _settings(self) -> ClientConfig:
        """Load the client settings of the file and the environment; server settings are ignored."""
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
    host: Annotated[str, typer.Option(envvar="QB_SERVER_HOST", help="Address of the broker.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            envvar="QB_SERVER_PORT", min=1, max=65535, help="Port of the broker for clients that speak first."
        ),
    ] = 9999,
    client_id: Annotated[str | None, typer.Option(help="ID of this client. \\[default: generated]")] = None,
    user: User = None,
    password: Password = None,
    token: Token = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration file with client.… settings: TOML, JSON or YAML.")
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run the commands of the Python broker's command line."""
    tls = read_tls(tls_ca, tls_cert, tls_key)
    context.obj = _BrokerAddress(host, port, client_id, user, password, token, config, tls)


@app.command("create-topic")
def create_topic(
    context: typer.Context,
    topic: _TopicName,
    partitions: Annotated[int, typer.Option(min=1, help="Number of partitions.")] = 1,
    retention: Annotated[
        int | None,
        typer.Option(min=1, metavar="HOURS", help="Drop older messages. \\[default: the server's setting]"),
    ] = None,
    json: JsonLines = False,
) -> None:
    """Create a topic."""
    with context.obj.client() as client:
        _check(client, client.create_topic(topic, partitions, retention))
    document = {"topic": topic, "partitions": partitions, "retention_hours": retention}
    _tell(f"Created topic '{safe(topic)}' with {partitions} partitions", document, as_json=json)


@app.command("create-subscription")
def create_subscription(
    context: typer.Context,
    name: _SubscriptionName,
    topic: _TopicName,
    offset: Annotated[int, typer.Option(min=0, help="First offset to deliver.")] = 0,
    json: JsonLines = False,
) -> None:
    """Create a subscription to a topic: its subscribers share the messages."""
    with context.obj.client() as client:
        _check(client, client.create_subscription(name, topic, offset))
    text = f"Created subscription '{safe(name)}' for topic '{safe(topic)}' starting at offset {offset}"
    _tell(text, {"subscription": name, "topic": topic, "start_offset": offset}, as_json=json)


@app.command("delete-subscription")
def delete_subscription(context: typer.Context, name: _SubscriptionName, json: JsonLines = False) -> None:
    """Delete a subscription and its position. The messages stay."""
    with context.obj.client() as client:
        _check(client, client.delete_subscription(name))
    _tell(f"Deleted subscription '{safe(name)}'", {"subscription": name}, as_json=json)


@app.command("publish")
def publish(
    context: typer.Context,
    topic: _TopicName,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Body of the message.")],
    partition: Annotated[
        int | None, typer.Option(min=0, help="Partition to publish to. \\[default: the broker chooses]")
    ] = None,
    properties: Annotated[
        str | None, typer.Option(metavar="JSON", help="""Properties, such as '{"colour": "red"}'.""")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Publish a message, and wait until it is stored with the durability of its topic."""
    given = _read_properties(properties)
    with context.obj.client() as client:
        _check(client, client.publish(topic, os.fsencode(message), partition, **given))
    _tell(f"Published message to topic '{safe(topic)}'", {"topic": topic, "properties": given}, as_json=json)


@app.command("join-subscription")
def join_subscription(
    context: typer.Context, name: _SubscriptionName, count: _Count = None, json: JsonLines = False
) -> None:
    """Join a subscription and print its messages as they arrive.

    Each message is acknowledged after it is printed. Ctrl-C exits with code 0.
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
    offset: Annotated[int, typer.Option(min=0, help="First offset to print.")] = 0,
    partition: Annotated[int, typer.Option(min=0, help="Partition to read.")] = 0,
    count: _Count = None,
    json: JsonLines = False,
) -> None:
    """Print the messages of a topic from an offset on, as they arrive.

    It uses a temporary subscription, which is deleted at the end. Ctrl-C exits with code 0.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with context.obj.client() as client, suppress(KeyboardInterrupt):
        printer = _Printer(client, count, as_json=json)
        _check(client, client.subscribe(topic, partition, offset, handler=printer.take))
        printer.wait()


class _Printer:
    """Print messages, in the client's thread, until the count is reached or printing fails."""

    def __init__(self, client: BrokerClient, count: int | None, *, as_json: bool) -> None:
        self._client = client
        self._left = count
        self._form = _json_line if as_json else _lines
        self._failure: Exception | None = None

    def take(self, message: BrokerMessage) -> None:
        try:
            print(self._form(message), flush=True)
        except Exception as error:
            # The message stays unacknowledged; `wait` raises the error again in the main thread.
            self._failure = error
            self._client.disconnect()
            raise
        if self._left is not None:
            self._left -= 1
            if not self._left:
                # Now, before the client takes another message that other subscribers could have.
                self._client.disconnect()

    def wait(self) -> None:
        """Wait until the count is reached, printing fails, or Ctrl-C."""
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
        raise _bad_properties(f"{text!r}: it must be an object of strings, numbers and booleans")
    # `data` is the name of the body in `publish`.
    taken = sorted({*RESERVED, "data"} & given.keys())
    if taken:
        raise _bad_properties(f"reserved property names: {', '.join(taken)}")
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
    """Return the properties that the publisher set."""
    from penstock.client.qb import RESERVED

    return {name: value for name, value in message.properties.items() if name not in RESERVED}
