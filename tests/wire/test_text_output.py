"""What the text codec writes: messages and replies, as nats-py reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nats.protocol.parser import ERR_RE
from nats.protocol.parser import Parser as NatsParser

from penstock.model.run import Run
from penstock.wire.events import (
    Refused,
)
from penstock.wire.text import (
    acknowledgements,
    error,
    info,
    messages,
    no_responders,
    numbered_messages,
)
from tests.support.text_rows import CLOSING, CUTS, REFUSED, cut

SUBJECTS: Final = st.sampled_from([b"a", b"orders.eu.created", "grüße".encode(), b"%b.%d", b"MSG"])
HEADERS: Final = st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n", b"X: %b %d\r\n"])
VALUES: Final = st.binary(max_size=6) | st.sampled_from([b"\r\n", b"%b %d", b"MSG a 1 1\r\nx\r\n", bytes(300)])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    kept = draw(
        st.lists(st.tuples(SUBJECTS, VALUES, st.none() | SUBJECTS, st.none() | HEADERS), min_size=1, max_size=8)
    )
    # As often as not one subject, one length, no replies, no headers: each has a way of its own.
    same_subject, same_value, plain, headless = (draw(st.booleans()) for _ in range(4))
    run = Run(
        [kept[0][0] if same_subject else row[0] for row in kept],
        [kept[0][1] if same_value else row[1] for row in kept],
    )
    run.replies = {} if plain else {index: row[2] for index, row in enumerate(kept) if row[2] is not None}
    run.headers = {} if headless else {index: row[3] for index, row in enumerate(kept) if row[3] is not None}
    return run


class Sent(NamedTuple):
    subject: bytes
    sid: bytes
    words: list[bytes]
    block: bytes | None
    value: bytes


def read_messages(data: bytes, numbers: int) -> list[Sent]:
    """A second, stupid reader of MSG and HMSG; `numbers` stand behind the lengths."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        verb, subject, sid, *words = line.split(b" ")
        behind = len(words) - numbers
        header_bytes = 0
        if verb == b"HMSG":
            header_bytes = int(words.pop(behind - 2))
            behind -= 1
        else:
            assert verb == b"MSG"
        total = int(words.pop(behind - 1))
        block = data[:header_bytes] if verb == b"HMSG" else None
        found.append(Sent(subject, sid, words, block, data[header_bytes:total]))
        assert data[total : total + 2] == b"\r\n"
        data = data[total + 2 :]
    return found


def nats_block(lines: bytes | None) -> bytes | None:
    return None if lines is None else b"NATS/1.0\r\n" + lines + b"\r\n"


def rows_of(run: Run) -> Iterator[tuple[bytes, bytes, bytes | None, bytes | None]]:
    for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
        yield subject, value, run.replies.get(index), run.headers.get(index)


@given(runs())
@settings(deadline=None)
def test_messages_for_nats_clients_can_be_read_back(run: Run) -> None:
    assert read_messages(messages(run, b"7"), 0) == [
        Sent(subject, b"7", [] if reply is None else [reply], nats_block(lines), value)
        for subject, value, reply, lines in rows_of(run)
    ]


@given(runs())
@settings(deadline=None)
def test_a_client_that_knows_no_headers_gets_none(run: Run) -> None:
    assert read_messages(messages(run, b"7", has_headers=False), 0) == [
        Sent(subject, b"7", [] if reply is None else [reply], None, value) for subject, value, reply, _ in rows_of(run)
    ]


@given(runs(), st.integers(0, 1 << 63))
@settings(deadline=None)
def test_messages_with_their_sequence_can_be_read_back(run: Run, first: int) -> None:
    sequences = range(first, first + 3 * len(run), 3)

    assert read_messages(numbered_messages(run, b"mine", sequences), 1) == [
        Sent(subject, b"mine", [b"%d" % sequence], None if lines is None else lines + b"\r\n", value)
        for (subject, value, _, lines), sequence in zip(rows_of(run), sequences, strict=True)
    ]


