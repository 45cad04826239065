"""The text door: the same bytes give the same events however they are cut, and what goes out can be read back."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nats.protocol.parser import ERR_RE
from nats.protocol.parser import Parser as NatsParser

from penstock.model.run import Run
from penstock.wire.events import (
    Ack,
    Call,
    Connect,
    Event,
    FlowControl,
    Pull,
    Refused,
    Replay,
    ReplayStart,
    SimpleCommand,
    Stats,
    Subscribe,
    Unsubscribe,
)
from penstock.wire.text import (
    LINE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TextParser,
    acknowledgements,
    error,
    info,
    messages,
    no_responders,
    numbered_messages,
    sequence_base,
    split_sequence,
)
from tests.support.batches import peak_bytes

CONNECT: Final = b'CONNECT {"verbose":false,"headers":true}\r\n'
NEXT: Final = b"PUB next 4\r\nlast\r\n"


class Message(NamedTuple):
    subject: bytes
    value: bytes
    reply: bytes | None = None
    headers: bytes | None = None
    is_live: bool = False


Said = Message | Event
Row = tuple[bytes, list[Said]]
Table = dict[str, Row]


def said(events: Iterable[Event]) -> list[Said]:
    """The events with a message in place of each of a run's, so that it does not matter where one run ends."""
    found: list[Said] = []
    for event in events:
        if isinstance(event, Run):
            assert 0 < len(event.values) == len(event.subjects)
            assert not event.keys
            assert (event.replies.keys() | event.headers.keys()) <= set(range(len(event)))
            found += (
                Message(subject, value, event.replies.get(index), event.headers.get(index), event.is_live)
                for index, (subject, value) in enumerate(zip(event.subjects, event.values, strict=True))
            )
        else:
            found.append(event)
    return found


def parser_of(is_nats: bool) -> TextParser:
    parser = TextParser()
    if is_nats:
        parser.feed(CONNECT)
    return parser


def feed(parser: TextParser, *pieces: bytes) -> list[Said]:
    return said(event for piece in pieces for event in parser.feed(piece))


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


# ---- what can be said in both dialects

