"""`penstock subscribe`: print messages as they arrive."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli.options import (
    PLACE,
    ConnectionOptions,
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
# Python can miss a signal that arrives just as a wait begins, so no wait is longer than this.
_POLL_S: Final = 0.5


@app.command()
@options
def subscribe(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Subjects to receive: * matches one token, > the rest.")
    ] = None,
    *,
    topic: Annotated[
        str | None,
        typer.Option(autocompletion=complete_topic, help="Receive all subjects of this topic, instead of PATTERN."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(autocompletion=complete_group, help="Join this group and share its messages.")
    ] = None,
    mode: Annotated[
        Literal["shared", "partitioned"] | None,
        typer.Option(help="Distribute single messages or whole partitions in the group. \\[default: shared]"),
    ] = None,
    start: Annotated[
        Any,
        typer.Option(
            parser=read_place, metavar=PLACE, help="Where to start; an existing group continues at its position."
        ),
    ] = "latest",
    count: Annotated[int | None, typer.Option(min=1, help="Exit after this many messages.")] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Do not acknowledge: the group redelivers the messages.")
    ] = False,
    json: JsonLines = False,
    at: ConnectionOptions,
) -> None:
    """Print messages as they arrive: subject, partition:offset and value; all fields with --json.

    Messages of a group are acknowledged after they are printed. Ctrl-C exits with code 0.
    """
    if group is None and (mode or no_ack):
        raise typer.BadParameter("it needs --group", param_hint="'--mode'" if mode else "'--no-ack'")
    check_selection(pattern, topic)
    acks = group is not None and not no_ack
    # In a group, request no more messages than are printed: other members can have the rest.
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
    """Print messages until the count is reached, or Ctrl-C."""
    from penstock.cli import messages as printed

    form = printed.json_line if as_json else printed.line
    left = count
    interruption = _Interruption()
    with suppress(KeyboardInterrupt):
        while left is None or left > 0:
            with interruption.allowed():
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
            return subscription.get_many(count_max, _POLL_S)
        except TimedOut:
            pass


class _Interruption:
    """Let Ctrl-C end the wait for messages, but not interrupt between printing and acknowledging them; a second Ctrl-C
    does, because printing may block."""

    def __init__(self) -> None:
        self._is_waiting = False
        self._is_pending = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self._is_waiting or self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._is_waiting = True
        if self._is_pending:
            raise KeyboardInterrupt
        yield
        self._is_waiting = False
