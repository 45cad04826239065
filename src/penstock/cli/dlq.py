"""`penstock dlq`: dead letters, the messages that a group could not process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.cli.options import ConnectionOptions, Json, Yes, complete_group, confirm, options
from penstock.cli.text import Document, counted, iso, put, shown
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.times import iso_or_none, read_moment

if TYPE_CHECKING:
    from penstock.client.values import DeadLetter, LetterFilter

app = typer.Typer(no_args_is_help=True, add_completion=False)

Pattern = Annotated[str, typer.Argument(metavar="[PATTERN]", help="Only subjects that match this pattern.")]
Count = Annotated[int | None, typer.Option(min=1, help="At most this many, oldest first. \\[default: all]")]
_PANEL = "Selection"


def _read_moment(text: str) -> str:
    """Return the text if it is a valid time; the client parses it again."""
    try:
        read_moment(text, SystemClock().now_us())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """Conditions that all must hold for a dead letter."""

    group: Annotated[
        str | None,
        typer.Option(autocompletion=complete_group, help="Only dead letters of this group.", rich_help_panel=_PANEL),
    ] = None
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only with this text in the reason.", rich_help_panel=_PANEL)
    ] = None
    since: Annotated[
        Any,
        typer.Option(
            parser=_read_moment,
            metavar="TIME",
            help="Only dead-lettered at this time or later.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    until: Annotated[
        Any,
        typer.Option(
            parser=_read_moment, metavar="TIME", help="Only dead-lettered before this time.", rich_help_panel=_PANEL
        ),
    ] = None
    partition: Annotated[
        int | None, typer.Option(min=0, help="Only in this partition of the dead-letter topic.", rich_help_panel=_PANEL)
    ] = None
    offset: Annotated[
        list[int] | None, typer.Option(min=0, help="Only at this offset; repeatable.", rich_help_panel=_PANEL)
    ] = None

    def filter(self) -> LetterFilter:
        given = asdict(self)
        given["offsets"] = given.pop("offset") or None
        return cast("LetterFilter", {name: value for name, value in given.items() if value is not None})


@app.command("list")
@options
def list_letters(
    pattern: Pattern = ">",
    *,
    count: Annotated[int, typer.Option(min=1, help="Show at most this many, oldest first.")] = 100,
    redriven: Annotated[bool, typer.Option("--redriven", help="Also show redriven dead letters.")] = False,
    which: LetterSelection,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """List dead letters with their position, origin and reason."""
    with at.client() as client:
        letters = client.dead_letters(pattern, limit=count, redriven=redriven, **which.filter())
    from penstock.cli import output

    if json:
        output.print_json([_document(letter) for letter in letters])
        return
    rows = [
        (
            letter.partition,
            str(letter.offset),
            iso_or_none(letter.timestamp_us, "seconds"),
            letter.subject,
            f"{letter.topic} {letter.origin_partition}:{letter.origin_offset}",
            letter.group,
            letter.attempts,
            letter.reason,
            "yes" if letter.redriven else "no",
        )
        for letter in letters
    ]
    names = ("partition", "offset", "died", "subject", "origin", "group", "deliveries", "reason", "redriven")
    output.console().print(output.table(names, rows, numbers=("partition", "offset", "deliveries")))


@app.command("peek")
@options
def peek(
    partition: Annotated[int, typer.Argument(min=0, metavar="PARTITION", help="Partition, from `penstock dlq list`.")],
    offset: Annotated[int, typer.Argument(min=0, metavar="OFFSET", help="Offset, from `penstock dlq list`.")],
    *,
    topic: Annotated[str, typer.Option(help="Dead-letter topic: the server's setting dlq.prefix.")] = "DLQ",
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Show one dead letter in full, redriven or not."""
    with at.client() as client:
        found = list(client.fetch(topic, partition, offset, end=offset + 1))
    if not found:
        raise PenstockError(f"no dead letter at {topic} {partition}:{offset}: `penstock dlq list` lists them")
    from penstock.cli import messages, output

    [message] = found
    if json:
        output.print_json(messages.document(message))
        return
    rows = [("died", iso(message.timestamp_us)), ("subject", message.subject), *message.headers.items()]
    if message.key is not None:
        rows.append(("key", shown(message.key, alone=True)))
    output.console().print(output.table(("field", "value"), [*rows, ("value", shown(message.value, alone=True))]))


@app.command("redrive")
@options
def redrive(
    pattern: Pattern = ">",
    *,
    count: Count = None,
    to_group: Annotated[bool, typer.Option("--to-group", help="Deliver each only to the group that failed.")] = False,
    which: LetterSelection,
    yes: Yes = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Redrive dead letters: publish each once to its original subject.

    Exit code 1 if some fail: these stay in the list, the others are redriven.
    """
    with at.client() as client:
        wanted, where = which.filter(), "groups" if to_group else "subjects"
        confirm(f"Redrive {_described(pattern, count, wanted)} to their {where}?", yes=yes)
        redriven = client.redrive(pattern, count=count, to_group=to_group, **wanted)
    letters = counted(redriven.count, "dead letter")
    if json:
        from penstock.cli import output

        output.print_json({"redriven": redriven.count, "skipped": redriven.skipped, "reason": redriven.reason})
    else:
        print(f"returned {letters} to their groups" if to_group else f"published {letters} again")
    if redriven.skipped:
        raise PenstockError(f"{counted(redriven.skipped, 'dead letter')} could not be redriven: {redriven.reason}")


@app.command("purge")
@options
def purge(
    pattern: Pattern = ">",
    *,
    count: Count = None,
    which: LetterSelection,
    yes: Yes = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Purge dead letters: they can no longer be listed or redriven. Retention frees their bytes."""
    with at.client() as client:
        wanted = which.filter()
        confirm(f"Purge {_described(pattern, count, wanted)}?", yes=yes)
        purged = client.purge_dead_letters(pattern, count=count, **wanted)
    if json:
        from penstock.cli import output

        output.print_json({"purged": purged})
    else:
        print(f"purged {counted(purged, 'dead letter')}")


def _described(pattern: str, count: int | None, wanted: LetterFilter) -> str:
    """Describe the selected dead letters, for a question to the user."""
    letters = "all dead letters" if count is None else f"at most {counted(count, 'dead letter')}"
    return f"{letters} of {pattern}{''.join(f', {name} {value}' for name, value in wanted.items())}"


def _document(letter: DeadLetter) -> Document:
    document = asdict(letter)
    put(document, "value", document.pop("value"))
    return document