BOTH: Final[Table] = {
    # Publish.
    "PUB": (b"PUB orders.eu 5\r\nhello\r\n", [Message(b"orders.eu", b"hello")]),
    "PUB of nothing": (b"PUB orders 0\r\n\r\n", [Message(b"orders", b"")]),
    "PUB with a reply": (b"PUB orders inbox.1 2\r\nhi\r\n", [Message(b"orders", b"hi", b"inbox.1")]),
    "PUB with nothing for a reply": (b"PUB orders  2\r\nhi\r\n", [Message(b"orders", b"hi")]),
    "PUB with blanks and tabs": (b"  PUB \t orders   2  \r\nhi\r\n", [Message(b"orders", b"hi")]),
    "PUB in lower case": (b"pub Orders 2\r\nhi\r\n", [Message(b"Orders", b"hi")]),
    "PUB in any case": (b"pUb Orders 2\r\nhi\r\n", [Message(b"Orders", b"hi")]),
    "PUB with line feeds alone": (b"PUB orders 2\nhi\n", [Message(b"orders", b"hi")]),
    "PUB of nothing with line feeds alone": (b"PUB orders 0\n\n", [Message(b"orders", b"")]),
    "PUB with either end of line": (b"PUB a 1\nx\r\nPUB a 1\r\ny\n", [Message(b"a", b"x"), Message(b"a", b"y")]),
    "PUB with a length that begins with zeros": (b"PUB a 002\r\nhi\r\n", [Message(b"a", b"hi")]),
    "PUB of a line end": (b"PUB a 2\r\n\r\n\r\n", [Message(b"a", b"\r\n")]),
    "PUB of a line feed": (b"PUB a 1\r\n\n\r\n", [Message(b"a", b"\n")]),
    "PUB of a carriage return": (b"PUB a 1\r\n\r\r\n", [Message(b"a", b"\r")]),
    "PUB of a carriage return, with line feeds alone": (b"PUB a 1\n\r\n", [Message(b"a", b"\r")]),
    "PUB of a line end at each end": (b"PUB a 7\r\n\r\nabc\r\n\r\n", [Message(b"a", b"\r\nabc\r\n")]),
    "PUB of commands": (b"PUB a 18\r\nPING\r\nPUB b 1\r\nx\r\n\r\n", [Message(b"a", b"PING\r\nPUB b 1\r\nx\r\n")]),
    "PUB of a PUB of itself": (b"PUB a 9\r\nPUB a 9\r\n\r\n", [Message(b"a", b"PUB a 9\r\n")]),
    "PUB of any bytes": (b"PUB a 256\r\n" + bytes(range(256)) + b"\r\n", [Message(b"a", bytes(range(256)))]),
    "PUB to a subject beyond ASCII": ("PUB grüße.天 1\r\nx\r\n".encode(), [Message("grüße.天".encode(), b"x")]),
    "PUB again and again": (b"PUB a 1\r\nx\r\n" * 3, [Message(b"a", b"x")] * 3),
    "PUB of several lengths": (
        b"PUB a 1\r\nx\r\nPUB a 2\r\nyy\r\nPUB a 1\r\nz\r\n",
        [Message(b"a", b"x"), Message(b"a", b"yy"), Message(b"a", b"z")],
    ),
    "PUB of nothing again and again": (b"PUB a 0\r\n\r\n" * 3, [Message(b"a", b"")] * 3),
    "PUB with and without a reply": (
        b"PUB a 1\r\nx\r\nPUB a r 1\r\ny\r\nPUB a 1\r\nz\r\nPUB b s 1\r\nw\r\n",
        [Message(b"a", b"x"), Message(b"a", b"y", b"r"), Message(b"a", b"z"), Message(b"b", b"w", b"s")],
    ),
    # Publish with headers.
    "HPUB": (
        b"HPUB orders 22 27\r\nNATS/1.0\r\nBar: Baz\r\n\r\nhello\r\n",
        [Message(b"orders", b"hello", headers=b"Bar: Baz\r\n")],
    ),
    "HPUB without a version": (
        b"HPUB orders 12 17\r\nBar: Baz\r\n\r\nhello\r\n",
        [Message(b"orders", b"hello", headers=b"Bar: Baz\r\n")],
    ),
    "HPUB with a reply": (
        b"HPUB orders inbox.1 12 14\r\nBar: Baz\r\n\r\nhi\r\n",
        [Message(b"orders", b"hi", b"inbox.1", b"Bar: Baz\r\n")],
    ),
    "HPUB with nothing for a reply": (
        b"HPUB orders  12 14\r\nBar: Baz\r\n\r\nhi\r\n",
        [Message(b"orders", b"hi", headers=b"Bar: Baz\r\n")],
    ),
    "HPUB of headers alone": (b"HPUB a 8 8\r\nA: b\r\n\r\n\r\n", [Message(b"a", b"", headers=b"A: b\r\n")]),
    "HPUB of many headers": (
        b"HPUB a 24 25\r\nNATS/1.0\r\nA: b\r\nC: d\r\n\r\nx\r\n",
        [Message(b"a", b"x", headers=b"A: b\r\nC: d\r\n")],
    ),
    "HPUB of a version and no headers": (
        b"HPUB a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
        [Message(b"a", b"hi", headers=b"")],
    ),
    "HPUB of no headers": (b"HPUB a 0 2\r\nhi\r\n", [Message(b"a", b"hi")]),
    "HPUB of nothing": (b"HPUB a 0 0\r\n\r\n", [Message(b"a", b"")]),
    "HPUB in lower case": (b"hpub a 8 9\r\nA: b\r\n\r\nx\r\n", [Message(b"a", b"x", headers=b"A: b\r\n")]),
    "HPUB with line feeds alone": (b"HPUB a 8 9\nA: b\r\n\r\nx\n", [Message(b"a", b"x", headers=b"A: b\r\n")]),
    "HPUB of a value that looks like headers": (
        b"HPUB a 8 16\r\nA: b\r\n\r\nC: d\r\n\r\n\r\n",
        [Message(b"a", b"C: d\r\n\r\n", headers=b"A: b\r\n")],
    ),
    "HPUB between PUBs": (
        b"PUB a 1\r\nx\r\nPUB a 1\r\ny\r\nHPUB a r 8 9\r\nA: b\r\n\r\nz\r\nPUB a 1\r\nw\r\n",
        [
            Message(b"a", b"x"),
            Message(b"a", b"y"),
            Message(b"a", b"z", b"r", b"A: b\r\n"),
            Message(b"a", b"w"),
        ],
    ),
    # Calls.
    "PUB to a subject that begins with $": (b"PUB $SRV.PING 0\r\n\r\n", [Message(b"$SRV.PING", b"")]),
    "PUB to the broker": (b"PUB $ACK.1 0\r\n\r\n", [Call(b"$ACK.1", b"", None)]),
    "PUB to the broker with a reply": (b"PUB $ACK.1 in.1 4\r\n+ACK\r\n", [Call(b"$ACK.1", b"+ACK", b"in.1")]),
    "PUB to the broker between others": (
        b"PUB a 1\r\nx\r\nPUB $ACK.b 1\r\ny\r\nPUB a 1\r\nz\r\n",
        [Message(b"a", b"x"), Call(b"$ACK.b", b"y", None), Message(b"a", b"z")],
    ),
    "PUB with $ elsewhere": (b"PUB a.$b 1\r\nx\r\n", [Message(b"a.$b", b"x")]),
    # Subscribe.
    "SUB": (b"SUB orders.eu 1\r\n", [Subscribe(b"orders.eu", b"1")]),
    "SUB with nothing for a queue": (b"SUB orders  1\r\n", [Subscribe(b"orders", b"1")]),
    "SUB with wildcards": (b"SUB *.eu.> 1\r\n", [Subscribe(b"*.eu.>", b"1")]),
    "SUB of everything": (b"SUB > 1\r\n", [Subscribe(b">", b"1")]),
    "SUB in lower case": (b"sub Orders A\r\n", [Subscribe(b"Orders", b"A")]),
    "SUB with a sid of text": (b"SUB orders mine\r\n", [Subscribe(b"orders", b"mine")]),
    "SUB of a durable": (b"SUB orders DURABLE:mail 7\r\n", [Subscribe(b"orders", b"7", b"mail", durable=True)]),
    "UNSUB": (b"UNSUB 1\r\n", [Unsubscribe(b"1")]),
    "UNSUB with nothing for a limit": (b"UNSUB 1 \r\n", [Unsubscribe(b"1")]),
    "UNSUB with a limit": (b"UNSUB 1 5\r\n", [Unsubscribe(b"1", 5)]),
    "UNSUB with a limit of nothing": (b"UNSUB 1 0\r\n", [Unsubscribe(b"1")]),
    "UNSUB with a word for a limit": (b"UNSUB 1 x\r\n", [Unsubscribe(b"1")]),
    "UNSUB with a limit below nothing": (b"UNSUB 1 -1\r\n", [Unsubscribe(b"1")]),
    "UNSUB with a limit beyond any number": (b"UNSUB 1 " + b"9" * 4000 + b"\r\n", [Unsubscribe(b"1")]),
    "+OK": (b"+OK\r\n", [SimpleCommand.PONG]),
    "UNSUB in lower case": (b"unsub A\r\n", [Unsubscribe(b"A")]),
    # What needs no words.
    "PING": (b"PING\r\n", [SimpleCommand.PING]),
    "PING in lower case": (b"ping\r\n", [SimpleCommand.PING]),
    "PING with a line feed alone": (b"PING\n", [SimpleCommand.PING]),
    "PING with blanks": (b" PING  \r\n", [SimpleCommand.PING]),
    "PONG": (b"PONG\r\n", [SimpleCommand.PONG]),
    "INFO": (b"INFO\r\n", [SimpleCommand.INFO]),
    "JOIN": (b"JOIN node-2 127.0.0.1:7000\r\n", [SimpleCommand.MEMBERSHIP]),
    "LEAVE": (b"LEAVE node-2\r\n", [SimpleCommand.MEMBERSHIP]),
    "STATS": (b"STATS\r\n", [Stats(None)]),
    "STATS of one": (b"STATS 7\r\n", [Stats(b"7")]),
    # Acknowledge and pull.
    "ACK": (b"ACK 42\r\n", [Ack(42)]),
    "ACK of the first": (b"ACK 0\r\n", [Ack(0)]),
    "ACK with a group": (b"ACK 42 orders:mail\r\n", [Ack(42, b"orders:mail")]),
    "ACK in lower case": (b"ack 42 Mail\r\n", [Ack(42, b"Mail")]),
    "ACK of a large sequence": (b"ACK 18446744073709551615\r\n", [Ack((1 << 64) - 1)]),
    "PULL": (b"PULL orders.* 10\r\n", [Pull(b"orders.*", 10)]),
    "PULL of one": (b"pull orders 1\r\n", [Pull(b"orders", 1)]),
    "PULL of the most": (b"PULL orders 1000000\r\n", [Pull(b"orders", 1_000_000)]),
    # Flow control.
    "FLOWCTL PULL": (b"FLOWCTL 1 PULL\r\n", [FlowControl(b"1", False)]),
    "FLOWCTL PUSH": (b"FLOWCTL 1 PUSH\r\n", [FlowControl(b"1", True)]),
    "FLOWCTL with a rate": (b"FLOWCTL 1 PUSH 100\r\n", [FlowControl(b"1", True, 100.0)]),
    "FLOWCTL with a part of a message each second": (b"FLOWCTL 1 PUSH 0.5\r\n", [FlowControl(b"1", True, 0.5)]),
    "FLOWCTL with no limit of rate": (b"FLOWCTL 1 PUSH 0\r\n", [FlowControl(b"1", True, 0.0)]),
    "FLOWCTL with a burst": (b"FLOWCTL 1 PUSH 100 10\r\n", [FlowControl(b"1", True, 100.0, 10)]),
    "FLOWCTL with a buffer": (b"FLOWCTL 1 PUSH 100 10 500\r\n", [FlowControl(b"1", True, 100.0, 10, 500)]),
    "FLOWCTL with everything": (
        b"FLOWCTL 1 PUSH 100 10 500 drop\r\n",
        [FlowControl(b"1", True, 100.0, 10, 500, "drop")],
    ),
    "FLOWCTL that blocks": (b"FLOWCTL 1 PUSH block\r\n", [FlowControl(b"1", True, overflow="block")]),
    "FLOWCTL that sheds": (b"flowctl 1 push 100 SHED\r\n", [FlowControl(b"1", True, 100.0, overflow="shed")]),
    "FLOWCTL PULL with everything": (
        b"FLOWCTL A pull 1 2 3 Drop\r\n",
        [FlowControl(b"A", False, 1.0, 2, 3, "drop")],
    ),
    # Replay.
    "REPLAY": (b"REPLAY 42\r\n", [Replay(ReplayStart.MESSAGE, 42, 1)]),
    "REPLAY SEQ": (b"REPLAY seq 42\r\n", [Replay(ReplayStart.SEQUENCE, 42, 100)]),
    "REPLAY SEQ some": (b"REPLAY SEQ 42 7\r\n", [Replay(ReplayStart.SEQUENCE, 42, 7)]),
    "REPLAY FIRST": (b"REPLAY FIRST\r\n", [Replay(ReplayStart.FIRST, 0, 100)]),
    "REPLAY FIRST some": (b"replay first 7\r\n", [Replay(ReplayStart.FIRST, 0, 7)]),
    "REPLAY LAST": (b"REPLAY last\r\n", [Replay(ReplayStart.LAST, 0, 1)]),
    "REPLAY TIME": (b"REPLAY time 1700000000\r\n", [Replay(ReplayStart.TIME, 1_700_000_000_000_000, 100)]),
    "REPLAY TIME some": (b"REPLAY TIME 1700000000.5 7\r\n", [Replay(ReplayStart.TIME, 1_700_000_000_500_000, 7)]),
    "REPLAY TIME from 1970 on": (b"REPLAY TIME 0\r\n", [Replay(ReplayStart.TIME, 0, 100)]),
    # Connect.
    "CONNECT": (
        b'CONNECT {"verbose": false, "name": "a client", "echo": true}\r\n',
        [Connect({"verbose": False, "name": "a client", "echo": True})],
    ),
    "CONNECT with nothing": (b"CONNECT\r\n", [Connect({})]),
    "CONNECT in lower case": ('connect {"user":"Grüße"}\r\n'.encode(), [Connect({"user": "Grüße"})]),
    # Nothing.
    "a blank line": (b"\r\n", []),
    "blank lines": (b"\r\n\n\r\n\n\nPING\r\n\r\n\r\n", [SimpleCommand.PING]),
    "lines of blanks": (b"  \r\n\t\n PING\r\n   \r\n", [SimpleCommand.PING]),
    "blank lines between messages": (b"PUB a 1\r\nx\r\n\r\n\n\r\n" * 3, [Message(b"a", b"x")] * 3),
    "blank lines before nothing": (b"PUB a 0\r\n\r\n\r\n\r\nPUB a 0\r\n\r\n", [Message(b"a", b"")] * 2),
    # One behind the other.
    "all sorts": (
        b"PING\r\nPUB a 1\r\nx\r\nPUB a 1\r\ny\r\nSUB a 1\r\nPUB a 1\r\nz\r\nPING\r\nPUB a 1\r\nw\r\n",
        [
            SimpleCommand.PING,
            Message(b"a", b"x"),
            Message(b"a", b"y"),
            Subscribe(b"a", b"1"),
            Message(b"a", b"z"),
            SimpleCommand.PING,
            Message(b"a", b"w"),
        ],
    ),
}

