"""ACK of Flux clients, and the acknowledgements of NATS clients, which are messages to `$ACK.<sid>.<sequence>`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.broker.group import Group
from penstock.doors.replies import Reply
from penstock.errors import PenstockError
from penstock.model import headers
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.security.identity import authorize_group
from penstock.security.permissions import Action
from penstock.wire import text
from penstock.wire.events import Ack, Call

if TYPE_CHECKING:
    from penstock.doors.text.dialect import Text


def acknowledge(dialect: Text, event: Ack) -> None:
    """Reply when the acknowledgement is stored, also if the message was acknowledged before."""
    session = dialect.session
    topic_id, partition, offset = text.split_sequence(event.sequence)
    groups = [reader for _, reader in session.subscriptions.values() if isinstance(reader, Group)]
    if event.group is not None:
        known = session.broker.groups
        groups = [known[event.group]] if event.group in known else []
        pattern = groups[0].pattern if groups else None
        authorize_group(session.checked, Action.GROUP_JOIN, event.group, pattern)
    reply = session.replies.reserve()
    for group in groups:
        if group.ack((topic_id, partition), offset, _saved(dialect, reply)):
            return
    reason = "unknown group" if event.group is not None and not groups else "not delivered, or a dead letter"
    session.replies.fill(reply, dialect.error_line(reason))


def _saved(dialect: Text, reply: Reply) -> Outcome:
    def saved(error: PenstockError | None) -> None:
        line = dialect.ok_line() if error is None else dialect.error_line(_reason(error))
        dialect.session.replies.fill(reply, line)

    return Outcome(dialect.session.guard(saved))


def acknowledge_by_subject(dialect: Text, event: Call) -> None:
    """Take what NATS clients write to `$ACK.…`: nothing or +ACK, -NAK, +WPI, +TERM."""
    replies = dialect.session.replies
    sid, _, number = event.subject.removeprefix(text.ACK_SUBJECT).rpartition(b".")
    held = dialect.session.subscriptions.get(sid)
    if held is None or not number.isdigit() or len(number) > 24 or not isinstance(held[1], Group):
        return
    member, group = held[0], held[1]
    topic_id, partition, offset = text.split_sequence(int(number))
    place = (topic_id, partition)
    word, _, rest = event.value.partition(b" ")
    match word:
        case b"" | b"+ACK":
            reply = replies.reserve()
            if not group.ack(place, offset, _saved_by_subject(dialect, reply, event.reply)):
                # The message is redelivered. A client that waits for a reply gets none.
                replies.fill(reply, b"")
        case b"-NAK":
            delay_us, reason = _read_nak(rest)
            group.nack(place, offset, delay_us, member, reason=reason)
        case b"+WPI":
            group.extend(place, offset, member)
        case b"+TERM":
            group.reject(place, offset, member, reason=_read_reason(rest))


def _saved_by_subject(dialect: Text, reply: Reply, subject: bytes | None) -> Outcome:
    """Send a message to `subject` when the acknowledgement is stored, for clients that ask for that (`ack_sync`)."""

    def saved(error: PenstockError | None) -> None:
        if error is None and subject is not None:
            dialect.session.broker.intake.publish(Run([subject], [b""]))
        dialect.session.replies.fill(reply, b"" if error is None else text.error(_reason(error), is_nats=True))

    return Outcome(dialect.session.guard(saved))


def _reason(error: PenstockError) -> str:
    return f"STORAGE {error.code} {error}"


def _read_nak(options: bytes) -> tuple[int, str]:
    """Return the delay and the reason of a NAK. NATS clients write the delay in nanoseconds:
    -NAK {"delay": 1000000000}. Anything but a JSON object is a reason."""
    if not options:
        return 0, ""
    try:
        fields = json.loads(options)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return 0, _read_reason(options)
    try:
        delay_us = int(fields.get("delay", 0)) // 1000
    except (ValueError, TypeError, OverflowError):
        delay_us = 0
    return min(max(0, delay_us), headers.DELAY_US_MAX), ""


def _read_reason(data: bytes) -> str:
    """Return the reason in `+TERM reason`, as NATS clients write it."""
    return data[: 4 * headers.REASON_BYTES_MAX].decode(errors="replace")
