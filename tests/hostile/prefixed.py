"""Hostile clients of the prefixed door: QB's protocol, and Cursus' commands."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from penstock.wire.cursus import VERBS, Packing, Record, batch, pack
from penstock.wire.prefixed import FRAME_BYTES_MAX, frame
from penstock.wire.qb import Kind, message
from tests.hostile.oracle import PASSWORD, USER
from tests.hostile.pieces import NUMBERS, around, dribble, in_pieces, name
from tests.hostile.siege import TOPIC, Attack, Door, Step, Target

_GATE_BYTES: Final = 64 << 10
_PAYLOAD_BYTES_MAX: Final = 1 << 20


def silence(source: random.Random, _: Target) -> Iterator[Step]:
    yield struct.pack(">I", source.randrange(1 << 16))[: source.randint(1, 4)]
    yield source.random() * 2


def noise(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"\0" + source.randbytes(4096)


def frame_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    size = around(source.choice((_GATE_BYTES, FRAME_BYTES_MAX)), source)
    yield struct.pack(">I", size) + source.choice((b"LIST ", b"\0\0\0\x09"))
    yield from in_pieces(bytes(min(size, 4 << 20)), source, 1 << 20)


def half_a_frame(source: random.Random, _: Target) -> Iterator[Step]:
    yield struct.pack(">I", FRAME_BYTES_MAX) + source.choice((b"PUBLISH hostile ", b"\0\0\0\x09"))
    yield bytes(source.randint(1, 2 << 20))
    yield 2.0


# QB.


def _message(kind: Kind, body: bytes = b"", /, **properties: Any) -> bytes:
    if kind is Kind.PUBLISH:
        properties = {"client_id": "hostile"} | properties
    block = b"".join(f"{key}={value}\0".encode() for key, value in properties.items())
    return message(kind, 7, 1_700_000_000_000, block, body)


_QB_LOGIN: Final = _message(Kind.HEARTBEAT, user=USER, password=PASSWORD)


def dribbled_message(_: random.Random, __: Target) -> Iterator[Step]:
    yield from dribble(_message(Kind.HEARTBEAT, user="x") + _message(Kind.PUBLISH, b"hello", topic=TOPIC))


def flood_of_properties(source: random.Random, _: Target) -> Iterator[Step]:
    yield _message(Kind.PUBLISH, b"x", topic=TOPIC, **{f"p{number}": "x" for number in range(100_000)})
    yield _message(Kind.HEARTBEAT, **{f"p{number}": source.random() for number in range(1000)})


def properties_beyond_the_payload(source: random.Random, _: Target) -> Iterator[Step]:
    yield _message(Kind.PUBLISH, b"x", topic=TOPIC, large="x" * source.choice((around(1 << 20, source), 5_000_000)))


def properties_of_a_whole_frame(source: random.Random, _: Target) -> Iterator[Step]:
    empty = len(_message(Kind.PUBLISH, topic=TOPIC, large=""))
    yield from in_pieces(_message(Kind.PUBLISH, topic=TOPIC, large="x" * (FRAME_BYTES_MAX - empty)), source, 8 << 20)


def properties_that_are_none(source: random.Random, _: Target) -> Iterator[Step]:
    blocks = (
        b"=\0",
        b"topic\0",
        b"\0\0\0",
        b"topic=\xed\xa0\x80\0",
        b"a=b" * 1000,
        b"topic=hostile\0a:b=c\0",
        b"topic=a\nb\0",
    )
    for block in blocks:
        yield message(source.choice(list(Kind)), 1, 2, block, b"x")


def body_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    yield _message(Kind.PUBLISH, bytes(around(_PAYLOAD_BYTES_MAX, source)), topic=TOPIC)


def lengths_that_disagree(source: random.Random, _: Target) -> Iterator[Step]:
    data = bytearray(_message(Kind.PUBLISH, b"hello", topic=TOPIC))
    struct.pack_into(
        ">I", data, source.choice((0, 24, len(data) - 9)), source.choice((0, 27, 28, 1 << 16, (1 << 32) - 1))
    )
    yield bytes(data) * 3


def topics_of_all_kinds(source: random.Random, _: Target) -> Iterator[Step]:
    for text in NUMBERS:
        yield _message(Kind.CREATE_TOPIC, topic="q1", partitions=text.decode(errors="replace"), retention_hours=1)
    yield _message(Kind.CREATE_TOPIC, topic=f"q{source.randrange(3)}", partitions=256)
    yield _message(Kind.CREATE_TOPIC, topic="x" * 100_000)
    yield _message(Kind.CREATE_TOPIC, topic="q2", retention_hours=10**17)


def flood_of_subscriptions(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(60):
        subscription = name(source, source.choice((10, 500, 100_000))).decode()
        yield _message(Kind.CREATE_SUBSCRIPTION, subscription_id=subscription, topic=TOPIC, start_offset=10**17)
        yield _message(Kind.SUBSCRIBE, subscription_id=subscription, subscriber_id=name(source, 500).decode())


def acknowledgements_of_nothing(source: random.Random, _: Target) -> Iterator[Step]:
    yield _message(Kind.CREATE_SUBSCRIPTION, subscription_id="s", topic=TOPIC)
    yield _message(Kind.SUBSCRIBE, subscription_id="s", subscriber_id=name(source).decode(), auto_ack="false")
    for text in NUMBERS:
        yield _message(Kind.ACK, subscription_id="s", topic=TOPIC, partition=text.decode(errors="replace"))
        yield _message(Kind.ACK, topic=".", partition=0, status="pending")


def flood_of_messages(source: random.Random, _: Target) -> Iterator[Step]:
    one = _message(Kind.PUBLISH, b"x", topic=TOPIC)
    yield from in_pieces(one * 20_000, source, 1 << 20)


def messages_that_ask(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(4):
        yield _message(Kind.PUBLISH, b"x", topic=TOPIC, **{"Msg-ID": name(source, 900_000).decode()})
        yield _message(Kind.PUBLISH, b"x", topic=TOPIC, **{"Penstock-Key": name(source, 900_000).decode()})
        yield _message(Kind.PUBLISH, bytes(900_000), topic=TOPIC, Delay="100ms")


def slow_subscriber(source: random.Random, _: Target) -> Iterator[Step]:
    subscription = f"slow-{source.randrange(3)}"
    yield _message(Kind.CREATE_SUBSCRIPTION, subscription_id=subscription, topic=TOPIC)
    yield _message(Kind.SUBSCRIBE, subscription_id=subscription, subscriber_id=name(source).decode())
    for _number in range(16):
        yield _message(Kind.PUBLISH, bytes(500_000), topic=TOPIC)


# Cursus.

_CURSUS_LOGIN: Final = frame(f"AUTH user={USER} password={PASSWORD}".encode())


def _records(values: Sequence[bytes], *, producer: bytes = b"", idempotent: bool = False) -> bytes:
    records = [Record(0, value, b"k", producer, 0, number) for number, value in enumerate(values, 1)]
    return batch(TOPIC.encode(), 0, records, "1", is_idempotent=idempotent)


@cache
def bomb_of_records() -> bytes:
    """60 KB that unpack to a frame of the largest size, with two million records."""
    head = _records([])
    count = (FRAME_BYTES_MAX - len(head)) // 32
    return pack(head[:-4] + struct.pack(">i", count) + bytes(32 * count), Packing.GZIP)


@cache
def bomb_of_producers() -> bytes:
    return pack(_records([b"x"] * 400, producer=bytes(0xFFFF), idempotent=True), Packing.GZIP)


@cache
def _bomb(packing: Packing, size: int) -> bytes:
    return pack(bytes(size), packing)


def dribbled_command(_: random.Random, __: Target) -> Iterator[Step]:
    yield from dribble(frame(b"PUBLISH hostile hello") + frame(b"LIST"))


def flood_of_packed_records(_: random.Random, __: Target) -> Iterator[Step]:
    yield frame(bomb_of_records())


def producers_of_the_longest_name(_: random.Random, __: Target) -> Iterator[Step]:
    yield frame(bomb_of_producers())


def bombs(source: random.Random, _: Target) -> Iterator[Step]:
    """At the limit, beyond it, within another, and cut off."""
    packing = source.choice((Packing.GZIP, Packing.LZ4))
    data = _bomb(packing, source.choice((FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 4 * FRAME_BYTES_MAX)))
    yield frame(data) + frame(pack(data, Packing.GZIP)) + frame(data[: len(data) // 2]) + frame(data + b"x")


def records_that_lie(source: random.Random, _: Target) -> Iterator[Step]:
    data = bytearray(_records([b"value"] * 5, producer=b"p", idempotent=True))
    for _number in range(50):
        damaged = bytearray(data)
        damaged[source.randrange(2, len(data))] = source.randrange(256)
        yield frame(bytes(damaged))
    for count in (-1, 0, (1 << 31) - 1):
        yield frame(_records([])[:-4] + struct.pack(">i", count))


def flood_of_producers(source: random.Random, _: Target) -> Iterator[Step]:
    records = [Record(0, b"x", b"", name(source, 300), 0, 1) for _number in range(2000)]
    yield frame(batch(TOPIC.encode(), 1, records, "1", is_idempotent=True))


def envelopes(source: random.Random, _: Target) -> Iterator[Step]:
    """What is not a command behind a topic is published there."""
    for topic in (b"hostile", b"", b"$delayed", b"\xff", name(source, 5000)):
        yield frame(struct.pack(">H", len(topic)) + topic + b"not a command")
    yield frame(struct.pack(">H", 0x1F00) + b"short")


def commands_of_all_kinds(source: random.Random, _: Target) -> Iterator[Step]:
    strange = [b"", b"hostile", b"*", b"a*", b"\xff", b"x" * 5000, b"=", b"topic=", *NUMBERS]
    names = (
        b"topic",
        b"group",
        b"member",
        b"partition",
        b"partitions",
        b"offset",
        b"generation",
        b"consumers",
        b"wait_ms",
    )
    # Without those that end the connection.
    verbs = [verb.encode() for verb in VERBS if verb not in ("EXIT", "AUTH", "STREAM", "DELETE")]
    for _number in range(300):
        verb = source.choice(verbs)
        yield frame(verb + b" " + b" ".join(source.choices(strange, k=3)))
        yield frame(
            verb + b" " + b" ".join(b"%b=%b" % (key, source.choice(strange)) for key in source.sample(names, 4))
        )


def flood_of_words(_: random.Random, __: Target) -> Iterator[Step]:
    yield frame(b"CONSUME " + b"a=b " * 200_000)
    yield frame(b"BATCH_COMMIT topic=hostile group=g member=m generation=1 " + b"P0:1," * 200_000)
    yield frame(b" " * 1_000_000 + b"LIST")
    yield frame(b"CONSUME " + b"*" * 1000 + b" 0 0")


def flood_of_commands(_: random.Random, __: Target) -> Iterator[Step]:
    """It never reads the answers."""
    for _number in range(20):
        yield (frame(b"HELP") + frame(b"LIST") + frame(b"DESCRIBE hostile") + frame(b"")) * 500


def flood_of_groups(source: random.Random, _: Target) -> Iterator[Step]:
    for _number in range(30):
        group, member = name(source, 200), name(source, 200)
        yield frame(b"REGISTER_GROUP hostile %b" % group) + frame(b"JOIN_GROUP hostile %b %b" % (group, member))


def consumers_that_do_not_read(source: random.Random, _: Target) -> Iterator[Step]:
    yield frame(b"PUBLISH hostile " + bytes(900_000)) * 8
    command = source.choice((b"CONSUME hostile 0 0 follow", b"STREAM hostile 0 0", b"SUBSCRIBE hostile slow 256"))
    yield frame(command)
    yield 1.0


def values_at_their_limit(source: random.Random, _: Target) -> Iterator[Step]:
    yield frame(b"PUBLISH hostile " + bytes(around(_PAYLOAD_BYTES_MAX, source)))
    yield frame(_records([bytes(around(_PAYLOAD_BYTES_MAX, source))]))
    yield frame(_records([bytes(900_000)] * 60))


_ANY: Final = (
    Attack(silence, connections=10_000),
    Attack(noise, connections=20),
    Attack(frame_at_its_limit, connections=6),
    Attack(half_a_frame, connections=100),
)
_QB: Final = (
    Attack(dribbled_message, connections=20),
    Attack(flood_of_properties),
    Attack(properties_beyond_the_payload),
    Attack(properties_of_a_whole_frame),
    Attack(properties_that_are_none),
    Attack(body_at_its_limit, connections=3),
    Attack(lengths_that_disagree, connections=10),
    Attack(topics_of_all_kinds),
    Attack(flood_of_subscriptions),
    Attack(acknowledgements_of_nothing),
    Attack(flood_of_messages),
    Attack(messages_that_ask),
    Attack(slow_subscriber, connections=3, reads=False),
)
_CURSUS: Final = (
    Attack(dribbled_command, connections=20),
    Attack(flood_of_packed_records, connections=2),
    Attack(producers_of_the_longest_name),
    Attack(bombs, connections=3),
    Attack(records_that_lie),
    Attack(flood_of_producers),
    Attack(envelopes),
    Attack(commands_of_all_kinds),
    Attack(flood_of_words),
    Attack(flood_of_commands, reads=False),
    Attack(flood_of_groups),
    Attack(consumers_that_do_not_read, connections=5, reads=False),
    Attack(values_at_their_limit),
)

QB: Final = Door("QB", "quiet", _ANY + _QB, _QB_LOGIN)
CURSUS: Final = Door("Cursus", "quiet", _ANY + _CURSUS, _CURSUS_LOGIN)
