"""`penstock fetch`: read a range of stored messages, as lines, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import json as json_text
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TextIO

import typer

from penstock.cli import messages as printed
from penstock.cli import output
from penstock.cli.options import PLACE, ConnectionOptions, JsonLines, TopicName, options, read_place
from penstock.cli.text import counted
from penstock.errors import PenstockError
from penstock.times import Place

if TYPE_CHECKING:
    from penstock.client.message import Message
    from penstock.client.sync import Client
    from penstock.client.values import PartitionPosition

app = typer.Typer(add_completion=False)

Form = Literal["lines", "json", "csv", "parquet"]

_CSV_NAMES: Final = ("partition", "offset", "timestamp", "subject", "key", "key_base64", "headers", "tombstone")
_CSV_VALUES: Final = ("value", "value_base64")
_ASK_S: Final = 0.2


class Span(NamedTuple):
    """A range of offsets of a partition."""

    partition: int
    first: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.first)


# Long only by its options.
@app.command()
@options
def fetch(
    topic: TopicName,
    *,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    start: Annotated[
        Any, typer.Option("--from", parser=read_place, metavar=PLACE, help="Start of the range in each partition.")
    ] = "earliest",
    end: Annotated[
        Any, typer.Option("--to", parser=read_place, metavar=PLACE, help="End of the range, exclusive.")
    ] = "latest",
    count: Annotated[int | None, typer.Option(min=1, help="Exit after this many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new messages until Ctrl-C.")] = False,
    expired: Annotated[bool, typer.Option("--expired", help="Include messages whose TTL has ended.")] = False,
    form: Annotated[
        Form, typer.Option("--format", help="Output format; lines omits keys, headers and times.")
    ] = "lines",
    path: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write to this file. \\[default: stdout]")
    ] = None,
    flatten: Annotated[
        bool, typer.Option("--flatten", help="With parquet: a column for each field of JSON values, by the schema.")
    ] = False,
    schema: Annotated[
        str | None,
        typer.Option(metavar="DDL", help="For --flatten, such as 'id bigint'. \\[default: the topic's schema]"),
    ] = None,
    json: JsonLines = False,
    at: ConnectionOptions,
) -> None:
    """Read the stored messages of a topic, one partition after the other."""
    if (flatten or schema is not None) and form != "parquet":
        raise typer.BadParameter("only --format parquet has columns for fields", param_hint="'--flatten'")
    if schema is not None and not flatten:
        raise typer.BadParameter("give --flatten too", param_hint="'--schema'")
    form = _check_form(form, json=json, follow=follow, path=path)
    if follow and end != "latest":
        raise typer.BadParameter("--follow has no end: use only one of them", param_hint="'--to'")
    with at.client() as client:
        spans = _spans(client, topic, _choose(client, topic, partition), start, end)
        read = _followed(client, topic, partition, spans, expired=expired) if follow else None
        messages = read or _stored(client, topic, spans, expired=expired)
        with closing(messages):
            chosen = islice(messages, count)
            if path is None:
                _write_text(chosen, form, sys.stdout, follow=follow)
                return
            total = None if follow else min(sum(span.length for span in spans), count or sys.maxsize)
            started = time.perf_counter()
            with output.moving("fetching", total) as advance:
                if form == "parquet":
                    from penstock.cli import parquet

                    ddl = (schema or client.schema(topic).to_ddl()) if flatten else None
                    written = parquet.write(client, topic, spans, count, path, advance, expired=expired, ddl=ddl)
                else:
                    with path.open("w", encoding="utf-8", newline="") as file:
                        written = _write_text(chosen, form, file, follow=follow, advance=advance)
    print(f"wrote {counted(written, 'message')} to {path}: {output.rate(written, time.perf_counter() - started)}")


def _check_form(form: Form, *, json: bool, follow: bool, path: Path | None) -> Form:
    if json and form not in ("lines", "json"):
        raise typer.BadParameter(f"--json means --format json, not {form}", param_hint="'--json'")
    if form == "parquet" and (path is None or follow):
        raise typer.BadParameter("Parquet needs --output, and excludes --follow")
    return "json" if json else form


def _choose(client: Client, topic: str, partition: int | None) -> list[PartitionPosition]:
    found = client.topic(topic)
    if found.refused is not None:
        raise PenstockError(f"{topic} cannot be read: {found.refused}")
    positions = found.positions
    chosen = [position for position in positions if partition in (None, position.partition)]
    if not chosen:
        raise PenstockError(f"invalid partition {partition}: {topic} has 0 to {len(positions) - 1}")
    return chosen


def _spans(client: Client, topic: str, positions: Sequence[PartitionPosition], start: Place, end: Place) -> list[Span]:
    if isinstance(start, int) and start > max(position.committed for position in positions):
        ends = ", ".join(f"{position.partition}:{position.committed}" for position in positions)
        raise PenstockError(f"{topic} has no offset {start} yet, it ends at {ends}; to give a time, write @{start}")
    return [_span(client, topic, position, start, end) for position in positions]


def _span(client: Client, topic: str, position: PartitionPosition, start: Place, end: Place) -> Span:
    def offset_of(place: Place) -> int:
        if isinstance(place, datetime):
            return client.offset_at(topic, position.partition, place)
        if isinstance(place, int):
            return place
        return position.start if place == "earliest" else position.committed

    return Span(position.partition, offset_of(start), min(offset_of(end), position.committed))


def _stored(client: Client, topic: str, spans: Sequence[Span], *, expired: bool) -> Generator[Message, None, None]:
    for span in spans:
        if span.length:
            yield from client.fetch(topic, span.partition, span.first, end=span.end, expired=expired)


def _followed(
    client: Client, topic: str, partition: int | None, spans: Sequence[Span], *, expired: bool
) -> Generator[Message, None, None]:
    """Yield stored and then new messages, also of new partitions. It polls, because Python can miss a Ctrl-C that comes
    at the beginning of an endless wait."""
    reached = {span.partition: span.first for span in spans}
    while True:
        positions = _choose(client, topic, partition)
        behind = [each for each in positions if reached.setdefault(each.partition, each.start) < each.committed]
        for each in behind:
            begin = reached[each.partition]
            yield from client.fetch(topic, each.partition, begin, end=each.committed, expired=expired)
            reached[each.partition] = each.committed
        if not behind:
            time.sleep(_ASK_S)


def _write_text(
    messages: Iterable[Message],
    form: Form,
    stream: TextIO,
    *,
    follow: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the messages; return how many."""
    write = _writer(form, stream)
    written = 0
    try:
        for message in messages:
            write(message)
            written += 1
            advance(1)
            if follow:
                stream.flush()
    except KeyboardInterrupt:
        if not follow:
            raise
    stream.flush()
    return written


def _writer(form: Form, stream: TextIO) -> Callable[[Message], object]:
    if form == "csv":
        table = csv.DictWriter(stream, (*_CSV_NAMES, *_CSV_VALUES), extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        return lambda message: table.writerow(_csv_row(message))
    line = printed.json_line if form == "json" else printed.line
    return lambda message: stream.write(f"{line(message)}\n")


def _csv_row(message: Message) -> dict[str, Any]:
    row = printed.document(message)
    return row | ({"headers": json_text.dumps(row["headers"])} if "headers" in row else {})
