"""Random frames at the binary door of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from penstock.model.batch import Compression, encode
from penstock.wire import binary
from penstock.wire.binary import Settle, Type, Verb
from tests.support.binary_door import OURS, PROVIDERS
from tests.support.frames import Bare, Frames
from tests.support.server import Serve

NUMBERS: Final = st.sampled_from([0, 1, 2, 3, 255, 256, 1 << 31, (1 << 32) - 1])
LARGE: Final = st.sampled_from([0, 1, 2, 3, 4, 100, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
NAMES: Final = st.sampled_from(
    [
        "orders",
        "orders.a",
        "bills",
        "g",
        "h",
        ">",
        "*",
        "a..b",
        "",
        "$delayed",
        "_x",
        "\ud800",
        "\x00",
        "DLQ",
        "DLQ.orders",
    ]
)
STARTS: Final = st.one_of(
    st.sampled_from(["latest", "earliest", "x"]),
    st.builds(lambda n: {"offset": n}, LARGE),
    st.builds(lambda n: {"time_us": n}, st.integers(-(1 << 70), 1 << 70)),
    st.builds(lambda rows: {"positions": rows}, st.lists(st.lists(LARGE, min_size=2, max_size=3), max_size=3)),
)
ANY: Final = st.one_of(st.none(), st.booleans(), LARGE, st.floats(), NAMES, st.lists(NAMES, max_size=2), STARTS)
POLICIES: Final = st.dictionaries(
    st.sampled_from(["retain_ms", "retain_bytes", "segment_bytes", "dedup", "durability", "deliveries_max", "colour"]),
    st.one_of(LARGE, st.sampled_from(["id", "payload", "off", "fsync", "flush"]), ANY),
    max_size=1,
)
FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "name": NAMES,
    "subject": NAMES,
    "pattern": NAMES,
    "group": NAMES,
    "topic": NAMES,
    "partition": LARGE,
    "partitions": st.one_of(LARGE, st.integers(0, 300)),
    "policy": POLICIES,
    "offset": LARGE,
    "bytes": LARGE,
    "time_us": LARGE,
    "mode": st.sampled_from(["shared", "partitioned", "x"]),
    "start": STARTS,
    "limit": LARGE,
    "count": LARGE,
    "redriven": st.booleans(),
    "subscription": st.integers(0, 3),
    "credit": LARGE,
    "version": st.sampled_from([1, 1, 2, None]),
    "token": NAMES,
    "msg_key": ANY,
    "event_type": st.sampled_from(["MESSAGE", "DELETE", "x"]),
    "data": ANY,
}
CALLS: Final[dict[str, tuple[str, ...]]] = {
    "resolve": ("subject",),
    "topics": (),
    "topic": ("name",),
    "create_topic": ("name", "partitions", "policy"),
    "alter_topic": ("name", "partitions", "policy"),
    "delete_topic": ("name",),
    "offset_at": ("name", "partition", "time_us"),
    "offset_after": ("name", "partition", "offset", "bytes"),
    "groups": (),
    "group": ("name",),
    "create_group": ("name", "pattern", "mode", "start"),
    "reset_group": ("name", "start", "topic", "partition"),
    "delete_group": ("name",),
    "commit": ("group", "topic", "partition", "offset"),
    "dead_letters": ("pattern", "limit", "redriven"),
    "redrive": ("pattern", "count"),
    "statistics": (),
    "reboot": ("name",),
}
OPEN: Final = ("subscription", "pattern", "group", "mode", "start", "credit")
CALL: Final = ("call",)
PROVIDERS_FIELDS: Final = ("topic", "group", "offset", "msg_key", "event_type", "data")
HEADERS: Final = st.sampled_from(
    [
        b"",
        b"Msg-ID: 1\r\n",
        b"Delay: 1ms\r\n",
        b"Delay: x\r\n",
        b"Deliver-At: 0001-01-01\r\n",
        b"\xff",
        b"Penstock-Key: k\r\n",
    ]
)


@st.composite
def objects(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """JSON with these fields, most of them there and of the kind that they must be."""
    fields: dict[str, Any] = {}
    if names is CALL:
        fields["call"] = draw(st.sampled_from(list(CALLS)))
        names = CALLS[fields["call"]]
    for name in names:
        match draw(st.integers(0, 9)):
            case 0:
                pass
            case 1:
                fields[name] = draw(ANY)
            case _:
                fields[name] = draw(FIELDS[name])
    return json.dumps(fields).encode()


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """A batch that is right, most of the time."""
    count = draw(st.integers(1, 4))

    def column(items: st.SearchStrategy[bytes]) -> list[bytes | None] | None:
        return draw(st.none() | st.lists(st.none() | items, min_size=count, max_size=count))

    subjects = st.sampled_from([b"orders", b"orders.a", b"bills.b", b"", b"a..b", b"$x", b"_INBOX.x", b"\xff"])
    made = encode(
        draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
        timestamp=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        subjects=column(subjects),
        keys=column(st.binary(max_size=3)),
        replies=column(st.sampled_from([b"r", b"\xff", b"a b"])),
        headers=column(HEADERS),
        tombstones=draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count)),
        producer=draw(st.sampled_from([0, 0, 1, (1 << 64) - 1])),
        sequence=draw(st.sampled_from([0, 0, 1, (1 << 64) - 1])),
        compression=draw(st.sampled_from(list(Compression))),
        asks=draw(st.booleans()),
    ).data
    data = bytearray(made)
    if draw(st.integers(0, 5)) == 0:
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


@st.composite
def frames(draw: st.DrawFn, kinds: list[Type]) -> bytes:
    kind, number = draw(st.sampled_from(kinds)), 0
    if draw(st.integers(0, 7)) == 0:
        return binary.frame(kind, number, draw(st.binary(max_size=80)))
    match kind:
        case Type.PUBLISH:
            return binary.frame(kind, number, draw(batches()))
        case Type.APPEND:
            to = binary.Append(draw(st.integers(0, 6) | LARGE), draw(NUMBERS), draw(NUMBERS))
            return binary.append_frame(number, to, draw(batches()))
        case Type.FETCH:
            ids = draw(st.integers(0, 6) | LARGE)
            fetch = binary.Fetch(
                ids, draw(NUMBERS), draw(st.sampled_from([0, 1])), *draw(st.tuples(LARGE, LARGE, NUMBERS))
            )
            return binary.fetch_frame(number, fetch)
        case Type.END:
            return binary.end_frame(number, draw(st.integers(0, 3)))
        case Type.CREDIT:
            return binary.credit_frame(draw(st.integers(0, 3)), draw(NUMBERS))
        case Type.SETTLE:
            offsets = draw(st.lists(LARGE, min_size=1, max_size=4))
            verb, generation, delay = draw(st.sampled_from(Verb)), draw(LARGE), draw(LARGE)
            ids = draw(st.integers(0, 6) | LARGE)
            settle = Settle(draw(st.integers(0, 3)), verb, generation, delay, ids, draw(NUMBERS), offsets)
            return binary.settle_frame(number, settle)
        case Type.HELLO:
            return binary.frame(kind, number, draw(objects(("version", "name", "token"))))
        case Type.OPEN:
            return binary.frame(kind, number, draw(objects(OPEN)))
        case Type.CALL:
            return binary.frame(kind, number, draw(objects(CALL)))
        case _:
            return binary.frame(kind, number, draw(objects(PROVIDERS_FIELDS)))


@pytest.fixture(scope="module")
def beaten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("beaten"), topic_topics_max=50) as server:
        yield server


# Nothing is made smaller: the server is not what it was before.
beatings = settings(
    max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)


@beatings
@given(data=st.lists(frames([Type.HELLO, *OURS, Type.OPEN, Type.CALL, Type.CALL]), min_size=1, max_size=12))
def test_each_request_has_one_answer_whatever_it_says(beaten: Serve, data: list[bytes]) -> None:
    note(repr(data))
    numbered = [each[:1] + number.to_bytes(8, "big") + each[9:] for number, each in enumerate(data, 100)]
    asked = {number for number, each in enumerate(data, 100) if each[0] != Type.CREDIT}
    answered: list[int] = []
    with Frames(beaten) as client:
        client.send(b"".join(numbered))
        while asked - set(answered):
            frame = client.frame()
            if frame.type in (Type.RESULT, Type.ERROR, Type.BATCHES):
                answered.append(frame.id)
            else:
                assert frame.type in (Type.MESSAGES, Type.ENDED), frame
    # A CREDIT that cannot be read is told of too.
    assert len(answered) == len(set(answered))
    assert "Traceback" not in beaten.stderr, beaten.stderr


@beatings
@given(data=st.lists(frames([*PROVIDERS, *PROVIDERS, *OURS, Type.HELLO]), min_size=1, max_size=12))
def test_no_frames_end_more_than_their_own_connection(beaten: Serve, data: list[bytes]) -> None:
    note(repr(data))
    with Bare(beaten) as client:
        client.send(b"".join(data) + binary.frame(Type.HEARTBEAT, 7))
        while client._receive() and binary.frame(Type.HEARTBEAT, 7) not in client._received:
            pass
    with Frames(beaten) as judge:
        judge.sync()
    assert "Traceback" not in beaten.stderr, beaten.stderr