# ---- what is refused, and the connection goes on

_SUBJECT: Final = Refused("Invalid Subject")
_SEQUENCE: Final = Refused("invalid sequence")
_COUNT: Final = Refused("invalid count")
_MODE: Final = Refused("invalid mode (PUSH or PULL)")
_REPLAY: Final = Refused("invalid replay mode")

REFUSED: Final[Table] = {
    **{
        f"SUB {pattern.decode()}": (b"SUB " + pattern + b" 1\r\n", [_SUBJECT])
        for pattern in (b"a..b", b".a", b"a.", b".", b"a.>.b", b">.a")
    },
    "SUB of a durable without a name": (b"SUB a DURABLE: 1\r\n", [Refused("Invalid Group")]),
    "SUB of a durable that is no text": (b"SUB a DURABLE:\xff 1\r\n", [Refused("Invalid Group")]),
    "SUB of a durable to no text": (b"SUB a.\xff DURABLE:mail 1\r\n", [_SUBJECT]),
    "PULL of no subject": (b"PULL a..b 1\r\n", [_SUBJECT]),
    **{
        f"ACK {words.decode()}": (b"ACK " + words + b"\r\n", [_SEQUENCE])
        for words in (b"", b"x", b"-1", b"+1", b"1.5", b"0x1", b"1_0", b"1 2 3", b"9" * 20, b"9" * 21, b"9" * 4000)
    },
    **{
        f"PULL {words.decode()}": (b"PULL " + words + b"\r\n", [_COUNT])
        for words in (b"", b"a", b"a x", b"a 0", b"a -1", b"a 1000001", b"a 1 2", b"a " + b"9" * 4000)
    },
    **{
        f"FLOWCTL {words.decode()}": (b"FLOWCTL " + words + b"\r\n", [_MODE])
        for words in (b"", b"1", b"1 SHOVE", b"1 1", b"1 PUSH 1 2 3 4", b"1 PUSH 1 2 3 drop 4")
    },
    "FLOWCTL that spills": (b"FLOWCTL 1 PUSH 1 spill\r\n", [Refused("invalid mode (block, drop or shed)")]),
    **{
        f"FLOWCTL with rate {rate.decode()}": (b"FLOWCTL 1 PUSH " + rate + b" 1\r\n", [Refused("invalid rate")])
        for rate in (b"x", b"-1", b"nan", b"inf", b"1e10", b"1.2.3", b"9" * 4000)
    },
    **{
        f"FLOWCTL with burst {burst.decode()}": (b"FLOWCTL 1 PUSH 1 " + burst + b"\r\n", [Refused("invalid burst")])
        for burst in (b"0", b"-1", b"1.5", b"1000000001", b"9" * 4000)
    },
    **{
        f"FLOWCTL with buffer {size.decode()}": (b"FLOWCTL 1 PUSH 1 1 " + size + b"\r\n", [Refused("invalid buffer")])
        for size in (b"0", b"-1", b"1.5", b"1000000001", b"9" * 4000)
    },
    **{
        f"REPLAY {words.decode()}": (b"REPLAY " + words + b"\r\n", [_REPLAY])
        for words in (
            b"",
            b"x",
            b"-1",
            b"TIME",
            b"SEQ",
            b"SEQ x",
            b"SEQ 1 2 3",
            b"LAST 1",
            b"FIRST 1 2",
            b"TIME 1 2 3",
            b"9" * 4000,
        )
    },
    **{
        f"REPLAY {words.decode()}": (b"REPLAY " + words + b"\r\n", [_COUNT])
        for words in (b"FIRST x", b"FIRST 0", b"FIRST 1000001", b"SEQ 1 0", b"SEQ 1 x", b"TIME 1 0", b"TIME 1 x")
    },
    **{
        f"REPLAY TIME {when.decode()}": (b"REPLAY TIME " + when + b"\r\n", [Refused("invalid time")])
        for when in (b"x", b"-1", b"nan", b"inf", b"1e12", b"2026-01-01", b"9" * 4000)
    },
}

