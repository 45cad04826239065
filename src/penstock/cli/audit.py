"""`penstock audit`: the audit trail, the topic `$audit`."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import ConnectionOptions, options
from penstock.cli.text import safe
from penstock.errors import PenstockError, UnknownTopic
from penstock.times import iso_or_none

if TYPE_CHECKING:
    from penstock.client.sync import Client

app = typer.Typer(add_completion=False)

_TOPIC: Final = "$audit"
_ASK_S: Final = 0.2


@app.command()
@options
def audit(
    *,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the last events.")] = None,
    who: Annotated[str | None, typer.Option(metavar="USER", help="Only events of this user.")] = None,
    result: Annotated[str | None, typer.Option(help="Only events with this result: ok, denied or failed.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new events until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
    at: ConnectionOptions,
) -> None:
    """Show who did what, from where, and with what result."""
    with at.client() as client:
        try:
            for event in _events(client, limit, follow=follow):
                if who in (None, event.get("user")) and result in (None, event.get("result")):
                    print(json_text.dumps(event) if json else safe(_line(event)))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not follow:
                raise


def _events(client: Client, limit: int | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    try:
        [position] = client.topic(_TOPIC).positions
    except UnknownTopic:
        raise PenstockError("the audit trail is empty or off: set auth.users, or auth.audit") from None
    offset = position.start if limit is None else max(position.start, position.committed - limit)
    while True:
        for message in client.fetch(_TOPIC, 0, offset):
            offset = (message.offset or 0) + 1
            yield json_text.loads(message.value)
        if not follow:
            return
        # It polls, because Python can miss a Ctrl-C that comes at the beginning of an endless wait.
        time.sleep(_ASK_S)


def _line(event: dict[str, Any]) -> str:
    where = f"{event.get('address') or 'in process'} ({event.get('door') or '-'})"
    parts = [
        iso_or_none(event["time_us"], "milliseconds") or "-",
        event["result"],
        event.get("user") or "-",
        event["what"],
        *([event["resource"]] if "resource" in event else []),
        f"from {where}",
        *([f": {event['why']}"] if "why" in event else []),
        *([f"({event['left_out']} left out)"] if "left_out" in event else []),
    ]
    return " ".join(parts)
