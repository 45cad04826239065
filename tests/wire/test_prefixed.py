"""The prefixed door: whichever protocol is spoken, the same bytes give the same frames however they are cut, what is
read is what was written, and what cannot be read is refused without costing more than its bytes."""

from __future__ import annotations

import gzip
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random
from types import FrameType
from typing import Any, Final, NamedTuple

import cramjam
import lz4.frame
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame, BadRequest, PeerError
from penstock.model.run import Run
from penstock.wire.cursus import (
    PLAIN_BYTES_LEAST,
    PLAIN_BYTES_MAX,
    RECORDS_MAX,
    VERBS,
    Command,
    Packing,
    Record,
    Records,
    batch,
    is_batch,
    is_command,
    open_envelope,
    pack,
    read_batch,
    read_command,
    run_batch,
    unpack,
    usage,
)
from penstock.wire.prefixed import FRAME_BYTES_MAX, PrefixedDialect, PrefixedReader, frame
from penstock.wire.qb import PROPERTIES_MAX, Kind, QbMessage, Style, message, properties, read_properties

U16_MAX: Final = (1 << 16) - 1
U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1
U32: Final = st.integers(0, U32_MAX)
U64: Final = st.integers(0, U64_MAX)
I32: Final = st.integers(-(1 << 31), (1 << 31) - 1)
I64: Final = st.integers(-(1 << 63), (1 << 63) - 1)
BYTES: Final = st.binary(max_size=40)
PLACES: Final = st.lists(st.integers(0, 1 << 16), max_size=20)
STYLES: Final = [Style(counts, first) for counts in (True, False) for first in (False, True)]

Frame = QbMessage | bytes


def feed(reader: PrefixedReader, pieces: Iterable[bytes]) -> list[Frame]:
    return [found for piece in pieces for found in reader.feed(piece)]


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def named_style(style: Style) -> str:
    counts = "counts itself" if style.counts_itself else "does not count itself"
    return f"{counts}, lengths first" if style.lengths_first else counts


each_style = pytest.mark.parametrize("style", STYLES, ids=named_style)


