"""What headers ask for is read as it was written, and what is wrong in them is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadHeader
from penstock.model.headers import (
    DELAY_US_MAX,
    KEY_BYTES_MAX,
    REASON_BYTES_MAX,
    HeaderOptions,
    check_key_size,
    hash_key,
    identity,
    lines,
    named,
    read,
    reason,
    value_of,
    without,
)
from tests.support.batches import peak_bytes

NOW_US: Final = 1_700_000_000_000_000
SECOND_US: Final = 1_000_000
DAY_US: Final = 24 * 3600 * SECOND_US


# ---- what is asked for


@pytest.mark.parametrize(
    ("block", "asked"),
    [
        (b"", HeaderOptions()),
        (b"Trace-ID: 7\r\nContent-Type: text/plain\r\n", HeaderOptions()),
        (b"Msg-ID: 7\r\n", HeaderOptions(identity=b"7")),
        (b"Nats-Msg-Id: 7\r\n", HeaderOptions(identity=b"7")),
        (b"MSG-id: 7\r\n", HeaderOptions(identity=b"7")),
        (b"Penstock-Key: customer 7\r\n", HeaderOptions(key=b"customer 7")),
        (b"penstock-key: \xff\xfe\r\n", HeaderOptions(key=b"\xff\xfe")),
        (b"Delay: 5s\r\n", HeaderOptions(due_us=NOW_US + 5 * SECOND_US)),
        (b"Deliver-At: 1700000001\r\n", HeaderOptions(due_us=NOW_US + SECOND_US)),
        (b"Penstock-Timestamp: 1500000000.25\r\n", HeaderOptions(time_us=1_500_000_000_250_000)),
        (b"penstock-timestamp: 2017-07-14T02:40:00Z\r\n", HeaderOptions(time_us=1_500_000_000_000_000)),
        (
            b"Trace-ID: 1\r\nMsg-ID: 2\r\nPenstock-Key: 3\r\nDelay: 4\r\nUser-ID: 5\r\n",
            HeaderOptions(b"2", b"3", NOW_US + 4 * SECOND_US),
        ),
    ],
)
def test_a_header_asks_for_what_it_names(block: bytes, asked: HeaderOptions) -> None:
    assert read(block, NOW_US) == asked


@pytest.mark.parametrize(
    "line", [b"Msg-ID:7", b"Msg-ID: 7", b"Msg-ID :7", b"Msg-ID \t: \t 7 \t ", b"Msg-ID: 7\r", b"msg-id: 7  \r"]
)
@pytest.mark.parametrize(("before", "behind"), [(b"", b""), (b"A: b\r\n", b"\nC: d\r\n"), (b"A: b\n", b"\n")])
def test_blanks_around_a_value_and_the_end_of_a_line_do_not_matter(line: bytes, before: bytes, behind: bytes) -> None:
    block = before + line + behind

    assert read(block, NOW_US) == HeaderOptions(identity=b"7")
    assert identity(block) == value_of(block, b"Msg-ID") == b"7"


@pytest.mark.parametrize(
    "line", [b"X-Msg-ID: 7\r\n", b"Msg-ID-2: 7\r\n", b"A: Msg-ID: 7\r\n", b" Msg-ID: 7\r\n", b"Msg-ID 7"]
)
def test_a_name_is_the_whole_name(line: bytes) -> None:
    assert read(line, NOW_US) == HeaderOptions()
    assert identity(line) is None
    assert value_of(line, b"Msg-ID") is None


def test_a_value_may_have_blanks_and_colons_within() -> None:
    assert read(b"Msg-ID: a b:c  d\r\n", NOW_US).identity == b"a b:c  d"


@pytest.mark.parametrize("block", [b"Msg-ID:\r\n", b"Msg-ID:   \r\nA: b\r\n", b"Nats-Msg-Id:"])
def test_an_empty_id_is_none(block: bytes) -> None:
    assert read(block, NOW_US).identity is None
    assert identity(block) is None


def test_an_empty_key_is_a_key() -> None:
    assert read(b"Penstock-Key:\r\n", NOW_US).key == b""


def test_an_empty_value_does_not_take_the_next_line() -> None:
    assert read(b"Penstock-Key:\r\nMsg-ID: 7\r\n", NOW_US) == HeaderOptions(b"7", b"")
    assert value_of(b"A:\r\nB: c\r\n", b"A") == b""


@pytest.mark.parametrize(
    "block",
    [
        b"Msg-ID: a\r\nNats-Msg-Id: b\r\n",
        b"Nats-Msg-Id: b\r\nMsg-ID: a\r\n",
        b"Msg-ID: a\r\nMsg-ID: b\r\n",
        b"Msg-ID: a\r\nMsg-ID:\r\n",
        b"Msg-ID:\r\nMsg-ID: b\r\n",
    ],
)
def test_of_two_ids_the_same_one_counts_when_it_is_stored_and_when_it_is_read_back(block: bytes) -> None:
    assert identity(block) == read(block, NOW_US).identity


@given(
    st.lists(st.sampled_from([b"Msg-ID", b"A", b":", b" ", b"\t", b"x", b"\r", b"\n", b"\r\n", b"\xff"])).map(b"".join)
)
@settings(max_examples=300)
def test_an_id_is_the_same_however_it_is_asked_for(block: bytes) -> None:
    if block.count(b"Msg-ID") == 1:
        assert identity(block) == read(block, NOW_US).identity == (value_of(block, b"Msg-ID") or None)


# Blanks that the value might end with, and does not: so many that only a single look at each is quick enough.
ODD_BLANKS: Final = [b"Msg-ID: a" + b" " * 100_000 + b"b\r\n", b"Msg-ID:" + b" " * 3000 + b"\rx\r\n"]


@pytest.mark.timeout(5)
@pytest.mark.parametrize("block", ODD_BLANKS, ids=["before the end", "before a carriage return"])
@pytest.mark.parametrize(
    "reader",
    [lambda block: read(block, NOW_US), identity, lambda block: value_of(block, b"Msg-ID")],
    ids=["read", "identity", "value_of"],
)
def test_very_many_blanks_do_not_hold_up_the_broker(reader: Callable[[bytes], object], block: bytes) -> None:
    reader(block)


# ---- when it is to be appended


@pytest.mark.parametrize(
    ("delay", "us"),
    [
        (b"0", 0),
        (b"5", 5 * SECOND_US),
        (b"5s", 5 * SECOND_US),
        (b"500ms", SECOND_US // 2),
        (b"1.5s", 3 * SECOND_US // 2),
        (b"0.001ms", 1),
        (b"2m", 120 * SECOND_US),
        (b"1h", 3600 * SECOND_US),
        (b"1d", DAY_US),
        (b"366d", DELAY_US_MAX),
    ],
)
def test_a_delay_is_a_number_and_a_unit(delay: bytes, us: int) -> None:
    assert read(b"Delay: " + delay + b"\r\n", NOW_US).due_us == NOW_US + us


@pytest.mark.parametrize(
    "delay", [b"", b"x", b"-5s", b"+5s", b"5 s", b"5S", b"5w", b"s", b"5.s", b".5s", b"1e3", b"inf", b"9" * 13, b"\xff"]
)
def test_any_other_delay_is_refused(delay: bytes) -> None:
    with pytest.raises(BadHeader, match=r"Delay: .* is not a duration such as 500ms, 5s, 2m, 1h or 1d"):
        read(b"Delay: " + delay + b"\r\n", NOW_US)


@pytest.mark.parametrize(
    ("moment", "us"),
    [
        (b"1700000000", NOW_US),
        (b"1700000000.5", NOW_US + SECOND_US // 2),
        (b"0", 0),
        (b"2023-11-14T22:13:20Z", NOW_US),
        (b"2023-11-14T22:13:20+00:00", NOW_US),
        (b"2023-11-14T23:13:20+01:00", NOW_US),
        (b"2023-11-14 22:13:20", NOW_US),
        (b"2023-11-14T22:13:20.25Z", NOW_US + SECOND_US // 4),
        (b"2023-11-14", NOW_US - (22 * 3600 + 13 * 60 + 20) * SECOND_US),
        (b"2000-01-01T00:00:00Z", 946_684_800 * SECOND_US),
        (b"@1700000000", NOW_US),
        (b"1700000000.123457", NOW_US + 123_457),
        (b"-5m", NOW_US - 300 * SECOND_US),
        (b"1h", NOW_US + 3600 * SECOND_US),
    ],
)
def test_a_moment_is_seconds_an_iso_time_or_relative(moment: bytes, us: int) -> None:
    assert read(b"Deliver-At: " + moment + b"\r\n", NOW_US).due_us == us


@given(st.datetimes(datetime(1970, 1, 1), datetime(2023, 1, 1)))  # noqa: DTZ001
def test_any_iso_time_is_that_moment(moment: datetime) -> None:
    exact = moment.replace(tzinfo=UTC)

    due_us = read(b"Deliver-At: " + exact.isoformat().encode(), NOW_US).due_us

    assert due_us is not None
    assert abs(due_us - (exact - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * SECOND_US) < 2


@pytest.mark.parametrize("moment", [b"", b"x", b"inf", b"nan", b"1e400", b"tomorrow", b"2023-13-01", b"22:13", b"\xff"])
def test_any_other_moment_is_refused(moment: bytes) -> None:
    with pytest.raises(BadHeader, match=r"Deliver-At: .* it must be a time like .*, seconds since 1970 like"):
        read(b"Deliver-At: " + moment + b"\r\n", NOW_US)


@pytest.mark.parametrize(
    "line", [b"Delay: 367d", b"Delay: 999999999999d", b"Deliver-At: 367d", b"Deliver-At: 9999-01-01"]
)
def test_more_than_a_year_is_refused(line: bytes) -> None:
    with pytest.raises(BadHeader, match="at most a year"):
        read(line + b"\r\n", NOW_US)


def test_a_year_is_not_too_long() -> None:
    last = b"Deliver-At: %d\r\n" % ((NOW_US + DELAY_US_MAX) // SECOND_US)

    assert read(last, NOW_US).due_us == NOW_US + DELAY_US_MAX


@given(st.sampled_from([b"Delay: ", b"Deliver-At: "]), st.binary(max_size=12) | st.text().map(str.encode))
@settings(max_examples=500)
@example(b"Deliver-At: ", b"0001-01-01T00:00:00+23:59")
@example(b"Deliver-At: ", b"9999-12-31T23:59:59-23:59")
@example(b"Deliver-At: ", b"-1e300")
@example(b"Deliver-At: ", "٣".encode())
def test_any_time_is_read_or_refused(name: bytes, value: bytes) -> None:
    try:
        asked = read(name + value + b"\r\n", NOW_US)
    except BadHeader:
        return
    assert asked.due_us is None or asked.due_us <= NOW_US + DELAY_US_MAX


# ---- lines


def test_lines_are_named_by_their_fields() -> None:
    assert lines(dead_letter_reason="time-out", attempts=3) == b"Dead-Letter-Reason: time-out\r\nAttempts: 3\r\n"
    assert lines() == b""


@given(st.text())
@example("a\r\nMsg-ID: forged")
def test_a_field_is_one_line_whatever_is_in_it(value: str) -> None:
    line = lines(reason=value)

    assert line.endswith(b"\r\n")
    assert not {*b"\r\n"} & {*line[:-2]}


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20))
def test_a_field_can_be_read_back(value: str) -> None:
    assert value_of(lines(first="x", reason=value, last="y"), b"Reason") == value.encode().strip(b" \t")


def test_a_value_is_that_of_the_first_line_of_its_name() -> None:
    assert value_of(b"A: 1\r\nB: 2\r\nb: 3\r\n", b"B") == b"2"
    assert value_of(b"A: 1\r\n", b"B") is None


def test_a_name_is_not_taken_for_an_expression() -> None:
    assert value_of(b"Axb: 1\r\n", b"A.b") is None


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([], b"Dead-Letter-Reason: x\r\nDEAD-LETTER-Topic : y\r\nA: dead-letter-a\r\nA-B: z\r\n"),
        ([b"dead-letter-"], b"A: dead-letter-a\r\nA-B: z\r\n"),
        ([b"dead-letter-topic"], b"Dead-Letter-Reason: x\r\nA: dead-letter-a\r\nA-B: z\r\n"),
        ([b"a", b"dead-letter-reason"], b"DEAD-LETTER-Topic : y\r\nA-B: z\r\n"),
        ([b"dead-letter", b"b"], b"Dead-Letter-Reason: x\r\nDEAD-LETTER-Topic : y\r\nA: dead-letter-a\r\nA-B: z\r\n"),
    ],
)
def test_lines_can_be_taken_out_by_name_or_by_how_it_begins(names: list[bytes], left: bytes) -> None:
    block = b"Dead-Letter-Reason: x\r\nDEAD-LETTER-Topic : y\r\nA: dead-letter-a\r\nA-B: z\r\n"

    assert without(block, *names) == left


# ---- keys


@pytest.mark.parametrize(
    ("key", "number"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_a_key_has_the_hash_that_others_compute(key: bytes, number: int) -> None:
    assert hash_key(key) == number


@pytest.mark.parametrize("size", [255, 256, 257, 5000])
def test_a_key_of_any_size_has_its_hash(size: int) -> None:
    number = 0xCBF29CE484222325
    for byte in (key := bytes(number % 251 for number in range(size))):
        number = (number ^ byte) * 0x100000001B3 % 2**64

    assert hash_key(key) == number


def test_long_keys_are_not_remembered() -> None:
    def flood() -> None:
        for number in range(40):
            hash_key(b"%d" % number + bytes(5000))

    assert peak_bytes(flood) < 50_000


def test_a_key_beyond_the_limit_is_refused_with_both_sizes() -> None:
    check_key_size(KEY_BYTES_MAX)
    with pytest.raises(BadHeader, match="key of 65537 bytes: at most 65536"):
        check_key_size(KEY_BYTES_MAX + 1)


def test_a_long_id_is_known_by_its_hash() -> None:
    ids = [bytes([letter]) * size for letter in b"ab" for size in (64, 65, 1_000_000)]
    found = [identity(b"Msg-ID: " + each + b"\r\n") for each in ids]

    assert len(set(found)) == len(ids)
    assert [len(each or b"") for each in found] == [64, 65, 65] * 2
    assert found[0] == ids[0]
    # What stands for a long one cannot be sent as an ID that stands for itself.
    assert identity(b"Msg-ID: " + (found[1] or b"") + b"\r\n") != found[1]


# ---- what a door has no other place for


@pytest.mark.parametrize("value", [b"soon", b"1e300", b"-1e300", b"nan"])
def test_a_time_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(BadHeader, match="Penstock-Timestamp"):
        read(b"Penstock-Timestamp: %b\r\n" % value, NOW_US)


def test_a_field_is_added_unless_it_is_there_or_does_not_fit() -> None:
    assert named(b"", penstock_key=b"k") == b"Penstock-Key: k\r\n"
    assert named(b"A: b\r\n", penstock_key=b"\xff") == b"A: b\r\nPenstock-Key: \xff\r\n"
    assert named(b"penstock-key: mine\r\n", penstock_key=b"k") == b"penstock-key: mine\r\n"
    assert named(b"", penstock_key=b"a\nb") == named(b"", penstock_key=b"a\rb") == b""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ValueError: x", "ValueError: x"),
        ("  two\r\nlines\tand \x1b[31mmore\x00 ", "two lines and [31mmore"),
        ("", ""),
        ("\r\n", ""),
        ("x" * 512, "x" * 512),
        ("x" * 513, "x" * 509 + "…"),
        ("é" * 257, "é" * 254 + "…"),
        ("half \ud800 a pair", "half a pair"),
    ],
)
def test_a_reason_is_one_printable_line_of_limited_size(text: str, line: str) -> None:
    assert reason(text) == line
    assert len(line.encode()) <= REASON_BYTES_MAX
