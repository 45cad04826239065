"""Hostile clients of the text door, in both of its dialects."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Final

from penstock.wire.text import LINE_BYTES_MAX, PAYLOAD_BYTES_MAX
from tests.hostile.oracle import credentials
from tests.hostile.pieces import NUMBERS, SURROGATE, around, deep_json, dribble, in_pieces, name
from tests.hostile.siege import Attack, Door, Step, Target
from tests.support.server import hpub, pub

_OPTIONS: Final = {"verbose": False, "headers": True, "no_responders": True}
_CONNECT: Final = b"CONNECT %b\r\n" % json.dumps(_OPTIONS | credentials()).encode()
_MEGABYTE: Final = bytes(PAYLOAD_BYTES_MAX)


@cache
def _publish(subject: str, size: int) -> bytes:
    return pub(subject, bytes(size))


# Both dialects.


def silence(source: random.Random, _: Target) -> Iterator[Step]:
    yield source.random() * 2


def noise(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"P" + source.randbytes(4096)


def line_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    size = around(LINE_BYTES_MAX, source) - len("PUB  0")
    yield b"PUB %b 0\r\n\r\n" % (b"hostile." + b"x" * (size - 8))


def line_without_end(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(64):
        yield b"PUB hostile." + name(source, 16 << 10)


def line_ends(_: random.Random, __: Target) -> Iterator[Step]:
    for _number in range(16):
        yield b"\r\n" * (32 << 10)


def dribbled_bytes(_: random.Random, __: Target) -> Iterator[Step]:
    yield from dribble(b"PUB hostile.x 5\r\nhello\r\nPING\r\n" * 3)


def payload_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    yield from in_pieces(_publish("hostile.x", around(PAYLOAD_BYTES_MAX, source)), source, 512 << 10)


def half_a_payload(source: random.Random, _: Target) -> Iterator[Step]:
    """It announces what is allowed, sends most of it, and waits."""
    yield b"PUB hostile.x %d\r\n" % PAYLOAD_BYTES_MAX
    yield _MEGABYTE[: source.randint(1, PAYLOAD_BYTES_MAX - 1)]
    yield 2.0


def payload_longer_than_said(_: random.Random, __: Target) -> Iterator[Step]:
    yield b"PUB hostile.x 3\r\nhello\r\nPING\r\n"


def numbers_that_are_none(source: random.Random, _: Target) -> Iterator[Step]:
    number = source.choice(NUMBERS)
    line = source.choice(
        (b"PUB hostile.x %b", b"HPUB hostile.x %b 5", b"HPUB hostile.x 5 %b", b"UNSUB 1 %b", b"ACK %b")
    )
    yield line % number + b"\r\n"


def headers_that_lie(source: random.Random, _: Target) -> Iterator[Step]:
    block = source.choice((b"NATS/1.0\r\n", b"NATS/1.0\r\n\r\n\r\n", b":\r\n\r\n", b"A" * 40, b"\xff: \xff\r\n\r\n"))
    yield b"HPUB hostile.x %d %d\r\n%b\r\n" % (len(block), len(block), block)
    yield b"HPUB hostile.x 10 5\r\nhello\r\n"


def subjects_that_are_none(_: random.Random, __: Target) -> Iterator[Step]:
    for subject in (
        b".",
        b"..",
        b"a..b",
        b"*",
        b">",
        b"a.*",
        b"\xff\xfe",
        b"\x00",
        b"a." * 1000,
        b"$",
        b"$SYS.x",
        b"_",
    ):
        yield b"PUB %b 1\r\nx\r\nSUB %b 1\r\n" % (subject, subject)


def flood_of_subjects(source: random.Random, _: Target) -> Iterator[Step]:
    """Each with a line that is long enough to matter, and short enough to be remembered."""
    for _number in range(20):
        yield b"".join(b"PUB hostile.%b 1\r\nx\r\n" % name(source, 200) for _each in range(500))


def flood_of_topics(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"".join(b"PUB t%b.x 1\r\nx\r\n" % name(source) for _number in range(200))


def flood_of_subscriptions(source: random.Random, _: Target) -> Iterator[Step]:
    begin = source.randrange(1 << 30)
    for number in range(begin, begin + 20_000, 1000):
        yield b"".join(b"SUB hostile.%d.> %d\r\n" % (each, each) for each in range(number, number + 1000))
    yield b"PUB hostile.%d.x 1\r\nx\r\n" % begin


def flood_of_long_subscriptions(source: random.Random, _: Target) -> Iterator[Step]:
    """Names at the limit of a line, in deep trees."""
    for number in range(300):
        yield b"SUB hostile.%b %d\r\n" % (name(source, 2), number) + b"SUB hostile.%b.> a%d\r\n" % (
            b".".join(name(source, 1) for _each in range(1900)),
            number,
        )


def flood_of_questions(_: random.Random, __: Target) -> Iterator[Step]:
    """It never reads the answers."""
    for _number in range(100):
        yield b"PING\r\nINFO\r\nSTATS\r\n" * 1000


def flood_of_messages(source: random.Random, _: Target) -> Iterator[Step]:
    yield from in_pieces(_publish("hostile.x", 1) * 100_000, source, 1 << 20)


def flood_of_ids(source: random.Random, _: Target) -> Iterator[Step]:
    """Message IDs that are most of a payload."""
    for _number in range(8):
        yield hpub("hostile.x", b"", msg_id=name(source, 900_000).decode())


def flood_of_keys(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(8):
        yield hpub("hostile", b"", penstock_key=name(source, 900_000).decode())


def flood_of_headers(source: random.Random, _: Target) -> Iterator[Step]:
    lines = {f"name_{number}": "x" for number in range(40_000)}
    yield hpub("hostile.x", name(source), **lines)


def headers_at_their_limit(source: random.Random, _: Target) -> Iterator[Step]:
    yield hpub("hostile.x", b"", padding="x" * (around(PAYLOAD_BYTES_MAX, source) - len("Padding: \r\n\r\n")))


def delays(source: random.Random, _: Target) -> Iterator[Step]:
    for text in ("1ms", "0", "1e9", "-1s", "366d", "367d", "999999999999d", "soon"):
        yield hpub("hostile.x", b"late", delay=text)
    for moment in ("0", "1e30", "nan", "9999-12-31T23:59:59", "-1"):
        yield hpub("hostile.x", b"late", deliver_at=moment)
    for _number in range(4):
        yield hpub(f"hostile.{source.randrange(4)}", bytes(900_000), delay="200ms")


def slow_reader(_: random.Random, __: Target) -> Iterator[Step]:
    """It subscribes to all that the others publish, publishes itself, and reads nothing."""
    yield b"SUB hostile.> 1\r\n"
    for _number in range(16):
        yield _publish("hostile.x", 500_000)


def slow_member(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"SUB hostile.> DURABLE:slow-%d 1\r\n" % source.randrange(3)
    for _number in range(8):
        yield _publish("hostile.x", 250_000)


def flood_of_groups(source: random.Random, _: Target) -> Iterator[Step]:
    for number in range(40):
        yield b"SUB hostile.> DURABLE:%b %d\r\n" % (name(source, 200), number)


# NATS.


def names_that_are_no_text(source: random.Random, _: Target) -> Iterator[Step]:
    known = json.dumps(credentials())[1:-1].encode() if source.random() < 0.5 else b'"user":"%b"' % SURROGATE
    yield b'CONNECT {"name":"%b","lang":"\\u0000",%b}\r\nPING\r\n' % (SURROGATE, known)
    yield 1.0


def names_without_end(source: random.Random, _: Target) -> Iterator[Step]:
    yield b'CONNECT {"name":"%b"}\r\nPING\r\n' % name(
        source, around(LINE_BYTES_MAX, source) - len('CONNECT {"name":""}')
    )


def json_that_recurses(_: random.Random, __: Target) -> Iterator[Step]:
    yield b"CONNECT " + deep_json(2000)[: LINE_BYTES_MAX - 10] + b"\r\n"


def options_of_other_types(_: random.Random, __: Target) -> Iterator[Step]:
    yield b'CONNECT {"name":[1],"verbose":"x","echo":{},"headers":9,"user":1,"pass":null,"auth_token":[]}\r\nPING\r\n'


def acknowledgements_of_nothing(source: random.Random, _: Target) -> Iterator[Step]:
    for number in NUMBERS:
        yield b"PUB $ACK.%b 4\r\n+ACK\r\n" % number[:100]
        yield b"PUB $ACK.1.%b.0.x 4\r\n-NAK\r\n" % name(source)


def requests_that_nobody_answers(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"SUB _INBOX.> 1\r\n"
    for _number in range(10):
        yield b"".join(b"PUB hostile.%b _INBOX.%b 1\r\nx\r\n" % (name(source), name(source)) for _each in range(100))


def without_echo(source: random.Random, _: Target) -> Iterator[Step]:
    yield b'CONNECT {"echo":false,"verbose":true}\r\nSUB hostile.> 1\r\n'
    yield from in_pieces(_publish("hostile.x", 10) * 5000, source)


# Flux.


def replays(source: random.Random, _: Target) -> Iterator[Step]:
    """It never reads them."""
    yield b"REPLAY FIRST 1000000\r\nPULL hostile.> 1000000\r\n" * 20
    yield b"REPLAY TIME %b 5\r\nREPLAY %b\r\n" % (source.choice(NUMBERS), source.choice(NUMBERS))


def flow_that_is_none(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"SUB hostile.> 1\r\n"
    for number in NUMBERS:
        yield b"FLOWCTL 1 PUSH %b %b %b drop\r\n" % (number, source.choice(NUMBERS), number)
    yield b"FLOWCTL 1 PULL 0.000001 1 1 block\r\n" + _publish("hostile.x", 10) * 1000


def flood_of_pulls(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(300):
        yield b"PULL hostile.%b 1\r\n" % name(source, 200)


def sequences_of_nobody(source: random.Random, _: Target) -> Iterator[Step]:
    for number in NUMBERS:
        yield b"ACK %b\r\nACK %b %b\r\nREPLAY %b\r\n" % (number, number, name(source), number)
    yield b"JOIN a b\r\nLEAVE a\r\nSTATS %b\r\n" % name(source)


_ANY: Final = (
    Attack(silence, connections=10_000),
    Attack(noise, connections=5),
    Attack(line_at_its_limit),
    Attack(line_without_end),
    Attack(line_ends),
    Attack(dribbled_bytes, connections=20),
    Attack(payload_at_its_limit),
    Attack(half_a_payload, connections=300),
    Attack(payload_longer_than_said),
    Attack(numbers_that_are_none, connections=20),
    Attack(headers_that_lie, connections=5),
    Attack(subjects_that_are_none),
    Attack(flood_of_subjects),
    Attack(flood_of_topics),
    Attack(flood_of_subscriptions),
    Attack(flood_of_long_subscriptions),
    Attack(flood_of_questions, reads=False),
    Attack(flood_of_messages),
    Attack(flood_of_ids, connections=2),
    Attack(flood_of_keys),
    Attack(flood_of_headers),
    Attack(headers_at_their_limit),
    Attack(delays),
    Attack(slow_reader, connections=10, reads=False),
    Attack(slow_member, connections=5, reads=False),
    Attack(flood_of_groups),
)
_NATS: Final = (
    Attack(names_that_are_no_text),
    Attack(names_without_end),
    Attack(json_that_recurses),
    Attack(options_of_other_types),
    Attack(acknowledgements_of_nothing),
    Attack(requests_that_nobody_answers),
    Attack(without_echo),
)
_FLUX: Final = (
    Attack(replays, reads=False),
    Attack(flow_that_is_none),
    Attack(flood_of_pulls),
    Attack(sequences_of_nobody),
)

NATS: Final = Door("NATS", "text", _ANY + _NATS, _CONNECT)
FLUX: Final = Door("Flux", "text", _ANY + _FLUX, None, guarded=False)
