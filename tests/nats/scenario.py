"""A scenario is a few lines of text: what each connection sends, in order.

    a SUB ~.x 1             connection a sends a command; it opens, with the default options, when it is first named
    b PUB ~.x ~.reply =hi   a payload follows `=`; `=x*1000` is x a thousand times
      HPUB ~.x {A: 1; B: 2} =hi
                            an indented line is part of the same write
    b 100x PUB ~.x =m%d     a hundred commands; %d is the number of each
    a RAW PUB ~.x 2\\r\\nhi    bytes, with escapes as in Python
    c OPEN {"echo": false}  open connection c with these options in addition to the defaults
    c SLOW                  open connection c with a small receive buffer
    a PAUSE                 read no more from a
    a RESUME                read again
    a KILL                  disconnect, and wait until the server knows
    a& PUB ~.x =1           send without waiting for the server; the next line is sent at once

Subjects must be unique to a run of a scenario, so that scenarios can share servers. `#` stands for a number that no
other run has, `~` for `t.#` and `~name` for `tname.#`: subjects of topics that many scenarios share. `^` stands for
`n#`: a topic that does not exist yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

DEFAULTS: Final = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}

_LINE: Final = re.compile(r"(\w+)(&?) +(.*)|[ \t]+(\S.*)")
_REPEAT: Final = re.compile(r"(\d+)x (.*)")
_PUBLISH: Final = re.compile(r"(H?PUB) (.*?)(?:\{(.*)\} ?)?=(.*)")
_LONG: Final = re.compile(r"(.)\*(\d+)")
_SUBSCRIBE: Final = re.compile(rb"SUB (\S+) (\S+) (\S+)\r\n")
_NAMES: Final = re.compile(r"~(\w*)|\^|#")


class Act(Enum):
    OPEN = auto()
    SLOW = auto()
    SEND = auto()
    PAUSE = auto()
    RESUME = auto()
    KILL = auto()


@dataclass(frozen=True, slots=True)
class Step:
    connection: str
    act: Act
    data: bytes = b""
    # How many PONGs the data asks for.
    pings: int = 0
    # Whether to wait until the server has processed it, and every connection has received what that caused.
    waits: bool = True

    def queues(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the sid and the queue name of each queue subscription in the data."""
        for _, queue, sid in _SUBSCRIBE.findall(self.data):
            yield sid, queue


def parse(text: str, number: int) -> list[Step]:
    """Return the steps of a scenario, with `number` for `#`. Every connection is opened before it is used."""
    steps: list[Step] = []
    opened: set[str] = set()
    for name, marks, commands in _writes(_substitute(text, number)):
        verb, _, words = commands[0].partition(" ")
        act = Act[verb] if verb in Act.__members__ else Act.SEND
        if name not in opened:
            opened.add(name)
            options: dict[str, Any] = DEFAULTS | (json.loads(words) if act is Act.OPEN else {})
            opening = Act.SLOW if act is Act.SLOW else Act.OPEN
            steps.append(Step(name, opening, b"CONNECT %b\r\nPING\r\n" % json.dumps(options).encode(), 1))
        if act is Act.SEND:
            data = b"".join(map(_encode, commands))
            steps.append(Step(name, act, data, sum(command.upper() == "PING" for command in commands), not marks))
        elif act not in (Act.OPEN, Act.SLOW):
            assert len(commands) == 1, f"{verb} stands alone: {commands}"
            steps.append(Step(name, act))
    return steps


def restore(text: str, number: int) -> str:
    """Write `~`, `^` and `#` again for what is unique to a run, and `$ACK` for the number of a message."""
    text = re.sub(r"\$ACK\.\d+\.\d+", "$ACK", text)
    text = re.sub(rf"\bt(\w*)\.{number}\b", r"~\1", text)
    text = re.sub(rf"\bn{number}\b", "^", text)
    return text.replace(str(number), "#")


def _substitute(text: str, number: int) -> str:
    def name(found: re.Match[str]) -> str:
        match found[0][0]:
            case "#":
                return str(number)
            case "^":
                return f"n{number}"
            case _:
                return f"t{found[1]}.{number}"

    return _NAMES.sub(name, text)


def _writes(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the commands of each write, with its connection and whether it is marked with `&`."""
    found: tuple[str, str, list[str]] | None = None
    for line in text.splitlines():
        if not line.strip():
            continue
        words = _LINE.fullmatch(line)
        assert words, f"not a line of a scenario: {line!r}"
        if words[4]:
            assert found, f"nothing to continue: {line!r}"
            found[2].append(words[4])
        else:
            if found:
                yield found
            found = words[1], words[2], [words[3]]
    if found:
        yield found


def _encode(command: str) -> bytes:
    if repeat := _REPEAT.fullmatch(command):
        return b"".join(_encode(repeat[2].replace("%d", str(number))) for number in range(int(repeat[1])))
    if command.startswith("RAW "):
        return command.removeprefix("RAW ").encode().decode("unicode_escape").encode("latin-1")
    if publish := _PUBLISH.fullmatch(command):
        verb, subjects, headers, payload = publish.groups()
        if long := _LONG.fullmatch(payload):
            payload = long[1] * int(long[2])
        if verb == "PUB":
            return f"PUB {subjects}{len(payload.encode())}\r\n{payload}\r\n".encode()
        lines = "".join(f"{line.strip()}\r\n" for line in (headers or "").split(";") if line.strip())
        block = f"NATS/1.0\r\n{lines}\r\n".encode()
        total = len(block) + len(payload.encode())
        return f"HPUB {subjects}{len(block)} {total}\r\n".encode() + block + payload.encode() + b"\r\n"
    return command.encode() + b"\r\n"
