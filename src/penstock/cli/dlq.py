"""`penstock dlq`: messages that a group could not handle."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Address, Json, Yes, confirm, options
from penstock.cli.text import Document, counted, iso, put, shown
from penstock.errors import PenstockError
from penstock.moments import iso_or_none

if TYPE_CHECKING:
    from penstock.client.values import DeadLetter

app = typer.Typer(no_args_is_help=True, add_completion=False)

Pattern = Annotated[str, typer.Argument(metavar="[PATTERN]", help="Those of these subjects.")]


@app.command("list")
@options
def list_letters(
    pattern: Pattern = ">",
    *,
    count: Annotated[int, typer.Option(min=1, help="At the most so many, oldest first.")] = 100,
    redriven: Annotated[bool, typer.Option("--redriven", help="Also those that were sent again.")] = False,
    json: Json = False,
    at: Address,
) -> None:
    """Show dead letters: where they are, where they were, and why they died."""
    with at.client() as client:
        letters = client.dead_letters(pattern, limit=count, redriven=redriven)
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
    partition: Annotated[int, typer.Argument(min=0, metavar="PARTITION", help="As `penstock dlq list` shows it.")],
    offset: Annotated[int, typer.Argument(min=0, metavar="OFFSET", help="The same.")],
    *,
    topic: Annotated[str, typer.Option(help="Where the server keeps them: its setting dlq.prefix.")] = "DLQ",
    json: Json = False,
    at: Address,
) -> None:
    """Show all of one dead letter, redriven or not."""
    with at.client() as client:
        found = list(client.fetch(topic, partition, offset, end=offset + 1))
    if not found:
        raise PenstockError(f"{topic} has nothing at {partition}:{offset}: `penstock dlq list` shows what there is")
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
    count: Annotated[int | None, typer.Option(min=1, help="At the most so many, oldest first.")] = None,
    yes: Yes = False,
    json: Json = False,
    at: Address,
) -> None:
    """Publish dead letters to their subjects again, each once."""
    with at.client() as client:
        confirm(f"Publish the dead letters of {pattern} to their subjects again?", yes=yes)
        redriven = client.redrive(pattern, count=count)
    if json:
        from penstock.cli import output

        output.print_json({"redriven": redriven})
    else:
        print(f"published {counted(redriven, 'dead letter')} again")


def _document(letter: DeadLetter) -> Document:
    document = asdict(letter)
    put(document, "value", document.pop("value"))
    return document
