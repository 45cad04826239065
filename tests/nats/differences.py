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


_SAYS_WHY: Final = "Penstock gives the reason for closing a connection, and has one error for invalid lines"

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
        "headers are stored as lines, and encoded again for delivery",
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
    "headers from a client without": Difference(_SAYS_WHY, ("+ 1 a: -ERR 'message headers not supported'",)),
    "a pong follows the messages it covers": Difference(
        "messages that are stored together are delivered together: a PONG may follow messages published after it",
        ("- 1 a: PONG", "- 1 a: PONG", "+ 1 a: PONG (2 times)"),
    ),
    "verbose to oneself": Difference(
        "+OK confirms that a message is stored: those before it are delivered first",
        (
            "+ 1 a: +OK",
            "+ 1 a: MSG ~.x =0 @1",
            "+ 1 a: MSG ~.x =1 @1",
            "- 1 a: MSG ~.x =0 @1",
            "- 1 a: +OK",
            "- 1 a: MSG ~.x =1 @1",
        ),
    ),
    "no responders takes its turn": Difference(
        "a missing responder is reported immediately, without waiting for messages being stored",
        (
            r"+ 2 a: MSG _INBOX.# {NATS/1.0 503\r\nNats-Subject: ~.service\r\n\r\n} =",
            r"- 2 a: MSG _INBOX.# {NATS/1.0 503\r\nNats-Subject: ~.service\r\n\r\n} =",
        ),
    ),
    "no responders once a max is reached": Difference(
        "a subscription counts as a responder until its last message is delivered, which is when it is stored",
        (r"- 1 a: MSG _INBOX.# {NATS/1.0 503\r\nNats-Subject: ~.x\r\n\r\n} =",),
    ),
}

# The same of what clients see, by client and check.
CLIENT_DIFFERENCES: Final[dict[str, Difference]] = {
    # Seen on busy machines with either server, with nats-server more often.
    "nats-py drain_a_subscription": Difference(
        "the client writes PING ahead of its publishes: if a server answers before they arrive, it has drained",
        is_rare=True,
    ),
}
