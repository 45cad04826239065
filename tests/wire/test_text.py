"""The text codec: the same bytes give the same events however they are cut, in both dialects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.model.run import Run
from penstock.wire.events import (
    Call,
    Connect,
    Refused,
    SimpleCommand,
)
from penstock.wire.text import (
    LINE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TextParser,
    sequence_base,
    split_sequence,
)
from tests.support.batches import peak_bytes
from tests.support.text_rows import (
    _TOO_LARGE,
    _TOO_LONG,
    _UNKNOWN,
    BOTH,
    CLOSING,
    CONNECT,
    CUTS,
    FLUX,
    NATS,
    REFUSED,
    Message,
    Said,
    Table,
    cut,
    feed,
    parser_of,
    said,
)

NEXT: Final = b"PUB next 4\r\nlast\r\n"


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


# ---- what ends the connection


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
