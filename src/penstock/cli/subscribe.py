"""`penstock subscribe`: messages as they come."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli.options import (
    PLACE,
    Address,
    JsonLines,
    check_selection,
    complete_group,
    complete_topic,
    options,
    read_place,
)
from penstock.errors import TimedOut

if TYPE_CHECKING:
    from penstock.client.message import Message
    from penstock.client.sync import Subscription

app = typer.Typer(add_completion=False)

_BUFFER: Final = 100
# Python can overlook a signal that comes just when it begins to wait: it looks up so often.
_LOOK_UP_S: Final = 0.5


@app.command()
@options
def subscribe(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Subjects: * is one token, > the rest.")
    ] = None,
    *,
    topic: Annotated[
        str | None, typer.Option(autocompletion=complete_topic, help="All subjects of a topic, instead of PATTERN.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(autocompletion=complete_group, help="Share them with the other members of a group.")
    ] = None,
    mode: Annotated[
        Literal["shared", "partitioned"] | None,
        typer.Option(help="Of the group: each message to one member, or each partition.  [default: shared]"),
    ] = None,
    start: Annotated[
        Any, typer.Option(parser=read_place, metavar=PLACE, help="Where to begin; a group that exists goes on.")
    ] = "latest",
    count: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Acknowledge nothing to the group: what is shown comes again.")
    ] = False,
    json: JsonLines = False,
    at: Address,
) -> None:
    """Print messages as they come: subject, partition:offset and value. All of them with --json.

    Those of a group are acknowledged when they are printed. Ctrl-C ends it, with exit code 0.
    """
    if group is None and (mode or no_ack):
        raise typer.BadParameter("it is for a --group", param_hint="'--mode'" if mode else "'--no-ack'")
    check_selection(pattern, topic)
    acks = group is not None and not no_ack
    # Of a group nothing is asked for that is not printed: others may be waiting for it.
    buffer = 1 if group is not None and count is not None and count <= _BUFFER else _BUFFER
    with (
        at.client() as client,
        client.subscribe(
            pattern, topic=topic, group=group, mode=mode or "shared", start=start, buffer=buffer
        ) as subscription,
    ):
        _print(subscription, count, acks=acks, as_json=json)
        if acks:
            subscription.flush()


def _print(subscription: Subscription, count: int | None, *, acks: bool, as_json: bool) -> None:
    """Until so many are printed, or Ctrl-C."""
    from penstock.cli import messages as printed

    form = printed.json_line if as_json else printed.line
    left = count
    interruption = _Interruption()
    with suppress(KeyboardInterrupt):
        while left is None or left > 0:
            with interruption.welcome():
                messages = _next(subscription, _BUFFER if left is None else min(left, _BUFFER))
            sys.stdout.write("".join([f"{form(message)}\n" for message in messages]))
            sys.stdout.flush()
            if acks:
                for message in messages:
                    message.ack()
            if left is not None:
                left -= len(messages)


def _next(subscription: Subscription, count_max: int) -> list[Message]:
    while True:
        try:
            return subscription.get_many(count_max, _LOOK_UP_S)
        except TimedOut:
            pass


class _Interruption:
    """Ctrl-C ends the wait for messages, and never comes between their printing and their acknowledgement; unless it
    comes twice, for then printing does not end."""

    def __init__(self) -> None:
        self._is_welcome = False
        self._is_asked_for = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self._is_welcome or self._is_asked_for:
            raise KeyboardInterrupt
        self._is_asked_for = True

    @contextmanager
    def welcome(self) -> Iterator[None]:
        self._is_welcome = True
        if self._is_asked_for:
            raise KeyboardInterrupt
        yield
        self._is_welcome = False