def written(given: QbMessage, style: Style) -> bytes:
    """As `message` writes it, but of any kind, and by another way."""
    counts = [struct.pack(">I", len(part)) for part in (given.properties, given.body)]
    if style.lengths_first:
        parts = [*counts, given.properties, given.body]
    else:
        parts = [counts[0], given.properties, counts[1], given.body]
    behind = struct.pack(">IQQ", given.kind, given.sequence, given.timestamp_ms) + b"".join(parts)
    return struct.pack(">I", len(behind) + (4 if style.counts_itself else 0)) + behind


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` held at once, whether or not it refused."""
    tracemalloc.start()
    try:
        with suppress(PeerError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def methods_called(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Every method of bytes that is called, and how many bytes it is called on: work that no clock must measure."""
    seen: list[tuple[str, int]] = []

    def see(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), bytes):
            seen.append((called.__name__, len(called.__self__)))

    sys.setprofile(see)
    try:
        with suppress(PeerError):
            call()
    finally:
        sys.setprofile(None)
    return seen


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
BATCH: Final = batch(b"orders", 1, [Record(7, b"value", b"key"), Record(8, b"", sequence=3)], "all")

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


# ---- how a QB client writes


@each_style
@pytest.mark.parametrize("block", [b"topic=a\0", b"a=\0", b"a=1\0b=\0", b"x"])
@pytest.mark.parametrize("body", [b"", b"body", bytes(64)])
def test_how_a_client_writes_is_found_out(style: Style, block: bytes, body: bytes) -> None:
    data = message(Kind.PUBLISH, 5, 10, block, body, style)
    for pieces in ([data], one_by_one(data)):
        reader = PrefixedReader()

        assert feed(reader, pieces) == [QbMessage(Kind.PUBLISH, 5, 10, block, body)]
        assert reader.style == style


@each_style
def test_without_properties_only_the_total_tells(style: Style) -> None:
    reader = PrefixedReader()

    reader.feed(message(Kind.PUBLISH, 5, 10, b"", b"body", style))

    assert reader.style == Style(style.counts_itself, lengths_first=False)


@each_style
@pytest.mark.parametrize("body", [b"", b"body"])
def test_the_layout_is_found_out_behind_messages_without_properties(style: Style, body: bytes) -> None:
    reader = PrefixedReader()
    bare, full = QbMessage(Kind.HEARTBEAT, 1, 2, b"", body), QbMessage(Kind.PUBLISH, 3, 4, b"topic=a\0", b"value")
    data = [written(each, style) for each in (bare, bare, full, bare)]

    assert feed(reader, data) == [bare, bare, full, bare]
    assert reader.style == style


OTHERS: Final = [(style, other) for style in STYLES for other in STYLES if style != other]


@pytest.mark.parametrize(("style", "other"), OTHERS, ids=named_style)
def test_a_client_sticks_to_how_it_writes(style: Style, other: Style) -> None:
    first, second = QbMessage(9, 1, 2, b"topic=a\0", b"value"), QbMessage(9, 3, 4, b"topic=b\0", b"other")
    data = written(first, style) + written(second, other)
    for pieces in ([data], one_by_one(data)):
        reader = PrefixedReader()

        assert feed(reader, pieces) == [first]
        assert reader.style == style
        assert str(reader.refusal) == "a message whose lengths do not agree"


@pytest.mark.parametrize("counts", [True, False])
def test_a_client_that_counts_itself_once_does_so_always(counts: bool) -> None:
    bare = QbMessage(Kind.HEARTBEAT, 1, 2, b"", b"")
    reader = PrefixedReader()

    assert reader.feed(written(bare, Style(counts)) + written(bare, Style(not counts)) + bytes(8)) == [bare]
    assert reader.refusal is not None


# Numbers that might be taken for lengths, and any others.
WORDS: Final = st.lists((st.integers(0, 80) | U32).map(lambda word: struct.pack(">I", word)), max_size=6).map(b"".join)
BODIES: Final = BYTES | WORDS | st.integers(0, 80).map(bytes)
PRINTABLE: Final = st.text(st.characters(min_codepoint=0x20, exclude_categories=["C"]), max_size=20).map(str.encode)
NAMES: Final = st.text(st.characters(min_codepoint=0x21, exclude_characters="=", exclude_categories=["C"]), min_size=1)
VALUES: Final = st.text(st.characters(min_codepoint=0x20, exclude_categories=["C"]), max_size=5)
BLOCKS: Final = st.dictionaries(NAMES, VALUES, max_size=3).map(properties)
MESSAGES: Final = st.lists(st.builds(QbMessage, st.integers(0, 255), U64, U64, PRINTABLE | BLOCKS, BODIES), max_size=5)


@given(st.sampled_from(STYLES), MESSAGES, PLACES)
@settings(max_examples=250)
@example(STYLES[1], [QbMessage(9, 1, 2, b"topic=a\0", bytes(40))], [])
@example(STYLES[2], [QbMessage(9, 1, 2, b"topic=a\0", struct.pack(">I", 4) * 8)], [])
def test_messages_are_the_same_however_they_are_written_and_cut(
    style: Style, messages: list[QbMessage], places: list[int]
) -> None:
    data = b"".join(written(each, style) for each in messages)
    has_layout = any(each.properties for each in messages)
    for pieces in ([data], one_by_one(data), cut(data, places)):
        reader = PrefixedReader()

        assert feed(reader, pieces) == messages
        assert reader.refusal is None
        if messages:
            assert reader.style == Style(style.counts_itself, style.lengths_first and has_layout)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("block", [b"a=\0", b"k=v\0b=\0"])
@pytest.mark.parametrize("more", [-4, 0, 4])
def test_properties_that_could_be_the_length_of_the_body_are_not_taken_for_it(
    counts: bool, block: bytes, more: int
) -> None:
    """Lengths first, and behind a name of one letter nothing: then zero, letter, =, zero stand where the other layout
    has the length, which is a length that is allowed."""
    body = bytes(int.from_bytes(b"\0" + block[-3:], "big") + more)
    reader = PrefixedReader()

    [found] = reader.feed(message(Kind.PUBLISH, 1, 2, block, body, Style(counts, lengths_first=True))) or [b""]

    assert reader.style == Style(counts, lengths_first=True)
    assert found == QbMessage(Kind.PUBLISH, 1, 2, block, body)


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

MIB: Final = 1 << 20
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


# ---- properties

TEXTS: Final = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
FIELDS: Final = st.dictionaries(TEXTS.filter(lambda name: name and "=" not in name), TEXTS, max_size=6)


@given(FIELDS)
@settings(max_examples=150)
@example({"a": "", "b": "=", "c": "x=y=z", "ключ": "значение", " ": "\n\r\t"})
def test_properties_are_read_as_they_were_written(fields: dict[str, str]) -> None:
    block = properties(fields)

    assert read_properties(block) == fields
    assert [*read_properties(block)] == [*fields]
    assert block == b"".join(f"{name}={value}\0".encode() for name, value in fields.items())


def test_a_value_is_written_as_its_text() -> None:
    assert properties({"offset": 7, "version": 1.0, "none": None}) == b"offset=7\0version=1.0\0none=None\0"


PROPERTIES: Final[dict[bytes, dict[str, str]]] = {
    b"": {},
    b"a=1\0": {"a": "1"},
    b"a=1": {"a": "1"},
    b"a=1\0b=2": {"a": "1", "b": "2"},
    b"a=\0": {"a": ""},
    b"a=": {"a": ""},
    b"a=b=c\0": {"a": "b=c"},
    b"a==\0": {"a": "="},
    b"a=1\0b=2\0a=3\0": {"a": "3", "b": "2"},
    b" a = 1 \0": {" a ": " 1 "},
    b"a=\n\0": {"a": "\n"},
    "ü=ß\0".encode(): {"ü": "ß"},
}


@pytest.mark.parametrize(("block", "fields"), PROPERTIES.items())
def test_properties_are_read_from_bytes(block: bytes, fields: dict[str, str]) -> None:
    assert read_properties(block) == fields


BAD_PROPERTIES: Final[dict[bytes, str]] = {
    b"a": "Invalid properties: 'a' is not key=value",
    b"a\0": "Invalid properties: 'a' is not key=value",
    b"=1\0": "Invalid properties: '=1' is not key=value",
    b"=": "Invalid properties: '=' is not key=value",
    b"\0": "Invalid properties: '' is not key=value",
    b"a=1\0\0": "Invalid properties: '' is not key=value",
    b"\0a=1\0": "Invalid properties: '' is not key=value",
    b"a=1\0\0b=2\0": "Invalid properties: '' is not key=value",
    b"a=1\0b\0c=2\0": "Invalid properties: 'b' is not key=value",
    b"a=\xff\0": "Invalid properties: they are not UTF-8",
    b"\xc3=1\0": "Invalid properties: they are not UTF-8",
    b"x" * 5000: f"Invalid properties: {'x' * 100!r} is not key=value",
}


@pytest.mark.parametrize(("block", "text"), BAD_PROPERTIES.items(), ids=lambda given: repr(given[:20]))
def test_properties_that_are_none_are_refused(block: bytes, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_properties(block)

    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["", "=", "a=b", "a\0", "\0"])
def test_a_name_that_would_be_read_as_something_else_is_not_sent(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot be sent"):
        properties({"good": 1, name: "value"})


@pytest.mark.parametrize("value", ["\0", "a\0b=c", "end\0"])
def test_a_value_that_would_be_read_as_something_else_is_not_sent(value: str) -> None:
    with pytest.raises(BadRequest, match="property 'name' cannot be sent"):
        properties({"name": value})


@pytest.mark.parametrize("fields", [{"a\ud800": "b"}, {"a": "\udcff"}])
def test_what_is_not_text_is_not_sent(fields: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="a property is not text"):
        properties(fields)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_whatever_comes_as_properties_is_read_or_refused(block: bytes) -> None:
    with suppress(BadRequest):
        assert read_properties(properties(read_properties(block))) == read_properties(block)


# ---- how Cursus packs its frames

PACKED: Final = [Packing.GZIP, Packing.LZ4, Packing.SNAPPY]
each_packing = pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
PAYLOADS: Final = [b"", b"LIST", BATCH, bytes(100_000), Random(1).randbytes(300_000)]


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_a_frame_is_unpacked_as_it_was_packed(packing: Packing, payload: bytes) -> None:
    packed = pack(payload, packing)

    assert packed.startswith(packing.value)
    assert unpack(packed) == (payload, packing)


@given(st.binary(max_size=2000), st.sampled_from(PACKED))
@settings(max_examples=100)
def test_any_bytes_are_unpacked_as_they_were_packed(payload: bytes, packing: Packing) -> None:
    assert unpack(pack(payload, packing)) == (payload, packing)


@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_others_can_unpack_it_and_their_packing_is_unpacked(payload: bytes) -> None:
    assert gzip.decompress(pack(payload, Packing.GZIP)) == payload
    assert lz4.frame.decompress(pack(payload, Packing.LZ4)) == payload
    assert unpack(gzip.compress(payload, 1)) == (payload, Packing.GZIP)
    for options in ({"store_size": False}, {"content_checksum": True}, {"block_linked": False}, {"block_size": 5}):
        assert unpack(lz4.frame.compress(payload, **options)) == (payload, Packing.LZ4)


@pytest.mark.parametrize("payload", [b"", b"\x1f", b"\x04\x22\x4d", b"LIST", b"\xff\x06\0\0sNaPpY", b"\x82SNAPP"])
def test_what_is_not_packed_is_left_alone(payload: bytes) -> None:
    assert unpack(payload) == (payload, Packing.NONE)


PACKERS: Final[dict[Packing, Callable[[bytes], bytes]]] = {
    Packing.GZIP: lambda payload: gzip.compress(payload, 1),
    Packing.LZ4: lz4.frame.compress,
}


@pytest.mark.parametrize("packing", PACKERS, ids=lambda packing: packing.name)
def test_so_much_is_unpacked_and_no_more(packing: Packing) -> None:
    """A little in any case; else 64 bytes for each packed one; and a limit above all."""
    rough = Random(1).randbytes(PLAIN_BYTES_MAX // 32)
    for size, whole in ((PLAIN_BYTES_LEAST, b""), (PLAIN_BYTES_MAX, rough)):
        most, more = (PACKERS[packing](whole + bytes(count - len(whole))) for count in (size, size + 1))
        assert len(unpack(most)[0]) == size
        with pytest.raises(BadFrame, match=f"more than {size} bytes"):
            unpack(more)


@pytest.mark.parametrize("packing", PACKERS, ids=lambda packing: packing.name)
def test_a_bomb_is_not_unpacked_beyond_the_limit(packing: Packing) -> None:
    for bomb in (PACKERS[packing](bytes(64 * MIB)), PACKERS[packing](Random(1).randbytes(MIB // 2) + bytes(64 * MIB))):
        with pytest.raises(BadFrame, match="unpacks to more than"):
            unpack(bomb)
        assert peak_bytes(lambda bomb=bomb: unpack(bomb)) < 40 * MIB  # type: ignore[misc]


def _block(payload: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(payload))


@pytest.mark.parametrize(
    "payload",
    [
        *(b"PUBLISH t %s" % bytes(size) for size in (0, 1, 20, 49, 50, 51, 118, 200, 15_920, 70_000)),
        *(f"{verb} a".encode() for verb in VERBS),
        b"DELETE ab",  # packed, it is the same text behind blanks
        b"LIST",
        BATCH,
        batch(b"t", 0, [Record(0, bytes(15_930 - 56))]),
        b"\0\x06orders" + bytes(100),
    ],
    ids=len,
)
def test_a_block_of_snappy_is_known_by_what_is_in_it(payload: bytes) -> None:
    assert unpack(_block(payload)) == (payload, Packing.SNAPPY)


@pytest.mark.parametrize(
    "payload", [b"  CREATE orders 4", b"FLY somewhere, whatever that may be", BATCH, b"\0\x04LIST"]
)
def test_text_that_looks_like_a_block_is_left_alone(payload: bytes) -> None:
    assert unpack(payload) == (payload, Packing.NONE)


def test_so_much_snappy_is_unpacked_and_no_more() -> None:
    """The 1 MiB that any frame may unpack to, or 64 times its size, which snappy never reaches; and the upper limit."""
    rough = b"PUBLISH t " + Random(1).randbytes(MIB)
    for size in (PLAIN_BYTES_MAX, PLAIN_BYTES_MAX + 1):
        payload = rough + bytes(size - len(rough))
        blocks = [payload[at : at + (32 << 10)] for at in range(0, size, 32 << 10)]
        marked = Packing.SNAPPY.value + bytes(8) + b"".join(frame(_block(block)) for block in blocks)
        for packed in (_block(payload), marked):
            if size <= PLAIN_BYTES_MAX:
                assert unpack(packed) == (payload, Packing.SNAPPY)
            else:
                with pytest.raises(BadFrame, match=f"more than {PLAIN_BYTES_MAX} bytes"):
                    unpack(packed)


def test_a_length_that_snappy_claims_allocates_nothing() -> None:
    bomb = b"\xff\xff\xff\xff\x0f" + _block(b"PUBLISH t x")[1:]
    many = Packing.SNAPPY.value + bytes(8) + frame(bomb) * 3
    for packed in (bomb, many):
        with pytest.raises(BadFrame, match="unpacks to more than"):
            unpack(packed)
        assert peak_bytes(lambda packed=packed: unpack(packed)) < MIB  # type: ignore[misc]


@pytest.mark.parametrize(
    "blocks", [b"\0", frame(b""), frame(b"\5\x10PUB")[:-1], frame(b"\5\x10PUB"), frame(_block(b"x")) * 16_385]
)
def test_blocks_of_snappy_that_are_none_are_refused(blocks: bytes) -> None:
    with pytest.raises(BadFrame, match="a frame that cannot be unpacked"):
        unpack(Packing.SNAPPY.value + bytes(8) + blocks)


def test_without_its_library_snappy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [pack(b"LIST", Packing.SNAPPY), _block(b"CREATE orders 4")]
    text = _block(b"DELETE ab")
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for payload in packed:
        with pytest.raises(BadFrame, match=r"install penstock\[snappy\]"):
            unpack(payload)
    assert unpack(text) == (text, Packing.NONE)


def test_a_batch_has_so_many_messages_and_no_more() -> None:
    most, more = (batch(b"t", 0, [Record(0, b"")] * count) for count in (RECORDS_MAX, RECORDS_MAX + 1))
    assert len(read_batch(most).records) == RECORDS_MAX
    with pytest.raises(BadFrame, match=f"a batch of {RECORDS_MAX + 1} messages, {RECORDS_MAX} are allowed"):
        read_batch(more)


def test_a_message_has_so_many_properties_and_no_more() -> None:
    most, more = (b"".join(b"%d=x\0" % name for name in range(count)) for count in (PROPERTIES_MAX, PROPERTIES_MAX + 1))
    assert len(read_properties(most)) == PROPERTIES_MAX
    with pytest.raises(BadRequest, match=f"{PROPERTIES_MAX + 1} of them, {PROPERTIES_MAX} are allowed"):
        read_properties(more)


def test_a_reader_may_take_some_frames_at_a_time() -> None:
    reader = PrefixedReader(frames_max=3)
    data = b"".join(frame(b"%d" % number) for number in range(8))
    found = [reader.feed(data[:-3])]
    while reader.has_more:
        found.append(reader.feed(b""))
    found.append(reader.feed(data[-3:]))
    assert found == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"], [b"7"]]
    assert not reader.has_more


@each_packing
@pytest.mark.parametrize("payload", [b"", b"LIST", bytes(2000), Random(2).randbytes(200)], ids=len)
def test_what_is_cut_off_is_not_unpacked(packing: Packing, payload: bytes) -> None:
    packed = pack(payload, packing)
    # Snappy's framing says of each block where it ends, and of the frame it does not.
    whole = {16, len(packed)} if packing is Packing.SNAPPY else {len(packed)}
    for end in set(range(len(packing.value), len(packed))) - whole:
        with pytest.raises(BadFrame, match="a frame that"):
            unpack(packed[:end])


@each_packing
def test_what_is_damaged_is_not_unpacked(packing: Packing) -> None:
    packed = pack(b"PUBLISH orders hello", packing)
    for data in (packing.value + b"garbage", packing.value + bytes(100), packed[:12] + b"\xff" * 20):
        with pytest.raises(BadFrame):
            unpack(data)


def test_a_wrong_checksum_is_refused() -> None:
    packed = pack(b"PUBLISH orders hello", Packing.GZIP)

    with pytest.raises(BadFrame, match="cannot be unpacked"):
        unpack(packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:])


@each_packing
@pytest.mark.parametrize("behind", [b"x", b"garbage", bytes(8)])
def test_what_goes_on_behind_its_end_is_refused(packing: Packing, behind: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(pack(b"LIST", packing) + behind)


@each_packing
def test_what_is_packed_behind_its_end_is_not_lost(packing: Packing) -> None:
    """Refused, or unpacked too."""
    two = pack(b"PUBLISH orders one", packing) + pack(b" and two", packing)
    try:
        payload, _ = unpack(two)
    except BadFrame:
        return
    assert payload == b"PUBLISH orders one and two"


@given(st.sampled_from([*(packing.value for packing in Packing), b"\x1f\x8b\x08"]), st.binary(max_size=99))
@settings(max_examples=300)
def test_whatever_comes_packed_is_unpacked_or_refused(begin: bytes, rest: bytes) -> None:
    with suppress(BadFrame):
        payload, packing = unpack(begin + rest)
        assert packing is not Packing.NONE or payload == begin + rest


# ---- Cursus' commands, as documented

ORDERED: Final[dict[bytes, Command]] = {
    b"CREATE orders": Command("CREATE", {"topic": "orders"}),
    b"CREATE orders 8": Command("CREATE", {"topic": "orders", "partitions": "8"}),
    b"DELETE orders": Command("DELETE", {"topic": "orders"}),
    b"LIST": Command("LIST", {}),
    b"DESCRIBE orders": Command("DESCRIBE", {"topic": "orders"}),
    b"SUBSCRIBE orders": Command("SUBSCRIBE", {"topic": "orders"}),
    b"SUBSCRIBE orders g": Command("SUBSCRIBE", {"topic": "orders", "group": "g"}),
    b"SUBSCRIBE orders g 3": Command("SUBSCRIBE", {"topic": "orders", "group": "g", "consumers": "3"}),
    b"PUBLISH orders hello": Command("PUBLISH", {"topic": "orders"}, b"hello"),
    b"CONSUME orders 0 10": Command("CONSUME", {"topic": "orders", "partition": "0", "offset": "10"}),
    b"CONSUME ord*s? 0 10": Command("CONSUME", {"topic": "ord*s?", "partition": "0", "offset": "10"}),
    b"CONSUME orders 0 10 follow": Command(
        "CONSUME", {"topic": "orders", "partition": "0", "offset": "10", "follow": "follow"}
    ),
    b"STREAM orders 0": Command("STREAM", {"topic": "orders", "partition": "0"}),
    b"STREAM orders 0 10": Command("STREAM", {"topic": "orders", "partition": "0", "offset": "10"}),
    b"REGISTER_GROUP orders g": Command("REGISTER_GROUP", {"topic": "orders", "group": "g"}),
    b"JOIN_GROUP orders g m": Command("JOIN_GROUP", {"topic": "orders", "group": "g", "member": "m"}),
    **{
        f"{verb} orders g m 3".encode(): Command(
            verb, {"topic": "orders", "group": "g", "member": "m", "generation": "3"}
        )
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    **{
        f"{verb} orders g m".encode(): Command(verb, {"topic": "orders", "group": "g", "member": "m"})
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    b"COMMIT_OFFSET orders 0 g 10": Command(
        "COMMIT_OFFSET", {"topic": "orders", "partition": "0", "group": "g", "offset": "10"}
    ),
    b"FETCH_OFFSET orders 0 g": Command("FETCH_OFFSET", {"topic": "orders", "partition": "0", "group": "g"}),
    b"BATCH_COMMIT orders g m 3 P0:100,P1:200": Command(
        "BATCH_COMMIT",
        {"topic": "orders", "group": "g", "member": "m", "generation": "3", "offsets": "P0:100,P1:200"},
    ),
    b"GROUP_STATUS g": Command("GROUP_STATUS", {"group": "g"}),
    b"GROUP_STATUS g orders": Command("GROUP_STATUS", {"group": "g", "topic": "orders"}),
    b"AUTH": Command("AUTH", {}),
    b"HELP": Command("HELP", {}),
    b"EXIT": Command("EXIT", {}),
}


def by_name(verb: str, message: bytes = b"", **arguments: str) -> Command:
    return Command(verb, arguments, message, is_named=True)


NAMED: Final[dict[bytes, Command]] = {
    b"CREATE topic=orders": by_name("CREATE", topic="orders"),
    b"CREATE topic=orders partitions=8": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE partitions=8 topic=orders": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE topic=orders retention_hours=2 retention_bytes=1000": by_name(
        "CREATE", topic="orders", retention_hours="2", retention_bytes="1000"
    ),
    b"DELETE topic=orders": by_name("DELETE", topic="orders"),
    b"DESCRIBE topic=orders": by_name("DESCRIBE", topic="orders"),
    b"SUBSCRIBE topic=orders group=g consumers=3": by_name("SUBSCRIBE", topic="orders", group="g", consumers="3"),
    b"PUBLISH topic=orders message=hello": by_name("PUBLISH", b"hello", topic="orders"),
    b"PUBLISH topic=a acks=all producerId=p seqNum=1 epoch=2 isIdempotent=true key=k partition=0 message=hi": by_name(
        "PUBLISH",
        b"hi",
        topic="a",
        acks="all",
        producerId="p",
        seqNum="1",
        epoch="2",
        isIdempotent="true",
        key="k",
        partition="0",
    ),
    b"CONSUME topic=orders partition=0 offset=10 group=g member=m": by_name(
        "CONSUME", topic="orders", partition="0", offset="10", group="g", member="m"
    ),
    b"CONSUME topic=orders partition=0 offset=10 follow=true autoOffsetReset=latest batch=5 wait_ms=100": by_name(
        "CONSUME",
        topic="orders",
        partition="0",
        offset="10",
        follow="true",
        autoOffsetReset="latest",
        batch="5",
        wait_ms="100",
    ),
    b"STREAM topic=orders partition=0 group=g member=m": by_name(
        "STREAM", topic="orders", partition="0", group="g", member="m"
    ),
    b"STREAM topic=orders partition=0 offset=7": by_name("STREAM", topic="orders", partition="0", offset="7"),
    b"REGISTER_GROUP topic=orders group=g": by_name("REGISTER_GROUP", topic="orders", group="g"),
    b"JOIN_GROUP topic=orders group=g member=m": by_name("JOIN_GROUP", topic="orders", group="g", member="m"),
    **{
        f"{verb} topic=orders group=g member=m generation=3".encode(): by_name(
            verb, topic="orders", group="g", member="m", generation="3"
        )
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    b"COMMIT_OFFSET topic=orders partition=0 group=g offset=10 generation=3 member=m": by_name(
        "COMMIT_OFFSET", topic="orders", partition="0", group="g", offset="10", generation="3", member="m"
    ),
    b"FETCH_OFFSET topic=orders partition=0 group=g": by_name("FETCH_OFFSET", topic="orders", partition="0", group="g"),
    b"BATCH_COMMIT topic=orders group=g generation=3 member=m P0:100,P1:200": by_name(
        "BATCH_COMMIT", topic="orders", group="g", generation="3", member="m", offsets="P0:100,P1:200"
    ),
    b"BATCH_COMMIT topic=orders group=g offsets=P0:100 generation=3 member=m": by_name(
        "BATCH_COMMIT", topic="orders", group="g", generation="3", member="m", offsets="P0:100"
    ),
    b"GROUP_STATUS group=g": by_name("GROUP_STATUS", group="g"),
    b"GROUP_STATUS topic=orders group=g": by_name("GROUP_STATUS", topic="orders", group="g"),
    b"AUTH user=u password=p": by_name("AUTH", user="u", password="p"),
    b"AUTH token=t": by_name("AUTH", token="t"),
}

BLANKS: Final[dict[bytes, Command]] = {
    b"LIST\n": Command("LIST", {}),
    b"\r\n LIST \r\n": Command("LIST", {}),
    b"\tCREATE \t orders\r\n 8\n": Command("CREATE", {"topic": "orders", "partitions": "8"}),
    b"CREATE\norders": Command("CREATE", {"topic": "orders"}),
    b"  CREATE   topic=orders \t partitions=8  ": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE topic=orders\r\n": by_name("CREATE", topic="orders"),
    b"CREATE topic=": by_name("CREATE", topic=""),
    "CREATE grüße".encode(): Command("CREATE", {"topic": "grüße"}),
    "CREATE topic=grüße".encode(): by_name("CREATE", topic="grüße"),
}
EQUALS: Final[dict[bytes, Command]] = {
    b"CREATE a=b": Command("CREATE", {"topic": "a=b"}),
    b"CREATE a=b 3": Command("CREATE", {"topic": "a=b", "partitions": "3"}),
    b"CREATE =b": Command("CREATE", {"topic": "=b"}),
    b"CREATE topic=a=b": by_name("CREATE", topic="a=b"),
    b"CREATE topic==": by_name("CREATE", topic="="),
    b"CREATE Topic=a": Command("CREATE", {"topic": "Topic=a"}),
    b"DELETE partitions=1": Command("DELETE", {"topic": "partitions=1"}),
    b"PUBLISH a=b topic=c": Command("PUBLISH", {"topic": "a=b"}, b"topic=c"),
    b"PUBLISH orders topic=c message=d": Command("PUBLISH", {"topic": "orders"}, b"topic=c message=d"),
    b"SUBSCRIBE orders group=g": Command("SUBSCRIBE", {"topic": "orders", "group": "group=g"}),
}
COMMANDS: Final = {**ORDERED, **NAMED, **BLANKS, **EQUALS}


@pytest.mark.parametrize(("payload", "command"), COMMANDS.items(), ids=lambda given: repr(given)[:60])
def test_a_command_is_read(payload: bytes, command: Command) -> None:
    assert read_command(payload) == command
    assert is_command(payload)


def test_the_tables_above_have_every_verb_in_both_forms() -> None:
    assert {command.verb for command in ORDERED.values()} == set(VERBS)
    assert {command.verb for command in NAMED.values()} == set(VERBS) - {"LIST", "HELP", "EXIT"}


@pytest.mark.parametrize("payload", [*ORDERED, *NAMED])
def test_the_case_of_a_verb_does_not_matter(payload: bytes) -> None:
    verb, blank, rest = payload.partition(b" ")
    for written_verb in (verb.lower(), verb.title(), verb.swapcase()):
        assert read_command(written_verb + blank + rest) == read_command(payload)
        assert is_command(written_verb + blank + rest)


PUBLISHED: Final[dict[str, bytes]] = {
    "nothing": b"",
    "one blank": b" ",
    "blanks around": b"  hello  world  ",
    "lines around": b"\r\nhello\r\nworld\r\n",
    "a tab first": b"\thello",
    "every byte": bytes(range(256)),
    "bytes that are not UTF-8": b"\xff\xfe\x80",
    "zero bytes": bytes(5),
    "message= within": b"hello message=again",
    "message= first": b"message=again",
    "parameters": b"key=value topic=other partition=9 ",
    "a command": b"PUBLISH other hello",
}


@pytest.mark.parametrize("value", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_what_is_published_stays_as_it_came(value: bytes) -> None:
    ordered, named = Command("PUBLISH", {"topic": "a"}, value), by_name("PUBLISH", value, topic="a", key="message")

    assert read_command(b"PUBLISH a " + value) == ordered
    assert read_command(b" publish   a " + value) == ordered
    assert read_command(b"PUBLISH topic=a key=message message=" + value) == named
    assert read_command(b"\npublish  topic=a \r\n\tkey=message  message=" + value) == named


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=300)
def test_any_bytes_can_be_published(value: bytes, is_named: bool) -> None:
    begin = b"PUBLISH topic=a message=" if is_named else b"PUBLISH a "

    assert read_command(begin + value) == Command("PUBLISH", {"topic": "a"}, value, is_named)


BAD_COMMANDS: Final[dict[bytes, str]] = {
    **dict.fromkeys((b"", b" ", b"\r\n\t "), "empty command"),
    b"NONSENSE": "unknown command: NONSENSE. Type HELP for available commands.",
    b"nonsense and more": "unknown command: NONSENSE. Type HELP for available commands.",
    b"LISTS": "unknown command: LISTS. Type HELP for available commands.",
    b"LIST\0": "unknown command: LIST\0. Type HELP for available commands.",
    b"\xff": "unknown command: \ufffd. Type HELP for available commands.",
    b"topic=a": "unknown command: TOPIC=A. Type HELP for available commands.",
    **dict.fromkeys((b"CREATE", b"CREATE ", b"DELETE", b"DESCRIBE\n", b"SUBSCRIBE"), "missing topic name"),
    **{
        payload: f"invalid {payload.split()[0].decode()} syntax. Expected: {expected}"
        for expected, payloads in {
            "CREATE <topic> [partitions] [retention_hours=] [retention_bytes=]": (b"CREATE a 1 2", b"CREATE a x=b 3"),
            "DELETE <topic>": (b"DELETE a b",),
            "LIST": (b"LIST a", b"LIST topic=a"),
            "DESCRIBE <topic>": (b"DESCRIBE a b",),
            "SUBSCRIBE <topic> [group] [consumers]": (b"SUBSCRIBE a b 1 2",),
            "PUBLISH <topic> <message> [key=] [partition=] [acks=] [producerId=] [seqNum=] [epoch=] [isIdempotent=]": (
                b"PUBLISH",
                b"PUBLISH ",
                b"PUBLISH a",
                b"PUBLISH  a",
                b"PUBLISH topic=a",
                b"PUBLISH topic=a key=b ",
                b"PUBLISH key=b",
            ),
            "CONSUME <topic> <partition> <offset> [follow] [group=] [member=] [autoOffsetReset=] [batch=] [wait_ms=]": (
                b"CONSUME",
                b"CONSUME a",
                b"CONSUME a 0",
                b"CONSUME a 0 0 follow more",
            ),
            "STREAM <topic> <partition> [offset] [group=] [member=]": (b"STREAM", b"STREAM a", b"STREAM a 0 0 0"),
            "REGISTER_GROUP <topic> <group>": (b"REGISTER_GROUP a", b"REGISTER_GROUP a b c"),
            "JOIN_GROUP <topic> <group> <member>": (b"JOIN_GROUP", b"JOIN_GROUP a b", b"JOIN_GROUP a b c d"),
            "SYNC_GROUP <topic> <group> <member> [generation]": (b"SYNC_GROUP a b", b"SYNC_GROUP a b c d e"),
            "LEAVE_GROUP <topic> <group> <member> [generation]": (b"LEAVE_GROUP a b", b"LEAVE_GROUP a b c d e"),
            "HEARTBEAT <topic> <group> <member> [generation]": (b"HEARTBEAT", b"HEARTBEAT a b c d e"),
            "COMMIT_OFFSET <topic> <partition> <group> <offset> [member=] [generation=]": (
                b"COMMIT_OFFSET a 0 g",
                b"COMMIT_OFFSET a 0 g 1 2",
            ),
            "FETCH_OFFSET <topic> <partition> <group>": (b"FETCH_OFFSET a 0", b"FETCH_OFFSET a 0 g 1"),
            "BATCH_COMMIT <topic> <group> <member> <generation> <offsets>": (
                b"BATCH_COMMIT a g m 1",
                b"BATCH_COMMIT a g m 1 P0:1 P1:2",
            ),
            "GROUP_STATUS <group> [topic]": (b"GROUP_STATUS", b"GROUP_STATUS g orders more"),
            "AUTH [user=] [password=] [token=]": (b"AUTH me", b"AUTH name=me", b"AUTH me token=t"),
            "HELP": (b"HELP me",),
            "EXIT": (b"EXIT now",),
        }.items()
        for payload in payloads
    },
    **{
        payload: f"unknown parameter, or one that came before: {shown}. Expected: {usage(payload.split()[0].decode())}"
        for payload, shown in {
            b"CREATE topic=a nonsense=1": "nonsense=1",
            b"CREATE topic=a Partitions=1": "Partitions=1",
            b"CREATE topic=a 4": "4",
            b"CREATE topic=a =4": "=4",
            b"CREATE topic=a \xff=4": "\ufffd=4",
            b"CREATE topic=a topic=b": "topic=b",
            b"DELETE topic=a partitions=4": "partitions=4",
            b"DELETE topic=a b": "b",
            b"PUBLISH topic=a message": "message",
            b"PUBLISH topic=a QbMessage=b": "QbMessage=b",
            b"PUBLISH topic=a key=b topic=a message=c": "topic=a",
            b"CONSUME topic=a message=b": "message=b",
            b"BATCH_COMMIT topic=a P0:1 P1:2": "P1:2",
            b"BATCH_COMMIT topic=a P0:1 offsets=P1:2": "offsets=P1:2",
            b"AUTH user=u password=p me": "me",
        }.items()
    },
    **dict.fromkeys(
        (
            b"CREATE \xff",
            b"CREATE topic=\xff",
            b"PUBLISH \xff hello",
            b"PUBLISH topic=\xff message=hello",
            b"PUBLISH topic=a key=\xff message=hello",
            b"CONSUME a 0 \xff",
            b"BATCH_COMMIT topic=a \xff",
        ),
        "a command is UTF-8, but for what is published",
    ),
}


@pytest.mark.parametrize(("payload", "text"), BAD_COMMANDS.items(), ids=lambda given: repr(given)[:60])
def test_a_command_that_is_none_is_refused_with_what_cursus_says(payload: bytes, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_command(payload)

    assert str(caught.value) == text


@pytest.mark.parametrize("payload", [b"", b" ", b"NONSENSE", b"LISTS", b"\xff\xfe", b"\0LIST", BATCH, bytes(40)])
def test_what_does_not_begin_with_a_verb_is_no_command(payload: bytes) -> None:
    assert not is_command(payload)


@pytest.mark.parametrize("verb", VERBS)
def test_how_a_verb_is_used_begins_with_it(verb: str) -> None:
    assert usage(verb).split(" ")[0] == verb


@pytest.mark.parametrize("payload", [b"\xff" * 100_000, b"CREATE topic=a " + b"\xff" * 100_000])
def test_a_refusal_is_short_whatever_is_refused(payload: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_command(payload)

    assert len(str(caught.value)) < 1000


def test_words_that_are_too_many_cost_no_object_each() -> None:
    payload = b"CREATE " + b"ab " * 100_000

    assert peak_bytes(lambda: read_command(payload)) < 3 * len(payload)


def test_a_command_is_read_in_time_that_grows_with_its_bytes() -> None:
    def work(times: int) -> int:
        payload = b"PUBLISH topic=a " + b"key=value " * times + b"message=hello"
        return sum(size for _, size in methods_called(lambda: read_command(payload)))

    assert work(400) <= 3 * work(200)


@given(st.sampled_from([*COMMANDS, *BAD_COMMANDS]), st.integers(0, 100), st.integers(0, 10), st.binary(max_size=10))
@settings(max_examples=300)
def test_whatever_comes_as_a_command_is_read_or_refused(payload: bytes, at: int, removed: int, put: bytes) -> None:
    changed = payload[:at] + put + payload[at + removed :]
    try:
        assert read_command(changed).verb in VERBS
    except BadRequest:
        return
    assert is_command(changed)


# ---- envelopes

ENVELOPES: Final[dict[bytes, tuple[bytes, bytes]]] = {
    b"": (b"", b""),
    b"LIST": (b"", b"LIST"),
    b" LIST": (b"", b" LIST"),
    b"\tLIST": (b"", b"\tLIST"),
    b"\r\nLIST": (b"", b"\r\nLIST"),
    b"\nLIST": (b"", b"\nLIST"),
    b"\xffLIST": (b"", b"\xffLIST"),
    b"\0\0": (b"", b""),
    b"\0\0LIST": (b"", b"LIST"),
    b"\0\x01a": (b"a", b""),
    b"\0\x06ordersPUBLISH orders hello": (b"orders", b"PUBLISH orders hello"),
    b"\0\x06orders\0\x06orders": (b"orders", b"\0\x06orders"),
    b"\0\x02\xff\0\xfe": (b"\xff\0", b"\xfe"),
    b"\x01\x02" + b"t" * 258 + b"LIST": (b"t" * 258, b"LIST"),
    b"\x1f\xff" + b"t" * 0x1FFF: (b"t" * 0x1FFF, b""),
}


@pytest.mark.parametrize(("payload", "parts"), ENVELOPES.items(), ids=lambda given: repr(given)[:40])
def test_an_envelope_is_opened(payload: bytes, parts: tuple[bytes, bytes]) -> None:
    assert open_envelope(payload) == parts


@pytest.mark.parametrize("payload", [b"\0", b"\x01", b"\x1f", b"\0\x01", b"\0\x06order", b"\x1f\xffLIST"])
def test_an_envelope_that_is_cut_off_is_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame, match="longer than its frame"):
        open_envelope(payload)


@given(st.binary(max_size=200), st.binary(max_size=60))
@settings(max_examples=200)
def test_a_topic_and_what_is_sent_to_it_are_told_apart(topic: bytes, payload: bytes) -> None:
    assert open_envelope(len(topic).to_bytes(2, "big") + topic + payload) == (topic, payload)


# ---- batches

RECORDS: Final = st.lists(st.builds(Record, U64, BYTES, BYTES, BYTES, I64, U64), max_size=6)
ACKS: Final = ["", "0", "1", "-1", "all", "é", "a" * 255]


def test_a_batch_lies_on_the_wire_as_drawn() -> None:
    records = [Record(3, b"one", b"key", b"me", -1, 5), Record(4, b"", b"", b"", 2, 9)]

    made = batch(b"orders", -1, records, "all", is_idempotent=True)

    parts = [
        b"\xba\x7c" + bytes.fromhex("0006") + b"orders" + bytes.fromhex("ffffffff 03") + b"all",
        bytes.fromhex("01 0000000000000005 0000000000000009 00000002"),
        bytes.fromhex("0000000000000003 0000000000000005 0002") + b"me" + bytes.fromhex("0003") + b"key",
        bytes.fromhex("ffffffffffffffff 00000003") + b"one",
        bytes.fromhex("0000000000000004 0000000000000009 0000 0000 0000000000000002 00000000"),
    ]
    assert made == b"".join(parts)
    assert is_batch(made)
    assert read_batch(made) == Records(b"orders", -1, records, "all", is_idempotent=True)


def test_a_batch_may_be_of_nothing() -> None:
    made = batch(b"", 0, [])

    assert made == b"\xba\x7c" + bytes(2 + 5 + 21)
    assert read_batch(made) == Records(b"", 0, [], "", is_idempotent=False)


@given(BYTES, I32, RECORDS, st.sampled_from(ACKS), st.booleans())
@settings(max_examples=150)
def test_a_batch_is_read_as_it_was_written(
    topic: bytes, partition: int, records: list[Record], acks: str, is_idempotent: bool
) -> None:
    made = batch(topic, partition, records, acks, is_idempotent=is_idempotent)

    assert read_batch(made) == Records(topic, partition, records, acks, is_idempotent)


def test_the_longest_fields_fit() -> None:
    record = Record(0, bytes(U16_MAX + 1), b"k" * U16_MAX, b"p" * U16_MAX)

    assert read_batch(batch(b"t" * U16_MAX, 0, [record])) == Records(b"t" * U16_MAX, 0, [record], "")


def test_only_what_has_the_mark_is_a_batch() -> None:
    assert not any(map(is_batch, (b"", b"\xba", b"\x7c\xba", b"LIST", b"\xba\x7d" + BATCH[2:])))


def test_a_run_is_sent_with_its_offsets_and_keys() -> None:
    run = Run([b"orders.eu", b"orders"], [b"one", b"\0\xff"])
    run.base_offset = 41
    run.keys = {1: b"\xffkey"}

    assert read_batch(run_batch(b"orders", 2, run)) == Records(
        b"orders", 2, [Record(41, b"one"), Record(42, b"\0\xff", b"\xffkey")], ""
    )


def test_a_run_with_holes_is_sent_with_the_offsets_that_are_left() -> None:
    run = Run([b"orders"] * 3, [b"one", b"two", b"three"])
    run.base_offset = 7
    run.offsets = [7, 10, 1 << 40]
    run.keys = {0: b"a", 2: b"c"}

    assert read_batch(run_batch(b"orders", 0, run)).records == [
        Record(7, b"one", b"a"),
        Record(10, b"two"),
        Record(1 << 40, b"three", b"c"),
    ]


@pytest.mark.parametrize(("key_bytes", "is_sent"), [(U16_MAX, True), (U16_MAX + 1, False), (1 << 20, False)])
def test_a_key_that_a_batch_has_no_room_for_is_left_out(key_bytes: int, is_sent: bool) -> None:
    run = Run([b"orders"], [b"one"])
    run.keys = {0: b"k" * key_bytes}

    assert read_batch(run_batch(b"orders", 0, run)).records == [Record(0, b"one", b"k" * key_bytes if is_sent else b"")]


LONG: Final = batch(
    b"orders", 1, [Record(7, b"value", b"key", b"me", 1, 2), Record(8, b""), Record(9, b"", b"k")], "all"
)


@pytest.mark.parametrize("whole", [BATCH, LONG, batch(b"orders", 0, []), batch(b"", 0, [Record(0, b"")])], ids=len)
def test_a_batch_that_is_cut_off_anywhere_is_refused(whole: bytes) -> None:
    read_batch(whole)
    for end in range(len(whole)):
        with pytest.raises(BadFrame, match="a batch"):
            read_batch(whole[:end])


@pytest.mark.parametrize("behind", [b"\0", b"x", bytes(32), BATCH])
def test_bytes_behind_the_last_message_are_refused(behind: bytes) -> None:
    for whole in (LONG, batch(b"orders", 0, [])):
        with pytest.raises(BadFrame, match=f"{len(behind)} bytes behind its last message"):
            read_batch(whole + behind)


def batch_of(number: int, behind: bytes = b"", acks: bytes = b"1") -> bytes:
    """One that says that it has so many messages."""
    head = b"\xba\x7c\0\x01t" + struct.pack(">iB", 0, len(acks)) + acks
    return head + struct.pack(">BQQi", 0, 0, 0, number) + behind


def record_of(producer_bytes: int = 0, key_bytes: int = 0, value_bytes: int = 0) -> bytes:
    """A message of a batch with these lengths, and nothing behind any of them."""
    return struct.pack(">QQHHqI", 0, 0, producer_bytes, key_bytes, 0, value_bytes)


BAD_BATCHES: Final[dict[str, bytes]] = {
    "fewer than there are": batch_of(1, record_of() * 2),
    "none, but there is one": batch_of(0, record_of()),
    "a producer beyond the end": batch_of(1, record_of(producer_bytes=U16_MAX)),
    "a key beyond the end": batch_of(1, record_of(key_bytes=U16_MAX)),
    "a value beyond the end": batch_of(1, record_of(value_bytes=1)),
    "a value of 4 GiB": batch_of(1, record_of(value_bytes=U32_MAX)),
    "a topic beyond the end": b"\xba\x7c\xff\xff" + bytes(100),
    "acks beyond the end": b"\xba\x7c\0\x01t" + struct.pack(">iB", 0, 255) + bytes(40),
}


@pytest.mark.parametrize("data", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_batch_whose_numbers_are_wrong_is_refused_before_they_cost_anything(data: bytes) -> None:
    def refuse() -> None:
        with pytest.raises(BadFrame, match="a batch"):
            read_batch(data)

    refuse()
    assert peak_bytes(refuse) < 1 << 16


@pytest.mark.parametrize("number", [-(1 << 31), -1, 1, 3, (1 << 31) - 1])
def test_a_batch_that_is_too_short_for_its_count_is_refused_at_once(number: int) -> None:
    def refuse(behind: bytes) -> None:
        with pytest.raises(BadFrame, match=f"says it has {number} messages, and is too short"):
            read_batch(batch_of(number, behind))

    refuse(b"")
    refuse(record_of()[:-1])
    if number != 1:
        refuse(record_of() * 2)
    assert peak_bytes(lambda: refuse(b"")) < 1 << 16


def test_a_batch_that_is_made_by_hand_is_read() -> None:
    assert read_batch(batch_of(2, record_of() * 2)) == Records(b"t", 0, [Record(0, b"")] * 2, "1")
    assert read_batch(batch_of(0)) == Records(b"t", 0, [], "1")


def test_acks_that_are_not_text_are_refused() -> None:
    with pytest.raises(PeerError):
        read_batch(batch_of(0, acks=b"\xff"))


@given(st.integers(0, len(LONG)), st.integers(0, 8), st.binary(max_size=8))
@settings(max_examples=300)
def test_whatever_comes_as_a_batch_is_read_or_refused(at: int, removed: int, put: bytes) -> None:
    with suppress(BadFrame, BadRequest):
        read_batch(LONG[:at] + put + LONG[at + removed :])
