"""`penstock topic`: topics, their contents and their policies."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import topic_schema
from penstock.cli.options import (
    ConnectionOptions,
    Declared,
    Json,
    TopicName,
    Yes,
    confirm,
    options,
    read_place,
    read_tls,
)
from penstock.cli.text import counted, iso, safe
from penstock.server.settings import OF_ONE_TOPIC, SETTINGS

if TYPE_CHECKING:
    from penstock.cli.copying import Copied
    from penstock.client.sync import Client
    from penstock.client.values import Refresh, RefreshedGroup, Topic

# How often the status of a refresh is polled.
_POLL_S: Final = 0.2

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(topic_schema.app, name="schema", help="Schemas of the values of a topic.")


# The settings `topic.*` that one topic may have.
TopicOptions = Annotated[dict[str, Any], Declared({name: SETTINGS[f"topic.{name}"] for name in OF_ONE_TOPIC})]


@app.command("create")
@options
def create(
    name: Annotated[
        str, typer.Argument(metavar="TOPIC", help="Name of the topic; it stores this subject and those below it.")
    ],
    *,
    settings: TopicOptions,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Create a topic. Options that are not given take the server's defaults."""
    with at.client() as client:
        _tell("created", client.create_topic(name, **settings), as_json=json)


@app.command("list")
@options
def list_topics(*, json: Json = False, at: ConnectionOptions) -> None:
    """List all topics."""
    with at.client() as client:
        topics = sorted(client.topics(), key=lambda topic: topic.name)
    from penstock.cli import output

    if json:
        output.print_json([asdict(topic) for topic in topics])
        return
    rows = [
        (
            topic.name,
            topic.partitions,
            _messages(topic),
            output.size(sum(position.bytes for position in topic.positions)),
            topic.policy["durability"],
            topic.policy["cleanup"],
            topic.refused or "ok",
        )
        for topic in topics
    ]
    names = ("topic", "partitions", "messages", "bytes", "durability", "cleanup", "state")
    output.console().print(output.table(names, rows, numbers=("partitions", "messages", "bytes")))


@app.command("describe")
@options
def describe(name: TopicName, *, json: Json = False, at: ConnectionOptions) -> None:
    """Show the partitions and the policy of a topic."""
    with at.client() as client:
        topic = client.topic(name)
    from penstock.cli import output

    if json:
        output.print_json(asdict(topic))
        return
    console = output.console()
    console.print(f"{_headline(topic)}\n", markup=False)
    rows = [
        (each.partition, str(each.start), str(each.committed), str(each.end), output.size(each.bytes))
        for each in topic.positions
    ]
    numbers = ("partition", "start", "committed", "end", "bytes")
    console.print(output.table(numbers, rows, numbers=numbers))
    if held := sum(position.held_bytes for position in topic.positions):
        group = topic.policy["retain_for"]
        console.print(
            f"\n{output.size(held)} are held for group {group}: retention drops them when it has processed them",
            markup=False,
        )
    console.print()
    settings = [(key, _as_text(key, value)) for key, value in topic.policy.items()]
    console.print(output.table(("policy", "value"), settings))


@app.command("alter")
@options
def alter(
    name: TopicName, *, settings: TopicOptions, yes: Yes = False, json: Json = False, at: ConnectionOptions
) -> None:
    """Change the policy of a topic, or add partitions. Options that are not given stay unchanged.

    Adding partitions moves keys to other partitions; at a terminal it asks for
    confirmation if the topic has messages.
    """
    if not settings:
        raise typer.BadParameter("give at least one option to change, see --help")
    with at.client() as client:
        topic = client.topic(name)
        if settings.get("partitions", 0) > topic.partitions and any(each.end for each in topic.positions):
            confirm(f"Add partitions to {name}? Keys move to other partitions and lose their order.", yes=yes)
        altered = client.alter_topic(name, **settings)
    _tell("changed", altered, as_json=json)
    if altered.warning is not None:
        print(safe(f"warning: {altered.warning}"), file=sys.stderr, flush=True)