def test_what_the_lines_have_no_place_for_goes_into_headers() -> None:
    run = Run([b"a", b"a"], [b"x", b"y"])
    run.keys = {1: b"k"}
    assert messages(run, b"7") == b"MSG a 7 1\r\nx\r\nHMSG a 7 29 30\r\nNATS/1.0\r\nPenstock-Key: k\r\n\r\ny\r\n"
    assert messages(run, b"7", has_headers=False) == b"MSG a 7 1\r\nx\r\nMSG a 7 1\r\ny\r\n"
    run.timestamps = [1_500_000_000_000_001, 2]
    first, second = read_messages(numbered_messages(run, b"7", [8, 9]), 1)
    assert first.block == b"Penstock-Timestamp: 1500000000.000001\r\n\r\n"
    assert second.block == b"Penstock-Key: k\r\nPenstock-Timestamp: 0.000002\r\n\r\n"


class Recorder:
    """What nats-py's own parser tells its client."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    async def _process_msg(self, *what: object) -> None:
        self.told.append(what)

    async def _process_err(self, what: str) -> None:
        self.told.append(("-ERR", what))

    async def _process_info(self, what: object) -> None:
        self.told.append(("INFO", what))


def told_nats_py(*pieces: bytes) -> list[tuple[object, ...]]:
    client = Recorder()
    parser: Any = NatsParser(client)
    for piece in pieces:
        with pytest.raises(StopIteration):
            parser.parse(piece).send(None)
    assert not parser.buf
    return client.told


@given(runs(), CUTS)
@settings(deadline=None)
def test_nats_py_reads_messages_as_they_were(run: Run, places: list[int]) -> None:
    assert told_nats_py(*filter(None, cut(messages(run, b"7"), places))) == [
        (7, subject, reply or b"", value, nats_block(lines)) for subject, value, reply, lines in rows_of(run)
    ]


def test_no_responders_is_as_nats_server_has_it() -> None:
    assert no_responders(b"_IN.1", b"9", b"nobody") == (
        b"HMSG _IN.1 9 38 38\r\nNATS/1.0 503\r\nNats-Subject: nobody\r\n\r\n\r\n"
    )


@pytest.mark.parametrize(("is_nats", "data"), [(True, b"-ERR 'no such topic'\r\n"), (False, b"-ERR no such topic\r\n")])
def test_an_error_is_quoted_for_nats_clients_only(is_nats: bool, data: bytes) -> None:
    assert error("no such topic", is_nats=is_nats) == data


@given(st.text(), st.booleans())
@example("a\r\nPING\nb\rc", True)
def test_an_error_is_one_line_whatever_its_reason(reason: str, is_nats: bool) -> None:
    data = error(reason, is_nats=is_nats)

    assert data.startswith(b"-ERR ")
    assert data.endswith(b"\r\n")
    assert not {*b"\r\n"} & {*data[:-2]}


@pytest.mark.parametrize(
    "reason",
    sorted(
        {
            event.reason
            for table in (REFUSED, CLOSING)
            for _, row in table.values()
            for event in row
            if isinstance(event, Refused)
        }
        | {"it's 'quoted'", "a\r\nb"}
    ),
)
def test_nats_py_reads_every_reason(reason: str) -> None:
    data = error(reason, is_nats=True)

    assert ERR_RE.fullmatch(data)
    assert told_nats_py(data) == [("-ERR", data[5:-2].decode().lower())]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
@example({"server_name": "a\r\nb\u2028"})
def test_info_is_one_line_of_json(fields: dict[str, Any]) -> None:
    data = info(fields)

    assert not {*b"\r\n"} & {*data[:-2]}
    assert json.loads(data.removeprefix(b"INFO ")) == fields
    assert told_nats_py(data) == [("INFO", fields)]


@pytest.mark.parametrize(
    ("count", "duplicates", "data"),
    [
        (0, [], b""),
        (1, [], b"+OK\r\n"),
        (3, [], b"+OK\r\n+OK\r\n+OK\r\n"),
        (1, [0], b"+OK DUP\r\n"),
        (3, [0, 2], b"+OK DUP\r\n+OK\r\n+OK DUP\r\n"),
    ],
)
def test_every_message_is_acknowledged(count: int, duplicates: list[int], data: bytes) -> None:
    assert acknowledgements(count, duplicates) == data


def test_each_message_that_was_refused_is_told_why_in_its_place() -> None:
    assert acknowledgements(4, [2], {0: "FULL a\nb", 3: "no"}) == b"-ERR FULL a b\r\n+OK\r\n+OK DUP\r\n-ERR no\r\n"
