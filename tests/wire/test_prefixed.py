"""The framing of the prefixed door: the same bytes give the same frames however they are cut."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame
from penstock.wire.cursus import (
    Packing,
    pack,
)
from penstock.wire.prefixed import FRAME_BYTES_MAX, PrefixedDialect, PrefixedReader, frame
from penstock.wire.qb import Kind, QbMessage, Style, message
from tests.support.prefixed_frames import (
    BATCH,
    MIB,
    PLACES,
    STYLES,
    U32_MAX,
    U64_MAX,
    Frame,
    cut,
    each_style,
    feed,
    methods_called,
    named_style,
    one_by_one,
    peak_bytes,
    written,
)


def joins(call: Callable[[], object]) -> int:
    return sum(name == "join" for name, _ in methods_called(call))


# ---- the bytes as drawn

HEAD: Final = "0000000000000005 000000000000000a"  # sequence 5, 10 ms
DRAWN: Final = {
    Style(counts_itself=True, lengths_first=False): ("0000002a 00000009", "00000004", "00000006"),
    Style(counts_itself=False, lengths_first=False): ("00000026 00000009", "00000004", "00000006"),
    Style(counts_itself=True, lengths_first=True): ("0000002a 00000009", "00000004 00000006", ""),
    Style(counts_itself=False, lengths_first=True): ("00000026 00000009", "00000004 00000006", ""),
}


@each_style
def test_a_message_lies_on_the_wire_as_drawn(style: Style) -> None:
    begin, before, between = DRAWN[style]
    head = bytes.fromhex(begin + HEAD + before)

    made = message(Kind.PUBLISH, 5, 10, b"a=b\0", b"\0body\xff", style)

    assert made == head + b"a=b\0" + bytes.fromhex(between) + b"\0body\xff"
    assert made == written(QbMessage(9, 5, 10, b"a=b\0", b"\0body\xff"), style)


def test_unless_it_is_said_a_message_is_written_as_documented() -> None:
    assert message(Kind.ACK, 5, 10, b"a=b\0", b"body") == message(Kind.ACK, 5, 10, b"a=b\0", b"body", STYLES[0])
    assert message(Kind.HEARTBEAT, 5, 10) == bytes.fromhex(f"00000020 00000003 {HEAD} 00000000 00000000")
    assert PrefixedReader().style == Style() == Style(counts_itself=True, lengths_first=False)


def test_the_kinds_are_numbered_as_documented() -> None:
    assert {kind.name: int(kind) for kind in Kind} == {
        "DATA": 1,
        "ACK": 2,
        "HEARTBEAT": 3,
        "CREATE_TOPIC": 4,
        "CREATE_SUBSCRIPTION": 5,
        "DELETE_SUBSCRIPTION": 6,
        "SUBSCRIBE": 7,
        "UNSUBSCRIBE": 8,
        "PUBLISH": 9,
    }


def test_a_frame_begins_with_how_many_bytes_follow() -> None:
    assert frame(b"LIST") == b"\0\0\0\x04LIST"
    assert frame(b"") == bytes(4)
    assert frame(bytes(0x01020304))[:5] == b"\x01\x02\x03\x04\0"


def test_a_frame_may_have_64_mib() -> None:
    assert PrefixedReader().bytes_max == FRAME_BYTES_MAX == 64 * 1024 * 1024


# ---- which protocol it is, and how it is cut


class Case(NamedTuple):
    dialect: PrefixedDialect
    data: bytes
    frames: list[Frame]
    # Of the same client, and what is in it.
    following: bytes
    followed: Frame


def qb(given: list[QbMessage], style: Style = STYLES[0]) -> Case:
    data = b"".join(written(each, style) for each in given)
    followed = QbMessage(Kind.PUBLISH, 77, 88, b"topic=next\0", b"the next")
    return Case(PrefixedDialect.QB, data, [*given], written(followed, style), followed)


def cursus(*payloads: bytes) -> Case:
    return Case(PrefixedDialect.CURSUS, b"".join(map(frame, payloads)), [*payloads], frame(b"LIST"), b"LIST")


PARTS: Final = [(b"", b""), (b"", b"body"), (b"topic=a\0", b""), (b"topic=a\0k=v\0", b"body"), (b"a=\0", bytes(9))]
CASES: Final[dict[str, Case]] = {
    **{f"QB: {kind.name}": qb([QbMessage(kind, 5, 10, b"topic=a\0", b"body")]) for kind in Kind},
    **{f"QB: unknown kind {kind}": qb([QbMessage(kind, 5, 10, b"topic=a\0", b"body")]) for kind in (0, 42, 255)},
    "QB: a kind of two bytes behind another": qb(
        [QbMessage(9, 1, 2, b"a=b\0", b""), QbMessage(256, 1, 2, b"a=b\0", b"")]
    ),
    "QB: the largest numbers": qb([QbMessage(9, 1, 2, b"", b""), QbMessage(U32_MAX, U64_MAX, U64_MAX, b"", b"")]),
    **{
        f"QB: {named_style(style)}, {len(block)} + {len(body)} bytes": qb([QbMessage(9, 5, 10, block, body)], style)
        for style in STYLES
        for block, body in PARTS
    },
    **{
        f"QB: {named_style(style)}, several": qb([QbMessage(9, 5, 10, *part) for part in PARTS], style)
        for style in STYLES
    },
    "QB: a body that looks like a message": qb(
        [QbMessage(9, 1, 2, b"a=b\0", message(Kind.DATA, 1, 2, b"c=d\0", b"e"))]
    ),
    "Cursus: a command": cursus(b"LIST"),
    "Cursus: one with arguments": cursus(b"CREATE topic=orders partitions=4"),
    "Cursus: text that is no command": cursus(b"abcdefgh"),
    "Cursus: blanks first": cursus(b"   LIST"),
    "Cursus: not ASCII": cursus("CREATE grüße".encode()),
    "Cursus: an envelope": cursus(b"\0\x06orders" + b"PUBLISH orders hello"),
    "Cursus: an envelope with nothing in front": cursus(b"\0\0LIST"),
    "Cursus: a batch": cursus(BATCH),
    "Cursus: gzip": cursus(pack(b"LIST", Packing.GZIP)),
    "Cursus: lz4": cursus(pack(b"LIST", Packing.LZ4)),
    "Cursus: a sign of life first": cursus(b"", b"LIST"),
    "Cursus: nothing but signs of life": cursus(b"", b"", b""),
    "Cursus: a sign of life between": cursus(b"LIST", b"", b"HELP"),
    "Cursus: zero bytes behind the first frame": cursus(b"LIST", bytes(40), b"\0"),
    "Cursus: a message of QB's behind the first frame": cursus(b"LIST", message(Kind.PUBLISH, 1, 2, b"a=b\0", b"c")),
    "Cursus: all of it": cursus(b"LIST", BATCH, b"", pack(BATCH, Packing.GZIP), pack(b"EXIT", Packing.LZ4)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_frames_are_read_whole(case: Case) -> None:
    reader = PrefixedReader()

    assert reader.feed(case.data) == case.frames
    assert (reader.dialect, reader.refusal) == (case.dialect, None)


@each_case
def test_frames_are_read_byte_by_byte(case: Case) -> None:
    reader = PrefixedReader()

    assert feed(reader, one_by_one(case.data)) == case.frames
    assert (reader.dialect, reader.refusal) == (case.dialect, None)


@each_case
def test_frames_are_read_cut_in_two_anywhere(case: Case) -> None:
    for place in range(len(case.data) + 1):
        assert feed(PrefixedReader(), cut(case.data, [place])) == case.frames


@given(st.sampled_from(sorted(CASES)), PLACES)
@settings(max_examples=300)
def test_frames_are_read_cut_anywhere(name: str, places: list[int]) -> None:
    case = CASES[name]

    assert feed(PrefixedReader(), cut(case.data + case.following, places)) == [*case.frames, case.followed]


@each_case
def test_the_beginning_of_the_next_frame_waits_for_its_end(case: Case) -> None:
    for place in range(1, len(case.following)):
        reader = PrefixedReader()

        assert reader.feed(case.data + case.following[:place]) == case.frames
        assert reader.feed(case.following[place:]) == [case.followed]
        assert reader.refusal is None


@each_case
def test_several_come_in_one_piece(case: Case) -> None:
    assert PrefixedReader().feed(case.data + case.following * 3) == [*case.frames, *[case.followed] * 3]


@each_case
def test_a_frame_comes_with_its_last_byte_and_not_before(case: Case) -> None:
    first = case.frames[0]
    size = 4 + len(first) if isinstance(first, bytes) else 32 + len(first.properties) + len(first.body)
    for end in range(size):
        reader = PrefixedReader()

        assert reader.feed(case.data[:end]) == []
        assert reader.refusal is None
    assert PrefixedReader().feed(case.data[:size]) == [first]


@pytest.mark.parametrize("payload", [b"x", b"hi", b"abc", b" ", b"\n", b"\0\0", b"\0"])
def test_a_first_frame_that_is_too_short_for_a_kind_is_cursus(payload: bytes) -> None:
    for pieces in ([frame(payload)], one_by_one(frame(payload)), [frame(payload) + frame(b"")]):
        reader = PrefixedReader()

        assert feed(reader, pieces)[:1] == [payload]
        assert reader.dialect is PrefixedDialect.CURSUS


def test_which_protocol_it_is_is_known_before_the_frame_is_whole() -> None:
    for case in (CASES["QB: PUBLISH"], CASES["Cursus: a command"]):
        reader = PrefixedReader()

        reader.feed(case.data[:4])
        assert reader.dialect is None
        reader.feed(case.data[4:8])
        assert reader.dialect is case.dialect


def test_a_reader_can_be_told_which_protocol_it_is() -> None:
    reader = PrefixedReader()
    reader.dialect = PrefixedDialect.QB
    large = QbMessage(1 << 24, 1, 2, b"a=b\0", b"c")

    assert reader.feed(written(large, STYLES[0])) == [large]


def test_a_read_of_nothing_changes_nothing() -> None:
    reader = PrefixedReader()

    assert feed(reader, [b"", b"\0\0", b"", b"\0\x04LI", b"", b"ST", b""]) == [b"LIST"]
    assert reader.feed(frame(b"HELP")) == [b"HELP"]


# ---- lengths that are wrong


def head(total: int, properties_bytes: int, behind: bytes = b"") -> bytes:
    return struct.pack(">IIQQI", total, Kind.PUBLISH, 1, 2, properties_bytes) + behind


def count(number: int) -> bytes:
    return struct.pack(">I", number)


# A first message that no way of writing explains. With 8 + 4 bytes in it, 44 or 40 are its total.
DISAGREE: Final[dict[str, bytes]] = {
    "properties longer by one": head(44, 9, b"topic=a\0" + count(4) + b"body"),
    "properties shorter by one": head(44, 7, b"topic=a\0" + count(4) + b"body"),
    "properties longer than the message": head(44, 100, b"topic=a\0" + count(4) + b"body"),
    "properties as long as the message": head(44, 44, b"topic=a\0" + count(4) + b"body"),
    "properties of 4 GiB": head(44, U32_MAX, b"topic=a\0" + count(4) + b"body"),
    "no properties, but they are there": head(44, 0, b"topic=a\0" + count(4) + b"body"),
    "a body longer by one": head(44, 8, b"topic=a\0" + count(5) + b"body"),
    "a body shorter by one": head(44, 8, b"topic=a\0" + count(3) + b"body"),
    "a body of 4 GiB": head(44, 8, b"topic=a\0" + count(U32_MAX) + b"body"),
    "no body, but it is there": head(44, 8, b"topic=a\0" + count(0) + b"body"),
    "lengths first, a body longer by one": head(44, 8, count(5) + b"topic=a\0" + b"body"),
    "lengths first, a body shorter by one": head(44, 8, count(3) + b"topic=a\0" + b"body"),
    "lengths first, a body of 4 GiB": head(44, 8, count(U32_MAX) + b"topic=a\0" + b"body"),
    "a total longer by one": head(45, 8, b"topic=a\0" + count(4) + b"body") + b"x",
    "a total longer by four": head(48, 8, b"topic=a\0" + count(4) + b"body") + b"four",
    "a total shorter by one": head(43, 8, b"topic=a\0" + count(4) + b"body"),
    "a total shorter by eight": head(36, 8, b"topic=a\0" + count(4) + b"body"),
    **{f"a total of {total}": head(total, 0, count(0)) + bytes(8) for total in (29, 30, 31, 33)},
    **{f"a total of {total} with properties": head(total, 8, b"topic=a\0" + count(0)) for total in (28, 31, 35)},
}
TOO_SMALL: Final = {f"a total of {total}": head(total, 0, count(0)) for total in (3, 4, 8, 24, 27)}


def both_ways(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield one_by_one(data)


@pytest.mark.parametrize("data", DISAGREE.values(), ids=DISAGREE.keys())
def test_lengths_that_do_not_agree_are_refused(data: bytes) -> None:
    for pieces in both_ways(data):
        reader = PrefixedReader()

        assert feed(reader, pieces) == []
        assert isinstance(reader.refusal, BadFrame)
        assert str(reader.refusal) == "a message whose lengths do not agree"


@pytest.mark.parametrize("data", TOO_SMALL.values(), ids=TOO_SMALL.keys())
def test_a_total_that_no_message_has_is_refused(data: bytes) -> None:
    for pieces in both_ways(data):
        reader = PrefixedReader()

        assert feed(reader, pieces) == []
        assert "32 are the least" in str(reader.refusal)


@each_style
@pytest.mark.parametrize("data", [*DISAGREE.values(), *TOO_SMALL.values()], ids=[*DISAGREE.keys(), *TOO_SMALL.keys()])
def test_what_stands_before_a_bad_message_is_read_and_nothing_behind_it(style: Style, data: bytes) -> None:
    good = QbMessage(Kind.PUBLISH, 1, 2, b"topic=a\0", b"value")
    before, behind = written(good, style) * 2, written(good, style)
    for pieces in both_ways(before + data + behind * 3):
        reader = PrefixedReader()

        assert feed(reader, pieces) == [good, good]
        refusal = reader.refusal
        assert refusal is not None
        assert reader.feed(behind) == []
        assert reader.refusal is refusal


def test_a_sign_of_life_is_none_in_qb() -> None:
    reader = PrefixedReader()
    good = QbMessage(Kind.PUBLISH, 1, 2, b"topic=a\0", b"value")

    assert reader.feed(written(good, STYLES[0]) + frame(b"")) == [good]
    assert "of 0 bytes" in str(reader.refusal)


@pytest.mark.parametrize("total", [28, 29, 30, 31])
def test_a_total_below_32_is_too_small_of_who_counts_itself(total: int) -> None:
    reader = PrefixedReader()
    bare = QbMessage(Kind.HEARTBEAT, 1, 2, b"", b"")

    assert reader.feed(written(bare, STYLES[0]) + head(total, 0, count(total - 28) + bytes(total - 28))) == [bare]
    assert reader.refusal is not None


@pytest.mark.parametrize("total", [28, 29, 30, 31])
def test_a_total_below_32_is_right_of_who_does_not_count_itself(total: int) -> None:
    reader = PrefixedReader()
    body = bytes(total - 28)

    assert reader.feed(head(total, 0, count(len(body)) + body)) == [QbMessage(Kind.PUBLISH, 1, 2, b"", body)]
    assert reader.style == Style(counts_itself=False)


# What may stand before it, by protocol.
BEFORE: Final[dict[str, tuple[bytes, list[Frame]]]] = {
    "first": (b"", []),
    "QB": (CASES["QB: PUBLISH"].data, CASES["QB: PUBLISH"].frames),
    "Cursus": (frame(b"LIST") + frame(b"") + frame(BATCH), [b"LIST", b"", BATCH]),
}
each_before = pytest.mark.parametrize(("before", "frames"), BEFORE.values(), ids=BEFORE.keys())


@each_before
@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 1, U32_MAX])
def test_a_frame_above_the_limit_is_refused_as_soon_as_its_length_is_there(
    before: bytes, frames: list[Frame], length: int
) -> None:
    for pieces in both_ways(before + count(length)):
        reader = PrefixedReader()

        assert feed(reader, pieces) == frames
        assert str(reader.refusal) == f"a frame of {length} bytes, {FRAME_BYTES_MAX} are allowed"
        assert reader.feed(frame(b"LIST")) == []


@each_before
def test_a_frame_of_the_limit_is_none_that_is_refused(before: bytes, frames: list[Frame]) -> None:
    reader = PrefixedReader()

    assert reader.feed(before + count(FRAME_BYTES_MAX)) == frames
    assert reader.refusal is None


def test_the_limit_can_be_smaller_and_is_raised_later() -> None:
    reader = PrefixedReader(100)

    assert reader.feed(frame(bytes(range(100, 200)))) == [bytes(range(100, 200))]
    reader.bytes_max = 101
    assert reader.feed(frame(bytes(101))) == [bytes(101)]
    assert reader.feed(frame(b"LIST") + frame(bytes(102)) + frame(b"LIST")) == [b"LIST"]
    assert str(reader.refusal) == "a frame of 102 bytes, 101 are allowed"


def test_the_limit_is_for_messages_too() -> None:
    one = QbMessage(Kind.PUBLISH, 1, 2, b"topic=a\0", bytes(60))
    larger = one._replace(body=bytes(61))
    reader = PrefixedReader(100)

    assert feed(reader, one_by_one(written(one, STYLES[0]) + written(larger, STYLES[0]))) == [one]
    assert str(reader.refusal) == "a frame of 101 bytes, 100 are allowed"


# ---- what it costs

LARGE: Final = {
    "Cursus": count(60 * MIB) + b"PUBLISH orders ",
    "QB": head(60 * MIB, 8, b"topic=a\0" + count(60 * MIB - 40)),
    "QB, large properties": head(60 * MIB, 60 * MIB - 32, b"topic=a\0"),
    "QB, lengths first": head(60 * MIB, 8, count(60 * MIB - 40) + b"topic=a\0"),
}


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE.keys())
def test_nothing_is_allocated_for_what_is_only_announced(data: bytes) -> None:
    reader = PrefixedReader()

    def read() -> None:
        assert reader.feed(data) == []
        assert feed(reader, [bytes(1000) for _ in range(10)]) == []

    assert peak_bytes(read) < 40_000
    assert reader.refusal is None


def test_behind_a_refusal_nothing_is_kept() -> None:
    reader = PrefixedReader()
    tracemalloc.start()
    try:
        assert reader.feed(count(U32_MAX) + bytes(MIB)) == []
        assert feed(reader, (bytes(10_000) for _ in range(100))) == []
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert reader.refusal is not None


def in_pieces(data: bytes) -> tuple[list[Frame], int]:
    """The frames that come out of pieces of 64 KiB, and how often pieces were joined."""
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
    reader = PrefixedReader()
    seen: list[Frame] = []
    times = joins(lambda: seen.extend(feed(reader, pieces)))
    return seen, times


def test_a_large_frame_in_pieces_is_joined_once() -> None:
    payload = bytes(range(256)) * (16 * MIB // 256)

    assert in_pieces(frame(payload)) == ([payload], 1)


@each_style
def test_a_large_body_in_pieces_is_joined_once(style: Style) -> None:
    large = QbMessage(Kind.PUBLISH, 1, 2, b"topic=a\0", bytes(range(256)) * (16 * MIB // 256))

    assert in_pieces(written(large, style)) == ([large], 1)


@each_style
def test_large_properties_in_pieces_are_joined_when_both_lengths_are_there_and_at_the_end(style: Style) -> None:
    large = QbMessage(Kind.PUBLISH, 1, 2, b"x" * 16 * MIB, bytes(MIB))

    assert in_pieces(written(large, style)) == ([large], 1 if style.lengths_first else 2)


@each_case
def test_a_frame_byte_by_byte_is_joined_a_few_times_only(case: Case) -> None:
    """When there is a length, a kind, a head, a letter behind it, the other length, and all of it."""
    reader = PrefixedReader()

    assert joins(lambda: feed(reader, one_by_one(case.data))) <= 6 * len(case.frames)
