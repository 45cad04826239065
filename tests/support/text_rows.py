"""What can be sent to the text codec, and the events that each makes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

from hypothesis import strategies as st

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
    PAYLOAD_BYTES_MAX,
    TextParser,
)

CONNECT: Final = b'CONNECT {"verbose":false,"headers":true}\r\n'


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


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


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
CUTS: Final = st.lists(st.integers(0, 1 << 16), max_size=8)
