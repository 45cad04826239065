"""`penstock topic`: what topics there are, what they hold, and what they ask of their logs."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli.options import Address, Json, TopicName, Yes, confirm, convert, options, read_place
from penstock.cli.text import counted, iso, safe

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.client.values import Refresh, RefreshedGroup, Topic

# How often a refresh is looked at.
_LOOK_S: Final = 0.2

app = typer.Typer(no_args_is_help=True, add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """What is given of a topic. Numbers, durations and sizes are read as in a file of settings; `none` is no limit."""

    partitions: Annotated[str | None, typer.Option(metavar="1", help="Logs that share its messages.")] = None
    durability: Annotated[
        Literal["fsync", "flush"] | None, typer.Option(help="Acknowledge when the disk has it, or the system.")
    ] = None
    retain: Annotated[str | None, typer.Option(metavar="7d|none", help="Drop segments that are older.")] = None
    retain_bytes: Annotated[
        str | None, typer.Option(metavar="5GB|none", help="Drop segments when a partition is larger.")
    ] = None
    cleanup: Annotated[
        Literal["delete", "compact"] | None, typer.Option(help="Drop old segments, or keep the latest of each key.")
    ] = None
    tombstone: Annotated[
        str | None, typer.Option(metavar="24h", help="Under compact: how long a deleted key is told of.")
    ] = None
    segment_bytes: Annotated[str | None, typer.Option(metavar="64MiB", help="A segment is sealed at this size.")] = None
    dedup: Annotated[
        Literal["id", "payload", "off"] | None, typer.Option(help="What makes two messages the same one.")
    ] = None
    dedup_window: Annotated[str | None, typer.Option(metavar="5m|none", help="How long that is remembered.")] = None
    ack_deadline: Annotated[
        str | None, typer.Option(metavar="5s", help="Deliver again what is not acknowledged by then.")
    ] = None
    deliveries_max: Annotated[
        str | None, typer.Option(metavar="4|none", help="Deliveries of a message, with the first.")
    ] = None
    dead_letters: Annotated[bool | None, typer.Option(help="Keep what was delivered so often in vain.")] = None
    refresh_wait: Annotated[
        str | None, typer.Option(metavar="60s", help="How long a refresh waits for a consumer.")
    ] = None
    on_damage: Annotated[
        Literal["stop", "skip"] | None, typer.Option(help="Readers stop at damaged messages, or skip them.")
    ] = None

    def given(self) -> dict[str, Any]:
        """As `create_topic` and `alter_topic` take it."""
        from penstock.server.config import SETTINGS

        given: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                name = field.name if f"topic.{field.name}" in SETTINGS else f"{field.name}_ms"
                given[name] = convert(SETTINGS[f"topic.{name}"], value, f"--{field.name.replace('_', '-')}")
        return given


@app.command("create")
@options
def create(
    name: Annotated[str, typer.Argument(metavar="TOPIC", help="Subjects at and below this name are stored there.")],
    *,
    settings: TopicOptions,
    json: Json = False,
    at: Address,
) -> None:
    """Make a topic. What is not given is as the server's settings say."""
    given = settings.given()
    with at.client() as client:
        _tell("made", client.create_topic(name, **given), as_json=json)


@app.command("list")
@options
def list_topics(*, json: Json = False, at: Address) -> None:
    """Show all topics."""
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
def describe(name: TopicName, *, json: Json = False, at: Address) -> None:
    """Show what a topic holds, partition by partition, and its policy."""
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
    console.print()
    settings = [(key, _as_text(key, value)) for key, value in topic.policy.items()]
    console.print(output.table(("policy", "value"), settings))


@app.command("alter")
@options
def alter(name: TopicName, *, settings: TopicOptions, yes: Yes = False, json: Json = False, at: Address) -> None:
    """Change the policy of a topic, or give it more partitions. What is not given stays.

    More partitions move keys: at a terminal it asks first if the topic has messages.
    """
    given = settings.given()
    if not given:
        raise typer.BadParameter("say what to change; --help lists it")
    with at.client() as client:
        topic = client.topic(name)
        if given.get("partitions", 0) > topic.partitions and any(each.end for each in topic.positions):
            confirm(f"Give {name} more partitions? Its keys move to others, and their order is not kept.", yes=yes)
        altered = client.alter_topic(name, **given)
    _tell("changed", altered, as_json=json)
    if altered.warning is not None:
        print(safe(f"warning: {altered.warning}"), file=sys.stderr, flush=True)