_NO_SUBJECTS: Final = (b"a.*", b"a.>", b"*", b">", b"a..b", b".a", b"a.", b"a\x7f", b"\xff", b"a" * 1025)
_UNPUBLISHED: Final = Refused("Invalid Publish Subject", publish=True)

# What can be delivered but not stored.
_UNSTORED: Final = (b"a\x01b", b"a.\xff", b"a" * 1025)

FLUX: Final[Table] = {
    **{f"SUB {pattern!r}": (b"SUB " + pattern + b" 1\r\n", [_SUBJECT]) for pattern in _UNSTORED},
    "SUB with a group that is no text": (b"SUB a \xff 1\r\n", [Refused("Invalid Group")]),
    "SUB with a group": (b"SUB orders 1 mail\r\n", [Subscribe(b"orders", b"1", b"mail", durable=True)]),
    "SUB with a group in front": (b"SUB orders mail 1\r\n", [Subscribe(b"orders", b"1", b"mail", durable=True)]),
    "SUB with a group and a sid of text": (
        b"SUB orders mine mail\r\n",
        [Subscribe(b"orders", b"mine", b"mail", durable=True)],
    ),
    "SUB with a group that is a number": (b"SUB orders 1 2\r\n", [Subscribe(b"orders", b"1", b"2", durable=True)]),
    "SUB of a durable with a sid of text": (
        b"SUB orders DURABLE:mail mine\r\n",
        [Subscribe(b"orders", b"mine", b"mail", durable=True)],
    ),
    "SUB of a durable whose sid is in front": (
        b"SUB orders 1 DURABLE:mail\r\n",
        [Subscribe(b"orders", b"1", b"mail", durable=True)],
    ),
    **{f"PUB to {subject!r}": (b"PUB " + subject + b" 2\r\nhi\r\n", [_UNPUBLISHED]) for subject in _NO_SUBJECTS},
    "PUB with a reply that is no subject": (b"PUB a b.* 2\r\nhi\r\n", [_UNPUBLISHED]),
    "HPUB to no subject": (b"HPUB a.* 8 10\r\nA: b\r\n\r\nhi\r\n", [_UNPUBLISHED]),
    "PUB to no subject between others": (
        b"PUB a 1\r\nx\r\nPUB * 4\r\nPING\r\nPUB a 1\r\ny\r\n",
        [Message(b"a", b"x"), _UNPUBLISHED, Message(b"a", b"y")],
    ),
    "the dialect changes with CONNECT": (
        b"SUB a 1 g\r\nCONNECT {}\r\nSUB a g 1\r\n",
        [Subscribe(b"a", b"1", b"g", durable=True), Connect({}), Subscribe(b"a", b"1", b"g")],
    ),
}

NATS: Final[Table] = {
    **{f"SUB {pattern!r}": (b"SUB " + pattern + b" 1\r\n", [Subscribe(pattern, b"1")]) for pattern in _UNSTORED},
    "SUB with a queue that is no text": (b"SUB a \xff 1\r\n", [Subscribe(b"a", b"1", b"\xff")]),
    **{
        f"PUB to {subject!r}": (b"PUB " + subject + b" 2\r\nhi\r\n", [Message(subject, b"hi", is_live=True)])
        for subject in _NO_SUBJECTS
    },
    "PUB with a reply that is no subject": (
        b"PUB a 1\r\nx\r\nPUB a b.* 2\r\nhi\r\nPUB a c 1\r\nx\r\n",
        [Message(b"a", b"x"), Message(b"a", b"hi", b"b.*", is_live=True), Message(b"a", b"x", b"c")],
    ),
    "HPUB to no subject": (
        b"HPUB a.* b 8 10\r\nA: b\r\n\r\nhi\r\n",
        [Message(b"a.*", b"hi", b"b", b"A: b\r\n", is_live=True)],
    ),
    "SUB with a queue": (b"SUB orders mail 1\r\n", [Subscribe(b"orders", b"1", b"mail")]),
    "SUB with a queue that is a number": (b"SUB orders 1 mail\r\n", [Subscribe(b"orders", b"mail", b"1")]),
    "CONNECT once more": (b"CONNECT {}\r\nSUB a 1 g\r\n", [Connect({}), Subscribe(b"a", b"g", b"1")]),
}

# ---- what ends the connection

_WRONG: Final = Refused("Parser Error", closes=True)
_UNKNOWN: Final = Refused("Unknown Protocol Operation", closes=True)
_TOO_LARGE: Final = Refused("Maximum Payload Violation", closes=True)
_TOO_LONG: Final = Refused("maximum control line exceeded", closes=True)

