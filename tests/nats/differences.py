"""Scenarios in which Penstock differs from nats-server, by name, each with its reason.

A difference that is intended also lists the lines that differ: `-` of nats-server, `+` of Penstock. One that no
longer occurs fails its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Difference:
    reason: str
    # None: any; what is not there yet is not described.
    lines: tuple[str, ...] | None = None
    # Whether it occurs in some runs only: then its absence proves nothing.
    is_rare: bool = False


_NOT_YET: Final = Difference("not yet")
_SAYS_WHY: Final = "Penstock says why it closes a connection, and has one error for lines that cannot be parsed"

DIFFERENCES: Final = {
    "a message ID twice": Difference(
        "messages are deduplicated by ID",
        (r"- 4 a: MSG ~.x {NATS/1.0\r\nNats-Msg-Id: #\r\n\r\n} =1 @1",),
    ),
    "a delayed message": Difference(
        "a message with Delay is stored now and published later",
        (r"- 3 a: MSG ~.x {NATS/1.0\r\nDelay: 1h\r\n\r\n} =later @1",),
    ),
    "headers that are none": Difference(
        "headers are stored one by one, and written again when they are delivered",
        (r"- 3 a: MSG ~.x {abcdef} =hi @1", r"+ 3 a: MSG ~.x {NATS/1.0\r\nabcdef\r\n\r\n} =hi @1"),
    ),
    "header length beyond the total": Difference(_SAYS_WHY, ("+ 1 a: -ERR 'Parser Error'",)),
    "a payload longer than it says": Difference(
        _SAYS_WHY, ("- 1 a: -ERR 'Unknown Protocol Operation'", "+ 1 a: -ERR 'Parser Error'")
    ),
    "sizes that are none": Difference(
        _SAYS_WHY,
        (
            "+ 1 a: -ERR 'Parser Error'",
            "+ 3 b: -ERR 'Parser Error'",
            "+ 5 c: -ERR 'Parser Error'",
            "+ 7 d: -ERR 'Maximum Payload Violation'",
        ),
    ),
    "sub without a sid": Difference(
        _SAYS_WHY,
        (
            "+ 1 a: -ERR 'Parser Error'",
            "- 3 b: -ERR 'Unknown Protocol Operation'",
            "+ 3 b: -ERR 'Parser Error'",
            "- 5 c: -ERR 'Unknown Protocol Operation'",
            "+ 5 c: -ERR 'Parser Error'",
        ),
    ),
    **dict.fromkeys(
        (
            # A PONG comes before messages that it covers.
            "a pong follows the messages it covers",
            "no responders takes its turn",
            "verbose to oneself",
            # A subscription that ends loses what was published before.
            "unsubscribe and subscribe at once",
            # The messages of one connection arrive in another order.
            "everything",
            "two subscriptions to one subject",
            "order over topics",
            "order over topics on one subscription",
            "order between subscriptions",
            "a reply does not overtake events",
            "an event does not overtake a reply",
            # Requests.
            "no responders without headers",
            "no responders once a max is reached",
            # Lines of clients that nats-server takes otherwise.
            "headers from a client without",
            "max that is none",
            "pong and ok from a client",
        ),
        _NOT_YET,
    ),
}

# The same of what clients see, by client and check.
CLIENT_DIFFERENCES: Final[dict[str, Difference]] = {
    # The client's PING may overtake what it has gathered; storing takes longer than the rest of its drain.
    "nats-py drain_a_subscription": Difference("not yet", is_rare=True),
}