@app.command("purge")
@options
def purge(
    name: TopicName,
    *,
    before: Annotated[
        Any, typer.Option(parser=read_place, metavar="TIME|latest", help="Drop what was stored before; latest: all.")
    ] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Drop what is below this offset of a partition.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only in this partition.")] = None,
    yes: Yes = False,
    json: Json = False,
    at: Address,
) -> None:
    """Drop the oldest messages of a topic. Groups go on behind them; the disk is freed by whole segments."""
    if (before is None) == (offset is None):
        raise typer.BadParameter("give either --before or --offset")
    if isinstance(before, int):
        raise typer.BadParameter(f"--before {before} is no time: use --offset {before}, or --before @{before}")
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
def delete(name: TopicName, *, yes: Yes = False, json: Json = False, at: Address) -> None:
    """Delete a topic and all that it holds."""
    with at.client() as client:
        topic = client.topic(name)
        confirm(f"Delete {name} and {counted(_messages(topic), 'message')}?", yes=yes)
        client.delete_topic(name)
    _tell("deleted", topic, as_json=json)


@app.command("copy")
@options
def copy(
    name: TopicName,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Made like TOPIC if it does not exist.")],
    *,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL[,…]", help="Another broker: nats://user:password@host:4222.  [default: the same]"),
    ] = None,
    json: Json = False,
    at: Address,
) -> None:
    """Copy what a topic holds now: keys, headers, times, partitions and subjects below its name.

    Offsets are given anew. Each message is stored once: if the copy is interrupted,
    the same command goes on where it was.
    """
    from penstock.cli import copying, output
    from penstock.client.sync import Client

    if to is None and target == name:
        raise typer.BadParameter("a topic cannot be copied to itself: name another, or a broker with --to")
    done, is_interrupted, started = copying.Copied(), False, time.perf_counter()
    with at.client() as client, ExitStack() as stack:
        source = client.topic(name)
        other = client
        if to is not None:
            try:
                other = stack.enter_context(Client(to.split(","), name="penstock"))
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
        before = f", after {counted(done.resumed, 'offset')} that were copied before" if done.resumed else ""
        lost = f", {done.lost:,} dropped at the source before they were copied" if done.lost else ""
        rate = output.rate(done.copied, seconds)
        print(safe(f"copied {counted(done.copied, 'message')} to {target}{before}{lost}: ") + rate, flush=True)
    if done.unchecked:
        places = ", ".join(map(str, done.unchecked))
        what = f"warning: cannot tell whether {target} has other messages in partition {places}: "
        print(safe(f"{what}what was copied last is gone at the source"), file=sys.stderr)
    if is_interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130)


@app.command("refresh")
@options
def refresh(
    name: TopicName,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is over; exit code 1 if it was given up.")] = False,
    json: Json = False,
    at: Address,
) -> None:
    """Let the consumers that keep a copy of a topic forget it, and have all of it again."""
    with at.client() as client:
        found = client.refresh_topic(name)
        while wait and not found.is_over:
            found = _follow(client, found)
    _tell_refresh(found, as_json=json)
    if found.state == "ABORTED":
        raise typer.Exit(1)


@app.command("refresh-status")
@options
def refresh_status(name: TopicName, *, json: Json = False, at: Address) -> None:
    """Show how far the last refresh of a topic is, and who is waited for."""
    with at.client() as client:
        _tell_refresh(client.refresh_status(name), as_json=json)


def _follow(client: Client, before: Refresh) -> Refresh:
    """Until something has changed, which whoever watches is told."""
    for group in before.groups:
        print(safe(f"{group.group}: {group.state}{_detail(group)}"), file=sys.stderr, flush=True)
    while (found := client.refresh_status(before.topic)) == before:
        time.sleep(_LOOK_S)
    return found


def _tell_refresh(refresh: Refresh, *, as_json: bool) -> None:
    from penstock.cli import output

    if as_json:
        output.print_json(asdict(refresh))
        return
    since = "" if refresh.started_us is None else f", begun {iso(refresh.started_us)}"
    print(safe(f"{refresh.topic}: {refresh.state}{since}"))
    if refresh.groups:
        rows = [(group.group, group.state, group.left, _detail(group).removeprefix(", ")) for group in refresh.groups]
        output.console().print(output.table(("group", "state", "left", ""), rows, numbers=("left",)))
    elif refresh.state != "IDLE":
        print("no group reads it whose members understand a refresh")


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
    """As it would be written in a file of settings."""
    from penstock.cli import output

    if value is None or isinstance(value, bool):
        return str(value).lower()
    return output.duration(value) if key.endswith("_ms") else str(value)
