"""How QB clients write their messages and properties."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.wire.prefixed import PrefixedReader
from penstock.wire.qb import Kind, QbMessage, Style, message, properties, read_properties
from tests.support.prefixed_frames import (
    BYTES,
    PLACES,
    STYLES,
    U32_MAX,
    U64,
    cut,
    each_style,
    feed,
    named_style,
    one_by_one,
    written,
)

U32: Final = st.integers(0, U32_MAX)

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
