"""The payloads of binary frames: JSON and structures, and those that are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame, BadRequest
from penstock.model.batch import Buffer, encode, parse
from penstock.wire.binary import (
    HEAD,
    JSON_VALUES_MAX,
    SCRATCH_BYTES,
    SETTLE_MAX,
    Append,
    Fetch,
    FrameReader,
    Messages,
    Settle,
    StageTarget,
    Type,
    Verb,
    append_frame,
    batches_head,
    credit_frame,
    end_frame,
    fetch_frame,
    frame,
    json_frame,
    messages_frame,
    read_append,
    read_batches,
    read_credit,
    read_end,
    read_fetch,
    read_json,
    read_messages,
    read_read,
    read_request,
    read_settle,
    read_stage,
    settle_frame,
    stage_frame,
)
from tests.support.batches import peak_bytes
from tests.support.binary_frames import BYTES, SCRATCH, U8, U8_MAX, U16_MAX, U32_MAX, U64, Payload, payload, reader_of

U32: Final = st.integers(0, U32_MAX)


def payload_of(data: bytes, kind: Type, number: int) -> bytes | bytearray:
    """The payload of the only frame in `data`, which is of this type and number."""
    [found] = reader_of(SCRATCH_BYTES).feed(data)
    assert (found.type, found.id) == (kind, number)
    return found.payload


# ---- JSON

JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS: Final = st.dictionaries(st.text(), JSON, max_size=5)


@given(st.sampled_from(Type), U64, OBJECTS)
@settings(deadline=None)
def test_an_object_comes_back_as_it_was(kind: Type, number: int, value: dict[str, Any]) -> None:
    assert read_json(payload_of(json_frame(kind, number, value), kind, number)) == value


@given(OBJECTS)
@settings(deadline=None)
def test_an_object_that_another_wrote_is_read(value: dict[str, Any]) -> None:
    assert read_json(json.dumps(value, indent=2, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(
    ("text", "value"),
    [(b"", {}), (b"{}", {}), (b' \t{"a" : 1}\r\n', {"a": 1}), ('{"é":"→"}'.encode(), {"é": "→"})],
)
def test_an_object_is_read_from_any_bytes_and_nothing_is_an_empty_one(
    kind: Callable[[bytes], Buffer], text: bytes, value: dict[str, Any]
) -> None:
    assert read_json(kind(text)) == value


@pytest.mark.parametrize("text", [b"[]", b"[{}]", b"1", b"1.5", b'"{}"', b"null", b"true", b"false"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest, match="an object is required"):
        read_json(text)


NOT_JSON: Final = {
    "nothing but a blank": b" ",
    "cut short": b'{"a":1',
    "two": b"{}{}",
    "something behind it": b"{} x",
    "a zero": b"\0",
    "a comma too many": b'{"a":1,}',
    "a key without quotes": b"{a:1}",
    "a line end in a text": b'{"a":"\n"}',
    "bytes that begin no character": b'{"a":"\xff"}',
    "a character cut short": b'{"a":"\xc3"}',
    "a character in too many bytes": b'{"a":"\xc0\x80"}',
    "half of a pair": b'{"a":"\xed\xa0\x80"}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"a":1}'.encode("utf-16-be"),
    "UTF-32": '{"a":1}'.encode("utf-32"),
    "no number": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "a number of very many digits": b'{"a":' + b"9" * 100_000 + b"}",
    "deep lists": b'{"a":' + b"[" * 100_000,
    "deep lists that are closed": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json_in_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest, match="invalid JSON"):
        read_json(text)


@pytest.mark.parametrize("text", [b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":[{"b":"x\\ud83d"}]}'])
def test_a_text_that_cannot_be_written_as_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        read_json(text)


@given(st.binary(max_size=60) | st.text('{}[]":,0123456789.eE+-truefalsn\\ud8 ').map(str.encode))
@example(b"[")
@settings(max_examples=500, deadline=None)
def test_whatever_comes_as_json_an_object_is_read_or_the_request_refused(text: bytes) -> None:
    try:
        assert isinstance(read_json(text), dict)
    except BadRequest:
        pass


# ---- each payload comes back as it went in


@given(U64, st.builds(Append, U64, U32, U32), BYTES)
def test_an_append_comes_back(number: int, to: Append, batch: bytes) -> None:
    found, carried = read_append(payload_of(append_frame(number, to, batch), Type.APPEND, number))

    assert found == to
    assert bytes(carried) == batch


@given(U64, st.builds(StageTarget, st.builds(Append, U64, U32, U32), BYTES, U64), BYTES)
def test_a_stage_comes_back(number: int, stage: StageTarget, batch: bytes) -> None:
    found, carried = read_stage(payload_of(stage_frame(number, stage, batch), Type.STAGE, number))

    assert found == stage
    assert bytes(carried) == batch


@given(U64, st.builds(Fetch, U64, U32, U32, U64, U64, U32))
def test_a_fetch_comes_back(number: int, fetch: Fetch) -> None:
    assert read_fetch(payload_of(fetch_frame(number, fetch), Type.FETCH, number)) == fetch


@given(U64, U64)
def test_an_end_comes_back(number: int, subscription: int) -> None:
    assert read_end(payload_of(end_frame(number, subscription), Type.END, number)) == subscription


@given(U64, U32)
def test_a_credit_comes_back_and_asks_for_no_answer(subscription: int, messages: int) -> None:
    assert read_credit(payload_of(credit_frame(subscription, messages), Type.CREDIT, 0)) == (subscription, messages)


OFFSETS: Final = st.lists(U64, min_size=1, max_size=20).map(tuple)
SETTLES: Final = st.builds(Settle, U64, st.sampled_from(Verb), U64, U64, U64, U32, OFFSETS, st.text(max_size=20))


@given(U64, SETTLES)
def test_a_settle_comes_back(number: int, settle: Settle) -> None:
    assert read_settle(payload_of(settle_frame(number, settle), Type.SETTLE, number)) == settle


@given(U64, U64, U64, BYTES)
def test_batches_come_back(number: int, start: int, committed: int, batches: bytes) -> None:
    data = batches_head(number, start, committed, len(batches)) + batches

    *offsets, carried = read_batches(payload_of(data, Type.BATCHES, number))

    assert offsets == [start, committed]
    assert bytes(carried) == batches


ATTEMPTS: Final = st.dictionaries(U32, U32, max_size=10)
MESSAGES: Final = st.builds(Messages, U64, U32, U64, BYTES, ATTEMPTS, BYTES)


@given(U64, MESSAGES)
@example(1, Messages(1, 2, 3, bytes(U16_MAX), {}, b""))
def test_messages_come_back(subscription: int, messages: Messages) -> None:
    assert read_messages(payload_of(messages_frame(subscription, messages), Type.MESSAGES, subscription)) == messages


def test_a_batch_within_a_frame_can_be_opened_where_it_lies() -> None:
    batch = encode([b"a", b"b"], timestamp=7)
    batch.stamp(40, append_time=8)
    payload = payload_of(messages_frame(1, Messages(1, 0, 0, b"orders", {1: 2}, batch.data)), Type.MESSAGES, 1)

    carried = read_messages(payload).batch

    assert isinstance(carried, memoryview)
    assert carried.obj is payload
    assert parse(carried).columns().values() == [b"a", b"b"]


@pytest.mark.parametrize("read", [lambda data: read_append(data)[1], lambda data: read_batches(data)[2]])
def test_what_follows_the_fields_is_not_copied(read: Callable[[bytes], memoryview]) -> None:
    payload = bytes(100)

    assert read(payload).obj is payload


# ---- payloads that do not fit

READERS: Final = {
    "append": payload(Type.APPEND, read_append, followed_by=len(b"batch")),
    "stage": payload(Type.STAGE, read_stage, followed_by=len(b"batch")),
    "fetch": payload(Type.FETCH, read_fetch),
    "read": payload(Type.READ, read_read),
    "end": payload(Type.END, read_end),
    "credit": payload(Type.CREDIT, read_credit),
    "settle": payload(Type.SETTLE, read_settle),
    "batches": payload(Type.BATCHES, read_batches, followed_by=len(b"batches")),
    "messages": payload(Type.MESSAGES, read_messages, followed_by=len(b"batch")),
}
each_reader = pytest.mark.parametrize("case", READERS.values(), ids=READERS)


@each_reader
def test_a_payload_that_is_cut_short_anywhere_is_refused(case: Payload) -> None:
    for end in range(case.fields_bytes):
        with pytest.raises(BadFrame, match="do not fit its length"):
            case.read(case.data[:end])
    for end in range(case.fields_bytes, len(case.data) + 1):
        case.read(case.data[:end])


@each_reader
@pytest.mark.parametrize("count", [1, 4, 8, 16, 1000])
def test_a_payload_that_goes_on_is_refused_unless_a_batch_ends_it(case: Payload, count: int) -> None:
    longer = case.data + bytes(count)
    if case.is_open:
        case.read(longer)
    else:
        with pytest.raises(BadFrame, match="do not fit its length"):
            case.read(longer)


@each_reader
@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_payload_is_read_from_any_bytes(case: Payload, kind: Callable[[bytes], Buffer]) -> None:
    assert case.read(kind(case.data)) == case.read(case.data)


@each_reader
@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_as_a_payload_is_read_or_refused(case: Payload, data: bytes) -> None:
    try:
        case.read(data)
    except BadFrame:
        pass


@given(st.tuples(U64, U8, U64, U64, U64, U32), st.integers(0, 6) | U32, st.lists(U64, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_settle_whose_count_is_wrong_is_refused(fields: Sequence[int], count: int, offsets: list[int]) -> None:
    data = struct.pack("!QBQQQIIH", *fields, count, 0) + struct.pack(f"!{len(offsets)}Q", *offsets)
    if count == len(offsets) > 0 and fields[1] <= max(Verb):
        assert read_settle(data) == (*fields, tuple(offsets), "")
    else:
        with pytest.raises(BadFrame):
            read_settle(data)


@pytest.mark.parametrize(("count", "is_allowed"), [(0, False), (1, True), (SETTLE_MAX, True), (SETTLE_MAX + 1, False)])
def test_a_settle_is_of_so_many_messages_at_most_and_not_of_none(count: int, is_allowed: bool) -> None:
    settle = Settle(1, Verb.ACK, 0, 0, 2, 3, tuple(range(count)))
    data = settle_frame(1, settle)[HEAD.size :]
    if is_allowed:
        assert read_settle(data) == settle
    else:
        with pytest.raises(BadFrame):
            read_settle(data)


@pytest.mark.parametrize("verb", [Verb.RELEASE + 1, U8_MAX])
def test_a_verb_that_is_not_known_is_refused(verb: int) -> None:
    with pytest.raises(BadFrame):
        read_settle(settle_frame(1, Settle(1, verb, 0, 0, 2, 3, [4]))[HEAD.size :])


@given(U64, U32, U64, st.integers(0, 60) | st.integers(0, U16_MAX), st.integers(0, 8) | U32, st.binary(max_size=100))
@settings(max_examples=300, deadline=None)
def test_messages_whose_lengths_are_wrong_are_refused(
    topic_id: int, partition: int, generation: int, name_bytes: int, again: int, rest: bytes
) -> None:
    data = struct.pack("!QIQHI", topic_id, partition, generation, name_bytes, again) + rest
    begin = name_bytes + 8 * again
    if begin <= len(rest):
        found = read_messages(data)
        assert found[:4] == (topic_id, partition, generation, rest[:name_bytes])
        assert found.attempts == {
            int.from_bytes(rest[at : at + 4], "big"): int.from_bytes(rest[at + 4 : at + 8], "big")
            for at in range(name_bytes, begin, 8)
        }
        assert found.batch == rest[begin:]
    else:
        with pytest.raises(BadFrame):
            read_messages(data)


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (read_settle, struct.pack("!QBQQQIIH", 1, 0, 0, 0, 1, 0, U32_MAX, 0) + bytes(80)),
        (read_messages, struct.pack("!QIQHI", 1, 0, 0, U16_MAX, 0) + bytes(80)),
        (read_messages, struct.pack("!QIQHI", 1, 0, 0, 0, U32_MAX) + bytes(80)),
    ],
    ids=["settle: count", "messages: name", "messages: again"],
)
def test_a_length_within_a_payload_is_checked_before_it_costs_anything(
    read: Callable[[Buffer], object], data: bytes
) -> None:
    def refuse() -> None:
        with pytest.raises(BadFrame):
            read(data)

    assert peak_bytes(refuse) < 1 << 16


def test_a_frame_without_a_batch_may_have_a_limit_of_its_own() -> None:
    reader = FrameReader(bytearray(SCRATCH), 1000, json_bytes_max=10)
    assert reader.feed(frame(Type.CALL, 1, bytes(10)) + frame(Type.PUBLISH, 2, bytes(1000)))
    with pytest.raises(BadFrame, match="a frame of 11 bytes, 10 are allowed"):
        reader.feed(frame(Type.CALL, 1, bytes(11)))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":[%s0]}' % ("0," * JSON_VALUES_MAX),
        '{"a":[%s0]}' % ("[]," * JSON_VALUES_MAX),
        '{"a":%s}' % ("[" * 900 + "0," * JSON_VALUES_MAX + "]" * 900),
        '{"a":[%s0]}' % ('"",' * JSON_VALUES_MAX),
        '{"a":[%s0]}' % ('"\\\\","\\"",' * (JSON_VALUES_MAX // 2)),
    ],
)
def test_a_request_has_so_many_values_and_no_more(text: str) -> None:
    with pytest.raises(BadRequest, match=f"more than {JSON_VALUES_MAX} values"):
        read_request(text.encode())


def test_what_is_in_a_string_of_a_request_is_no_value() -> None:
    for text in ("a,b:[" * 100_000, 'a,\\"[{' * 100_000, "\\" * 100_001 + "," * 100_000):
        assert read_request(json.dumps({"data": text}).encode()) == {"data": text}