CLOSING: Final[Table] = {
    **{
        f"the verb {verb!r}": (verb + b"\r\n", [_UNKNOWN])
        for verb in (
            b"NONSENSE",
            b"P",
            b"PUBB a 1",
            b"MSG a 1 1",
            b"GET / HTTP/1.1",
            b"\x00",
            b"\xff\xfe",
            b"$",
        )
    },
    "an unknown verb behind others": (
        b"PING\r\nPUB a 1\r\nx\r\nNONSENSE\r\n",
        [SimpleCommand.PING, Message(b"a", b"x"), _UNKNOWN],
    ),
    **{
        words.decode(): (words + b"\r\n", [_WRONG])
        for words in (
            b"PUB",
            b"PUB a",
            b"PUB a b c 1",
            b"PUB a x",
            b"PUB a -1",
            b"PUB a +1",
            b"PUB a 1.5",
            b"PUB a 0x1",
            b"PUB a 1_0",
            b"PUB a " + b"9" * 21,
            b"PUB a " + b"9" * 4000,
            b"HPUB",
            b"HPUB a",
            b"HPUB a 1",
            b"HPUB a b c 1 1",
            b"HPUB a x 1",
            b"HPUB a 1 x",
            b"HPUB a -1 1",
            b"HPUB a 1 -1",
            b"HPUB a 3 2",
            b"HPUB a " + b"9" * 20 + b" 2",
            b"HPUB a " + b"9" * 4000 + b" 2",
            b"SUB",
            b"SUB a",
            b"SUB a b c d",
            b"UNSUB",
            b"UNSUB 1 2 3",
            b"CONNECT x",
            b"CONNECT {",
            b"CONNECT []",
            b"CONNECT null",
            b"CONNECT 1",
            b'CONNECT "x"',
            b'CONNECT {"a":1} {"b":2}',
            b"CONNECT " + b"[" * 4000,
            b'CONNECT {"a":' * 200,
            b"CONNECT {" + b"9" * 4000,
        )
    },
    "a CONNECT that is no text": (b'CONNECT {"a":"\xff"}\r\n', [_WRONG]),
    **{
        words.decode(): (words + b"\r\n", [_TOO_LARGE])
        for words in (
            b"PUB a %d" % (PAYLOAD_BYTES_MAX + 1),
            b"PUB a b %d" % (PAYLOAD_BYTES_MAX + 1),
            b"PUB a " + b"9" * 20,
            b"HPUB a 1 %d" % (PAYLOAD_BYTES_MAX + 1),
            b"HPUB a %d %d" % (PAYLOAD_BYTES_MAX + 1, PAYLOAD_BYTES_MAX + 1),
        )
    },
    "a value that is longer than it said": (b"PUB a 3\r\nabcd\r\n", [_WRONG]),
    "a value that is much longer than it said": (b"PUB a 3\r\nabcPING\r\nPING\r\n", [_WRONG]),
    "a value where there is to be none": (b"PUB a 0\r\nabc\r\n", [_WRONG]),
    "a value that is longer than it said, of a line that is known": (
        b"PUB a 1\r\nx\r\nPUB a 1\r\ny\r\nPUB a 1\r\nzz\r\n",
        [Message(b"a", b"x"), Message(b"a", b"y"), _WRONG],
    ),
    "a second value that is longer than it said": (b"PUB a 1\r\nx\r\nPUB a 1\r\nyy\r\n", [Message(b"a", b"x"), _WRONG]),
    "a value that is shorter than it said": (b"PUB a 5\r\nabc\r\nPING\r\n", [_WRONG]),
    "a value with headers that is longer than it said": (b"HPUB a 8 9\r\nA: b\r\n\r\nxx\r\n", [_WRONG]),
    "a value to the broker that is longer than it said": (b"PUB $a 1\r\nxx\r\n", [_WRONG]),
}


def rows(flux: Iterable[Table], nats: Iterable[Table]) -> pytest.MarkDecorator:
    """A row of the tables for each dialect."""
    return pytest.mark.parametrize(
        ("is_nats", "data", "expected"),
        [
            pytest.param(is_nats, *row, id=f"{'nats' if is_nats else 'flux'}: {name[:80]}")
            for is_nats, tables in ((False, flux), (True, nats))
            for table in tables
            for name, row in table.items()
        ],
    )


OPEN_ROWS: Final = rows([BOTH, REFUSED, FLUX], [BOTH, REFUSED, NATS])
CLOSING_ROWS: Final = rows([CLOSING], [CLOSING])
ALL_ROWS: Final = rows([BOTH, REFUSED, FLUX, CLOSING], [BOTH, REFUSED, NATS, CLOSING])


