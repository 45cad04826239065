"""`penstock top`: sample the rates of topics and the lag of groups."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.options import ConnectionOptions, JsonLines, options
from penstock.cli.text import Document, iso
from penstock.clock import SystemClock

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.client.sync import Client
    from penstock.client.values import Group, Topic

app = typer.Typer(add_completion=False)


@app.command()
@options
def top(
    *,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between samples.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Exit after this many samples.")] = None,
    json: JsonLines = False,
    at: ConnectionOptions,
) -> None:
    """Show the rates of topics and the lag of groups, busiest first. Ctrl-C exits with code 0."""
    with at.client() as client, suppress(KeyboardInterrupt):
        samples = _samples(client, interval, count)
        if json:
            for sample in samples:
                print(json_text.dumps(sample), flush=True)
        else:
            _show(samples)


def _show(samples: Iterator[Document]) -> None:
    from rich.live import Live

    from penstock.cli import output

    console = output.console()
    if not sys.stdout.isatty():
        for sample in samples:
            console.print(_tables(sample))
        return
    with Live("measuring …", console=console, auto_refresh=False) as live:
        for sample in samples:
            live.update(_tables(sample), refresh=True)


class _Reading(NamedTuple):
    time_s: float
    topics: dict[int, Topic]
    groups: dict[str, Group]


def _samples(client: Client, interval: float, count: int | None) -> Iterator[Document]:
    before = _read(client)
    taken = 0
    while count is None or taken < count:
        time.sleep(interval)
        now = _read(client)
        yield _sample(before, now)
        before = now
        taken += 1


def _read(client: Client) -> _Reading:
    topics = {topic.id: topic for topic in client.topics()}
    groups = {group.name: group for group in client.groups()}
    return _Reading(time.monotonic(), topics, groups)


def _sample(before: _Reading, now: _Reading) -> Document:
    seconds = now.time_s - before.time_s

    def rate(old: int, new: int) -> float:
        # Retention and resets must not show as negative rates.
        return max(0, new - old) / seconds

    topics = []
    for topic in now.topics.values():
        # A new topic or group has no rate yet.
        old = before.topics.get(topic.id, topic)
        topics.append(
            {
                "name": topic.name,
                "messages_per_second": rate(_committed(old), _committed(topic)),
                "bytes_per_second": rate(_bytes(old), _bytes(topic)),
                "messages": sum(position.committed - position.start for position in topic.positions),
                "bytes": _bytes(topic),
            }
        )
    groups = []
    for group in now.groups.values():
        groups.append(
            {
                "name": group.name,
                "pattern": group.pattern,
                "members": len(group.members),
                "lag": group.lag,
                "done_per_second": rate(_done(before.groups.get(group.name, group)), _done(group)),
                "pending": group.pending,
                "dead_letters": group.dead_lettered,
            }
        )
    return {
        "time": iso(SystemClock().now_us()),
        "topics": sorted(topics, key=lambda each: (-each["messages_per_second"], each["name"])),
        "groups": sorted(groups, key=lambda each: (-each["lag"], each["name"])),
    }


def _committed(topic: Topic) -> int:
    return sum(position.committed for position in topic.positions)


def _bytes(topic: Topic) -> int:
    return sum(position.bytes for position in topic.positions)


def _done(group: Group) -> int:
    return sum(position.committed for position in group.positions)


def _tables(sample: Document) -> RenderableType:
    from rich.console import Group as Rows

    from penstock.cli import output

    topics = [
        (
            each["name"],
            round(each["messages_per_second"]),
            output.size(round(each["bytes_per_second"])),
            each["messages"],
            output.size(each["bytes"]),
        )
        for each in sample["topics"]
    ]
    groups = [
        (
            each["name"],
            each["pattern"],
            each["members"],
            each["lag"],
            round(each["done_per_second"]),
            each["pending"],
            each["dead_letters"],
        )
        for each in sample["groups"]
    ]
    topic_names = ("topic", "messages/s", "bytes/s", "messages", "bytes")
    group_names = ("group", "pattern", "members", "lag", "done/s", "pending", "dead letters")
    return Rows(
        f"{sample['time']}\n",
        output.table(topic_names, topics, numbers=topic_names[1:]),
        "",
        output.table(group_names, groups, numbers=group_names[2:]),
        "",
    )
