"""A run comes back from the batch that it was made into, and keeps its offsets when it is taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BatchTooLarge
from penstock.model.batch import Batch, encode, parse
from penstock.model.run import RUN_BYTES, Run, batch_bytes, check_size, fitting, open_batch, split

TOPIC: Final = b"orders"


class Message(NamedTuple):
    subject: bytes
    value: bytes
    key: bytes | None = None
    reply: bytes | None = None
    headers: bytes | None = None
    is_tombstone: bool = False


def run_of(messages: Sequence[Message], base_offset: int = 0, offsets: Sequence[int] | None = None) -> Run:
    run = Run([message.subject for message in messages], [message.value for message in messages])
    run.keys = {i: message.key for i, message in enumerate(messages) if message.key is not None}
    run.replies = {i: message.reply for i, message in enumerate(messages) if message.reply is not None}
    run.headers = {i: message.headers for i, message in enumerate(messages) if message.headers is not None}
    run.tombstones = {i for i, message in enumerate(messages) if message.is_tombstone}
    run.base_offset = base_offset
    run.offsets = offsets
    return run


def messages_of(run: Run) -> list[Message]:
    assert len(run) == len(run.subjects) == len(run.values)
    assert (run.keys.keys() | run.replies.keys() | run.headers.keys() | run.tombstones) <= set(range(len(run)))
    return [
        Message(subject, value, run.keys.get(i), run.replies.get(i), run.headers.get(i), i in run.tombstones)
        for i, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True))
    ]


def offsets_of(run: Run) -> list[int]:
    return [run.offset(index) for index in range(len(run))]


def test_a_time_that_a_publisher_gave_stays_with_its_message() -> None:
    first, second = run_of([Message(TOPIC, b"a"), Message(TOPIC, b"b")]), run_of([Message(TOPIC, b"c")])
    first.times, second.times = {1: 11}, {0: 22}
    first.extend(second)
    first.stamp(99)
    assert times_of(first) == times_of(open_batch(first.encode(TOPIC, 99), TOPIC)) == [99, 11, 22]
    assert first.select([0, 2]).times == {1: 22}
    assert times_of(first.select([0, 2])) == [99, 22]
    bare = run_of([Message(TOPIC, b"a")])
    bare.stamp(99)
    assert bare.timestamps is None


def times_of(run: Run) -> list[int]:
    return [run.timestamp] * len(run) if run.timestamps is None else list(run.timestamps)


def stored(batch: Batch, base_offset: int) -> Batch:
    batch.stamp(base_offset, append_time=0, durable_bytes=0)
    return batch


def with_holes(count: int, deltas: Sequence[int], span: int, base_offset: int) -> Batch:
    """What compaction leaves: messages 0, 1, … at base_offset + deltas."""
    values = [b"%d" % index for index in range(count)]
    return stored(encode(values, timestamp=0, deltas=deltas, span=span), base_offset)


ITEM: Final = st.none() | st.binary(max_size=6)
SUBJECT: Final = st.sampled_from([TOPIC, b"orders.eu", b"orders.us.created"])
MESSAGE: Final = st.builds(Message, SUBJECT, st.binary(max_size=20), ITEM, ITEM, ITEM, st.booleans())
MESSAGES: Final = st.lists(MESSAGE, min_size=1, max_size=12)
OFFSET: Final = st.integers(0, 1 << 40)

PLAIN: Final = [Message(b"orders.%d" % i, b"value %d" % i) for i in range(6)]
RICH: Final = [
    Message(TOPIC, b"a"),
    Message(b"orders.eu", b"b", b"key"),
    Message(b"orders.eu", b"c", None, b"reply"),
    Message(TOPIC, b"d", None, None, b"A: b\r\n"),
    Message(b"orders.us", b"e", b"", b"", b"", is_tombstone=True),
]
TIME: Final = 1_700_000_000_000_000


# ---- to a batch and back


@given(MESSAGES, OFFSET)
@settings(deadline=None)
def test_a_run_comes_back_from_its_batch(messages: list[Message], base_offset: int) -> None:
    run = open_batch(stored(run_of(messages).encode(TOPIC, 7), base_offset), TOPIC)

    assert messages_of(run) == messages
    assert offsets_of(run) == list(range(base_offset, base_offset + len(messages)))
    assert (run.base_offset, run.end) == (base_offset, base_offset + len(messages))


@given(MESSAGES, OFFSET, st.integers(-2, 14))
@settings(deadline=None)
def test_a_batch_can_be_opened_from_any_offset(messages: list[Message], base_offset: int, begin: int) -> None:
    batch = stored(run_of(messages).encode(TOPIC, 7), base_offset)

    run = open_batch(batch, TOPIC, base_offset + begin)

    left = messages[max(0, begin) :]
    assert messages_of(run) == left
    assert offsets_of(run) == list(range(base_offset + max(0, begin), base_offset + len(messages)))


def test_a_batch_is_of_the_time_that_was_said() -> None:
    assert run_of(PLAIN).encode(TOPIC, TIME).timestamp == TIME


def test_a_subject_that_is_the_topics_name_takes_no_bytes() -> None:
    columns = run_of([Message(TOPIC, b"a"), Message(TOPIC, b"b")]).encode(TOPIC, 0).columns()

    assert columns.subjects() is None


def test_among_other_subjects_the_topics_name_is_absent() -> None:
    columns = run_of(RICH).encode(TOPIC, 0).columns()

    assert columns.subjects() == [None, b"orders.eu", b"orders.eu", None, b"orders.us"]


def test_a_topic_that_is_named_otherwise_now_names_its_messages() -> None:
    batch = run_of(RICH).encode(TOPIC, 0)

    assert open_batch(batch, b"renamed").subjects == [b"renamed", b"orders.eu", b"orders.eu", b"renamed", b"orders.us"]


def test_columns_that_no_message_has_are_not_made() -> None:
    columns = run_of(PLAIN).encode(TOPIC, 0).columns()

    assert (columns.keys(), columns.replies(), columns.headers(), columns.tombstones()) == (None, None, None, None)
    assert columns.timestamps_at < 0


def test_an_empty_key_is_not_an_absent_one() -> None:
    batch = run_of(RICH).encode(TOPIC, 0)

    assert open_batch(batch, TOPIC).keys == {1: b"key", 4: b""}


def test_equal_subjects_of_a_batch_are_one_object() -> None:
    subjects = open_batch(run_of(RICH).encode(TOPIC, 0), TOPIC).subjects

    assert subjects[1] is subjects[2]
    assert subjects[0] is subjects[3] is TOPIC


def test_a_message_that_deletes_its_key_still_does_so_in_the_batch() -> None:
    batch = run_of([Message(TOPIC, b"a", b"k"), Message(TOPIC, b"", b"k", is_tombstone=True)]).encode(TOPIC, 0)

    assert batch.columns().tombstones() == [False, True]
    assert open_batch(batch, TOPIC).tombstones == {1}


# ---- times


def test_an_opened_run_is_of_the_time_of_its_batch() -> None:
    run = open_batch(stored(run_of(PLAIN).encode(TOPIC, TIME), 10), TOPIC)

    assert (run.timestamp, run.timestamps) == (TIME, None)


def test_a_run_that_is_not_stored_yet_has_no_time() -> None:
    assert (Run([TOPIC], [b""]).timestamp, Run([TOPIC], [b""]).timestamps) == (0, None)


@pytest.mark.parametrize(("begin", "left"), [(0, [3, -1, 2]), (10, [3, -1, 2]), (11, [-1, 2]), (12, [2]), (13, [])])
def test_messages_that_have_times_of_their_own_keep_them(begin: int, left: list[int]) -> None:
    batch = stored(encode([b"a", b"b", b"c"], timestamp=TIME, timestamps=[3, -1, 2]), 10)

    assert times_of(open_batch(batch, TOPIC, begin)) == left


@pytest.mark.parametrize("indices", [[0], [4], [1, 2, 3], [0, 2, 4], range(5), range(1, 5, 2)])
@pytest.mark.parametrize("timestamps", [None, [5, 4, 3, 2, 1]])
def test_chosen_messages_keep_their_times(indices: Sequence[int], timestamps: list[int] | None) -> None:
    run = run_of(RICH, 10)
    run.timestamp, run.timestamps = TIME, timestamps

    chosen = run.select(indices)

    assert times_of(chosen) == [times_of(run)[index] for index in indices]
    assert chosen.timestamp == TIME


def test_times_of_their_own_count_before_the_one_that_is_said() -> None:
    run = run_of(PLAIN[:2])
    run.timestamps = [3, 4]

    assert list(run.encode(TOPIC, TIME).columns().timestamps()) == [3, 4]


# ---- as it is stored


@given(MESSAGES, st.none() | st.sets(st.integers(0, 99), min_size=12, max_size=12), OFFSET, st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_run_comes_back_from_the_bytes_that_it_is_stored_as(
    messages: list[Message], deltas: set[int] | None, base_offset: int, have_times: bool
) -> None:
    offsets = None if deltas is None else [base_offset + delta for delta in sorted(deltas)[: len(messages)]]
    run = run_of(messages, base_offset, offsets)
    run.timestamp = TIME
    run.timestamps = [TIME - index for index in range(len(messages))] if have_times else None

    batch = parse(run.stored(TOPIC))
    found = open_batch(batch, TOPIC)

    assert messages_of(found) == messages
    assert offsets_of(found) == offsets_of(run)
    assert (batch.base_offset, batch.end) == (found.base_offset, found.end) == (base_offset, run.end)
    assert (found.timestamp, times_of(found)) == (TIME, times_of(run))


@pytest.mark.parametrize("indices", [[0], [4], [1, 2, 3], [0, 2, 4], range(5), range(1, 5, 2)])
def test_a_part_of_what_is_stored_comes_back_with_its_offsets(indices: Sequence[int]) -> None:
    whole = open_batch(stored(run_of(RICH).encode(TOPIC, TIME), 10), TOPIC)

    found = open_batch(parse(whole.select(indices).stored(TOPIC)), TOPIC)

    assert messages_of(found) == [RICH[index] for index in indices]
    assert offsets_of(found) == [10 + index for index in indices]
    assert found.timestamp == TIME


def test_a_part_of_a_run_with_holes_comes_back_with_its_offsets() -> None:
    whole = open_batch(with_holes(4, [1, 4, 6, 7], 9, 100), TOPIC)

    found = open_batch(parse(whole.select([1, 2]).stored(TOPIC)), TOPIC)

    assert offsets_of(found) == [104, 106]
    assert found.values == [b"1", b"2"]


@pytest.mark.parametrize("begin", [0, 10])
def test_an_opened_batch_is_stored_as_it_was(begin: int) -> None:
    batch = stored(run_of(RICH).encode(TOPIC, TIME), 10)

    run = open_batch(batch, TOPIC, begin)

    assert run.batch is batch
    assert run.stored(TOPIC) is batch.data


PARTS: Final[list[Callable[[Run], Run]]] = [
    lambda run: run.select([0, 1]),
    lambda run: run.select([0, 4]),
    lambda run: run.below(12),
    lambda run: run.at_least(11),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_opened_batch_is_not_that_batch(part: Callable[[Run], Run]) -> None:
    run = open_batch(stored(run_of(RICH).encode(TOPIC, TIME), 10), TOPIC)

    assert part(run).batch is None
    assert run.batch is not None


def test_a_batch_that_is_opened_from_within_is_not_at_hand() -> None:
    assert open_batch(stored(run_of(RICH).encode(TOPIC, TIME), 10), TOPIC, 11).batch is None


def test_what_was_gathered_is_stored_with_the_topics_own_name_left_out() -> None:
    columns = parse(run_of(RICH, 10).stored(TOPIC)).columns()

    assert columns.subjects() == [None, b"orders.eu", b"orders.eu", None, b"orders.us"]


# ---- holes


def test_a_batch_with_holes_keeps_its_offsets() -> None:
    run = open_batch(with_holes(3, [1, 4, 6], 9, 100), TOPIC)

    assert offsets_of(run) == [101, 104, 106]
    assert run.end == 107


@pytest.mark.parametrize(
    ("begin", "left"),
    [(0, [101, 104, 106]), (101, [101, 104, 106]), (102, [104, 106]), (104, [104, 106]), (106, [106]), (107, [])],
)
def test_a_batch_with_holes_can_be_opened_from_any_offset(begin: int, left: list[int]) -> None:
    run = open_batch(with_holes(3, [1, 4, 6], 9, 100), TOPIC, begin)

    assert offsets_of(run) == left
    assert run.values == [b"0", b"1", b"2"][3 - len(left) :]


def test_a_part_of_a_run_with_holes_keeps_its_offsets() -> None:
    run = open_batch(with_holes(4, [1, 4, 6, 7], 9, 100), TOPIC)

    assert offsets_of(run.select([1, 2])) == [104, 106]
    assert offsets_of(run.select([2, 3]).select([1])) == [107]


@given(st.sets(st.integers(0, 50), min_size=1), OFFSET, st.data())
@settings(deadline=None)
def test_any_part_of_any_part_keeps_its_offsets(deltas: set[int], base_offset: int, data: st.DataObject) -> None:
    ordered = sorted(deltas)
    run = open_batch(with_holes(len(ordered), ordered, ordered[-1] + 1, base_offset), TOPIC)
    expected = [(base_offset + delta, b"%d" % index) for index, delta in enumerate(ordered)]

    for _ in range(2):
        chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(run))), min_size=1)))
        run = run.select(chosen)
        expected = [expected[index] for index in chosen]

        assert list(zip(offsets_of(run), run.values, strict=True)) == expected
        assert (run.base_offset, run.end) == (expected[0][0], expected[-1][0] + 1)


# ---- select and extend


@pytest.mark.parametrize("indices", [[0], [4], [0, 4], [1, 2, 3], [0, 2, 4], range(1, 5, 2), range(2), range(5)])
def test_chosen_messages_keep_all_that_they_have(indices: Sequence[int]) -> None:
    chosen = run_of(RICH, 10).select(indices)

    assert messages_of(chosen) == [RICH[index] for index in indices]
    assert offsets_of(chosen) == [10 + index for index in indices]
    assert (chosen.base_offset, chosen.end) == (10 + indices[0], 11 + indices[-1])


def test_messages_in_a_row_need_no_list_of_offsets() -> None:
    assert run_of(PLAIN, 10).select([2, 3, 4]).offsets is None


@pytest.mark.parametrize("indices", [[1, 3], [1, 2], range(5)])
def test_whatever_becomes_of_the_chosen_the_run_stays_as_it_was(indices: Sequence[int]) -> None:
    run = run_of(RICH, 10)
    run.select(indices).extend(run_of(RICH))

    assert messages_of(run) == RICH
    assert offsets_of(run) == [10, 11, 12, 13, 14]


def whole_or_with_holes(deltas: Sequence[int] | None) -> Run:
    return run_of(RICH, 10, None if deltas is None else [10 + delta for delta in deltas])


@pytest.mark.parametrize("deltas", [None, [0, 1, 2, 3, 4], [0, 2, 3, 7, 9], [3, 4, 5, 6, 7]])
@pytest.mark.parametrize("offset", range(8, 22))
def test_a_run_is_parted_at_any_offset(deltas: list[int] | None, offset: int) -> None:
    run = whole_or_with_holes(deltas)
    rows = list(zip(offsets_of(run), RICH, strict=True))

    below, above = run.below(offset), run.at_least(offset)

    assert list(zip(offsets_of(below), messages_of(below), strict=True)) == [row for row in rows if row[0] < offset]
    assert list(zip(offsets_of(above), messages_of(above), strict=True)) == [row for row in rows if row[0] >= offset]


@pytest.mark.parametrize("deltas", [None, [0, 2, 3, 7, 9]])
def test_all_of_a_run_is_that_run(deltas: list[int] | None) -> None:
    run = whole_or_with_holes(deltas)

    assert run.at_least(10) is run
    assert run.below(run.end) is run


@pytest.mark.parametrize("has_headers", [False, True])
def test_as_many_messages_fit_as_a_batch_of_so_many_bytes_has(*, has_headers: bool) -> None:
    run = Run([b"orders", b"bills", b"orders"] * 10, [bytes(number) for number in range(30)])
    if has_headers:
        run.headers, run.keys = {3: b"A: b\r\n"}, {7: b"key"}
    sizes = [batch_bytes(run.select(range(count))) for count in range(1, 31)]
    for bytes_max in range(0, sizes[-1] + 100, 7):
        assert fitting(run, bytes_max) == max(1, sum(size <= bytes_max for size in sizes))
    run.extend(Run([b"orders"], [b"more"]))
    run.size = 0
    assert fitting(run, 1 << 20) == 31


def test_there_is_nothing_in_an_empty_run_to_be_parted() -> None:
    assert len(Run([], []).below(5)) == len(Run([], []).at_least(5)) == 0


@pytest.mark.parametrize("deltas", [None, [0, 2, 3, 7, 9]])
def test_the_offsets_of_a_run_can_be_had_at_once(deltas: list[int] | None) -> None:
    run = whole_or_with_holes(deltas)

    assert list(run.all_offsets()) == offsets_of(run)


@given(MESSAGES, MESSAGES, MESSAGES)
def test_a_run_that_is_extended_has_the_messages_of_both(
    first: list[Message], second: list[Message], third: list[Message]
) -> None:
    run = run_of(first, 10)
    run.extend(run_of(second))
    run.extend(run_of(third))

    assert messages_of(run) == first + second + third
    assert offsets_of(run) == list(range(10, 10 + len(first + second + third)))


def test_extending_leaves_the_other_run_as_it_was() -> None:
    other = run_of(RICH)
    run = run_of(PLAIN)
    run.extend(other)
    run.extend(run_of(PLAIN))

    assert messages_of(other) == RICH


def test_an_empty_run_can_be_extended() -> None:
    run = Run([], [])
    run.extend(run_of(RICH))

    assert messages_of(run) == RICH


# ---- what is asked of a run


@pytest.mark.parametrize(
    ("subjects", "subject"),
    [
        ([b"a"], b"a"),
        ([b"a", b"a"], b"a"),
        ([b"a", b"b"], None),
        ([b"a", b"b", b"a"], None),
        ([b"a", b"a", b"b"], None),
    ],
)
def test_a_run_knows_whether_it_has_but_one_subject(subjects: list[bytes], subject: bytes | None) -> None:
    assert Run(subjects, [b""] * len(subjects)).subject == subject


def test_equal_subjects_are_one_even_as_several_objects() -> None:
    assert Run([bytes(bytearray(b"a.b")) for _ in range(3)], [b""] * 3).subject == b"a.b"


@pytest.mark.parametrize(
    ("message", "is_plain"),
    [
        (Message(b"a", b"x"), True),
        (Message(b"a", b"x", key=b""), False),
        (Message(b"a", b"x", reply=b"r"), False),
        (Message(b"a", b"x", headers=b""), False),
        (Message(b"a", b"x", is_tombstone=True), False),
    ],
)
def test_a_run_is_plain_if_it_has_but_values_and_subjects(message: Message, is_plain: bool) -> None:
    assert run_of([*PLAIN, message]).is_plain is is_plain


# ---- its size


@given(st.lists(MESSAGE, min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_batch_is_no_larger_than_was_foreseen(messages: list[Message]) -> None:
    run = run_of(messages)

    assert len(run.encode(b"another", 0).data) <= batch_bytes(run)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_a_batch_with_every_column_is_no_larger_than_was_foreseen(count: int, size: int) -> None:
    item = bytes(size)
    # The last message lacks what the others have, so that every column needs to say who has it.
    run = run_of([*[Message(b"orders.eu", item, item, item, item, True)] * count, Message(TOPIC, item)])

    assert len(run.encode(TOPIC, 0).data) <= batch_bytes(run)


@given(MESSAGES, MESSAGES)
def test_what_was_foreseen_for_parts_is_enough_for_the_whole(first: list[Message], second: list[Message]) -> None:
    run, other = run_of(first), run_of(second)
    foreseen = batch_bytes(run) + batch_bytes(other)
    run.extend(other)

    assert batch_bytes(run) <= foreseen


def test_a_large_run_is_foreseen_closely() -> None:
    run = run_of([Message(TOPIC, bytes(1000))] * 1000)

    assert batch_bytes(run) < 1.05 * len(run.encode(b"another", 0).data)


_messages = st.lists(
    st.tuples(st.binary(max_size=40), st.sampled_from([b"t", b"t.a", b"t.longer.subject"]), st.integers(0, 63)),
    min_size=1,
    max_size=60,
)


def _made(messages: list[tuple[bytes, bytes, int]]) -> Run:
    run = Run([subject for _, subject, _ in messages], [value for value, _, _ in messages])
    for index, (value, _, parts) in enumerate(messages):
        if parts & 1:
            run.keys[index] = value
        if parts & 2:
            run.replies[index] = b"_INBOX.1"
        if parts & 4:
            run.headers[index] = b"A: 1\r\n"
        if parts & 8:
            run.tombstones.add(index)
        if parts & 16:
            run.times[index] = 1
    run.stamp(1)
    return run


@given(_messages, st.booleans())
def test_no_batch_is_larger_than_its_calculated_size(messages: list[tuple[bytes, bytes, int]], holes: bool) -> None:
    run = _made(messages)
    if holes:
        run.offsets = range(0, 2 * len(run), 2)
    assert len(run.stored(b"t")) <= batch_bytes(run)


@given(_messages, st.integers(RUN_BYTES, RUN_BYTES + 1000))
def test_the_pieces_of_a_run_fit_and_are_together_the_run(messages: list[tuple[bytes, bytes, int]], limit: int) -> None:
    run = _made(messages)
    pieces = list(split(run, limit))
    assert all(batch_bytes(piece) <= limit or len(piece) == 1 for piece in pieces)
    together = pieces[0]
    for piece in pieces[1:]:
        together.extend(piece)
    assert (together.values, together.subjects, together.keys) == (run.values, run.subjects, run.keys)
    assert (together.replies, together.headers, together.times) == (run.replies, run.headers, run.times)
    assert together.tombstones == run.tombstones


def test_a_run_that_does_not_fit_names_the_limit() -> None:
    run = Run([b"t"], [b"x" * 100])
    check_size(run, 1000)
    with pytest.raises(BatchTooLarge, match="the limit is 300"):
        check_size(run, 300)