@ALL_ROWS
def test_a_whole_command_is_an_event(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    assert feed(parser_of(is_nats), data) == expected


@ALL_ROWS
def test_a_command_may_come_byte_by_byte(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    assert feed(parser_of(is_nats), *one_by_one(data)) == expected


@ALL_ROWS
def test_a_command_may_be_cut_anywhere(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    for at in range(0, len(data), 1 if len(data) < 300 else 97):
        assert feed(parser_of(is_nats), data[:at], data[at:]) == expected


@OPEN_ROWS
def test_a_command_may_have_a_part_of_the_next_behind_it(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    for at in range(len(NEXT)):
        parser = parser_of(is_nats)
        assert feed(parser, data + NEXT[:at]) == expected
        assert feed(parser, NEXT[at:]) == [Message(b"next", b"last")]


@OPEN_ROWS
def test_a_command_may_come_again(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    # Once it was seen, a line is known and goes another way; CONNECT changes what comes behind it.
    if not any(isinstance(event, Connect) for event in expected):
        assert feed(parser_of(is_nats), data * 3) == expected * 3


@CLOSING_ROWS
def test_nothing_is_said_behind_the_end(is_nats: bool, data: bytes, expected: list[Said]) -> None:
    parser = parser_of(is_nats)
    assert feed(parser, data + NEXT) == expected
    assert feed(parser, NEXT, b"", b"\r\n", b"PING\r\n") == []


# ---- many, large, and hostile


def test_thousands_of_commands_come_in_one_piece() -> None:
    data = b"".join(b"PUB s.%d %d\r\n%d\r\nPING\r\n" % (i % 7, len(str(i)), i) for i in range(5000))

    events = feed(TextParser(), data)

    assert events[::2] == [Message(b"s.%d" % (i % 7), b"%d" % i) for i in range(5000)]
    assert set(events[1::2]) == {SimpleCommand.PING}


def test_messages_in_a_row_are_one_run() -> None:
    parser = TextParser()
    parser.feed(b"PUB a 1\r\nx\r\n")

    events = parser.feed(b"PUB a 1\r\nx\r\n" * 5000)

    assert len(events) == 1
    assert said(events) == [Message(b"a", b"x")] * 5000


def test_equal_subjects_of_a_connection_are_one_object() -> None:
    events = TextParser().feed(b"PUB a.b 1\r\nx\r\nPUB a.b 2\r\nxx\r\nPUB a.b r 1\r\nx\r\nHPUB a.b 0 1\r\nx\r\n")

    assert len({id(subject) for event in events if isinstance(event, Run) for subject in event.subjects}) == 1


def test_more_subjects_than_are_remembered_are_all_told_apart() -> None:
    parser = TextParser()
    data = b"".join(b"PUB s.%d 1\r\nx\r\n" % i for i in range(10_000))

    for _ in range(2):
        assert feed(parser, data) == [Message(b"s.%d" % i, b"x") for i in range(10_000)]


def test_a_flood_of_subjects_is_not_all_remembered() -> None:
    parser = TextParser()

    def flood() -> None:
        for number in range(30_000):
            parser.feed(b"PUB s.%d 1\r\nx\r\n" % number)

    assert peak_bytes(flood) < 2 << 20


@pytest.mark.parametrize("piece", [1, 2, 4096, 65_536])
def test_the_largest_value_may_come_in_small_pieces(piece: int) -> None:
    value = bytes(range(256)) * (PAYLOAD_BYTES_MAX // 256)
    data = b"PUB a %d\r\n%b\r\n" % (len(value), value)
    parser = TextParser()

    events = feed(parser, *(data[at : at + piece] for at in range(0, len(data), piece)))

    assert events == [Message(b"a", value)]
    assert feed(parser, NEXT) == [Message(b"next", b"last")]


def test_a_large_value_that_comes_in_pieces_is_held_about_once() -> None:
    def receive() -> None:
        parser = TextParser()
        parser.feed(b"PUB a %d\r\n" % PAYLOAD_BYTES_MAX)
        for _ in range(PAYLOAD_BYTES_MAX // 4096 - 1):
            parser.feed(bytes(4096))

    assert peak_bytes(receive) < 1.2 * PAYLOAD_BYTES_MAX


def test_a_length_that_was_announced_takes_no_memory() -> None:
    assert peak_bytes(lambda: TextParser(1 << 30).feed(b"PUB a %d\r\nx" % (1 << 30))) < 1 << 16


@pytest.mark.parametrize("verb", [b"PUB a 64", b"HPUB a 8 64", b"PUB a r 064"])
def test_the_largest_value_that_was_agreed_is_taken(verb: bytes) -> None:
    events = feed(TextParser(payload_bytes_max=64), verb + b"\r\nA: b\r\n\r\n" + bytes(56) + b"\r\n")

    assert len(events) == 1
    assert isinstance(events[0], Message)


@pytest.mark.parametrize("verb", [b"PUB a 65", b"HPUB a 8 65", b"PUB a r 65"])
def test_a_larger_value_than_was_agreed_is_refused_before_it_comes(verb: bytes) -> None:
    assert feed(TextParser(payload_bytes_max=64), verb + b"\r\n") == [_TOO_LARGE]


LONGEST: Final = b"PING" + b" " * (LINE_BYTES_MAX - 5) + b"\r"


def test_the_longest_line_is_taken() -> None:
    assert feed(TextParser(), LONGEST + b"\n") == [SimpleCommand.PING]
    assert feed(TextParser(), *one_by_one(LONGEST + b"\n")) == [SimpleCommand.PING]


@pytest.mark.parametrize("data", [b" " + LONGEST + b"\n", b" " + LONGEST, b"\xff" * 100_000, b"PUB a" + b" " * 5000])
def test_a_longer_line_is_refused_before_it_ends(data: bytes) -> None:
    assert feed(TextParser(), data) == [_TOO_LONG]
    assert feed(TextParser(), *one_by_one(data)) == [_TOO_LONG]


def test_a_line_that_is_too_long_does_not_hide_what_came_before_it() -> None:
    assert feed(TextParser(), NEXT * 2 + b"x" * 5000) == [Message(b"next", b"last")] * 2 + [_TOO_LONG]


def test_the_strings_of_connect_keep_their_blanks() -> None:
    assert feed(TextParser(), b'CONNECT {"pass":"a  b"}\r\n') == [Connect({"pass": "a  b"})]


def test_a_call_with_headers_has_its_value_without_them() -> None:
    assert feed(TextParser(), b"HPUB $ACK.1 8 12\r\nA: b\r\n\r\n+ACK\r\n") == [Call(b"$ACK.1", b"+ACK", None)]


@pytest.mark.parametrize("block", [b"A: b", b"A: b\r\n", b"A: b\r\n\r\n", b"NATS/1.0\r\nA: b"])
def test_header_lines_have_an_end_so_that_others_can_be_put_behind_them(block: bytes) -> None:
    events = feed(TextParser(), b"HPUB a %d %d\r\n%bx\r\n" % (len(block), len(block) + 1, block))

    assert events == [Message(b"a", b"x", headers=b"A: b\r\n")]


# ---- any bytes, in any pieces

_FRAGMENTS: Final = [
    *(data for table in (BOTH, REFUSED, FLUX, NATS, CLOSING) for data, _ in table.values() if len(data) < 200),
    *(b"PUB a 1\r\n", b"PUB a 5\r\n", b"PUB b 0\r\n", b"HPUB a 4 9\r\n", b"PUB a 1\r\nx\r\n", b"PUB a 1\n", CONNECT),
    *(b"\r\n", b"\n", b"\r", b" ", b"x", b"1", b"PUB ", b"SUB ", b"\x00", b"\xff"),
]
STREAMS: Final = st.lists(st.sampled_from(_FRAGMENTS) | st.binary(max_size=12), max_size=12).map(b"".join)
CUTS: Final = st.lists(st.integers(0, 1 << 16), max_size=8)


@given(STREAMS | st.binary(max_size=200), CUTS)
@example(b"PUB a 1\r\nx\rPING\r\n", [10])
@example(b"PUB a 1\r\nx\r\nPUB a 1\r\nx\n\rPUB a 1\r\nx\r\r\n", [21, 22, 23])
@settings(max_examples=1000, deadline=None)
def test_any_bytes_give_the_same_events_however_they_are_cut(data: bytes, places: list[int]) -> None:
    whole = feed(TextParser(), data)

    assert feed(TextParser(), *cut(data, places)) == whole
    assert feed(TextParser(), *one_by_one(data)) == whole


@given(STREAMS | st.binary(max_size=200), CUTS)
@settings(max_examples=500, deadline=None)
def test_whatever_ends_the_connection_is_the_last_event(data: bytes, places: list[int]) -> None:
    parser = TextParser(payload_bytes_max=100)

    events = feed(parser, *cut(data, places))

    closing = [event for event in events if isinstance(event, Refused) and event.closes]
    assert closing in ([], events[-1:])
    if closing:
        assert feed(parser, NEXT) == []


@given(st.binary(min_size=1, max_size=64).filter(lambda junk: not junk.isspace()))
@settings(max_examples=300, deadline=None)
def test_binary_junk_ends_the_connection_and_nothing_else(junk: bytes) -> None:
    events = feed(TextParser(), b"\x00" + junk.replace(b"\n", b"") + b"\r\n")

    assert events == [_UNKNOWN]


# ---- what goes out

SUBJECTS: Final = st.sampled_from([b"a", b"orders.eu.created", "grüße".encode(), b"%b.%d", b"MSG"])
HEADERS: Final = st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n", b"X: %b %d\r\n"])
VALUES: Final = st.binary(max_size=6) | st.sampled_from([b"\r\n", b"%b %d", b"MSG a 1 1\r\nx\r\n", bytes(300)])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    kept = draw(
        st.lists(st.tuples(SUBJECTS, VALUES, st.none() | SUBJECTS, st.none() | HEADERS), min_size=1, max_size=8)
    )
    # As often as not one subject, one length, no replies, no headers: each has a way of its own.
    same_subject, same_value, plain, headless = (draw(st.booleans()) for _ in range(4))
    run = Run(
        [kept[0][0] if same_subject else row[0] for row in kept],
        [kept[0][1] if same_value else row[1] for row in kept],
    )
    run.replies = {} if plain else {index: row[2] for index, row in enumerate(kept) if row[2] is not None}
    run.headers = {} if headless else {index: row[3] for index, row in enumerate(kept) if row[3] is not None}
    return run


class Sent(NamedTuple):
    subject: bytes
    sid: bytes
    words: list[bytes]
    block: bytes | None
    value: bytes


def read_messages(data: bytes, numbers: int) -> list[Sent]:
    """A second, stupid reader of MSG and HMSG; `numbers` stand behind the lengths."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        verb, subject, sid, *words = line.split(b" ")
        behind = len(words) - numbers
        header_bytes = 0
        if verb == b"HMSG":
            header_bytes = int(words.pop(behind - 2))
            behind -= 1
        else:
            assert verb == b"MSG"
        total = int(words.pop(behind - 1))
        block = data[:header_bytes] if verb == b"HMSG" else None
        found.append(Sent(subject, sid, words, block, data[header_bytes:total]))
        assert data[total : total + 2] == b"\r\n"
        data = data[total + 2 :]
    return found


def nats_block(lines: bytes | None) -> bytes | None:
    return None if lines is None else b"NATS/1.0\r\n" + lines + b"\r\n"


def rows_of(run: Run) -> Iterator[tuple[bytes, bytes, bytes | None, bytes | None]]:
    for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
        yield subject, value, run.replies.get(index), run.headers.get(index)


@given(runs())
@settings(deadline=None)
def test_messages_for_nats_clients_can_be_read_back(run: Run) -> None:
    assert read_messages(messages(run, b"7"), 0) == [
        Sent(subject, b"7", [] if reply is None else [reply], nats_block(lines), value)
        for subject, value, reply, lines in rows_of(run)
    ]


@given(runs())
@settings(deadline=None)
def test_a_client_that_knows_no_headers_gets_none(run: Run) -> None:
    assert read_messages(messages(run, b"7", has_headers=False), 0) == [
        Sent(subject, b"7", [] if reply is None else [reply], None, value) for subject, value, reply, _ in rows_of(run)
    ]


@given(runs(), st.integers(0, 1 << 63))
@settings(deadline=None)
def test_messages_with_their_sequence_can_be_read_back(run: Run, first: int) -> None:
    sequences = range(first, first + 3 * len(run), 3)

    assert read_messages(numbered_messages(run, b"mine", sequences), 1) == [
        Sent(subject, b"mine", [b"%d" % sequence], None if lines is None else lines + b"\r\n", value)
        for (subject, value, _, lines), sequence in zip(rows_of(run), sequences, strict=True)
    ]


def test_what_the_lines_have_no_place_for_goes_into_headers() -> None:
    run = Run([b"a", b"a"], [b"x", b"y"])
    run.keys = {1: b"k"}
    assert messages(run, b"7") == b"MSG a 7 1\r\nx\r\nHMSG a 7 29 30\r\nNATS/1.0\r\nPenstock-Key: k\r\n\r\ny\r\n"
    assert messages(run, b"7", has_headers=False) == b"MSG a 7 1\r\nx\r\nMSG a 7 1\r\ny\r\n"
    run.timestamps = [1_500_000_000_000_001, 2]
    first, second = read_messages(numbered_messages(run, b"7", [8, 9]), 1)
    assert first.block == b"Penstock-Timestamp: 1500000000.000001\r\n\r\n"
    assert second.block == b"Penstock-Key: k\r\nPenstock-Timestamp: 0.000002\r\n\r\n"


class Recorder:
    """What nats-py's own parser tells its client."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    async def _process_msg(self, *what: object) -> None:
        self.told.append(what)

    async def _process_err(self, what: str) -> None:
        self.told.append(("-ERR", what))

    async def _process_info(self, what: object) -> None:
        self.told.append(("INFO", what))


def told_nats_py(*pieces: bytes) -> list[tuple[object, ...]]:
    client = Recorder()
    parser: Any = NatsParser(client)
    for piece in pieces:
        with pytest.raises(StopIteration):
            parser.parse(piece).send(None)
    assert not parser.buf
    return client.told


@given(runs(), CUTS)
@settings(deadline=None)
def test_nats_py_reads_messages_as_they_were(run: Run, places: list[int]) -> None:
    assert told_nats_py(*filter(None, cut(messages(run, b"7"), places))) == [
        (7, subject, reply or b"", value, nats_block(lines)) for subject, value, reply, lines in rows_of(run)
    ]


def test_no_responders_is_as_nats_server_has_it() -> None:
    assert no_responders(b"_IN.1", b"9", b"nobody") == (
        b"HMSG _IN.1 9 38 38\r\nNATS/1.0 503\r\nNats-Subject: nobody\r\n\r\n\r\n"
    )


@pytest.mark.parametrize(("is_nats", "data"), [(True, b"-ERR 'no such topic'\r\n"), (False, b"-ERR no such topic\r\n")])
def test_an_error_is_quoted_for_nats_clients_only(is_nats: bool, data: bytes) -> None:
    assert error("no such topic", is_nats=is_nats) == data


@given(st.text(), st.booleans())
@example("a\r\nPING\nb\rc", True)
def test_an_error_is_one_line_whatever_its_reason(reason: str, is_nats: bool) -> None:
    data = error(reason, is_nats=is_nats)

    assert data.startswith(b"-ERR ")
    assert data.endswith(b"\r\n")
    assert not {*b"\r\n"} & {*data[:-2]}


@pytest.mark.parametrize(
    "reason",
    sorted(
        {
            event.reason
            for table in (REFUSED, CLOSING)
            for _, row in table.values()
            for event in row
            if isinstance(event, Refused)
        }
        | {"it's 'quoted'", "a\r\nb"}
    ),
)
def test_nats_py_reads_every_reason(reason: str) -> None:
    data = error(reason, is_nats=True)

    assert ERR_RE.fullmatch(data)
    assert told_nats_py(data) == [("-ERR", data[5:-2].decode().lower())]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
@example({"server_name": "a\r\nb\u2028"})
def test_info_is_one_line_of_json(fields: dict[str, Any]) -> None:
    data = info(fields)

    assert not {*b"\r\n"} & {*data[:-2]}
    assert json.loads(data.removeprefix(b"INFO ")) == fields
    assert told_nats_py(data) == [("INFO", fields)]


@pytest.mark.parametrize(
    ("count", "duplicates", "data"),
    [
        (0, [], b""),
        (1, [], b"+OK\r\n"),
        (3, [], b"+OK\r\n+OK\r\n+OK\r\n"),
        (1, [0], b"+OK DUP\r\n"),
        (3, [0, 2], b"+OK DUP\r\n+OK\r\n+OK DUP\r\n"),
    ],
)
def test_every_message_is_acknowledged(count: int, duplicates: list[int], data: bytes) -> None:
    assert acknowledgements(count, duplicates) == data


def test_each_message_that_was_refused_is_told_why_in_its_place() -> None:
    assert acknowledgements(4, [2], {0: "FULL a\nb", 3: "no"}) == b"-ERR FULL a b\r\n+OK\r\n+OK DUP\r\n-ERR no\r\n"


# ---- sequences


@given(st.integers(0, (1 << 31) - 1), st.integers(0, 255), st.integers(0, (1 << 40) - 1))
@example((1 << 16) - 1, 255, (1 << 40) - 1)
def test_a_sequence_says_topic_partition_and_offset(topic_id: int, partition: int, offset: int) -> None:
    assert split_sequence(sequence_base(topic_id, partition) + offset) == (topic_id, partition, offset)


@given(st.integers(0, (1 << 64) - 1))
def test_every_sequence_is_that_of_one_place(sequence: int) -> None:
    topic_id, partition, offset = split_sequence(sequence)

    assert sequence_base(topic_id, partition) + offset == sequence


def test_a_sequence_of_the_first_topic_is_small_enough_to_type() -> None:
    assert sequence_base(0, 0) == 0
    assert split_sequence(42) == (0, 0, 42)


# ---- nats-server, asked the same

SERVER: Final = Path(sys.executable).with_name("nats-server")
Ask = Callable[[bytes], tuple[list[str], bool]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """What nats-server says of a command: its errors, and whether it closes."""
    if not SERVER.exists():
        pytest.skip("nats-server is not installed")
    command = [str(SERVER), "-a", "127.0.0.1", "-p", "-1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            port = 0
            for line in server.stderr:
                if found := re.search(rb"client connections on 127\.0\.0\.1:(\d+)", line):
                    port = int(found[1])
                if b"Server is ready" in line:
                    break

            def ask_server(data: bytes) -> tuple[list[str], bool]:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                    connection.sendall(CONNECT + data + b"PING\r\n")
                    answer = b""
                    while b"PONG" not in answer:
                        try:
                            received = connection.recv(65_536)
                        except ConnectionResetError:
                            received = b""
                        if not received:
                            return re.findall(r"-ERR '(.*)'", answer.decode()), True
                        answer += received
                    return re.findall(r"-ERR '(.*)'", answer.decode()), False

            yield ask_server
        finally:
            server.terminate()


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n",
        b"SUB a..b 1\r\n",
        b"SUB a.>.b 1\r\n",
        b"PUB a %d\r\n" % (PAYLOAD_BYTES_MAX + 1),
        b"SUB " + b"a" * 5000 + b" 1\r\n",
        b"PUB  a   1 \r\nx\r\n",
        b"PUB a 007\r\n1234567\r\n",
        b"PUB a 1\nx\r\n",
        b"HPUB a 12 13\r\nNATS/1.0\r\n\r\nx\r\n",
        b"UNSUB 1 \r\n",
        b"sub a q 1\r\n",
    ],
    ids=lambda data: data[:20].decode().strip(),
)
def test_nats_server_gives_the_same_error(ask: Ask, data: bytes) -> None:
    errors, closes = ask(data)

    refusals = [event for event in feed(parser_of(True), data) if isinstance(event, Refused)]
    assert ([event.reason for event in refusals], any(event.closes for event in refusals)) == (errors, closes)


@pytest.mark.parametrize(
    "data",
    [
        b"PUB\r\n",
        b"PUB a\r\n",
        b"PUB a b c 1\r\n",
        b"PUB a x\r\n",
        b"PUB a -1\r\n",
        b"PUB a " + b"9" * 21 + b"\r\n",
        b"PUB a 3\r\nabcd\r\n",
        b"HPUB a 10 5\r\n",
        b"HPUB a 5\r\n",
        b"SUB a\r\n",
        b"SUB a b c d\r\n",
        b"CONNECT nonsense\r\n",
    ],
    ids=lambda data: data[:20].decode().strip(),
)
def test_nats_server_closes_too(ask: Ask, data: bytes) -> None:
    assert ask(data)[1]
    assert feed(parser_of(True), data) == [_WRONG]


def test_a_parser_may_take_some_lines_at_a_time() -> None:
    data = b"".join(b"PUB a.%d 1\r\nx\r\nPING\r\nPUB a r 1\r\ny\r\n" % number for number in range(20))
    parser = TextParser(lines_max=3)
    found = []
    for at in range(0, len(data), 100):
        events = parser.feed(data[at : at + 100])
        found += events
        while parser.has_more:
            assert len(events) <= 3
            events = parser.feed(b"")
            found += events
    pings = [event for event in found if event is SimpleCommand.PING]
    values = [value for event in found if isinstance(event, Run) for value in event.values]
    assert (len(pings), values) == (20, [b"x", b"y"] * 20)


def test_messages_whose_lines_are_known_do_not_count() -> None:
    parser = TextParser(lines_max=2)
    parser.feed(b"PUB a 1\r\nx\r\n")
    [run] = parser.feed(b"PUB a 1\r\nx\r\n" * 100)
    assert isinstance(run, Run)
    assert len(run) == 100
    assert not parser.has_more


@pytest.mark.parametrize(
    "line", [b"PUB a 1000000\r\n", b"PING\r\n", b"SUB a 1\r\n", b"\r\n HPUB a 1 9\r\n", b"NONE\r\n"]
)
def test_a_line_in_front_of_connect_is_refused_at_once_if_connect_is_needed(line: bytes) -> None:
    assert TextParser(needs_connect=True).feed(line) == [Refused("Authorization Violation", closes=True)]
    parser = TextParser(needs_connect=True)
    events = parser.feed(b"CONNECT {}\r\nPUB a 1\r\nx\r\n")
    assert [type(event) for event in events] == [Connect, Run]
