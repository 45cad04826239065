"""`penstock delayed`: messages that are not due yet."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.options import ConnectionOptions, Json, Yes, confirm, options
from penstock.cli.text import counted, iso, put, shown

app = typer.Typer(no_args_is_help=True, add_completion=False)

MessageId = Annotated[str | None, typer.Option(help="Only messages with this message ID.")]


@app.command("list")
@options
def list_delayed(
    pattern: Annotated[str, typer.Argument(metavar="[PATTERN]", help="Only subjects that match this pattern.")] = ">",
    *,
    message_id: MessageId = None,
    count: Annotated[int, typer.Option(min=1, help="Show at most this many messages, next due first.")] = 100,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """List messages that are not due yet."""
    with at.client() as client:
        messages = client.delayed(pattern, limit=count, message_id=message_id)
    from penstock.cli import output

    if json:
        documents = []
        for message in messages:
            document = asdict(message)
            put(document, "value", document.pop("value"))
            if (key := document.pop("key")) is not None:
                put(document, "key", key)
            documents.append(document)
        output.print_json(documents)
        return
    rows = [
        (str(each.offset), iso(each.due_us), each.subject, each.message_id or "", shown(each.value, alone=True))
        for each in messages
    ]
    output.console().print(output.table(("offset", "due", "subject", "id", "value"), rows, numbers=("offset",)))


@app.command("cancel")
@options
def cancel(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="Subjects that match this pattern; > for all.")],
    *,
    message_id: MessageId = None,
    offset: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only the message at this offset, from `penstock delayed list`; repeatable."),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Cancel delayed messages: they are never published."""
    which = "" if message_id is None else f", ID {message_id}"
    which += f", offset {', '.join(map(str, offset))}" if offset else ""
    with at.client() as client:
        confirm(f"Cancel the delayed messages of {pattern}{which}?", yes=yes)
        cancelled = client.cancel_delayed(pattern, message_id=message_id, offsets=offset or None)
    if json:
        from penstock.cli import output

        output.print_json({"cancelled": cancelled})
    else:
        print(f"cancelled {counted(cancelled, 'delayed message')}")
