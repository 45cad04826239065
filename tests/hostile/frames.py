"""Hostile clients of the binary door: our own protocol, and the Provider's."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from penstock.model.batch import BATCH_BYTES_MAX, Batch, Compression, encode
from penstock.wire.binary import (
    FRAME_BYTES_MAX,
    JSON_BYTES_MAX,
    SETTLE_MAX,
    Append,
    Fetch,
    Settle,
    StageTarget,
    Type,
    Verb,
    append_frame,
    credit_frame,
    end_frame,
    fetch_frame,
    frame,
    head,
    json_frame,
    settle_frame,
    stage_frame,
)
from tests.hostile.oracle import PASSWORD, USER
from tests.hostile.pieces import SURROGATE, around, deep_json, dribble, in_pieces, name, wide_json
from tests.hostile.siege import SUBJECT, TOPIC, Attack, Door, Step, Target
from tests.support.frames import TIMESTAMP

_LOGIN: Final = json_frame(Type.HELLO, 1, {"version": 1, "name": "hostile", "user": USER, "password": PASSWORD})
_U64: Final = (0, 1, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
# What a connection may send before it is authorised.
_GATE_BYTES: Final = 64 << 10


def _call(number: int, call: str, **fields: Any) -> bytes:
    return json_frame(Type.CALL, number, {"call": call, **fields})


def _raw(kind: Type, payload: bytes) -> bytes:
    return frame(kind, 2, payload)


@cache
def large_batch() -> bytes:
    """A legal one, exactly at the limit; only its last message has another subject."""
    values = [bytes(1 << 20)] * 63 + [bytes(1 << 10), b""]
    subjects = [SUBJECT] * 64 + [b"hostile.y"]
    missing = BATCH_BYTES_MAX - len(encode(values, timestamp=TIMESTAMP, subjects=subjects).data)
    values[-2] = bytes(len(values[-2]) + missing)
    data = encode(values, timestamp=TIMESTAMP, subjects=subjects).data
    assert len(data) == BATCH_BYTES_MAX
    return bytes(data)


@cache
def _packed_batch(compression: Compression, count: int) -> bytes:
    """As much as packing allows: it is opened to 64 times its size at the most."""
    values = [bytes((60 << 20) // count)] * count
    return bytes(encode(values, timestamp=TIMESTAMP, subjects=[SUBJECT] * count, compression=compression).data)


@cache
def _batch(count: int = 3) -> Batch:
    return encode([b"value"] * count, timestamp=TIMESTAMP, subjects=[SUBJECT] * count)


# Any protocol.


def silence(source: random.Random, _: Target) -> Iterator[Step]:
    yield head(source.choice((Type.HELLO, Type.DATA)), 1, source.randrange(1 << 10))[: source.randint(1, 13)]
    yield source.random() * 2


def noise(source: random.Random, _: Target) -> Iterator[Step]:
    yield bytes([source.choice([kind for kind in Type if kind < Type.RESULT])]) + source.randbytes(4096)


def dribbled_bytes(_: random.Random, target: Target) -> Iterator[Step]:
    yield from dribble(_LOGIN[:40] + append_frame(2, Append(target.topic_id, 0, 2), _batch().data))


def frame_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    """Of somebody who has not said who it is, of somebody who has not said HELLO, of anybody."""
    size = around(source.choice((_GATE_BYTES, JSON_BYTES_MAX, FRAME_BYTES_MAX)), source)
    yield head(source.choice((Type.HELLO, Type.DATA, Type.PUBLISH)), 1, size)
    yield from in_pieces(bytes(min(size, 4 << 20)), source, 1 << 20)


def half_a_frame(source: random.Random, _: Target) -> Iterator[Step]:
    """Announced, begun, and never finished."""
    yield head(Type.PUBLISH, 2, FRAME_BYTES_MAX)
    yield bytes(source.randint(1, 2 << 20))
    yield 2.0


def json_that_hurts(source: random.Random, _: Target) -> Iterator[Step]:
    kind = source.choice((Type.HELLO, Type.CALL, Type.OPEN, Type.DATA, Type.SUBSCRIBE))
    texts = (deep_json(30_000), wide_json(3000), b"[]", b"null", b'{"a":NaN}', b"\xff", b'{"a":"%b"}' % SURROGATE)
    for text in texts:
        yield _raw(kind, text)


def credentials_of_other_types(source: random.Random, _: Target) -> Iterator[Step]:
    value: Any = source.choice((1, None, [], {}, "x" * 50_000, "\udc80", True))
    yield json_frame(Type.HELLO, 1, {"version": 1, "name": value, "user": value, "password": value, "token": value})


def every_type(source: random.Random, _: Target) -> Iterator[Step]:
    for kind in source.sample(range(256), 20):
        yield bytes([kind]) + head(Type.ACK, 7, 40)[1:] + source.randbytes(40)


# Our own.


def damaged_batches(source: random.Random, target: Target) -> Iterator[Step]:
    for _number in range(50):
        data = bytearray(_batch().data)
        for _each in range(source.randint(1, 3)):
            data[source.randrange(len(data))] = source.randrange(256)
        yield _raw(Type.PUBLISH, bytes(data))
        yield append_frame(3, Append(target.topic_id, source.choice((0, 1, 2, 1 << 31)), 2), data)


def large_batch_for_who_wants_most_of_it(_: random.Random, target: Target) -> Iterator[Step]:
    """The rest of it must be encoded anew, with a column more."""
    yield json_frame(Type.OPEN, 2, {"subscription": 1, "pattern": SUBJECT.decode(), "credit": 1000})
    yield append_frame(3, Append(target.topic_id, 0, 2), large_batch())


def batch_beyond_the_limit(source: random.Random, _: Target) -> Iterator[Step]:
    yield from in_pieces(frame(Type.PUBLISH, 2, bytes(around(BATCH_BYTES_MAX, source))), source, 4 << 20)


def packed_batches(source: random.Random, target: Target) -> Iterator[Step]:
    """Bombs: a megabyte that is opened to sixty, as few messages or as many."""
    data = _packed_batch(source.choice((Compression.LZ4, Compression.ZSTD)), source.choice((60, 60_000)))
    yield append_frame(3, Append(target.topic_id, 1, 2), data)
    yield _raw(Type.PUBLISH, data)


def flood_of_records(source: random.Random, target: Target) -> Iterator[Step]:
    yield append_frame(3, Append(target.topic_id, 1, 2), encode([b""] * 200_000, timestamp=TIMESTAMP).data)
    subjects = [b"hostile.%d" % (number % 5000) for number in range(50_000)]
    yield _raw(Type.PUBLISH, bytes(encode([b""] * 50_000, timestamp=TIMESTAMP, subjects=subjects).data))
    yield source.random()


def flood_of_topics(source: random.Random, _: Target) -> Iterator[Step]:
    subjects = [b"b%b.x" % name(source) for _number in range(300)]
    yield _raw(Type.PUBLISH, bytes(encode([b""] * 300, timestamp=TIMESTAMP, subjects=subjects).data))


def batches_that_ask(source: random.Random, target: Target) -> Iterator[Step]:
    """IDs, keys and delays, as long as a batch has room for."""
    blocks = [b"Msg-Id: %b\r\n" % name(source, 900_000), b"Delay: 100ms\r\n", b"Delay: x\r\n", b"no line"]
    for block in blocks:
        data = encode([b"x"], timestamp=TIMESTAMP, subjects=[SUBJECT], headers=[block], asks=True).data
        yield _raw(Type.PUBLISH, bytes(data))
        yield append_frame(3, Append(target.topic_id, 0, 2), data)
    keys = [name(source, 900_000) for _number in range(8)]
    yield _raw(Type.PUBLISH, bytes(encode([b""] * 8, timestamp=TIMESTAMP, subjects=[b"hostile"] * 8, keys=keys).data))


def flood_of_producers(source: random.Random, target: Target) -> Iterator[Step]:
    for number in range(500):
        batch = encode([b"x"], timestamp=TIMESTAMP, producer=source.randrange(1, 1 << 62), sequence=number % 2)
        yield append_frame(number, Append(target.topic_id, 0, 2), batch.data)


def flood_of_fetches(source: random.Random, target: Target) -> Iterator[Step]:
    """It never reads what it asked for."""
    for number in range(2000):
        wait_ms = source.choice((0, 1000, (1 << 32) - 1))
        offset = source.choice((0, 0, *_U64))
        yield fetch_frame(number, Fetch(target.topic_id, number % 3, wait_ms, offset, 0, (1 << 32) - 1))


def flood_of_subscriptions(source: random.Random, _: Target) -> Iterator[Step]:
    for number in range(3000):
        pattern = "hostile." + source.choice((">", "*", "x", name(source, 500).decode()))
        yield json_frame(Type.OPEN, number, {"subscription": number, "pattern": pattern, "start": "earliest"})


def flood_of_groups(source: random.Random, _: Target) -> Iterator[Step]:
    for number in range(40):
        group, mode = name(source, 500).decode(), source.choice(("shared", "partitioned", "none"))
        options = {"subscription": number, "pattern": "hostile.>", "group": group, "mode": mode, "refresh": True}
        yield json_frame(Type.OPEN, number, options)


def credit_and_settlements_of_nothing(source: random.Random, target: Target) -> Iterator[Step]:
    yield json_frame(Type.OPEN, 2, {"subscription": 1, "pattern": "hostile.>", "group": "g", "credit": (1 << 63) - 1})
    for number in _U64:
        yield credit_frame(number, (1 << 32) - 1) + credit_frame(1, (1 << 32) - 1) + end_frame(5, number)
    for verb in Verb:
        offsets = [source.choice(_U64) for _number in range(SETTLE_MAX)]
        for topic_id in (target.topic_id, 0, (1 << 64) - 1):
            yield settle_frame(6, Settle(1, verb, source.choice((0, 1, 99)), (1 << 64) - 1, topic_id, 0, offsets))
    yield _raw(Type.SETTLE, struct.pack("!QBQQQIIH", 1, 99, 0, 0, 1, 0, SETTLE_MAX + 1, 0))


def calls_of_all_kinds(source: random.Random, target: Target) -> Iterator[Step]:
    strange: list[Any] = ["", ".", "$delayed", "x" * 5000, 0, -1, 1 << 63, 1.5, None, [], {}, "\ud800", True]
    names = ("resolve", "topics", "topic", "create_topic", "alter_topic", "offset_at", "offset_after", "wait", "groups",
             "group", "create_group", "reset_group", "delete_group", "commit", "commit_transaction", "dead_letters",
             "transaction", "abort_transaction", "redrive", "refresh_status", "statistics", "nothing", "")  # fmt: skip
    fields = ("name", "subject", "pattern", "group", "partition", "partitions", "offset", "limit", "topic_id",
              "time_us", "positions", "number", "parts", "policy", "mode", "start", "count", "offsets", "wait_ms",
              "bytes")  # fmt: skip
    for number in range(400):
        chosen = {field: source.choice(strange) for field in source.sample(fields, 6)}
        yield json_frame(Type.CALL, number, {"call": source.choice(names), **chosen})
    yield _call(1, "create_topic", name=f"wide-{source.randrange(3)}", partitions=source.choice((256, 257)))
    yield _call(2, "create_group", name=name(source, 5000).decode(), pattern="hostile.>")
    for number in range(30):
        yield _call(number, "wait", positions=[[target.topic_id, number % 2, 1 << 62]] * 10_000, wait_ms=10_000)


def transactions_without_end(source: random.Random, target: Target) -> Iterator[Step]:
    for number in range(200):
        stage = StageTarget(
            Append(target.topic_id, 0, 2), name(source, source.choice((1, 0xFFFF))), source.choice(_U64)
        )
        yield stage_frame(number, stage, _batch().data)


def hello_again(_: random.Random, __: Target) -> Iterator[Step]:
    yield _LOGIN * 100
    yield json_frame(Type.HELLO, 3, {"version": 99})


def slow_reader(_: random.Random, target: Target) -> Iterator[Step]:
    yield json_frame(Type.OPEN, 2, {"subscription": 1, "pattern": "hostile.>", "credit": 1_000_000})
    data = encode([bytes(500_000)], timestamp=TIMESTAMP).data
    for number in range(16):
        yield append_frame(number, Append(target.topic_id, number % 2, 2), data)


# The Provider's.


def _data(**fields: Any) -> bytes:
    return json_frame(Type.DATA, 1, {"topic": TOPIC, **fields})


def records_of_other_types(_: random.Random, __: Target) -> Iterator[Step]:
    strange: list[Any] = ["", "$x", ".", 1, -1.5, None, [1], {"a": {}}, "x" * 100_000, True]
    for value in strange:
        yield _data(data=value, msg_key=value) + json_frame(Type.SUBSCRIBE, 2, {"topic": value, "group": value})
        yield json_frame(Type.COMMIT_OFFSET, 3, {"topic": value, "offset": value}) + _data(event_type=value, data=1)


def record_at_its_limit(source: random.Random, _: Target) -> Iterator[Step]:
    limit = source.choice((_GATE_BYTES, 1 << 20, JSON_BYTES_MAX))
    empty = len(_data(data="")) - 13
    yield _data(data="x" * (around(limit, source) - empty))


def records_with_surrogates(_: random.Random, __: Target) -> Iterator[Step]:
    for field in (b"topic", b"data", b"msg_key", b"event_type"):
        yield frame(Type.DATA, 1, b'{"%b":"%b"}' % (field, SURROGATE))


def flood_of_provider_groups(source: random.Random, _: Target) -> Iterator[Step]:
    for number in range(60):
        yield json_frame(Type.SUBSCRIBE, number, {"topic": TOPIC, "group": name(source, 300).decode()})
    yield frame(Type.ACK, source.choice(_U64)) * 100


def slow_provider_reader(source: random.Random, _: Target) -> Iterator[Step]:
    yield json_frame(Type.SUBSCRIBE, 1, {"topic": TOPIC, "group": f"slow-{source.randrange(3)}"})
    for _number in range(8):
        yield _data(data="x" * 500_000)


_ANY: Final = (
    Attack(silence, connections=10_000),
    Attack(noise, connections=20),
    Attack(dribbled_bytes, connections=20),
    Attack(frame_at_its_limit, connections=6),
    Attack(half_a_frame, connections=100),
    Attack(json_that_hurts, connections=3),
    Attack(credentials_of_other_types, connections=5),
    Attack(every_type, connections=5),
)
_OURS: Final = (
    Attack(damaged_batches),
    Attack(large_batch_for_who_wants_most_of_it),
    Attack(batch_beyond_the_limit),
    Attack(packed_batches, connections=2),
    Attack(flood_of_records),
    Attack(flood_of_topics),
    Attack(batches_that_ask),
    Attack(flood_of_producers),
    Attack(flood_of_fetches, reads=False),
    Attack(flood_of_subscriptions),
    Attack(flood_of_groups),
    Attack(credit_and_settlements_of_nothing),
    Attack(calls_of_all_kinds),
    Attack(transactions_without_end),
    Attack(hello_again),
    Attack(slow_reader, connections=5, reads=False),
)
_PROVIDER: Final = (
    Attack(records_of_other_types),
    Attack(record_at_its_limit, connections=3),
    Attack(records_with_surrogates),
    Attack(flood_of_provider_groups),
    Attack(slow_provider_reader, connections=3, reads=False),
)

BINARY: Final = Door("binary", "quiet", _ANY + _OURS, _LOGIN)
PROVIDER: Final = Door("Provider", "quiet", _ANY + _PROVIDER, None, guarded=False)
