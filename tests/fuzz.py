"""Any bytes for the parser of the text door, from a seed: only protocol errors may come out, however they are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from penstock.run import Run
from penstock.wire.events import Event, Refused
from penstock.wire.text import Parser

_PIECES: Final = [
    b"PUB a 1\r\nx\r\n", b"PUB a.b 3\r\nabc\r\n", b"PUB a r 0\r\n\r\n", b"HPUB a 8 9\r\nA: b\r\n\r\nx\r\n",
    b"HPUB a 22 22\r\nNATS/1.0\r\nB: cccccc\r\n\r\n", b"SUB a.> 1\r\n", b"SUB a q 2\r\n", b"UNSUB 1 5\r\n",
    b'CONNECT {"verbose":false}\r\n', b"ACK 12\r\n", b"PULL a 3\r\n", b"REPLAY FIRST 3\r\n", b"PING\r\n", b"PONG\r\n",
    b"FLOWCTL 1 PUSH 3 4 5\r\n", b"STATS\r\n", b"INFO\r\n", b"\r\n", b"\n", b"\r", b" ", b"PUB", b"1048577", b"-1",
    b"99999999999999999999", b"\x00", b"\xff",
]  # fmt: skip


def fuzz(seed: int, rounds: int, progress: Callable[[int], None] = lambda _: None) -> int:
    """How many bytes were parsed. Raises AssertionError with the seed of the round that went wrong."""
    total = 0
    for number in range(rounds):
        source = random.Random(f"{seed}/{number}")
        data = bytearray(b"".join(source.choices(_PIECES, k=source.randint(1, 30))))
        for _ in range(source.randint(0, 4)):
            place = source.randrange(len(data) + 1)
            match source.randrange(3):
                case 0:
                    data[place:place] = source.randbytes(source.randint(1, 4))
                case 1:
                    del data[place : place + source.randint(1, 8)]
                case 2 if place < len(data):
                    data[place] = source.randrange(256)
        try:
            whole = _parse([bytes(data)])
            assert _parse(_cut(bytes(data), source)) == whole, "cut otherwise, it is read otherwise"
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {number}: {bytes(data)!r}: {error}") from error
        total += len(data)
        progress(number + 1)
    return total


def _cut(data: bytes, source: random.Random) -> list[bytes]:
    places = sorted(source.randrange(len(data) + 1) for _ in range(source.randint(0, 12)))
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


def _parse(parts: list[bytes]) -> list[object]:
    """Messages one by one, so that it does not matter how they were gathered into runs."""
    parser = Parser()
    seen: list[object] = []
    for part in parts:
        events: list[Event] = parser.feed(part)
        for event in events:
            assert not (seen and isinstance(seen[-1], Refused) and seen[-1].closes), "something came behind the end"
            if isinstance(event, Run):
                for index in range(len(event)):
                    reply, headers = event.replies.get(index), event.headers.get(index)
                    seen.append((event.subjects[index], event.values[index], reply, headers))
            else:
                seen.append(event)
    return seen
