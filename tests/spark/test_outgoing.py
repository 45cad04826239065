"""Rows become the batches that the client would have made of them, in the partitions where it would have put them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.client.outgoing import ABSENT, prepare
from penstock.client.partitioner import Layout
from penstock.errors import BadHeader, BadSubject, BatchTooLarge, UnknownTopic
from penstock.model import arrow
from penstock.model.batch import Compression, accept
from penstock.model.headers import hash_key
from penstock.spark import outgoing
from penstock.spark.outgoing import PartitionBatch, Router, hash_keys

TYPES = {
    "value": pyarrow.binary(),
    "key": pyarrow.binary(),
    "subject": pyarrow.string(),
    "topic": pyarrow.string(),
    "headers": pyarrow.map_(pyarrow.string(), pyarrow.string()),
    "partition": pyarrow.int32(),
}
# What the broker has.
TOPICS = {"orders": 4, "sensors": 1, "logs.web": 3}
NOW = 1_700_000_000_000_000

Row = dict[str, Any]
Message = tuple[bytes, bytes | None, bytes, bytes | None, bool]


def resolve(subject: str) -> tuple[str, int, int]:
    for number, (name, partitions) in enumerate(TOPICS.items()):
        if subject == name or subject.startswith(f"{name}."):
            return name, number + 1, partitions
    raise BadSubject(f"{subject} has no topic")


def rows_of(rows: Sequence[Row], names: Iterable[str], types: dict[str, Any] = TYPES) -> pyarrow.RecordBatch:
    arrays = {}
    for name in names:
        column = [row[name] for row in rows]
        if name == "headers":
            column = [None if each is None else list(each.items()) for each in column]
        arrays[name] = pyarrow.array(column, types[name])
    return pyarrow.RecordBatch.from_pydict(arrays)


def read(parts: Iterable[PartitionBatch]) -> dict[tuple[str, int], list[Message]]:
    """What a partition holds after the parts were appended to it."""
    found: dict[tuple[str, int], list[Message]] = defaultdict(list)
    for topic, partition, batch in parts:
        columns = accept(batch.data).columns()
        nothing = [None] * batch.count
        subjects = columns.subjects() or nothing
        found[topic, partition] += zip(
            columns.values(),
            columns.keys() or nothing,
            [subject or topic.encode() for subject in subjects],
            columns.headers() or nothing,
            columns.tombstones() or [False] * batch.count,
            strict=True,
        )
    return dict(found)


def one_by_one(rows: Iterable[Row], topic: str | None, turn: int) -> dict[tuple[str, int], list[Message]]:
    """What the client would do."""
    found: dict[tuple[str, int], list[Message]] = defaultdict(list)
    for row in rows:
        subject = row.get("subject") or topic or row["topic"]
        key, headers = row.get("key"), row.get("headers")
        message = prepare(subject, row["value"], ABSENT, key, headers, None, None, None, NOW)
        name, number, partitions = resolve(subject)
        partition = row.get("partition")
        if partition is None:
            partition = Layout(name.encode(), number, partitions).choose(subject.encode(), message.key)
        place = name, turn % partitions if partition is None else partition
        found[place].append((message.value, message.key, subject.encode(), message.headers, message.is_tombstone))
    return dict(found)


SUBJECTS = ["orders", "orders.eu", "orders.us.new", "sensors", "sensors.1", "logs.web", "logs.web.a"]
HEADER_NAMES = st.text("abcXYZ019-_!", min_size=1, max_size=5)
HEADER_VALUES = st.text("abc :;äß\u2028", max_size=8).map(lambda text: text.strip(" \t"))
HEADERS = st.one_of(
    st.none(),
    st.dictionaries(HEADER_NAMES, HEADER_VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["Penstock-Key", "Msg-ID", "other"]), HEADER_VALUES, max_size=2),
)
ROWS = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=12),
        "key": st.one_of(st.none(), st.binary(max_size=6)),
        "subject": st.one_of(st.none(), st.sampled_from(SUBJECTS)),
        "headers": HEADERS,
        "partition": st.one_of(st.none(), st.just(0)),
    }
)
COLUMNS = st.sets(st.sampled_from(["key", "subject", "headers", "partition"]))


@given(
    st.lists(ROWS, min_size=1, max_size=30),
    COLUMNS,
    st.integers(0, 10),
    st.integers(0, 3),
    st.sampled_from(list(Compression)),
)
@settings(max_examples=400, deadline=None)
def test_rows_go_where_the_client_would_send_them_and_hold_the_same(
    rows: list[Row], names: set[str], turn: int, skipped: int, compression: Compression
) -> None:
    for row in rows:
        row["topic"] = row["subject"] or "orders"
    given_rows = rows_of([*rows[:1] * skipped, *rows], ["value", "topic", *sorted(names)]).slice(skipped)

    parts = list(Router(resolve, compression=compression, turn=turn).parts(given_rows, timestamp=NOW))

    plain = [{name: row[name] for name in ("value", "topic", *names)} for row in rows]
    assert read(parts) == one_by_one(plain, None, turn)
    assert all(part.batch.timestamp == NOW for part in parts)


@given(st.lists(ROWS, min_size=1, max_size=30), COLUMNS, st.integers(0, 10))
@settings(max_examples=200, deadline=None)
def test_the_option_topic_stands_for_the_column(rows: list[Row], names: set[str], turn: int) -> None:
    for row in rows:
        row |= {"topic": "sensors", "subject": row["subject"] and "orders.eu"}

    made = read(
        Router(resolve, topic="orders", turn=turn).parts(
            rows_of(rows, ["value", "topic", *sorted(names)]), timestamp=NOW
        )
    )

    assert made == one_by_one([{name: row[name] for name in ("value", *names)} for row in rows], "orders", turn)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9)), max_size=600))
@example([b"%d" % number for number in range(1000)])
@example([bytes([number % 256]) * (number % 40) for number in range(2000)])
@example([b"", None, b"x" * 10_000])
@settings(max_examples=50, deadline=None)
def test_keys_are_hashed_as_the_client_hashes_them(keys: list[bytes | None]) -> None:
    hashes = hash_keys(pyarrow.array([b"before", *keys], pyarrow.binary()).slice(1))

    assert hashes.to_pylist() == [None if key is None else hash_key(key) for key in keys]


def test_a_null_value_deletes_its_key() -> None:
    rows: list[Row] = [{"value": None, "key": b"a"}, {"value": b"v", "key": b"b"}, {"value": b"", "key": b"c"}]

    made = read(Router(resolve, topic="sensors").parts(rows_of(rows, ["value", "key"]), timestamp=NOW))

    assert made == one_by_one(rows, "sensors", 0)
    assert [message[4] for message in made["sensors", 0]] == [True, False, False]


def test_rows_of_no_partition_go_to_each_in_turn() -> None:
    router = Router(resolve, topic="orders", turn=2)
    rows = rows_of([{"value": b"a"}, {"value": b"b"}], ["value"])

    partitions = [[part.partition for part in router.parts(rows, timestamp=NOW)] for _ in range(5)]

    assert partitions == [[2], [3], [0], [1], [2]]


def test_text_is_taken_for_bytes() -> None:
    text = {"value": pyarrow.string(), "key": pyarrow.large_string(), "topic": pyarrow.large_string()}
    rows = [{"value": "ä", "key": "ö", "topic": "orders"}]

    made = read(Router(resolve).parts(rows_of(rows, ["value", "key", "topic"], text), timestamp=NOW))

    assert list(made.values()) == [[("ä".encode(), "ö".encode(), b"orders", None, False)]]


def test_each_topic_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(subject: str) -> tuple[str, int, int]:
        asked.append(subject)
        return resolve(subject)

    router = Router(counted)
    rows = [{"value": b"", "subject": f"orders.{number}"} for number in range(50)] + [
        {"value": b"", "subject": "sensors"}
    ]

    for _ in range(3):
        list(router.parts(rows_of(rows, ["value", "subject"]), timestamp=NOW))

    assert asked == ["orders.0", "sensors"]


def test_batches_are_as_large_as_readers_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "BATCH_BYTES", 100)
    monkeypatch.setattr(outgoing, "BATCH_ROWS", 7)
    rows = [{"value": bytes(size), "key": b"k"} for size in [49, 50, *range(60), 500, 1, *[0] * 20, 99, 100]]

    parts = list(Router(resolve, topic="orders").parts(rows_of(rows, ["value", "key"]), timestamp=NOW))

    assert read(parts) == one_by_one(rows, "orders", 0)
    for part in parts:
        values = part.batch.columns().values()
        assert len(values) <= 7
        assert len(values) == 1 or sum(map(len, values)) + len(values) <= 100
    assert len(parts) < 50


def test_a_message_that_no_batch_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "PLAIN_BYTES_MAX", 1000)
    monkeypatch.setattr("penstock.model.batch.PLAIN_BYTES_MAX", 1000)
    rows = rows_of([{"value": bytes(1000)}], ["value"])

    with pytest.raises(BatchTooLarge, match="bytes in one batch"):
        list(Router(resolve, topic="orders").parts(rows, timestamp=NOW))


def test_no_rows_make_no_batch() -> None:
    assert list(Router(resolve, topic="orders").parts(rows_of([], ["value"]), timestamp=NOW)) == []


def test_only_batches_with_an_id_are_to_be_looked_into() -> None:
    def asks(headers: dict[str, str]) -> bool:
        rows = rows_of([{"value": b"", "headers": headers}], ["value", "headers"])
        [part] = Router(resolve, topic="orders").parts(rows, timestamp=NOW)
        return part.batch.asks

    assert asks({"MSG-id": "1"})
    assert asks({"Nats-Msg-Id": "1"})
    assert not asks({"Message-Id": "1"})


@pytest.mark.parametrize(
    ("row", "error", "sentence"),
    [
        (
            {"value": None},
            ValueError,
            "a message with a null value is a tombstone and needs a key: add a key, or a value",
        ),
        ({"value": None, "key": None}, ValueError, "a message with a null value is a tombstone"),
        ({"subject": None}, ValueError, "a row has neither a subject nor a topic: fill the column, or set the option"),
        ({"topic": None}, ValueError, "a row has neither a subject nor a topic"),
        ({"topic": "orders..eu"}, BadSubject, "invalid subject 'orders..eu'"),
        ({"topic": "orders.*"}, BadSubject, "invalid subject"),
        ({"topic": "orders", "subject": "sensors.1"}, BadSubject, "'sensors.1' is not in topic 'orders'"),
        ({"topic": "orders", "subject": "orders2"}, BadSubject, "'orders2' is not in topic 'orders'"),
        ({"topic": "nowhere"}, BadSubject, "nowhere has no topic"),
        ({"topic": "orders", "partition": 4}, UnknownTopic, "invalid partition 4: topic orders has 4 \\(0-3\\)"),
        ({"topic": "orders", "partition": -1}, UnknownTopic, "invalid partition -1: topic orders"),
        ({"topic": "sensors", "partition": 1}, UnknownTopic, "invalid partition 1: topic sensors has 1 \\(0-0\\)"),
        ({"headers": {"a b": "c"}}, BadHeader, "'a b' is not a valid header name"),
        ({"headers": {"": "c"}}, BadHeader, "'' is not a valid header name"),
        ({"headers": {"a": "b\nc"}}, BadHeader, r"header a: 'b\\nc' has a line break"),
        ({"headers": {"a": "b "}}, BadHeader, "begins or ends with a blank"),
        ({"headers": {"a": None}}, BadHeader, "header a is null"),
        ({"headers": {"Delay": "5s"}}, BadHeader, "header Delay: Spark batches cannot have delayed messages"),
        ({"headers": {"deliver-at": "5"}}, BadHeader, "Spark batches cannot have delayed messages"),
    ],
)
def test_what_cannot_be_stored_is_refused(row: Row, error: type[Exception], sentence: str) -> None:
    topic = None if {"topic", "subject"} & row.keys() else "orders"
    good = {"value": b"v", "key": b"k", "topic": "orders", "subject": "orders", "headers": {}, "partition": 0}
    bad = {"value": b"v"} | row
    rows = rows_of([good, bad, good], bad)

    with pytest.raises(error, match=sentence):
        list(Router(resolve, topic=topic).parts(rows, timestamp=NOW))