@app.command("purge")
@options
def purge(
    name: TopicName,
    *,
    before: Annotated[
        Any,
        typer.Option(
            parser=read_place, metavar="TIME|latest", help="Drop messages stored before this time; latest: all."
        ),
    ] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Drop messages below this offset.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only in this partition.")] = None,
    yes: Yes = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Drop the oldest messages of a topic. Groups continue after them; disk space is freed in whole segments."""
    if (before is None) == (offset is None):
        raise typer.BadParameter("give either --before or --offset")
    if isinstance(before, int):
        raise typer.BadParameter(f"invalid time {before}: use --offset {before}, or --before @{before}")
    place: Any = offset if before is None else before
    with at.client() as client:
        topic = client.topic(name)
        confirm(f"Drop messages of {name}? It has {counted(_messages(topic), 'message')}.", yes=yes)
        purged = client.purge_topic(name, place, partition=partition)
    dropped = _dropped(topic, purged)
    _tell(f"dropped {counted(dropped, 'message')} of", purged, as_json=json)


def _dropped(before: Topic, after: Topic) -> int:
    return sum(new.start - old.start for old, new in zip(before.positions, after.positions, strict=True))


@app.command("delete")
@options
def delete(name: TopicName, *, yes: Yes = False, json: Json = False, at: ConnectionOptions) -> None:
    """Delete a topic and its messages."""
    with at.client() as client:
        topic = client.topic(name)
        confirm(f"Delete {name} and {counted(_messages(topic), 'message')}?", yes=yes)
        client.delete_topic(name)
    _tell("deleted", topic, as_json=json)


# Long only by its options.
@app.command("copy")
@options
def copy(
    name: TopicName,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Topic to copy to; created like TOPIC if it does not exist.")
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,…]", help="Copy to this broker: nats://user:password@host:4222. \\[default: the same]"
        ),
    ] = None,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Copy the messages of a topic: values, keys, headers, times, partitions and subjects below its name.

    Messages get new offsets. Each is copied exactly once: after an interruption,
    run the same command again to resume.
    """
    from penstock.cli import copying, output
    from penstock.client.sync import Client

    if to is None and target == name:
        raise typer.BadParameter("a topic cannot be copied to itself: give another TARGET, or another broker with --to")
    done, is_interrupted, started = copying.Copied(), False, time.perf_counter()
    with at.client() as client, ExitStack() as stack:
        source = client.topic(name)
        other = client
        if to is not None:
            try:
                tls = read_tls(at.tls_ca, at.tls_cert, at.tls_key)
                other = stack.enter_context(Client(to.split(","), name="penstock", tls=tls))
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="'--to'") from None
        made = copying.prepare(source, other, target)
        with output.moving("copying", _messages(source)) as advance:
            try:
                copying.copy(client, source, other, made, done, advance)
            except KeyboardInterrupt:
                is_interrupted = True
    seconds = time.perf_counter() - started
    if json:
        output.print_json({**asdict(done), "interrupted": is_interrupted, "seconds": seconds})
    else:
        _show_copy(done, target, seconds)
    _warn_unchecked(done, target)
    if is_interrupted:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        raise typer.Exit(130)


def _show_copy(done: Copied, target: str, seconds: float) -> None:
    from penstock.cli import output

    before = f", resumed after {counted(done.resumed, 'offset')}" if done.resumed else ""
    lost = f", {done.lost:,} dropped at the source before they were copied" if done.lost else ""
    rate = output.rate(done.copied, seconds)
    print(safe(f"copied {counted(done.copied, 'message')} to {target}{before}{lost}: ") + rate, flush=True)


def _warn_unchecked(done: Copied, target: str) -> None:
    if done.unchecked:
        partitions = ", ".join(map(str, done.unchecked))
        what = f"warning: cannot tell whether {target} has other messages in partition {partitions}: "
        print(safe(f"{what}the message copied last is gone at the source"), file=sys.stderr)


@app.command("refresh")
@options
def refresh(
    name: TopicName,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end; exit code 1 if it is aborted.")] = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Refresh a topic: consumers that keep a copy discard it and receive all messages again."""
    with at.client() as client:
        found = client.refresh_topic(name)
        while wait and not found.is_over:
            found = _follow(client, found)
    _tell_refresh(found, as_json=json)
    if found.state == "ABORTED":
        raise typer.Exit(1)


@app.command("refresh-status")
@options
def refresh_status(name: TopicName, *, json: Json = False, at: ConnectionOptions) -> None:
    """Show the progress of the last refresh of a topic, and the consumers it waits for."""
    with at.client() as client:
        _tell_refresh(client.refresh_status(name), as_json=json)


def _follow(client: Client, before: Refresh) -> Refresh:
    """Print the state, and wait until it changes."""
    for group in before.groups:
        print(safe(f"{group.group}: {group.state}{_detail(group)}"), file=sys.stderr, flush=True)
    while (found := client.refresh_status(before.topic)) == before:
        time.sleep(_POLL_S)
    return found


def _tell_refresh(refresh: Refresh, *, as_json: bool) -> None:
    from penstock.cli import output

    if as_json:
        output.print_json(asdict(refresh))
        return
    since = "" if refresh.started_us is None else f", started {iso(refresh.started_us)}"
    print(safe(f"{refresh.topic}: {refresh.state}{since}"))
    if refresh.groups:
        rows = [(group.group, group.state, group.left, _detail(group).removeprefix(", ")) for group in refresh.groups]
        output.console().print(output.table(("group", "state", "left", ""), rows, numbers=("left",)))
    elif refresh.state != "IDLE":
        print("no group with members that support a refresh reads it")


def _detail(group: RefreshedGroup) -> str:
    if group.reason is not None:
        return f", {group.reason}"
    left = f", {counted(group.left, 'message')} left" if group.left else ""
    return left + (f", waits for {', '.join(group.waits_for)}" if group.waits_for else "")


def _tell(deed: str, topic: Topic, *, as_json: bool) -> None:
    if as_json:
        from penstock.cli import output

        output.print_json(asdict(topic))
    else:
        print(f"{deed} {_headline(topic)}")


def _headline(topic: Topic) -> str:
    size = f"{counted(topic.partitions, 'partition')}, {counted(_messages(topic), 'message')}"
    return safe(f"{topic.name}: id {topic.id}, {size}" + (f", refused: {topic.refused}" if topic.refused else ""))


def _messages(topic: Topic) -> int:
    return sum(position.committed - position.start for position in topic.positions)


def _as_text(key: str, value: Any) -> str:
    """Return a value as it is written in a configuration file."""
    from penstock.cli import output

    if value is None or isinstance(value, bool):
        return str(value).lower()
    return output.duration(value) if key.endswith("_ms") else str(value)
